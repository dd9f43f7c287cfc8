"""Evaluate a world model on held-out episodes, each figure beside its baseline.

Baselines: the *true* present state held (for positions), the last observed frame held (for pixels),
the majority class (for flags and operations). Errors are means with medians beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from worldserve.data.dataset import Clip, clips
from worldserve.data.suites import Suite
from worldserve.models.protocol import RolloutInput, RolloutOutput, WorldModel

__all__ = ["STEPS", "Evaluation", "evaluate", "picture", "psnr", "roll_out", "ssim"]

STEPS = (1, 2, 4, 8)
CONTEXTS = (1, 32)
_MOVED_M = 0.01
_CHANGED = 0.06 * 127.5


@dataclass
class Prediction:
    """One predicted stretch: `present` is the last observed frame, future arrays start after it."""

    clip: Clip
    present: int
    physics: NDArray[np.float32]  # (H, P)
    frames: NDArray[np.uint8]  # (H, h, w, 3)
    operation: str

    @property
    def true_frames(self) -> NDArray[np.uint8]:
        return self.clip.frames[self.present + 1 : self.present + 1 + len(self.frames)]

    @property
    def true_physics(self) -> NDArray[np.float32]:
        return self.clip.physics[self.present + 1 : self.present + 1 + len(self.physics)]


@dataclass
class Evaluation:
    """figures[context][...]: plain numbers, ready for JSON; predictions of the longest context."""

    figures: dict[int, dict[str, Any]]
    predictions: list[Prediction]


def evaluate(
    model: WorldModel,
    suite: Suite,
    root: Path,
    split: str = "test",
    contexts: tuple[int, ...] = CONTEXTS,
    starts: tuple[int, ...] = (40, 80),
    prompt: bool = False,
    camera: int = 0,
) -> Evaluation:
    """Predict `STEPS[-1]` frames after each of `starts` frames of every episode of the split.

    prompt: whether the model is told what is going on; camera: which of the suite's it looks from.
    """
    figures, predictions = {}, []
    for context in contexts:
        predictions = list(_predict(model, suite, root, split, context, starts, prompt, camera))
        figures[context] = _figures(predictions, suite)
    return Evaluation(figures, predictions)


def _predict(
    model: WorldModel,
    suite: Suite,
    root: Path,
    split: str,
    context: int,
    starts: tuple[int, ...],
    prompt: bool,
    camera: int,
) -> Iterator[Prediction]:
    every = list(clips(root, suite, split, camera))
    for clip in track(every, description=f"{split}, {context} frames of context"):
        conditioning, _ = model.condition(clip.prompt if prompt else "", clip.view)
        for start in starts:
            out, _ = roll_out(model, clip, start, context, conditioning)
            [generated] = model.generate([clip.frames[start - 1]], [out.tokens], [0])
            yield Prediction(
                clip, start - 1, model.physics(out.states), generated, model.operation(out.states)
            )


def roll_out(
    model: WorldModel, clip: Clip, start: int, context: int, conditioning: Any
) -> tuple[RolloutOutput, NDArray[np.float32]]:
    """What follows after `context` frames up to frame `start - 1`, and that frame's tokens."""
    tokens = model.embed(clip.frames[start - context : start])
    controls = clip.controls[start - context : start - 1]
    memory = model.assemble([], 0)
    if context > 1:
        memory = model.absorb(memory, tokens[:-1], controls, conditioning).memory
    plan = clip.controls[start - 1 : start - 1 + STEPS[-1]]
    [out] = model.rollout([RolloutInput(memory, tokens[-1], plan, conditioning)])
    return out, tokens[-1]


def _figures(predictions: list[Prediction], suite: Suite) -> dict[str, Any]:
    predicted = np.stack([p.physics for p in predictions])  # (n, H, P)
    true = np.stack([p.true_physics for p in predictions])
    present = np.stack([p.clip.physics[p.present] for p in predictions])[:, None]
    steps = [s - 1 for s in STEPS]
    object_moved = np.linalg.norm(true[..., 4:7] - present[..., 4:7], axis=-1) > _MOVED_M
    gripper_moved = np.linalg.norm(true[..., :3] - present[..., :3], axis=-1) > _MOVED_M
    figures: dict[str, Any] = {"contexts": len(predictions), "steps": list(STEPS)}
    for name, part, moved in (
        ("gripper", slice(0, 3), gripper_moved),
        ("object", slice(4, 7), object_moved),
    ):
        error = 100 * np.linalg.norm(predicted[..., part] - true[..., part], axis=-1)  # (n, H) cm
        copy = 100 * np.linalg.norm(present[..., part] - true[..., part], axis=-1)
        figures[f"{name}_cm"] = _per_step(error, steps)
        figures[f"{name}_median_cm"] = [round(float(np.median(error[:, s])), 2) for s in steps]
        figures[f"{name}_copy_cm"] = _per_step(copy, steps)
        figures[f"{name}_moved_cm"] = _per_step(error, steps, moved)
        figures[f"{name}_moved_copy_cm"] = _per_step(copy, steps, moved)
        figures[f"{name}_moved_count"] = [int(moved[:, s].sum()) for s in steps]
    for name, column in (("grasped", 7), ("succeeded", 8)):
        right = (predicted[..., column] > 0.5) == (true[..., column] > 0.5)
        share = true[..., column].mean()
        figures[f"{name}_accuracy"] = round(float(right.mean()), 4)
        figures[f"{name}_majority"] = round(float(max(share, 1 - share)), 4)
    right_operation = [p.operation == p.clip.operation for p in predictions]
    figures["operation_accuracy"] = round(float(np.mean(right_operation)), 4)
    figures["operation_majority"] = round(1 / len(suite.operations), 4)
    return figures | _pixel_figures(predictions, steps)


def _per_step(
    values: NDArray[np.floating[Any]], steps: list[int], where: NDArray[np.bool_] | None = None
) -> list[float]:
    chosen = [values[:, s] if where is None else values[where[:, s], s] for s in steps]
    return [round(float(v.mean()), 2) if len(v) else float("nan") for v in chosen]


def _pixel_figures(predictions: list[Prediction], steps: list[int]) -> dict[str, Any]:
    rows: dict[str, list[list[float]]] = {
        name: [] for name in ("psnr_db", "psnr_copy_db", "ssim", "ssim_copy")
    }
    squared = np.zeros((2, len(steps)))
    pixels = np.zeros(len(steps))
    for p in predictions:
        last = p.clip.frames[p.present]
        pairs = [(p.frames[s], p.true_frames[s]) for s in steps]
        rows["psnr_db"].append([psnr(a, b) for a, b in pairs])
        rows["psnr_copy_db"].append([psnr(last, b) for _, b in pairs])
        rows["ssim"].append([ssim(a, b) for a, b in pairs])
        rows["ssim_copy"].append([ssim(last, b) for _, b in pairs])
        for i, (made, true) in enumerate(pairs):
            difference = np.abs(true.astype(float) - last).mean(-1)
            changed = difference > _CHANGED
            pixels[i] += 3 * changed.sum()
            squared[0, i] += ((made.astype(float) - true)[changed] ** 2).sum()
            squared[1, i] += ((last.astype(float) - true)[changed] ** 2).sum()
    figures: dict[str, Any] = {
        name: [round(float(v), 3) for v in np.mean(values, 0)] for name, values in rows.items()
    }
    changed_db = 10 * np.log10(255.0**2 / (squared / np.maximum(pixels, 1)))
    figures["psnr_changed_db"] = [round(float(v), 2) for v in changed_db[0]]
    figures["psnr_changed_copy_db"] = [round(float(v), 2) for v in changed_db[1]]
    return figures


def psnr(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float:
    """Peak signal-to-noise ratio in dB of two uint8 images; 60 for (nearly) equal ones."""
    error = float(np.mean((a.astype(np.float64) - b) ** 2))
    return 10 * float(np.log10(255.0**2 / max(error, 0.065)))


def ssim(a: NDArray[np.uint8], b: NDArray[np.uint8], window: int = 7) -> float:
    """Mean structural similarity (Wang et al., 2004) of luma, uniform window."""
    weights = np.array([0.299, 0.587, 0.114])
    x, y = a @ weights, b @ weights

    def mean(image: NDArray[np.float64]) -> NDArray[np.float64]:
        view = np.lib.stride_tricks.sliding_window_view(image, (window, window))
        averaged: NDArray[np.float64] = view.mean((-1, -2))
        return averaged

    mx, my = mean(x), mean(y)
    vx, vy, vxy = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    score = ((2 * mx * my + c1) * (2 * vxy + c2)) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    return float(score.mean())


def picture(
    predictions: list[Prediction], path: Path, operations: int = 12, scale: int = 2
) -> None:
    """Rows of last observed | true +1 +2 +4 +8 | predicted +1 +2 +4 +8, one row per operation."""
    from PIL import Image, ImageDraw

    steps = [s - 1 for s in STEPS]
    liveliest: dict[str, tuple[float, Prediction]] = {}
    for p in predictions:
        change = float(np.abs(p.true_frames[-1].astype(float) - p.clip.frames[p.present]).mean())
        if change > liveliest.get(p.clip.operation, (-1.0, p))[0]:
            liveliest[p.clip.operation] = (change, p)
    chosen = [p for _, p in liveliest.values()][:operations]
    px = chosen[0].frames.shape[1] * scale
    gap, label = 6, 110
    image = Image.new("RGB", (label + 9 * px + 2 * gap, 18 + len(chosen) * px), "white")
    draw = ImageDraw.Draw(image)
    titles = ["last seen"] + [f"true +{s}" for s in STEPS] + [f"predicted +{s}" for s in STEPS]
    columns = [label + i * px + gap * ((i > 0) + (i > 4)) for i in range(9)]
    for x, title in zip(columns, titles, strict=True):
        draw.text((x + 4, 3), title, fill="black")
    for row, p in enumerate(chosen):
        y = 18 + row * px
        draw.text((4, y + px // 2 - 5), p.clip.operation, fill="black")
        cells = [p.clip.frames[p.present], *p.true_frames[steps], *p.frames[steps]]
        for x, cell in zip(columns, cells, strict=True):
            image.paste(Image.fromarray(cell).resize((px, px), Image.Resampling.NEAREST), (x, y))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)
