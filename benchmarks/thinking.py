"""What work in the user's thinking time costs the requests, and what it buys.

    python benchmarks/thinking.py [--quick] [--users 1 2] [--asks 60] [--pause 0.35] [--rounds 3]

Two servers with the same weights take turns, with as many instances as `ctrlcache up` starts: one
scores, prefetches and commits in the background, the other does not (`background=false`). Each user
has a session on a clip and drags: small steps of the control, now and then a jump, now and then an
advance, with a pause after each reply.
Reported per kind of answer: client latency, and the share of its time that a computed answer spends
outside the model (encode, dynamics, decode). Scoring happens after a reply, so its share of a
computed answer must be nothing but noise: the ratio of the medians says so.

Every round, the order is reversed, and each server begins with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from rich.console import Console
from rich.table import Table

from worldserve.bench.report import machine
from worldserve.runtime import Runtime, RuntimeConfig
from worldserve.settings import default_instances

PROJECT = Path(__file__).resolve().parent.parent
OUTPUTS = ("STATE", "PREDICTED_FRAMES", "CACHE_TIER", "EXACT", "TIMING_MS")
Samples = dict[str, list[tuple[float, float]]]  # kind -> (latency ms, ms outside the model)


class User:
    """One session, dragging."""

    def __init__(self, url: str, clip: Path, seed: int, max_error: float) -> None:
        with np.load(clip) as data:
            self.frames, self.controls = data["frames"][:16], data["controls"][:15]
        self.client = triton.InferenceServerClient(url)
        self.draw = np.random.default_rng(seed)
        self.id = f"{clip.stem}-{seed}"
        self.max_error = max_error
        self.control = np.append(self.draw.uniform(-0.5, 0.5, 3), 1.0).astype(np.float32)

    def ask(self, first: bool = False, **parameters: Any) -> tuple[str, float, float]:
        """One request: (kind of answer, latency, ms outside the model)."""
        arrays = {"CONTROL": self.control[None]}
        if first:
            arrays = {
                "CONTROL": np.vstack([self.controls, self.control]),
                "FRAMES": self.frames,
            }
        inputs = []
        for name, array in arrays.items():
            kind = "UINT8" if array.dtype == np.uint8 else "FP32"
            inputs.append(triton.InferInput(name, list(array.shape), kind))
            inputs[-1].set_data_from_numpy(array)
        began = time.perf_counter()
        reply = self.client.infer(
            "world_model",
            inputs,
            outputs=[triton.InferRequestedOutput(name) for name in OUTPUTS],
            sequence_id=self.id,
            sequence_start=first,
            parameters={"max_error": str(self.max_error), **parameters},
        )
        took_ms = (time.perf_counter() - began) * 1e3
        timing = reply.as_numpy("TIMING_MS")
        tier, exact = reply.as_numpy("CACHE_TIER")[0].decode(), reply.as_numpy("EXACT")[0]
        kind = "computed" if tier == "none" else "exact hit" if exact else "near hit"
        return kind, took_ms, took_ms - float(timing[1] + timing[3] + timing[4])

    def drag(self, asks: int, pause_s: float, samples: Samples, lock: threading.Lock) -> None:
        direction = np.zeros(4, np.float32)
        for number in range(asks):
            if number % 12 == 0:  # a jump, and another direction
                self.control[:3] = self.draw.uniform(-0.6, 0.6, 3)
                direction[:3] = self.draw.normal(0, 0.03, 3)
            self.control = np.clip(self.control + direction, -1, 1).astype(np.float32)
            mode = "advance" if number % 12 == 11 else "probe"
            kind, took_ms, outside_ms = self.ask(mode=mode)
            with lock:
                samples[kind].append((took_ms, outside_ms))
            time.sleep(pause_s)


def play(url: str, users: int, asks: int, pause_s: float, round: int, max_error: float) -> Samples:
    clips = sorted((PROJECT / "client_examples" / "clips").glob("*.npz"))
    people = [
        User(url, clips[n % len(clips)], seed=100 * round + n, max_error=max_error)
        for n in range(users)
    ]
    for person in people:
        person.ask(first=True)
    samples: Samples = defaultdict(list)
    lock = threading.Lock()
    threads = [
        threading.Thread(target=person.drag, args=(asks, pause_s, samples, lock))
        for person in people
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return samples


def measure(background: bool, users: int, args: argparse.Namespace, round: int) -> Samples:
    config = RuntimeConfig.aside(
        PROJECT / "model_repository",
        instances=default_instances(),
        parameters={"background": str(background).lower()},
    )
    with Runtime(config) as runtime:
        url = runtime.endpoints.grpc
        return play(url, users, args.asks, args.pause, round, args.max_error)


def summary(samples: list[tuple[float, float]], total: int) -> dict[str, float]:
    took, outside = np.array(samples).T
    return {
        "share": len(samples) / total,
        "p50_ms": float(np.percentile(took, 50)),
        "p99_ms": float(np.percentile(took, 99)),
        "outside_p50": float(np.percentile(outside / took, 50)),
    }


def compare(users: int, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Both servers with so many users, in turns; prints a table."""
    found: dict[bool, Samples] = {True: defaultdict(list), False: defaultdict(list)}
    for round in range(args.rounds):
        for background in (True, False) if round % 2 else (False, True):
            for kind, samples in measure(background, users, args, round).items():
                found[background][kind] += samples
    results: dict[str, Any] = {}
    table = Table(title=f"{users} users, {args.pause} s pause, {args.rounds} rounds")
    for name in ("thinking time", "answer", "share", "p50 ms", "p99 ms", "outside the model"):
        table.add_column(name, justify="left" if name in ("thinking time", "answer") else "right")
    for background, kinds in found.items():
        label = "used" if background else "unused"
        everything = [sample for samples in kinds.values() for sample in samples]
        for kind, samples in [*sorted(kinds.items()), ("all", everything)]:
            row = results.setdefault(label, {})[kind] = summary(samples, len(everything))
            table.add_row(
                label,
                kind,
                f"{row['share']:.0%}",
                f"{row['p50_ms']:.1f}",
                f"{row['p99_ms']:.1f}",
                f"{row['outside_p50']:.1%}" if kind == "computed" else "",
            )
    used, unused = results["used"], results["unused"]
    results["computed_ratio_p50"] = used["computed"]["p50_ms"] / unused["computed"]["p50_ms"]
    results["all_ratio_p99"] = used["all"]["p99_ms"] / unused["all"]["p99_ms"]
    console.print(table)
    console.print(
        f"a computed answer takes {results['computed_ratio_p50']:.2f} times as long (median) where "
        f"thinking time is used; p99 of all answers: {results['all_ratio_p99']:.2f} times"
    )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--asks", type=int, default=60, help="of each user, per round")
    parser.add_argument("--pause", type=float, default=0.35, help="thinking time, seconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-error", type=float, default=0.02)
    parser.add_argument("--json", type=Path, default=PROJECT / "benchmarks/results/thinking.json")
    parser.add_argument("--quick", action="store_true", help="one round, half the requests")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.asks = 1, args.asks // 2

    console = Console()
    report: dict[str, Any] = {
        "made_on": machine(),
        "pause_s": args.pause,
        "rounds": args.rounds,
        "users": {str(users): compare(users, args, console) for users in args.users},
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
