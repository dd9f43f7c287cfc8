"""What writing costs those who read, and those who admit.

    python benchmarks/flush.py [--flushes 20] [--minutes 5] [--rate 14] [--json FILE]

1. A reader in another process fetches couplets from the warm tier at a steady pace. Its p99 during
   flushes of 128 full couplets, against its p99 between them, in alternation.
2. The whole cache (hot and warm tier, background upkeep) takes full couplets at `rate` MB/s for
   `minutes`. The share of the time that the admitting thread is blocked in `admit` (wall clock
   minus its CPU time, minus its wait for a core): it waits for the interpreter, for the hot tier's
   write lock, or for the disk. The same for up to a minute with the warm tier in memory, where no
   disk can be waited for, tells which: the difference is the share of the disk. And the reader's
   p99 against before.

Stored bytes count. Deletes what it made.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
from full_couplets import PROVENANCE, Factory, full_couplet, identity, percentiles
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ctrlcache.admission import Trust
from ctrlcache.config import CacheConfig
from ctrlcache.couplet import decode
from ctrlcache.shared import SharedMemory
from ctrlcache.tiered import CoupletCache
from ctrlcache.tiers.warm import WarmTier
from ctrlcache.transfer import Jacobian
from worldserve.bench.report import machine

LIMIT = 8 << 30
PACE_S = 0.002
BEFORE_S = 5.0


def reader(directory: Path, index: Path, count: int, ready: Event, stop: Event, out: Any) -> None:
    """Fetch and decode random couplets; send (when, seconds) of each."""
    tier = WarmTier(directory, index, limit_bytes=LIMIT, read_only=True)
    rng = np.random.default_rng(os.getpid())
    measured: list[tuple[float, float]] = []
    for n in range(100):
        tier.get(identity(n % count))
    ready.set()
    while not stop.is_set():
        id = identity(int(rng.integers(count)))
        begin = time.perf_counter()
        payload = tier.get(id)
        if payload is not None:
            decode(payload, PROVENANCE, fields=())
        measured.append((time.monotonic(), time.perf_counter() - begin))
        time.sleep(PACE_S)
    out.send(measured)
    tier.close()


class Reader:
    def __init__(self, directory: Path, index: Path, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop, ready = context.Event(), context.Event()
        self._pipe, out = context.Pipe(duplex=False)
        self._process = context.Process(
            target=reader, args=(directory, index, count, ready, self._stop, out), daemon=True
        )
        self._process.start()
        ready.wait()

    def finish(self) -> list[tuple[float, float]]:
        self._stop.set()
        measured: list[tuple[float, float]] = self._pipe.recv()
        self._process.join()
        return measured


def occupied_s() -> float:
    """Seconds this thread has run or waited for a core to run on."""
    running, waiting, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(running) + int(waiting)) / 1e9


def within(measured: list[tuple[float, float]], spans: list[tuple[float, float]]) -> list[float]:
    return [s for when, s in measured if any(begin <= when <= end for begin, end in spans)]


def flushes(work: Path, index: Path, rounds: int) -> dict[str, Any]:
    factory = Factory()
    tier = WarmTier(work / "warm", index, limit_bytes=LIMIT, follow_s=None)
    known = 1024
    for batch in factory.batches(known, 128):
        tier.put(batch)
    watch = Reader(work / "warm", index, known)
    during: list[tuple[float, float]] = []
    between: list[tuple[float, float]] = []
    took = []
    for batch in track(list(factory.batches(rounds * 128, 128, known)), "flushing"):
        begin = time.monotonic()
        time.sleep(0.5)
        between.append((begin, time.monotonic()))
        begin = time.monotonic()
        tier.put(batch)
        during.append((begin, time.monotonic()))
        took.append(time.monotonic() - begin)
    measured = watch.finish()
    tier.close()
    a, b = within(measured, between), within(measured, during)
    result: dict[str, Any] = {"flush_ms": percentiles(took), "between": percentiles(a)}
    result["samples"] = {"between": len(a), "during": len(b)}
    if b:
        result["during"] = percentiles(b)
        result["ratio_p99"] = result["during"]["p99"] / result["between"]["p99"]
    return result


def sustained(work: Path, index: Path, minutes: float, rate_mb_s: float) -> dict[str, Any]:
    factory = Factory()
    warm = WarmTier(work / "warm", index, limit_bytes=LIMIT)
    known = 1024
    for batch in factory.batches(known, 128):
        warm.put(batch)
    shm = index.with_name(index.name + "-hot")
    memory = SharedMemory.open(shm, 4 << 30)
    # Stored whatever their scores: this measures the way, not the judgement.
    cache = CoupletCache(memory, warm, PROVENANCE, Trust(None, 0.05), Jacobian(), CacheConfig())
    base = [full_couplet(seed) for seed in range(16)]
    watch = Reader(work / "warm", index, known)
    before_begin = time.monotonic()
    time.sleep(BEFORE_S)
    before = [(before_begin, time.monotonic())]
    interval_s = factory.mean_bytes / 1e6 / rate_mb_s
    begin = time.monotonic()
    blocked = admitted = 0.0
    count = late = 0
    while (now := time.monotonic()) - begin < minutes * 60:
        due = begin + count * interval_s
        if now < due:
            time.sleep(due - now)
        elif now - due > 1.0:
            late += 1
        couplet = replace(base[count % 16], space=identity(1_000_000 + count))
        wall, own = time.perf_counter(), occupied_s()
        cache.admit(couplet)
        wall, own = time.perf_counter() - wall, occupied_s() - own
        blocked += max(0.0, wall - own)
        admitted += wall
        count += 1
    span = [(begin, time.monotonic())]
    took_s = span[0][1] - span[0][0]
    measured = watch.finish()
    stored = warm.stats()
    cache.close()
    warm.close()
    memory.close()
    SharedMemory.remove(shm)
    result: dict[str, Any] = {
        "seconds": took_s,
        "admitted": count,
        "mb_s": count * factory.mean_bytes / 1e6 / took_s,
        "more_than_1_s_late": late,
        "warm_entries": stored.entries,
        "admit_share": admitted / took_s,
        "blocked_share": blocked / took_s,
        "before": percentiles(within(measured, before)),
        "during": percentiles(within(measured, span)),
    }
    result["ratio_p99"] = result["during"]["p99"] / result["before"]["p99"]
    return result


def show(console: Console, title: str, report: dict[str, Any]) -> None:
    table = Table("reader", "p50 µs", "p95 µs", "p99 µs", "max µs", title=title)
    for name in ("before", "between", "during"):
        if name in report:
            table.add_row(name, *(f"{report[name][q]:.0f}" for q in ("p50", "p95", "p99", "max")))
    console.print(table)
    plain = {k: v for k, v in report.items() if isinstance(v, int | float)}
    console.print(", ".join(f"{name} {value:,.4g}" for name, value in plain.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--flushes", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=14.0, help="MB/s, as stored")
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results/flush.json")
    args = parser.parse_args()
    console = Console()
    report: dict[str, Any] = {"machine": machine(), "load_before": os.getloadavg()[0]}
    for name, work_on in (
        ("flush", lambda w, i: flushes(w, i, args.flushes)),
        ("no disk", lambda w, i: sustained(i / "work", i, min(1.0, args.minutes), args.rate)),
        ("sustained", lambda w, i: sustained(w, i, args.minutes, args.rate)),
    ):
        if not (args.flushes if name == "flush" else args.minutes):
            continue
        work = Path(tempfile.mkdtemp(prefix="ctrlcache-bench-", dir=args.directory))
        index = Path("/dev/shm") / work.name
        try:
            report[name] = work_on(work, index)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            for path in index.parent.glob(f"{index.name}*"):
                shutil.rmtree(path, ignore_errors=True)
        show(console, name, report[name])
    if args.minutes:
        report["disk_share"] = max(
            0.0, report["sustained"]["blocked_share"] - report["no disk"]["blocked_share"]
        )
        console.print(f"share of the time waiting for the disk: {report['disk_share']:.2%}")
    args.json.parent.mkdir(exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
