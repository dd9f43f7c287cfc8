"""Hits of the policy `trust` against `fixed` at equal measured error, and whether bounds hold.

A hand moves through the controls of held-out scenes: it drifts, corrects itself by little, jumps,
comes back. Every control that a policy cannot answer from what it has is computed, scored and kept;
every answer it does give is compared with the model's own. `fixed` is given every reach from 0.005
to 0.3 (0.03 is the original's), `trust` every budget; both start empty in every scene, use the same
couplets and the same migration. Writes trust.json and trust.png.

    python benchmarks/trust.py --data data --suite kitchen
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ctrlcache.admission import Fixed, Policy, Trust
from ctrlcache.calibration import TrustModel, trust_path
from ctrlcache.scores import Scores, probe_controls, relative_error, scores_from_probes
from ctrlcache.tiers.base import Candidate
from ctrlcache.transfer import Jacobian
from worldserve.calibrate import REFERENCE, load_model
from worldserve.data.dataset import clips
from worldserve.data.suites import get_suite
from worldserve.models.protocol import RolloutInput, WorldModel
from worldserve.neighbourhood import Present, presents

matplotlib.use("Agg")
from matplotlib import pyplot as plt

REACHES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
BUDGETS = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05)
ORIGINAL_REACH = 0.03
HORIZON = 8


@dataclass(frozen=True, eq=False)
class Scene:
    """One context and the controls of one hand: controls (n, C), the model's states (n, H, S), the
    scores of each as a couplet, and errors (n, n): [i, j] of answering j from couplet i."""

    controls: NDArray[np.float32]
    scores: list[Scores]
    errors: NDArray[np.float64]
    distances: NDArray[np.float64]


@dataclass
class Outcome:
    """What a policy did over all scenes: approximate hits with their true errors and bounds."""

    asked: int = 0
    repeats: int = 0  # the very same control again: exact hits, the same for all policies
    errors: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        errors, bounds = np.array(self.errors), np.array(self.bounds)
        some = len(errors) > 0
        return {
            "hit_rate": len(errors) / max(self.asked - self.repeats, 1),
            "mean_error": float(errors.mean()) if some else 0.0,
            "p95_error": float(np.quantile(errors, 0.95)) if some else 0.0,
            "over_bound": float((errors > bounds).mean()) if some else 0.0,
            "hits": len(errors),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=Path, default=Path("model_repository/world_model/1"))
    parser.add_argument("--loader", default=REFERENCE)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--suite", default="kitchen")
    parser.add_argument("--scenes", type=int, default=48)
    parser.add_argument("--interactions", type=int, default=40, help="per scene")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    model = load_model(options.loader, options.weights)
    trust = TrustModel.load(trust_path(options.weights), model.spec.weights_digest)
    rng = np.random.default_rng(0)
    points = presents(model, clips(options.data, get_suite(options.suite), "test"), 1, rng, HORIZON)
    scenes = [
        play(model, point, hand(rng, options.interactions, model.spec.control_dim), trust)
        for point in track(itertools.islice(points, options.scenes), "scenes", total=options.scenes)
    ]
    results = run(scenes, trust)
    results["scenes"], results["weights_digest"] = len(scenes), model.spec.weights_digest
    report(results, options.suite, Console())
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"trust-{options.suite}"
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, options.suite, stem.with_suffix(".png"))


def hand(rng: np.random.Generator, count: int, axes: int) -> NDArray[np.float32]:
    """Controls (count, axes) of one hand: drift 55 %, correction 25 %, jump 10 %, return 10 %."""
    path = [rng.uniform(-0.8, 0.8, axes)]
    velocity = np.zeros(axes)
    while len(path) < count:
        kind = rng.random()
        if kind < 0.55:
            velocity = 0.8 * velocity + 0.05 * rng.normal(size=axes)
            step = path[-1] + velocity
        elif kind < 0.8:
            step = path[-1] + 0.015 * rng.normal(size=axes)
        elif kind < 0.9:
            step = rng.uniform(-0.8, 0.8, axes)
        else:
            step = path[int(rng.integers(len(path)))] + 0.01 * rng.normal(size=axes)
        path.append(np.clip(step, -1, 1))
    return np.array(path, dtype=np.float32)


def play(
    model: WorldModel, present: Present, controls: NDArray[np.float32], trust: TrustModel
) -> Scene:
    """Let the model predict, and score, every control of the hand."""
    scale, states, scores = model.spec.state_scale, [], []
    for control in controls:
        at = probe_controls(control, trust.probe_radius)
        made = model.rollout(
            [
                RolloutInput(
                    present.memory,
                    present.tokens,
                    np.repeat(c[None], HORIZON, axis=0),
                    present.conditioning,
                )
                for c in (control, *at)
            ]
        )
        own, probes = made[0].states, np.stack([m.states for m in made[1:]])
        states.append(own)
        scores.append(scores_from_probes(own, control, probes, at, scale, trust.rho_max))
    truth = np.stack(states)  # (n, H, S)
    errors = np.stack(
        [
            relative_error(Jacobian().migrate(s, q.jacobian, c, controls), truth, scale)
            for s, q, c in zip(truth, scores, controls, strict=True)
        ]
    )
    distances = np.linalg.norm(controls[:, None].astype(np.float64) - controls[None], axis=-1)
    return Scene(controls, scores, errors, distances)


def run(scenes: list[Scene], trust: TrustModel) -> dict[str, Any]:
    """Replay all scenes with every reach and every budget."""
    fixed = {reach: replay(scenes, Fixed(trust, np.inf, reach), np.inf, trust) for reach in REACHES}
    trusted = {budget: replay(scenes, Trust(trust, budget), budget, trust) for budget in BUDGETS}
    made: dict[str, Any] = {
        "fixed": {str(k): v.figures() for k, v in fixed.items()},
        "trust": {str(k): v.figures() for k, v in trusted.items()},
    }
    for measure in ("mean_error", "p95_error"):
        made[f"trust_hit_rate_at_equal_{measure}"] = {
            reach: at_equal(made["trust"], figures[measure], measure)
            for reach, figures in made["fixed"].items()
        }
    return made


def replay(scenes: list[Scene], policy: Policy, budget: float, trust: TrustModel) -> Outcome:
    """One policy over all scenes, each from an empty cache."""
    outcome = Outcome()
    for scene in scenes:
        kept: list[tuple[int, float]] = []  # couplet, radius
        for j in range(len(scene.controls)):
            outcome.asked += 1
            if any(scene.distances[i, j] == 0 for i, _ in kept):
                outcome.repeats += 1
                continue
            found = answer(scene, kept, j, policy, budget)
            if found is None:
                admission = policy.decide(scene.scores[j])
                kept.append((j, admission.radius))
            else:
                i, distance = found
                outcome.errors.append(float(scene.errors[i, j]))
                outcome.bounds.append(trust.bound(scene.scores[i].curvature, distance))
    return outcome


def answer(
    scene: Scene, kept: list[tuple[int, float]], j: int, policy: Policy, budget: float
) -> tuple[int, float] | None:
    """The couplet that answers for control j, and how far it is: the one of the smallest bound."""
    best: tuple[float, float, int] | None = None
    for i, radius in kept:
        distance = float(scene.distances[i, j])
        if distance > radius:
            continue
        if isinstance(policy, Fixed):  # the original: distance decides, no bound is asked for
            rank = (distance, distance, i)
        else:
            candidate = Candidate(
                b"", scene.controls[i], radius, scene.scores[i].curvature, distance
            )
            bound = policy.accept(candidate, budget)
            if bound is None:
                continue
            rank = (bound, distance, i)
        best = rank if best is None else min(best, rank)
    return None if best is None else (best[2], best[1])


def at_equal(trust: dict[str, dict[str, float]], error: float, measure: str) -> float:
    """Hit rate of `trust` at a budget whose measured error is `error` (linear in between)."""
    points = sorted((f[measure], f["hit_rate"]) for f in trust.values())
    return float(np.interp(error, [p[0] for p in points], [p[1] for p in points]))


def report(results: dict[str, Any], suite: str, console: Console) -> None:
    fixed = Table(
        "reach",
        "hits of fixed",
        "mean error",
        "p95",
        "trust at that mean",
        "trust at that p95",
        title=f"{suite}: approximate hits among new controls, at equal measured error",
        title_justify="left",
    )
    for reach, f in results["fixed"].items():
        name = f"{reach} (original)" if float(reach) == ORIGINAL_REACH else reach
        equal = (
            results[f"trust_hit_rate_at_equal_{m}"][reach] for m in ("mean_error", "p95_error")
        )
        fixed.add_row(
            name,
            f"{f['hit_rate']:.1%}",
            f"{f['mean_error']:.2g}",
            f"{f['p95_error']:.2g}",
            *(f"{rate:.1%}" for rate in equal),
        )
    console.print(fixed)
    bound = Table("budget", "hits", "mean error", "over bound", title="trust", title_justify="left")
    for budget, f in results["trust"].items():
        bound.add_row(
            budget, f"{f['hit_rate']:.1%}", f"{f['mean_error']:.2g}", f"{f['over_bound']:.1%}"
        )
    console.print(bound)


def plot(results: dict[str, Any], suite: str, path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for ax, measure in zip(axes, ("mean_error", "p95_error"), strict=True):
        for policy, marker in (("fixed", "s"), ("trust", "o")):
            rows = [f for f in results[policy].values() if f["hits"]]
            ax.plot(
                [f[measure] for f in rows],
                [100 * f["hit_rate"] for f in rows],
                marker=marker,
                label=policy,
            )
        original = results["fixed"][str(ORIGINAL_REACH)]
        ax.plot(original[measure], 100 * original["hit_rate"], "k*", ms=14, label="fixed, 0.03")
        ax.set_xscale("log")
        ax.set_xlabel(f"{measure.replace('_', ' ')} of the answers (relative state error)")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("approximate hits, % of new controls")
    axes[0].legend()
    figure.suptitle(f"{suite}, {results['scenes']} held-out scenes")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
