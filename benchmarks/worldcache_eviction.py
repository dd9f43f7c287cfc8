"""WorldCache's eviction score against LRU and the offline optimum, on traces of a real server.

    python benchmarks/worldcache_eviction.py [--trace FILE ...] [--share S ...]

Replays recorded traces (`ctrlcache up --record-trace`; by default those in `benchmarks/traces/`)
through `worldcache.shelf`, as a level does it: the same sampling, the same score. What was stored
without anybody having asked takes up room and counts neither as a hit nor as a miss; the score is
told so by the kind of the record, as a level is. LRU evicts exactly, not by sample. `belady` knows
the future and drops what is needed last. Repeated computation: the cost of look-ups that missed
although the record had been there before, which a larger cache would have answered.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ctrlcache.trace import Request, accesses, requests
from worldcache.eviction import Usual, Weights, score
from worldcache.experience import Experience
from worldcache.shelf import Held, Shelf
from worldserve.bench.report import machine

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "worldcache_eviction.json"
SHARES = (0.02, 0.05, 0.1, 0.2)


@dataclass
class Tally:
    """asked, hits: look-ups. repeated_ms: recomputed although it had been there."""

    asked: int = 0
    hits: int = 0
    all_ms: float = 0.0
    missed_ms: float = 0.0
    repeated_ms: float = 0.0

    def count(self, request: Request, hit: bool, seen: set[str]) -> None:
        if not request.asked:
            return
        self.asked += 1
        self.hits += hit
        self.all_ms += request.cost_ms
        if not hit:
            self.missed_ms += request.cost_ms
            self.repeated_ms += request.cost_ms * (request.key in seen)

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.asked)

    @property
    def saved_share(self) -> float:
        return 1 - self.missed_ms / max(1e-9, self.all_ms)


Replay = Callable[[Sequence[Request], int], Tally]


def by_score(trace: Sequence[Request], limit: int, weights: Weights | None = None) -> Tally:
    weights = weights or Weights()
    shelf: Shelf[None] = Shelf(limit, weights)
    experience = Experience()
    tally, seen = Tally(), set[str]()
    for r in trace:
        id = r.key.encode()
        held = shelf.get(id)
        tally.count(r, held is not None, seen)
        seen.add(r.key)
        if held is not None:
            if r.asked:
                experience.used(held, r.time_s)
            continue
        kind = r.kind if r.asked else r.kind + " ahead"
        standing = experience.arrived(id, kind, r.size_bytes, r.cost_ms, r.time_s, asked=r.asked)
        new = Held(None, standing, kind, b"")
        if r.size_bytes <= limit and make_room(shelf, new, r.time_s, experience.usual, weights):
            shelf.add(id, new)
    return tally


def make_room(
    shelf: Shelf[None], new: Held[None], now_s: float, usual: Usual, weights: Weights
) -> bool:
    """Whether there is room now; what is worth less than all that is there gets none."""
    own = score(new.standing, now_s, usual, weights)
    while shelf.size_bytes + new.standing.size_bytes > shelf.limit_bytes:
        victim = shelf.least(now_s, usual)
        held = None if victim is None else shelf.get(victim)
        if victim is None or held is None:
            return False
        if score(held.standing, now_s, usual, weights) > own:
            return False
        shelf.pop(victim)
    return True


def lru(trace: Sequence[Request], limit: int) -> Tally:
    held: OrderedDict[str, int] = OrderedDict()
    total = 0
    tally, seen = Tally(), set[str]()
    for r in trace:
        tally.count(r, r.key in held, seen)
        seen.add(r.key)
        if r.key in held:
            held.move_to_end(r.key)
            continue
        if r.size_bytes > limit:
            continue
        held[r.key] = r.size_bytes
        total += r.size_bytes
        while total > limit:
            total -= held.popitem(last=False)[1]
    return tally


def belady(trace: Sequence[Request], limit: int) -> Tally:
    never = len(trace) + 1
    following, last = [never] * len(trace), dict[str, int]()
    for i in range(len(trace) - 1, -1, -1):
        following[i] = last.get(trace[i].key, never)
        if trace[i].asked:
            last[trace[i].key] = i
    held: dict[str, tuple[int, int]] = {}
    heap: list[tuple[int, str]] = []
    total = 0
    tally, seen = Tally(), set[str]()
    for i, r in enumerate(trace):
        tally.count(r, r.key in held, seen)
        seen.add(r.key)
        if r.key not in held:
            total += r.size_bytes
        held[r.key] = (r.size_bytes, following[i])
        heapq.heappush(heap, (-following[i], r.key))
        while total > limit:
            due, key = heapq.heappop(heap)
            if held.get(key, (0, 0))[1] == -due:
                total -= held.pop(key)[0]
    return tally


POLICIES: dict[str, Replay] = {"lru": lru, "score": by_score, "belady": belady}


def compare(trace: Sequence[Request], share: float) -> dict[str, dict[str, float]]:
    limit = int(share * sum({r.key: r.size_bytes for r in trace}.values()))
    tallies = {name: replay(trace, limit) for name, replay in POLICIES.items()}
    base = tallies["lru"]
    return {
        name: {
            "hit_rate": t.hit_rate,
            "hit_rate_against_lru": t.hit_rate / max(1e-9, base.hit_rate) - 1,
            "saved_share": t.saved_share,
            "repeated_against_lru": t.repeated_ms / max(1e-9, base.repeated_ms) - 1,
        }
        for name, t in tallies.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, action="append", default=[])
    parser.add_argument("--share", type=float, action="append", help="of all bytes of the trace")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    paths = args.trace or sorted((HERE / "traces").glob("*.jsonl*"))
    if not paths:
        raise SystemExit("no trace: record one with benchmarks/record_trace.py, or name --trace")
    report: dict[str, Any] = {"machine": machine(), "traces": {}}
    console = Console()
    for path in paths:
        trace = list(requests(accesses(path)))
        asked = sum(r.asked for r in trace)
        rows = report["traces"][path.name] = {}
        table = Table(
            "cache", "policy", "hit rate", "against LRU", "ms saved", "repeated, against LRU",
            title=f"{path.name}: {asked} look-ups, {len(trace) - asked} stored ahead",
        )  # fmt: skip
        for share in args.share or SHARES:
            rows[str(share)] = found = compare(trace, share)
            for name, row in found.items():
                table.add_row(
                    f"{share:.0%}",
                    name,
                    f"{row['hit_rate']:.1%}",
                    f"{row['hit_rate_against_lru']:+.0%}",
                    f"{row['saved_share']:.1%}",
                    f"{row['repeated_against_lru']:+.0%}",
                )
        console.print(table)
    args.json.parent.mkdir(exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
