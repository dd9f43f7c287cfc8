"""How it scales: users at once, and the size of the model.

    python -m worldserve.bench.scale [--sessions 1 2 4 ...] [--sizes ...] [--seconds 20]

Users: each plays his own session at his own pace, as many at once as said; what is counted is how
many answers come later than the deadline, with the cache and on a stateful server without. Size:
models with random weights, for their latency alone: what a question costs when it is computed and
when it is found.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from worldserve.bench.clips import load_clips
from worldserve.bench.report import machine
from worldserve.bench.rivals import RIVALS, Stateful
from worldserve.bench.scoreboard import DEADLINES_S
from worldserve.bench.workload import HABITS, Action, Clip, act
from worldserve.runtime import Runtime, RuntimeConfig

__all__ = ["Crowd", "Sized", "measure_crowd", "measure_size"]

SESSIONS = (1, 2, 4, 8, 16, 32, 64)
#: width, heads, layers of the dynamics, blocks of the generator
SIZES = ((192, 3, 4, 3), (256, 4, 6, 4), (384, 6, 8, 6), (512, 8, 12, 8))


@dataclass(frozen=True)
class Crowd:
    """late: share of answers over the deadline. questions: answered, of all users together."""

    rival: str
    sessions: int
    questions: int
    p50_ms: float
    p99_ms: float
    late: float
    hit_rate: float


@dataclass(frozen=True)
class Sized:
    """Medians, ms. parameters: of the network. open_ms: the first question, frames encoded."""

    parameters: int
    open_ms: float
    computed_ms: float
    found_ms: float

    @property
    def saving(self) -> float:
        return self.computed_ms / self.found_ms


def measure_crowd(
    rival: str, sessions: int, clips: Sequence[Clip], seconds: float, repository: Path
) -> Crowd:
    """`sessions` users at once for so many seconds, on a server of their own."""
    took: list[tuple[float, str]] = []
    lock = threading.Lock()
    with Runtime(_config(repository, RIVALS[rival].settings)) as runtime:
        stop = threading.Event()
        threads = [
            threading.Thread(
                target=_user, args=(runtime.endpoints.grpc, rival, clips, n, stop, took, lock)
            )
            for n in range(sessions)
        ]
        for thread in threads:
            thread.start()
        stop.wait(seconds)
        stop.set()
        for thread in threads:
            thread.join()
    latency = np.array([ms for ms, _ in took])
    deadline_ms = 1e3 * DEADLINES_S[clips[0].suite]
    return Crowd(
        rival=rival,
        sessions=sessions,
        questions=len(took),
        p50_ms=float(np.percentile(latency, 50)),
        p99_ms=float(np.percentile(latency, 99)),
        late=float((latency > deadline_ms).mean()),
        hit_rate=float(np.mean([tier != "none" for _, tier in took])),
    )


def _user(
    url: str,
    rival: str,
    clips: Sequence[Clip],
    number: int,
    stop: threading.Event,
    took: list[tuple[float, str]],
    lock: threading.Lock,
) -> None:
    """Session after session, each on the next clip, until told to stop."""
    import tritonclient.grpc as grpcclient

    with grpcclient.InferenceServerClient(url) as client:
        # Users do not begin in step.
        stop.wait(0.1 * (number % 16))
        for round in range(1_000):
            clip = clips[(number + round) % len(clips)]
            play = RIVALS[rival].begin(client, clip, None, 0.02)
            for action in act(clip, HABITS[clip.suite], user=100 * number + round):
                if stop.is_set():
                    break
                if action.asks:
                    reply = play.ask(action)
                    with lock:
                        took.append((reply.latency_ms, reply.tier))
                else:
                    play.watch(action)
                stop.wait(action.pause_s)
            play.close()
            if stop.is_set():
                return


def measure_size(size: tuple[int, int, int, int], clip: Clip, repository: Path) -> Sized:
    """One model of random weights on a server of its own."""
    from worldserve.models.network import NetworkConfig, WorldNetwork
    from worldserve.models.reference import Statistics, save_weights

    raw = json.loads((repository / "world_model" / "1" / "config.json").read_text())
    width, heads, layers, blocks = size
    network = {**raw["network"], "width": width, "heads": heads}
    network |= {"dynamics_layers": layers, "generator_blocks": blocks}
    made = WorldNetwork(NetworkConfig.from_dict(network))
    with tempfile.TemporaryDirectory(prefix="ctrlcache-size-") as folder:
        statistics = {k: np.asarray(v, np.float32) for k, v in raw["statistics"].items()}
        save_weights(Path(folder), made, Statistics(**statistics))
        with Runtime(_config(repository, {"weights_dir": folder, "background": "false"})) as run:
            open_ms, computed_ms, found_ms = _ask_around(run.endpoints.grpc, clip)
    return Sized(
        sum(p.numel() for p in made.parameters()),
        float(np.median(open_ms)),
        float(np.median(computed_ms)),
        float(np.median(found_ms)),
    )


def _ask_around(url: str, clip: Clip) -> tuple[list[float], list[float], list[float]]:
    """Latencies of first questions, of new ones, and of the same ones again."""
    import tritonclient.grpc as grpcclient

    opened: list[float] = []
    computed: list[float] = []
    found: list[float] = []
    draw = np.random.default_rng(0)
    with grpcclient.InferenceServerClient(url) as client:
        for round in range(3):
            # Nothing may be known from the round before: a tenant of its own.
            wire = Stateful(client, clip, max_error="0", tenant=f"round-{round}")
            first = tuple(float(c) for c in draw.uniform(-0.8, 0.8, 4))
            opened.append(wire.ask(Action("open", "probe", first, 0, (0, 24))).latency_ms)
            for _ in range(4):
                control = tuple(float(c) for c in draw.uniform(-0.8, 0.8, 4))
                asked = Action("jump", "probe", control, 0)
                for into in (computed, found):
                    reply = wire.ask(asked)
                    if (reply.tier == "none") != (into is computed):
                        raise RuntimeError(f"a new question came from {reply.tier}")
                    into.append(reply.latency_ms)
            wire.close()
    return opened[1:], computed[4:], found[4:]


def _config(repository: Path, settings: Any) -> RuntimeConfig:
    return RuntimeConfig.aside(
        repository,
        parameters=dict(settings),
    )


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, nargs="*", default=list(SESSIONS))
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many, smallest first")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--suite", default="kitchen", choices=tuple(HABITS))
    parser.add_argument("--repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    clips = load_clips(args.suite)
    console = Console()

    crowds = []
    table = Table("users", "server", "questions", "p50 ms", "p99 ms", "late", "hits")
    for sessions in args.sessions:
        for rival in ("stateful", "trust"):
            one = measure_crowd(rival, sessions, clips, args.seconds, args.repository)
            crowds.append(one)
            table.add_row(
                *(str(sessions), RIVALS[rival].label, str(one.questions)),
                *(f"{one.p50_ms:.0f}", f"{one.p99_ms:.0f}", f"{one.late:.1%}"),
                f"{one.hit_rate:.1%}",
            )
    console.print(table)
    sized = []
    table = Table("parameters, M", "first ms", "computed ms", "found ms", "saving")
    for size in SIZES[: args.sizes]:
        row = measure_size(size, clips[0], args.repository)
        sized.append(row)
        table.add_row(
            *(f"{row.parameters / 1e6:.1f}", f"{row.open_ms:.0f}", f"{row.computed_ms:.0f}"),
            *(f"{row.found_ms:.1f}", f"{row.saving:.0f}x"),
        )
    console.print(table)
    content = {
        "made_on": machine(),
        "made_at": time.strftime("%Y-%m-%d"),
        "seconds": args.seconds,
        "users": [asdict(one) for one in crowds],
        "sizes": [{**asdict(row), "saving": row.saving} for row in sized],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "scale.json").write_text(json.dumps(content, indent=1) + "\n")
    from worldserve.bench.pictures import scale_picture

    scale_picture(crowds, sized, args.out / "scale.png")
    console.print(f"written: {args.out}/scale.json and scale.png")


if __name__ == "__main__":
    main()
