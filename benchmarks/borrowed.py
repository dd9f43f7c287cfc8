"""How good is what is borrowed: slopes of other contexts, and frames drawn from migrated tokens.

    python benchmarks/borrowed.py [--data DIR] [--contexts 40]

In each context a control is probed, then the session advances, one, two and three frames, while the
control drifts. At every stage one exact rollout is taken, and from it the answers for controls at
several distances are derived with the slope that was probed at the beginning:

- states: how far off they are, relative; the bound that is stated (`worldserve.inheritance`: the
  calibrated one, with the curvature that the calibration says for a slope of that age), and the
  share over it;
- frames: PSNR against the full computation, of the worst of the predicted frames: of the exact
  rollout's own frames shown as they are, and of frames drawn from tokens moved along the borrowed
  slope (`worldserve.drawing`).

DIR: .npz files with `frames` (T, h, w, 3) or (E, T, V, h, w, 3), and `controls`.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ctrlcache.calibration import TrustModel, trust_path
from ctrlcache.scores import probe_controls, relative_error, scores_from_probes
from ctrlcache.transfer import Jacobian
from worldserve.bench.report import machine
from worldserve.drawing import token_slope
from worldserve.models.protocol import RolloutInput, RolloutOutput
from worldserve.models.reference import ReferenceWorldModel

PROJECT = Path(__file__).resolve().parent.parent
WEIGHTS = PROJECT / "model_repository" / "world_model" / "1"
DISTANCES = (0.03, 0.06, 0.1, 0.2, 0.3)
HORIZON = 8
AGES = 3  # frames in between
Array = NDArray[np.float32]


def clips(directory: Path) -> list[tuple[NDArray[np.uint8], Array]]:
    found = []
    for path in sorted(directory.rglob("*.npz")):
        with np.load(path) as data:
            frames, controls = data["frames"], data["controls"].astype(np.float32)
        if frames.ndim == 6:  # (E, T, V, h, w, 3): several episodes, several views
            found += [(f[:, 0], c) for f, c in zip(frames, controls, strict=True)]
        else:
            found.append((frames, controls))
    return found


def worst_psnr(frames: NDArray[np.uint8], truth: NDArray[np.uint8]) -> float:
    error = np.square(frames.astype(float) - truth.astype(float)).mean(axis=(1, 2, 3))
    return float(10 * np.log10(255**2 / np.maximum(error, 1e-3)).min())


class Context:
    """A present of the model, which can be asked and advanced."""

    def __init__(
        self, model: ReferenceWorldModel, frames: NDArray[np.uint8], controls: Array
    ) -> None:
        self.model = model
        self.conditioning, _ = model.condition("", "")
        self.base = frames[-1]
        tokens = model.embed(frames)
        before = model.absorb(model.assemble((), 0), tokens[:-1], controls, self.conditioning)
        self.memory, self.tokens = before.memory, tokens[-1]

    def ask(self, *controls: Array) -> list[RolloutOutput]:
        plans = [np.repeat(control[None], HORIZON, axis=0) for control in controls]
        return self.model.rollout(
            [RolloutInput(self.memory, self.tokens, plan, self.conditioning) for plan in plans]
        )

    def advance(self, control: Array) -> None:
        out = self.model.absorb(self.memory, self.tokens[None], control[None], self.conditioning)
        self.memory, self.tokens = out.memory, out.predicted_tokens

    def draw(self, tokens: Array) -> NDArray[np.uint8]:
        [frames] = self.model.generate([self.base], [tokens], [0])
        return frames


def measure(context: Context, trust: TrustModel, draw: Any) -> Iterator[tuple[Any, ...]]:
    """(frames in between, distance, error, bound, PSNR as they are, PSNR from migrated tokens)."""
    scale = context.model.spec.state_scale
    control = np.append(draw.uniform(-0.6, 0.6, 3), draw.choice([-1, 1])).astype(np.float32)
    probes = probe_controls(control, trust.probe_radius)
    center, *around = context.ask(control, *probes)
    states = np.stack([out.states for out in around])
    scores = scores_from_probes(center.states, control, states, probes, scale, trust.rho_max)
    slope = token_slope(center.tokens, control, probes, [out.tokens for out in around])
    drift = draw.normal(size=4) * [1, 1, 1, 0]
    drift *= 0.05 / np.linalg.norm(drift)
    for between in range(AGES + 1):
        if between:
            context.advance(control)
            control = np.clip(control + drift, -1, 1).astype(np.float32)
        asked = []
        for distance in DISTANCES:
            way = draw.normal(size=4) * [1, 1, 1, 0]
            to = control + distance * way / np.linalg.norm(way)
            asked.append(np.clip(to, -1, 1).astype(np.float32))
        here, *there = context.ask(control, *asked)
        shown = context.draw(here.tokens)
        for distance, to, truth in zip(DISTANCES, asked, there, strict=True):
            estimate = Jacobian().migrate(here.states, scores.jacobian, control, to)
            away = float(np.linalg.norm(to - control))
            yield (
                between,
                distance,
                float(relative_error(estimate, truth.states, scale)),
                trust.bound(scores.curvature * trust.lent_factor(between), away),
                worst_psnr(shown, frames := context.draw(truth.tokens)),
                worst_psnr(
                    context.draw(here.tokens + slope.astype(np.float32) @ (to - control)), frames
                ),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=PROJECT / "client_examples" / "clips")
    parser.add_argument("--contexts", type=int, default=40)
    parser.add_argument("--json", type=Path, default=PROJECT / "benchmarks/results/borrowed.json")
    args = parser.parse_args()

    model = ReferenceWorldModel.load(WEIGHTS)
    trust = TrustModel.load(trust_path(WEIGHTS), model.spec.weights_digest)
    draw = np.random.default_rng(0)
    episodes = clips(args.data)
    rows: dict[tuple[int, float], list[tuple[float, ...]]] = defaultdict(list)
    for _ in track(range(args.contexts), "contexts"):
        frames, controls = episodes[int(draw.integers(len(episodes)))]
        stop = int(draw.integers(6, min(24, len(frames))))
        context = Context(model, frames[:stop], controls[: stop - 1])
        for between, distance, *values in measure(context, trust, draw):
            rows[between, distance].append(tuple(values))

    reach = trust.frame_radius()
    table = Table(title=f"{args.contexts} contexts; frames reach {reach:.3f}")
    headings = ("frames between", "distance", "error", "bound", "over", "shown dB", "drawn dB (p5)")
    for name in headings:
        table.add_column(name, justify="right")
    results = []
    for (between, distance), values in sorted(rows.items()):
        error, bound, shown, drawn = np.array(values).T
        result = {
            "between": between,
            "distance": distance,
            "error": float(np.median(error)),
            "bound": float(np.median(bound)),
            "over": float((error > bound).mean()),
            "shown_db": float(np.median(shown)),
            "shown_db_p5": float(np.percentile(shown, 5)),
            "drawn_db": float(np.median(drawn)),
            "drawn_db_p5": float(np.percentile(drawn, 5)),
        }
        results.append(result)
        table.add_row(
            str(between),
            f"{distance:g}",
            f"{result['error']:.4f}",
            f"{result['bound']:.4f}",
            f"{result['over']:.1%}",
            f"{result['shown_db']:.1f} ({result['shown_db_p5']:.1f})",
            f"{result['drawn_db']:.1f} ({result['drawn_db_p5']:.1f})",
        )
    Console().print(table)
    content = {"made_on": machine(), "contexts": args.contexts, "rows": results}
    args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
