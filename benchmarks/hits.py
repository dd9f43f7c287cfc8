"""What a hit takes, by what is asked for, beside the computations that it stands for.

    python benchmarks/hits.py [--rounds 5] [--each 40] [--json FILE]

Starts the server of `ctrlcache up` with the shipped weights. One session on a clip, 32 frames seen.
In each round, an answer that is known, again and again; then, in random order: a known one, and
answers near one, for STATE alone and with frames; the same computed by the session, which keeps its
keys and values (`cache=off`); and computed from nothing, as a server without sessions does it.
gRPC, by the client's clock. Ratios are of medians, round by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from worldserve.bench.report import machine
from worldserve.runtime import Runtime, RuntimeConfig
from worldserve.sequence_client import SequenceClient
from worldserve.settings import default_instances

PROJECT = Path(__file__).resolve().parent.parent
CLIP = PROJECT / "client_examples" / "clips" / "drawer-open.npz"
SEEN, HORIZON = 32, 8
STATE, FRAMES = ("STATE",), ("STATE", "PREDICTED_FRAMES")
BUDGET = "0.05"
HELD = np.array([0.2, -0.1, 0.1, 1.0], np.float32)
#: Within the reach of shown frames, and beyond it.
NEAR, FAR = 0.03, 0.1

Ask = Callable[[], float]  # -> milliseconds


class Asker:
    """One session, and the ways in which it may be asked."""

    def __init__(self, client: Any) -> None:
        with np.load(CLIP) as data:
            self._frames = data["frames"][:SEEN]
            self._past = data["controls"][: SEEN - 1]
        self._client = client
        self._draw = np.random.default_rng(0)
        self._session = SequenceClient(client, HORIZON, max_error=BUDGET)
        self._session.tell(
            np.vstack([self._past, HELD]), self._frames, outputs=FRAMES, prompt="open the drawer"
        )
        self._session.tell(HELD, outputs=FRAMES, drain="true")

    def kinds(self) -> dict[str, Ask]:
        session = self._session
        return {
            "known, STATE": lambda: session.tell(HELD, outputs=STATE),
            "known, frames": lambda: session.tell(HELD, outputs=FRAMES),
            "near, STATE": lambda: session.tell(self._beside(FAR), outputs=STATE),
            "near, frames shown": lambda: session.tell(self._beside(NEAR), outputs=FRAMES),
            "near, frames drawn": lambda: session.tell(self._beside(FAR), outputs=FRAMES),
            "computed, STATE": lambda: session.tell(self._new(), outputs=STATE, cache="off"),
            "computed, frames": lambda: session.tell(self._new(), outputs=FRAMES, cache="off"),
            "from nothing, frames": self._from_nothing,
        }

    def _beside(self, distance: float) -> NDArray[np.float32]:
        away = self._draw.normal(size=HELD.size)
        away[3] = 0.0  # the hand is closed as far as it goes
        moved: NDArray[np.float32] = (HELD + distance * away / np.linalg.norm(away)).astype("<f4")
        return moved

    def _new(self) -> NDArray[np.float32]:
        return self._draw.uniform(-1, 1, HELD.size).astype(np.float32)

    def _from_nothing(self) -> float:
        alone = SequenceClient(self._client, HORIZON, cache="off")
        return alone.tell(
            np.vstack([self._past, self._new()]), self._frames, end=True, outputs=FRAMES
        )


def measure(url: str, rounds: int, each: int) -> dict[str, list[list[float]]]:
    """Milliseconds by kind, round by round."""
    found: dict[str, list[list[float]]] = {}
    with triton.InferenceServerClient(url) as client:
        kinds = Asker(client).kinds()
        order = np.random.default_rng(1)
        for _ in track(range(rounds), "rounds"):
            for name in ("known, STATE", "known, frames"):
                alone = [kinds[name]() for _ in range(each)]
                found.setdefault(f"{name}, in a row", []).append(alone)
            plan = [name for name in kinds for _ in range(each)]
            times: dict[str, list[float]] = {name: [] for name in kinds}
            for number in order.permutation(len(plan)):
                times[plan[number]].append(kinds[plan[number]]())
            for name, values in times.items():
                found.setdefault(name, []).append(values)
    return found


def ratio(found: dict[str, list[list[float]]], a: str, b: str) -> dict[str, float]:
    """How many times longer a takes than b: median, least and most of the rounds."""
    rounds = [
        statistics.median(x) / statistics.median(y) for x, y in zip(found[a], found[b], strict=True)
    ]
    return {"median": statistics.median(rounds), "least": min(rounds), "most": max(rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each", type=int, default=40, help="questions of each kind, per round")
    parser.add_argument("--json", type=Path, default=PROJECT / "benchmarks/results/hits.json")
    args = parser.parse_args()
    config = RuntimeConfig.aside(
        PROJECT / "model_repository",
        instances=default_instances(),
    )
    with Runtime(config) as runtime:
        found = measure(runtime.endpoints.grpc, args.rounds, args.each)
    report: dict[str, Any] = {"machine": machine(), "ms": {}, "times": {}}
    table = Table("answer", "p50 ms", "p99 ms", title=f"{args.rounds} rounds of {args.each}")
    for name, rounds in found.items():
        values = np.concatenate(rounds)
        p50, p99 = (float(np.percentile(values, p)) for p in (50, 99))
        report["ms"][name] = {"p50": p50, "p99": p99}
        table.add_row(name, f"{p50:.1f}", f"{p99:.1f}")
    console = Console()
    console.print(table)
    for a, b in (
        ("computed, STATE", "known, STATE"),
        ("computed, frames", "known, frames"),
        ("computed, frames", "near, frames shown"),
        ("computed, frames", "near, frames drawn"),
        ("from nothing, frames", "computed, frames"),
        ("from nothing, frames", "known, frames"),
    ):
        row = report["times"][f"{a} / {b}"] = ratio(found, a, b)
        console.print(f"{a} / {b}: {row['median']:.1f} ({row['least']:.1f} to {row['most']:.1f})")
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
