"""What a couplet weighs as stored, part by part, and what its precision costs.

    python benchmarks/couplet.py [--weights DIR] [--clips DIR] [--per-clip 8] [--json FILE]

Couplets of the reference model along the shipped clips, scored and with frames, are encoded "raw"
and "stored". Cost of precision: tokens as int8 against exact ones, relative and in the frames that
the generator draws from them (PSNR between the two, and of each against nothing else); the slice
likewise; the Jacobian's float16 in the states of a neighbour 0.1 away. Times of encoding and
decoding are of this process, and mean little while the machine does other things.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ctrlcache.couplet import ALL_FIELDS, Couplet, decode, encode
from ctrlcache.key import digest
from ctrlcache.scores import probe_controls, scores_from_probes
from ctrlcache.transfer import Jacobian
from worldserve.bench.report import machine
from worldserve.calibrate import REFERENCE, load_model
from worldserve.models.protocol import Float, Pixels, RolloutInput, WorldModel
from worldserve.neighbourhood import Present, presents

PROJECT = Path(__file__).resolve().parent.parent
HORIZON, PROBE_RADIUS = 8, 0.05
BUDGET_BYTES = 184_000
OWNER = digest(b"benchmark")


@dataclass(frozen=True)
class ShippedClip:
    frames: Pixels
    controls: Float
    operation: str
    prompt: str = ""
    view: str = "front"


def couplet_of(model: WorldModel, present: Present) -> Couplet:
    """The couplet of what was done at that point of the clip, scored and with frames."""
    control = np.clip(present.control, -1, 1).astype(np.float32)
    controls = np.concatenate([control[None], probe_controls(control, PROBE_RADIUS)])
    plans = np.repeat(controls[:, None], HORIZON, axis=1)
    began = time.perf_counter()
    own, *probes = (
        model.rollout([RolloutInput(present.memory, present.tokens, plan, present.conditioning)])[0]
        for plan in plans
    )
    states = np.stack([probe.states for probe in probes])
    scores = scores_from_probes(own.states, control, states, controls[1:], model.spec.state_scale)
    [frames] = model.generate([present.frame], [own.tokens], [0])
    return Couplet(
        digest(b"space"), plans[0], own.states, own.tokens, own.slice, frames, scores.jacobian,
        scores.stability, scores.transferability, scores.curvature, 0.1,
        (time.perf_counter() - began) * 1e3, time.time(),
    )  # fmt: skip


def parts(couplet: Couplet) -> dict[str, int]:
    """Stored bytes by part: what leaving it out saves."""
    whole = len(encode(couplet, OWNER, "stored"))
    sizes = {
        name: whole - len(encode(replace(couplet, **{name: None}), OWNER, "stored"))
        for name in sorted(ALL_FIELDS)
    }
    return {**sizes, "states and header": whole - sum(sizes.values()), "whole": whole}


def psnr(left: Pixels, right: Pixels) -> float:
    error = np.mean((left.astype(np.float64) - right) ** 2)
    return float(10 * np.log10(255**2 / max(error, 1e-3)))


def relative(exact: NDArray[Any], other: NDArray[Any]) -> float:
    away = np.asarray(exact, np.float64) - other
    return float(np.linalg.norm(away) / np.linalg.norm(exact))


def cost(model: WorldModel, present: Present, couplet: Couplet) -> dict[str, float]:
    back = decode(encode(couplet, OWNER, "stored"), OWNER)
    assert couplet.tokens is not None
    assert back.tokens is not None
    assert couplet.slice is not None
    assert back.slice is not None
    assert couplet.jacobian is not None
    assert back.jacobian is not None
    assert np.array_equal(couplet.states, back.states)
    assert np.array_equal(couplet.frames, back.frames)
    assert np.array_equal(couplet.jacobian, back.jacobian)
    [redrawn] = model.generate([present.frame], [back.tokens], [0])
    assert couplet.frames is not None
    query = couplet.control + np.float32(0.05)  # 0.1 away
    exact_slope = couplet.jacobian.astype(np.float32)
    # Float16 rounds by half a step: move every entry by that much, the worst that it can do.
    off = exact_slope * (1 + 2.0**-11)
    move = Jacobian().migrate
    exact = move(couplet.states, exact_slope, couplet.control, query)
    return {
        "tokens, relative": relative(couplet.tokens, back.tokens),
        "frames drawn from them, PSNR dB": psnr(couplet.frames, redrawn),
        "slice, relative": relative(couplet.slice[-1:], back.slice),
        "jacobian, relative state at 0.1": relative(
            exact, move(couplet.states, off, couplet.control, query)
        ),
    }


def timed(work: Callable[[], object], repeats: int = 30) -> float:
    """Best of some, in milliseconds."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=Path, default=PROJECT / "model_repository/world_model/1")
    parser.add_argument("--clips", type=Path, default=PROJECT / "client_examples/clips")
    parser.add_argument("--per-clip", type=int, default=8)
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "results" / "couplet.json"
    )
    args = parser.parse_args()
    model = load_model(REFERENCE, args.weights)
    shipped = []
    for path in sorted(args.clips.glob("*.npz")):
        with np.load(path) as shard:
            shipped.append(ShippedClip(shard["frames"], shard["controls"], path.stem))
    rng = np.random.default_rng(0)
    weights: list[dict[str, int]] = []
    costs: list[dict[str, float]] = []
    made: list[Couplet] = []
    for present in track(list(presents(model, shipped, args.per_clip, rng, HORIZON)), "couplets"):
        couplet = couplet_of(model, present)
        made.append(couplet)
        weights.append(parts(couplet))
        costs.append(cost(model, present, couplet))
    console = Console()
    table = Table("stored", "mean bytes", "largest")
    for name in weights[0]:
        sizes = [w[name] for w in weights]
        table.add_row(name, f"{np.mean(sizes):,.0f}", f"{max(sizes):,}")
    table.add_row("budget", f"{BUDGET_BYTES:,}", "")
    table.add_row("raw", f"{np.mean([len(encode(c, OWNER, 'raw')) for c in made]):,.0f}", "")
    console.print(table)
    table = Table("cost of precision", "median", "worst")
    for name in costs[0]:
        values = [c[name] for c in costs]
        worst = min(values) if "PSNR" in name else max(values)
        table.add_row(name, f"{np.median(values):.3g}", f"{worst:.3g}")
    console.print(table)
    sample = made[len(made) // 2]
    raw, stored = (encode(sample, OWNER, precision) for precision in ("raw", "stored"))
    times = {
        "encode stored": timed(lambda: encode(sample, OWNER, "stored")),
        "encode raw": timed(lambda: encode(sample, OWNER, "raw")),
        "decode stored, states": timed(lambda: decode(stored, OWNER, ())),
        "decode stored, all": timed(lambda: decode(stored, OWNER)),
        "decode raw, states": timed(lambda: decode(raw, OWNER, ())),
    }
    table = Table("time", "ms, best of 30")
    for name, milliseconds in times.items():
        table.add_row(name, f"{milliseconds:.3f}")
    console.print(table)
    args.json.parent.mkdir(exist_ok=True)
    report = {
        "machine": machine(),
        "weights": model.spec.weights_digest,
        "couplets": len(made),
        "stored": weights,
        "precision": costs,
        "ms": times,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
