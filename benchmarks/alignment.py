"""What aligning controls to frame times gains in physical accuracy.

A controller at 120 Hz, with a clock of its own, drives a recorded clip; its samples arrive with a
delay that varies. The model predicts from the clip's frames under three versions of the controls:
the true ones, those aligned by time stamp (`ctrlcache.control.align`), and those a server without
time stamps would take, the newest sample that has arrived when the frame comes. Errors are those of
the predicted gripper against the simulator's.

    python benchmarks/alignment.py --data data --suite kitchen
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ctrlcache.control import align
from worldserve.calibrate import REFERENCE, load_model
from worldserve.data.dataset import Clip, clips
from worldserve.data.suites import get_suite
from worldserve.models.protocol import RolloutInput, WorldModel
from worldserve.neighbourhood import presents

RATE_HZ, DELAY_S, JITTER_S = 120.0, 0.06, 0.015
HORIZON, STEPS = 8, (1, 2, 4, 8)
Floats = NDArray[np.float32]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=Path, default=Path("model_repository/world_model/1"))
    parser.add_argument("--loader", default=REFERENCE)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--suite", default="kitchen")
    parser.add_argument("--clips", type=int, default=36)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    model, suite = load_model(options.loader, options.weights), get_suite(options.suite)
    rng = np.random.default_rng(0)
    errors: dict[str, list[Floats]] = {"true": [], "aligned": [], "unaligned": []}
    source = itertools.islice(clips(options.data, suite, "test"), options.clips)
    for number, clip in enumerate(track(source, "clips", total=options.clips)):
        aligned, unaligned = driven(clip.controls, 1 / suite.rate_hz, rng)
        for name, controls in (
            ("true", clip.controls),
            ("aligned", aligned),
            ("unaligned", unaligned),
        ):
            errors[name].append(gripper_error_cm(model, clip, controls, seed=number))
    results = {name: np.concatenate(parts) for name, parts in errors.items()}  # (n, H)
    table = Table("controls", *(f"{s} steps, cm" for s in STEPS), "mean, cm")
    summary: dict[str, object] = {"weights_digest": model.spec.weights_digest}
    for name, values in results.items():
        cells = [float(values[:, s - 1].mean()) for s in STEPS]
        table.add_row(name, *(f"{c:.2f}" for c in cells), f"{values.mean():.2f}")
        summary[name] = {"steps": STEPS, "gripper_cm": cells, "mean_cm": float(values.mean())}
    gains = resampled_gain(results["aligned"], results["unaligned"], rng)
    summary["gain"] = gains
    console = Console()
    console.print(table)
    console.print("alignment lowers the error by {:.1%} ({:.1%} to {:.1%})".format(*gains))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"alignment-{options.suite}.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")


def driven(controls: Floats, interval_s: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """The controls (T, C) of a clip as a server gets them, with and without time stamps."""
    frames = interval_s * np.arange(len(controls))
    stamps = np.arange(-0.2, frames[-1] + 0.2, 1 / RATE_HZ) + rng.uniform(0, 1 / RATE_HZ)
    samples = np.stack(
        [np.interp(stamps, frames, controls[:, axis]) for axis in range(controls.shape[1])], axis=1
    )
    aligned = align(samples, stamps, len(controls) - 1, 1, frames, None, interval_s)
    arrived = np.maximum.accumulate(
        stamps + DELAY_S + rng.uniform(-JITTER_S, JITTER_S, len(stamps))
    )
    newest = np.maximum(np.searchsorted(arrived, frames, side="right") - 1, 0)
    both = np.concatenate([aligned.transitions, aligned.plan])
    return both, samples[newest].astype(np.float32)


def gripper_error_cm(model: WorldModel, clip: Clip, controls: Floats, seed: int) -> Floats:
    """(contexts, H): distance of the predicted gripper from the simulator's."""
    where = [model.spec.physics_names.index(f"gripper_{axis}_m") for axis in "xyz"]
    rng = np.random.default_rng(seed)
    errors = []
    for point in presents(model, [replace(clip, controls=controls)], 4, rng, HORIZON + 1):
        plan = controls[point.position : point.position + HORIZON]
        [made] = model.rollout([RolloutInput(point.memory, point.tokens, plan, point.conditioning)])
        truth = clip.physics[point.position + 1 : point.position + 1 + HORIZON, :3]
        errors.append(100 * np.linalg.norm(model.physics(made.states)[:, where] - truth, axis=1))
    return np.stack(errors)


def resampled_gain(
    aligned: Floats, unaligned: Floats, rng: np.random.Generator
) -> tuple[float, float, float]:
    """1 - mean error aligned / unaligned, with the 95 % range of the bootstrap over contexts."""
    means = np.stack([aligned.mean(axis=1), unaligned.mean(axis=1)], axis=1)  # (n, 2)
    drawn = means[rng.integers(len(means), size=(2_000, len(means)))].mean(axis=1)  # (2000, 2)
    low, high = np.quantile(1 - drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
    whole = means.mean(axis=0)
    return float(1 - whole[0] / whole[1]), float(low), float(high)


if __name__ == "__main__":
    main()
