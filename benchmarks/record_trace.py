"""Record what a real server's cache is asked, while modelled users play on it.

    python benchmarks/record_trace.py [--workload kitchen | popular] [--users 24] [--asks 30]
                                      [--at-once 3] [--speed 4]

Starts the reference model with `trace_file` set (as `ctrlcache up --record-trace` does) and a hot
tier that nothing has to leave, and lets users of `worldserve.bench.workload` play: `at-once` of
them at any time, pausing `speed` times shorter than people do.

`kitchen`: `--users` sessions on the clips that ship with the clients, chosen by Zipf popularity.
`popular`: sessions on stretches of all suites' test clips, as `popular_scenes` says: users on
popular scenes, users who come back, and looks that nobody repeats. Without thinking time, so that
everything in the trace was asked for, and exact answers only, so that the trace does not depend on
how the weights are calibrated.

`benchmarks/eviction.py` and `benchmarks/worldcache_eviction.py` replay what is in
`benchmarks/traces/`, made by the command with `--workload` and no other argument.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from popular_scenes import Visit, visits
from rich.console import Console
from rich.progress import Progress

from ctrlcache.trace import accesses, write
from worldserve.bench.clips import load_clips
from worldserve.bench.rivals import RIVALS
from worldserve.bench.workload import HABITS, Clip, act
from worldserve.runtime import Runtime, RuntimeConfig

PROJECT = Path(__file__).resolve().parent.parent
TRACES = Path(__file__).parent / "traces"
#: Of a workload: sessions, questions of each, bound on the error, clips of each suite.
DEFAULTS = {"kitchen": (24, 30, 0.02), "popular": (140, 8, 0.0)}
PARAMETERS = {"kitchen": {}, "popular": {"background": "false"}}
_CLIPS = 6


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


def kitchen(users: int, asks: int) -> list[Visit]:
    """A clip for each user, the first ones most popular."""
    clips = [load(path) for path in sorted((PROJECT / "client_examples/clips").glob("*.npz"))]
    weights = 1.0 / np.arange(1, len(clips) + 1) ** 0.9
    picks = np.random.default_rng(0).choice(len(clips), users, p=weights / weights.sum())
    habits = replace(HABITS["kitchen"], asks=asks)
    return [Visit("new", clips[n], habits, user) for user, n in enumerate(picks)]


def popular(users: int, asks: int) -> list[Visit]:
    """As `popular_scenes` says, on the first clips of every suite."""
    clips = [clip for suite in HABITS for clip in load_clips(suite, _CLIPS)]
    return visits(clips, users, asks)


WORKLOADS = {"kitchen": kitchen, "popular": popular}


def play(url: str, visit: Visit, speed: float, max_error: float) -> int:
    """One session; how many questions it asked."""
    actions = act(visit.clip, visit.habits, visit.user, seed=1)
    asked = 0
    with triton.InferenceServerClient(url) as client:
        session = RIVALS["trust"].begin(client, visit.clip, None, max_error)
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
    waiting: queue.SimpleQueue[Visit] = queue.SimpleQueue()
    for visit in WORKLOADS[args.workload](args.users, args.asks):
        waiting.put(visit)
    config = RuntimeConfig.aside(
        PROJECT / "model_repository",
        parameters={
            "trace_file": str(file),
            "hot_size_bytes": "6GiB",
            **PARAMETERS[args.workload],
        },
    )
    asked: list[int] = []
    failures: list[Exception] = []
    with Runtime(config) as runtime, Progress() as progress:
        task = progress.add_task("sessions", total=args.users)

        def work() -> None:
            while not failures and time.monotonic() < deadline:
                try:
                    visit = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    url = runtime.endpoints.grpc
                    asked.append(play(url, visit, args.speed, args.max_error))
                except Exception as error:
                    failures.append(error)
                progress.advance(task)

        deadline = time.monotonic() + args.minutes * 60
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
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="kitchen")
    parser.add_argument("--users", type=int, help="sessions in all")
    parser.add_argument("--asks", type=int, help="questions of each")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--speed", type=float, default=4.0, help="pauses are this much shorter")
    parser.add_argument("--max-error", type=float)
    parser.add_argument("--minutes", type=float, default=60.0, help="no session begins after that")
    parser.add_argument("--out", type=Path, help="default: benchmarks/traces/WORKLOAD.jsonl.gz")
    args = parser.parse_args()
    for name, value in zip(("users", "asks", "max_error"), DEFAULTS[args.workload], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.out = args.out or TRACES / f"{args.workload}.jsonl.gz"
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
