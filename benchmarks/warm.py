"""The warm tier: fetching full couplets, and finding neighbours among very many small ones.

    python benchmarks/warm.py [--couplets 20000] [--fetches 5000] [--small 1000000] [--json FILE]

Full couplets (reference shapes, about 150 KB) are written, then fetched in random order: with the
page cache as it is after writing, and with every segment dropped from it before each round and, for
each fetch, the pages it needs certainly on the disk. "decode" is what a look-up decodes (states);
"all" is every field, frames and tokens included. Small couplets measure the index: neighbours of a
random control (16 couplets per space), a fetch, and how long a restart takes to read everything
again. Needs about 3.5 GB of disk and 1 GB of /dev/shm at full size; deletes what it made.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from full_couplets import PROVENANCE, Factory, identity, percentiles
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ctrlcache.couplet import ALL_FIELDS, decode
from ctrlcache.tiers.base import Entry, Record
from ctrlcache.tiers.warm import WarmTier
from worldserve.bench.report import machine

TARGET_US = {"fetch + decode": 600.0, "neighbours": 300.0}


def drop_cache(directory: Path) -> None:
    """Have the kernel forget the pages of every file."""
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fetch(tier: WarmTier, ids: list[bytes], fields: frozenset[str]) -> list[float]:
    seconds = []
    for id in ids:
        begin = time.perf_counter()
        payload = tier.get(id)
        assert payload is not None
        decode(payload, PROVENANCE, fields=fields)
        seconds.append(time.perf_counter() - begin)
    return seconds


def full_size(work: Path, index: Path, couplets: int, fetches: int) -> dict[str, object]:
    factory = Factory()
    tier = WarmTier(work / "full", index, limit_bytes=1 << 40, follow_s=None)
    begin = time.perf_counter()
    for batch in track(list(range(0, couplets, 128)), "writing full couplets"):
        tier.put([factory.record(n) for n in range(batch, min(batch + 128, couplets))])
    wrote_s = time.perf_counter() - begin
    rng = np.random.default_rng(0)
    report: dict[str, object] = {
        "couplets": couplets,
        "mean_bytes": factory.mean_bytes,
        "write_mb_s": couplets * factory.mean_bytes / 1e6 / wrote_s,
    }

    def some() -> list[bytes]:
        return [identity(int(n)) for n in rng.permutation(couplets)[:fetches]]

    fetch(tier, some()[:200], frozenset())
    report["fetch + decode, page cache warm"] = percentiles(fetch(tier, some(), frozenset()))
    report["fetch + all, page cache warm"] = percentiles(fetch(tier, some(), ALL_FIELDS))
    drop_cache(tier.directory)
    report["fetch + decode, page cache cold"] = percentiles(fetch(tier, some(), frozenset()))
    drop_cache(tier.directory)
    report["fetch + all, page cache cold"] = percentiles(fetch(tier, some(), ALL_FIELDS))
    tier.close()
    drop_cache(tier.directory)
    WarmTier.remove_index(index)
    begin = time.perf_counter()
    tier = WarmTier(work / "full", index, limit_bytes=1 << 40, follow_s=None)
    report["restart_s"] = time.perf_counter() - begin
    assert tier.stats().entries == couplets
    tier.close()
    WarmTier.remove_index(index)
    shutil.rmtree(work / "full")
    return report


def small_size(work: Path, index: Path, count: int, queries: int) -> dict[str, object]:
    rng = np.random.default_rng(1)
    tier = WarmTier(work / "small", index, limit_bytes=1 << 40, follow_s=None, durable=False)
    payload = bytes(64)

    def record(n: int) -> Record:
        control = rng.uniform(-1, 1, 4).astype(np.float32)
        return Record(Entry(identity(n), identity(n >> 4), control, 0.2, 0.2, 50.0, 1e9), payload)

    begin = time.perf_counter()
    for at in track(range(0, count, 4096), "writing small couplets"):
        tier.put([record(n) for n in range(at, min(at + 4096, count))])
    report: dict[str, object] = {
        "couplets": count,
        "puts_per_s": count / (time.perf_counter() - begin),
    }
    asked = []
    for n in rng.integers(0, count, queries):
        control = rng.uniform(-1, 1, 4).astype(np.float32)
        begin = time.perf_counter()
        tier.neighbours(identity(int(n) >> 4), control)
        asked.append(time.perf_counter() - begin)
    report["neighbours"] = percentiles(asked)
    fetched = []
    for n in rng.integers(0, count, queries):
        begin = time.perf_counter()
        assert tier.get(identity(int(n))) is not None
        fetched.append(time.perf_counter() - begin)
    report["get"] = percentiles(fetched)
    tier.close()
    WarmTier.remove_index(index)
    begin = time.perf_counter()
    tier = WarmTier(work / "small", index, limit_bytes=1 << 40, follow_s=None)
    report["restart_s"] = time.perf_counter() - begin
    assert tier.stats().entries == count
    report["index_bytes"] = sum(p.stat().st_blocks * 512 for p in index.iterdir())
    tier.close()
    WarmTier.remove_index(index)
    shutil.rmtree(work / "small")
    return report


def show(console: Console, title: str, report: dict[str, object]) -> None:
    table = Table("", "p50 µs", "p95 µs", "p99 µs", "max µs", title=title, title_justify="left")
    for name, value in report.items():
        if isinstance(value, dict):
            table.add_row(name, *(f"{value[q]:.0f}" for q in ("p50", "p95", "p99", "max")))
    console.print(table)
    plain = {name: value for name, value in report.items() if not isinstance(value, dict)}
    console.print(", ".join(f"{name} {value:,.1f}" for name, value in plain.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--couplets", type=int, default=20_000)
    parser.add_argument("--fetches", type=int, default=5_000)
    parser.add_argument("--small", type=int, default=1_000_000)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results/warm.json")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="ctrlcache-bench-", dir=args.directory))
    index = Path("/dev/shm") / work.name
    console = Console()
    report: dict[str, object] = {"machine": machine(), "load_before": os.getloadavg()[0]}
    try:
        if args.couplets:
            report["full"] = full_size(work, index, args.couplets, args.fetches)
            show(console, "full couplets", report["full"])  # type: ignore[arg-type]
        if args.small:
            report["small"] = small_size(work, index, args.small, args.fetches)
            show(console, "small couplets", report["small"])  # type: ignore[arg-type]
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(index, ignore_errors=True)
    args.json.parent.mkdir(exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
