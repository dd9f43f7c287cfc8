"""Eviction policies on replayed traces, against the offline optimum.

    python benchmarks/eviction.py [--trace FILE ...] [--requests N] [--seeds N] [--json FILE]

Each policy drives the same size-limited cache (sampled eviction as in the tiers, 64 candidates)
over the same requests; `worldcache` is the score of WorldCache's levels, in their own code. Two
offline rows know the future: `belady` drops what is needed last (optimal for equal sizes and costs)
and `belady-cost` drops the least recompute-ms saved per byte and request of waiting (the optimum
with sizes and costs is NP-hard; this is the usual stand-in).

Recorded traces (`ctrlcache up --record-trace`, `benchmarks/record_trace.py`; by default those in
`benchmarks/traces/`) are replayed one by one, as `ctrlcache.trace.requests` reads them: what was
stored without anybody having asked takes up room and counts neither as a hit nor as a miss.

The synthetic trace (`--requests`, seeded) imitates interactive sessions: clips are chosen by Zipf
popularity (exponent 0.9); a session walks along its clip, now and then scrubs back to one of the
moments it was at; at each moment the hand wanders by small steps between control cells, so nearby
cells repeat within seconds. Half of the couplets hold frames (about 150 KB), the rest states only
(about 30 KB); costs are log-normal around 120 ms, four times that with frames. Whenever a session
comes to a moment it also asks for that moment's context slice (about 400 KB, 20 ms).
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from worldcache_eviction import by_score

from ctrlcache.eviction import POLICIES, Usage, used
from ctrlcache.trace import Request, accesses, requests
from worldserve.bench.report import machine

HERE = Path(__file__).parent
Report = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class Outcome:
    hit_rate: float
    saved_share: float  # of the recompute-ms of all requests


def synthetic(requests: int, seed: int, clips: int = 400, sessions: int = 8) -> list[Request]:
    rng = random.Random(seed)
    weights = [1.0 / (rank + 1) ** 0.9 for rank in range(clips)]
    facts: dict[str, tuple[int, float]] = {}
    walkers = [_session(rng, weights) for _ in range(sessions)]
    time_s = 0.0
    trace: list[Request] = []
    while len(trace) < requests:
        n = rng.randrange(sessions)
        try:
            id = next(walkers[n])
        except StopIteration:
            walkers[n] = _session(rng, weights)
            continue
        if id not in facts and id.endswith("slice"):
            facts[id] = int(400_000 * rng.uniform(0.9, 1.1)), rng.lognormvariate(3.0, 0.2)
        elif id not in facts:
            frames = rng.random() < 0.5
            size = int((150_000 if frames else 30_000) * rng.uniform(0.8, 1.2))
            facts[id] = size, rng.lognormvariate(4.8, 0.5) * (4 if frames else 1)
        time_s += rng.expovariate(sessions / 0.4)  # each session acts every 0.4 s
        trace.append(Request(time_s, str(n), id, "couplet", *facts[id], asked=True))
    return trace


def _session(rng: random.Random, weights: list[float]) -> Iterator[str]:
    clip = rng.choices(range(len(weights)), weights)[0]
    moment, visited = 0, [0]
    yield f"{clip}/{moment}/slice"
    hand = [rng.gauss(0, 2), rng.gauss(0, 2)]
    for _ in range(rng.randrange(50, 400)):
        if rng.random() < 0.08:
            moment = rng.choice(visited) if rng.random() < 0.3 else moment + 1
            visited.append(moment)
            yield f"{clip}/{moment}/slice"
        hand = [0.9 * h + rng.gauss(0, 0.6) for h in hand]
        yield f"{clip}/{moment}/{round(hand[0])}/{round(hand[1])}"


def replay_online(trace: list[Request], limit: int, name: str, sample: int = 64) -> Outcome:
    """As a tier does it: a random sample, the lowest priority goes, until the new record fits."""
    policy = POLICIES[name]
    rng = random.Random(1)
    held: dict[str, Usage] = {}
    order: list[str] = []
    place: dict[str, int] = {}
    total = 0
    clock = 0.0
    score = _Score()
    for r in trace:
        usage = held.get(r.key)
        score.count(r, usage is not None)
        if usage is not None:
            if r.asked:
                held[r.key] = used(usage, r.time_s, clock)
            continue
        while total + r.size_bytes > limit and order:
            picks = {rng.randrange(len(order)) for _ in range(min(sample, len(order)))}
            priority, victim = min((policy(held[order[i]], r.time_s), order[i]) for i in picks)
            clock = max(clock, priority) if name == "gdsf" else clock
            total -= held.pop(victim).size_bytes
            index, last = place.pop(victim), order.pop()
            if last != victim:
                order[index] = last
                place[last] = index
        held[r.key] = Usage(r.size_bytes, r.cost_ms, r.time_s, r.time_s, clock=clock)
        place[r.key] = len(order)
        order.append(r.key)
        total += r.size_bytes
    return score.outcome()


def replay_offline(
    trace: list[Request], limit: int, value: Callable[[Request, int], float]
) -> Outcome:
    """Keeps what has the highest value(request, requests until its next use); may keep nothing new.

    A value only grows while its record waits, so a noted value that is out of date is too low: it
    is popped early, brought up to date, and goes back. What is popped up to date is the lowest.
    """
    following = [len(trace) * 10] * len(trace)
    last: dict[str, int] = {}
    for i in range(len(trace) - 1, -1, -1):
        following[i] = last.get(trace[i].key, len(trace) * 10)
        last[trace[i].key] = i
    held: dict[str, tuple[int, int]] = {}  # id -> (size, index of its next use)
    heap: list[tuple[float, int, str]] = []
    total = 0
    score = _Score()
    for i, r in enumerate(trace):
        score.count(r, r.key in held)
        if r.key not in held:
            total += r.size_bytes
        held[r.key] = (r.size_bytes, following[i])
        heapq.heappush(heap, (value(r, following[i] - i), following[i], r.key))
        while total > limit:
            noted, due, id = heapq.heappop(heap)
            if held.get(id, (0, -1))[1] != due:
                continue  # an older note of a record that was used or dropped since
            fresh = value(trace[due] if due < len(trace) else r, due - i)
            if due < len(trace) and fresh > noted:
                heapq.heappush(heap, (fresh, due, id))
                continue
            total -= held.pop(id)[0]
    return score.outcome()


class _Score:
    def __init__(self) -> None:
        self._hits = self._requests = 0
        self._saved = self._cost = 0.0

    def count(self, request: Request, hit: bool) -> None:
        if not request.asked:
            return
        self._requests += 1
        self._hits += hit
        self._cost += request.cost_ms
        self._saved += request.cost_ms * hit

    def outcome(self) -> Outcome:
        return Outcome(self._hits / max(1, self._requests), self._saved / max(1e-9, self._cost))


def compare(trace: list[Request], shares: list[float]) -> dict[float, dict[str, Outcome]]:
    unique = {r.key: r.size_bytes for r in trace}
    footprint = sum(unique.values())
    table: dict[float, dict[str, Outcome]] = {}
    for share in shares:
        limit = int(footprint * share)
        rows = {name: replay_online(trace, limit, name) for name in POLICIES}
        scored = by_score(trace, limit)
        rows["worldcache"] = Outcome(scored.hit_rate, scored.saved_share)
        rows["belady"] = replay_offline(trace, limit, lambda r, wait: 1.0 / wait)
        rows["belady-cost"] = replay_offline(
            trace, limit, lambda r, wait: r.cost_ms / (r.size_bytes * wait)
        )
        table[share] = rows
    return table


def report_of(traces: list[list[Request]], shares: list[float]) -> Report:
    """By cache size and policy, means over the traces."""
    results = [compare(trace, shares) for trace in traces]
    report: Report = {}
    for share in shares:
        rows = report[str(share)] = {}
        lru = statistics.mean(1 - r[share]["lru"].saved_share for r in results)
        for name in results[0][share]:
            hits = [r[share][name].hit_rate for r in results]
            saved = statistics.mean(r[share][name].saved_share for r in results)
            rows[name] = {
                "hit_rate": statistics.mean(hits),
                "hit_rate_spread": statistics.pstdev(hits),
                "saved_share": saved,
                "recomputed_against_lru": (1 - saved) / lru - 1 if lru else 0.0,
            }
    return report


def show(console: Console, name: str, report: Report) -> None:
    for share, rows in report.items():
        table = Table(title=f"{name}: a cache of {float(share):.0%} of all bytes")
        for column in ("policy", "hit rate", "± traces", "recompute-ms saved", "recomputed vs lru"):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for policy, row in rows.items():
            table.add_row(
                policy,
                f"{row['hit_rate']:.1%}",
                f"{row['hit_rate_spread']:.1%}",
                f"{row['saved_share']:.1%}",
                f"{row['recomputed_against_lru']:+.1%}",
            )
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, action="append", help="default: all recorded ones")
    parser.add_argument("--requests", type=int, default=40_000, help="of a synthetic trace")
    parser.add_argument("--seeds", type=int, default=3, help="synthetic traces; 0 for none")
    parser.add_argument("--share", type=float, action="append", help="cache size / all bytes")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "eviction.json")
    args = parser.parse_args()
    shares = args.share or [0.05, 0.1, 0.2, 0.4]
    console = Console()
    report: dict[str, Any] = {"machine": machine(), "traces": {}}
    for path in args.trace or sorted((HERE / "traces").glob("*.jsonl*")):
        trace = list(requests(accesses(path)))
        made = report["traces"][path.name] = report_of([trace], shares)
        asked = sum(r.asked for r in trace)
        show(console, f"{path.name}, {asked} look-ups, {len(trace) - asked} other stores", made)
    if args.seeds:
        traces = [synthetic(args.requests, seed) for seed in range(args.seeds)]
        made = report["traces"]["synthetic"] = report_of(traces, shares)
        show(console, f"{args.seeds} synthetic traces of {args.requests} requests", made)
    args.json.parent.mkdir(exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
