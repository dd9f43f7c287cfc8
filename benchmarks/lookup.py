"""The hot look-up from a second process, and the control hash index at a million couplets.

    python benchmarks/lookup.py [--entries 10000] [--small 1000000] [--hnsw] [--json FILE]

Hot: this process fills the hot tier with couplets of the reference shapes (states, Jacobian, and
`--bulk` bytes in place of tokens and slice, which an answer about states never reads). A second
process then asks for plans that are there (exact), that are near (a neighbour's states moved by its
Jacobian) and that are neither (miss), through `CoupletCache.lookup`, as the server does. Each asked
once per call, in random order; percentiles per round, over several rounds. `engine alone` reads
what an exact look-up reads and copies as much of it, but makes no answer: the floor here.

Index: small couplets (no payload) in the form that the hot and the warm tier share, as one space of
all of them and as spaces of 100; random queries, 16 answers at most, compared with brute force.
faiss-cpu, where it is installed (`pip install faiss-cpu`), searches the same points in one space:
it knows no radius per point, so it is asked for the 16 nearest, of which those count whose own
radius reaches. Recall is the share of the up to 16 nearest reaching couplets that were found.

Needs about 2 GB of /dev/shm; deletes what it made.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ctrlcache import index
from ctrlcache.admission import Trust
from ctrlcache.calibration import TrustModel
from ctrlcache.couplet import Couplet
from ctrlcache.index import ControlHashIndex
from ctrlcache.key import digest, plan_key
from ctrlcache.shared import SharedMemory
from ctrlcache.tiered import CoupletCache, Hit, Query
from ctrlcache.tiers.base import Entry
from ctrlcache.transfer import Jacobian
from worldserve.bench.report import machine

HORIZON, STATE, CONTROLS = 8, 256, 4
PER_SPACE = 50
BARE, COPIED = "engine alone", 8_192
PROVENANCE = digest(b"benchmark")
TARGETS_US = {"exact": 25.0, "one space": 300.0, "spaces of 100": 300.0}
CALIBRATION = TrustModel(
    weights_digest="benchmark", migration="jacobian", delta=0.05, q=1.0, kappa0=0.0,
    curvature_power=1.0, distance_power=2.0, floor=0.0, max_distance=0.4, probe_radius=0.05,
    horizon=HORIZON, rho_max=1.0, stability_threshold=0.0, transferability_threshold=0.0,
    frame_psnr_db=35.0, frame_distance=0.1, frame_change=0.01, pairs=0, contexts=0, created="",
)  # fmt: skip

Report = dict[str, Any]


# -- hot ------------------------------------------------------------------------------------------


def open_cache(directory: str, size_bytes: int) -> tuple[SharedMemory, CoupletCache]:
    memory = SharedMemory(directory, size_bytes)
    policy = Trust(CALIBRATION, max_error=0.1)
    return memory, CoupletCache(memory, None, PROVENANCE, policy, Jacobian(), background=False)


def place(n: int) -> tuple[bytes, NDArray[np.float32]]:
    """Space and plan of couplet `n`, the same in both processes."""
    control = np.random.default_rng(n).uniform(-0.9, 0.9, CONTROLS).astype(np.float32)
    return digest(b"space", b"%d" % (n // PER_SPACE)), np.tile(control, (HORIZON, 1))


def fill(cache: CoupletCache, entries: int, bulk: int) -> None:
    rng = np.random.default_rng(0)
    states = rng.normal(size=(HORIZON, STATE)).astype(np.float32)
    jacobian = rng.normal(size=(HORIZON, STATE, CONTROLS)).astype(np.float16)
    kept = rng.normal(size=bulk // 4).astype(np.float32) if bulk else None
    for n in track(range(entries), "filling the hot tier"):
        space, plan = place(n)
        made = Couplet(space, plan, states, slice=kept, jacobian=jacobian, cost_ms=50.0)
        # A radius of 0.15 at the budget of 0.05.
        cache.admit(Couplet(**{**vars(made), "curvature": 0.05 / 0.15**2, "radius": 0.15}))


def queries(entries: int, round: int) -> dict[str, list[Query]]:
    rng = np.random.default_rng([1, round])
    asked: dict[str, list[Query]] = {"exact": [], "near": [], "miss": []}
    for n in rng.integers(0, entries, 4000):
        space, plan = place(int(n))
        away = rng.normal(size=CONTROLS)
        moved = plan + (0.05 * away / np.linalg.norm(away)).astype(np.float32)
        asked["exact"].append(Query(space, plan, 0.05))
        asked["near"].append(Query(space, moved, 0.05))
        asked["miss"].append(Query(digest(space), plan, 0.05))
    return asked


def measure_hot(directory: str, size_bytes: int, entries: int, rounds: int) -> Report:
    """In the second process: microseconds by kind of look-up, percentiles per round."""
    memory, cache = open_cache(directory, size_bytes)
    right: dict[str, Callable[[Hit | None], bool]] = {
        "exact": lambda hit: hit is not None and hit.exact,
        "near": lambda hit: hit is not None and not hit.exact,
        "miss": lambda hit: hit is None,
    }
    report: Report = {kind: [] for kind in (*right, BARE)}

    def bare(id: bytes) -> bytes | None:
        """The engine's part alone: the record's first bytes, as many as an answer copies."""
        return memory.hot.read(id, lambda head, _: bytes(head[:COPIED]))

    for round in range(rounds):
        names = [plan_key(query.space, query.plan)[0] for query in queries(entries, round)["exact"]]
        assert all(bare(name) is not None for name in names[:300])
        report[BARE].append(percentiles(timed(bare, names)))
        for kind, asked in queries(entries, round).items():
            for query in asked[:300]:
                assert right[kind](cache.lookup(query)), f"not {kind}"
            seconds = timed(cache.lookup, asked)
            report[kind].append(percentiles(seconds))
    memory.close()
    return report


# -- index ----------------------------------------------------------------------------------------


def points(small: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Controls (N, C), and radii from 0.01 to 0.1, as many of each magnitude."""
    rng = np.random.default_rng(2)
    controls = rng.uniform(-1, 1, (small, CONTROLS)).astype(np.float32)
    return controls, np.exp(rng.uniform(np.log(0.01), np.log(0.1), small))


def identity(n: int) -> bytes:
    return n.to_bytes(16, "big")


def build(directory: Path, small: int, per_space: int) -> tuple[lmdb.Environment, ControlHashIndex]:
    env = lmdb.open(
        str(directory), map_size=4 << 30, max_dbs=index.DATABASES, sync=False, max_spare_txns=1
    )
    chi = ControlHashIndex(env, "benchmark")
    controls, radii = points(small)
    for start in track(range(0, small, 20_000), f"filing, {per_space} in a space"):
        chunk = range(start, min(start + 20_000, small))
        with env.begin(write=True) as txn:
            chi.add(
                txn,
                (
                    Entry(identity(n), space(n // per_space), controls[n], radii[n], 1.0, 1.0, 0.0)
                    for n in chunk
                ),
            )
    return env, chi


def space(n: int) -> bytes:
    return digest(b"%d" % n)


def reaching(
    controls: NDArray[np.float32], radii: NDArray[np.float64], query: NDArray[np.float32]
) -> NDArray[np.int64]:
    """Brute force: the 16 nearest couplets whose own radius reaches the query."""
    away = np.sqrt(((controls.astype(np.float64) - query.astype(np.float64)) ** 2).sum(axis=1))
    reached = np.flatnonzero(away <= radii)
    return reached[np.argsort(away[reached])][:16]


def measure_index(directory: Path, small: int, per_space: int, rounds: int) -> Report:
    env, chi = build(directory, small, per_space)
    controls, radii = points(small)
    rng = np.random.default_rng(3)

    def answer(asked: tuple[int, NDArray[np.float32]]) -> list[bytes]:
        with env.begin(buffers=True) as txn:
            return [c.id for c in chi.query(txn, space(asked[0]), asked[1], 16)]

    def some(count: int) -> list[tuple[int, NDArray[np.float32]]]:
        # Where couplets are, as a hand returns to where it was: beside one of them.
        chosen = rng.integers(0, small, count)
        moved = controls[chosen] + rng.normal(size=(count, CONTROLS)).astype(np.float32) * 0.02
        return [(int(n) // per_space, query) for n, query in zip(chosen, moved, strict=True)]

    found = expected = 0
    for number, query in some(300):
        members = slice(number * per_space, (number + 1) * per_space)
        truth = {
            identity(int(n) + members.start)
            for n in reaching(controls[members], radii[members], query)
        }
        found += len(truth & set(answer((number, query))))
        expected += len(truth)
    report: Report = {"recall": found / max(expected, 1), "answers": expected / 300}
    for _ in range(rounds):
        report.setdefault("rounds", []).append(percentiles(timed(answer, some(4000))))
    report["bytes"] = (directory / "data.mdb").stat().st_blocks * 512
    env.close()
    return report


def measure_faiss(small: int, rounds: int, hnsw: bool) -> Report:
    try:
        import faiss
    except ImportError:
        return {}
    faiss.omp_set_num_threads(1)
    controls, radii = points(small)
    rng = np.random.default_rng(3)
    lists = max(16, int(4 * small**0.5))
    kinds: dict[str, Any] = {"IndexFlatL2": faiss.IndexFlatL2(CONTROLS)}
    quantiser = faiss.IndexFlatL2(CONTROLS)
    kinds[f"IndexIVFFlat, {lists} lists, 8 probed"] = faiss.IndexIVFFlat(quantiser, CONTROLS, lists)
    if hnsw:
        kinds["IndexHNSWFlat, M = 32"] = faiss.IndexHNSWFlat(CONTROLS, 32)
    chosen = rng.integers(0, small, 300)
    moved = controls[chosen] + rng.normal(size=(300, CONTROLS)).astype(np.float32) * 0.02
    truths = [set(reaching(controls, radii, query).tolist()) for query in moved]
    report: Report = {}
    for name, made in track(kinds.items(), "faiss"):
        if not made.is_trained:
            made.train(controls[: 40 * lists])
        made.add(controls)
        if hasattr(made, "nprobe"):
            made.nprobe = 8

        def answer(query: NDArray[np.float32], made: Any = made) -> set[int]:
            distances, ids = made.search(query[None], 16)
            within = (ids[0] >= 0) & (np.sqrt(distances[0]) <= radii[ids[0]])
            return set(ids[0][within].tolist())

        found = sum(len(truth & answer(q)) for truth, q in zip(truths, moved, strict=True))
        asked = list(moved) if "Flat" in name[:9] else list(np.tile(moved, (10, 1)))
        report[name] = {
            "recall": found / max(sum(map(len, truths)), 1),
            "rounds": [percentiles(timed(answer, asked)) for _ in range(rounds)],
        }
    return report


# -- measuring and showing ------------------------------------------------------------------------


def timed(work: Callable[[Any], object], asked: Sequence[Any]) -> list[float]:
    seconds = []
    for query in asked:
        began = time.perf_counter()
        work(query)
        seconds.append(time.perf_counter() - began)
    return seconds


def percentiles(seconds: list[float]) -> dict[str, float]:
    """In microseconds."""
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e6
    return {"p50": float(p50), "p99": float(p99)}


def spread(rounds: list[dict[str, float]], which: str) -> str:
    values = sorted(r[which] for r in rounds)
    return f"{statistics.median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f})"


def show(report: Report, console: Console) -> None:
    table = Table("", "p50 us, median (range)", "p99 us, median (range)", "target p99", "recall")
    for kind, rounds in report["hot"].items():
        row = (f"hot look-up, {kind}", spread(rounds, "p50"), spread(rounds, "p99"))
        table.add_row(*row, _target(kind), "")
    table.add_section()
    for kind, made in {**report["index"], **report["faiss"]}.items():
        ours = kind in report["index"]
        row = ("index, " if ours else "faiss, ") + kind
        recall = f"{made['recall']:.4f}"
        rounds = made["rounds"]
        table.add_row(row, spread(rounds, "p50"), spread(rounds, "p99"), _target(kind), recall)
    console.print(table)
    console.print(
        f"{report['entries']} couplets in the hot tier, {report['small']} in the index; "
        f"{len(report['hot']['exact'])} rounds; load before: {report['load']:.1f} "
        f"on {report['cores']} cores"
    )


def _target(kind: str) -> str:
    return f"{TARGETS_US[kind]:g}" if kind in TARGETS_US else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--bulk", type=int, default=60_000, help="bytes beside states, per couplet")
    parser.add_argument("--small", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hnsw", action="store_true", help="also build HNSW, which takes minutes")
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "results" / "lookup.json"
    )
    parser.add_argument("--second-process", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.second_process:
        directory, size = args.second_process
        print(json.dumps(measure_hot(directory, int(size), args.entries, args.rounds)))
        return
    report: Report = {
        "entries": args.entries,
        "small": args.small,
        "bulk": args.bulk,
        "load": os.getloadavg()[0],
        "cores": len(os.sched_getaffinity(0)),
        "machine": machine(),
        "when": time.strftime("%Y-%m-%d %H:%M"),
    }
    base = Path(f"/dev/shm/ctrlcache-benchmark-{os.getpid()}")
    try:
        size = int(args.entries * (args.bulk + 45_000) * 1.3) + (256 << 20)
        memory, cache = open_cache(str(base / "hot"), size)
        fill(cache, args.entries, args.bulk)
        command = [
            sys.executable, __file__, "--second-process", str(base / "hot"), str(size),
            "--entries", str(args.entries), "--rounds", str(args.rounds),
        ]  # fmt: skip
        second = subprocess.run(command, check=True, capture_output=True, text=True)
        report["hot"] = json.loads(second.stdout)
        memory.close()
        SharedMemory.remove(base / "hot")
        report["index"] = {
            name: measure_index(base / name.replace(" ", "-"), args.small, per_space, args.rounds)
            for name, per_space in (("one space", args.small), ("spaces of 100", 100))
        }
        report["faiss"] = measure_faiss(args.small, args.rounds, args.hnsw)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    show(report, Console())
    args.json.parent.mkdir(exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
