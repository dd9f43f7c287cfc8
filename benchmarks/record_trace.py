"""Record what a real server's cache is asked, while modelled users play on it.

    python benchmarks/record_trace.py [--users 24] [--asks 30] [--at-once 3] [--speed 4]

Starts the reference model with `trace_file` set (as `ctrlcache up --record-trace` does) and a hot
tier that nothing has to leave, and lets users of `worldserve.bench.workload` play the clips that
ship with the clients: `users` sessions in all, clips by Zipf popularity, `at-once` of them at any
time, pausing `speed` times shorter than people do. The trace is what `benchmarks/eviction.py`
replays; the one in `benchmarks/traces/` was made by the command without arguments.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from rich.console import Console
from rich.progress import Progress

from ctrlcache.trace import accesses, write
from worldserve.bench.rivals import RIVALS
from worldserve.bench.workload import HABITS, Clip, Habits, act
from worldserve.runtime import Runtime, RuntimeConfig

PROJECT = Path(__file__).resolve().parent.parent
OUT = Path(__file__).parent / "traces" / "kitchen.jsonl.gz"


def load(path: Path) -> Clip:
    with np.load(path) as data:
        return Clip(
            name=path.stem,
            suite="kitchen",
            operation=str(data["operation"]),
            prompt=str(data["prompt"]),
            frames=data["frames"],
            controls=data["controls"],
            physics=data["physics"],
        )


def chosen(clips: list[Clip], users: int) -> list[Clip]:
    """A clip for each user, the first ones most popular."""
    weights = 1.0 / np.arange(1, len(clips) + 1) ** 0.9
    picks = np.random.default_rng(0).choice(len(clips), users, p=weights / weights.sum())
    return [clips[n] for n in picks]


def play(url: str, clip: Clip, user: int, asks: int, speed: float, max_error: float) -> int:
    """One session; how many questions it asked."""
    habits: Habits = HABITS["kitchen"]
    actions = act(clip, Habits(**{**vars(habits), "asks": asks}), user, seed=1)
    asked = 0
    with triton.InferenceServerClient(url) as client:
        session = RIVALS["trust"].begin(client, clip, None, max_error)
        for action in actions:
            if action.asks:
                session.ask(action)
                asked += 1
            else:
                session.watch(action)
            time.sleep(action.pause_s / speed)
        session.close()
    return asked


def record(file: Path, args: argparse.Namespace) -> int:
    clips = [load(path) for path in sorted((PROJECT / "client_examples/clips").glob("*.npz"))]
    waiting: queue.SimpleQueue[tuple[int, Clip]] = queue.SimpleQueue()
    for item in enumerate(chosen(clips, args.users)):
        waiting.put(item)
    config = RuntimeConfig(
        model_repository=PROJECT / "model_repository",
        models=("world_model",),
        cold="none",
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        parameters={"trace_file": str(file), "hot_size_bytes": "6GiB"},
    )
    asked: list[int] = []
    failures: list[Exception] = []
    with Runtime(config) as runtime, Progress() as progress:
        task = progress.add_task("sessions", total=args.users)

        def work() -> None:
            while not failures:
                try:
                    user, clip = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    url = runtime.endpoints.grpc
                    asked.append(play(url, clip, user, args.asks, args.speed, args.max_error))
                except Exception as error:
                    failures.append(error)
                progress.advance(task)

        threads = [threading.Thread(target=work) for _ in range(args.at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return sum(asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--users", type=int, default=24, help="sessions in all")
    parser.add_argument("--asks", type=int, default=30, help="questions of each")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--speed", type=float, default=4.0, help="pauses are this much shorter")
    parser.add_argument("--max-error", type=float, default=0.02)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ctrlcache-trace-") as folder:
        file = Path(folder) / "trace.jsonl"
        asked = record(file, args)
        rows = accesses(file)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write(args.out, rows)
    kinds = {(row.op, row.kind) for row in rows}
    Console().print(
        f"{asked} questions of {args.users} sessions in {time.monotonic() - began:.0f} s: "
        + ", ".join(
            f"{sum((row.op, row.kind) == kind for row in rows)} {kind[0]} {kind[1]}"
            for kind in sorted(kinds)
        )
        + f"; {args.out.stat().st_size / 1e3:.0f} kB in {args.out}"
    )


if __name__ == "__main__":
    main()
