"""The generator's flow with reuse between its steps (`worldcache.running`).

A chunk is one predicted frame: all frames of a request are drawn together, and each has a scope of
its own. Without reuse, `Generator.sample` is the same flow, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from worldcache.analyze import Analysis, gradients
from worldcache.running import Reuse
from worldcache.weights import WeightSettings, activity, restless, settled
from worldserve.models.generator import NOISE, Generator

__all__ = ["analysis_of", "block_change", "sample", "weigh"]

Array = NDArray[np.float32]


def sample(
    generator: Generator,
    last: Tensor,
    tokens: Tensor,
    noise: Tensor,
    reuse: Reuse,
    change: Array,
    settings: WeightSettings,
    checkpoint: Callable[[], None] | None = None,
) -> Tensor:
    """As `Generator.sample`, in `reuse.steps` steps. change (B, R, K): of blocks by region, from
    the calibration; empty where there is none."""
    x = last + NOISE * noise
    for step in range(reuse.steps):
        t = step / reuse.steps
        end = _end(generator, x, t, last, tokens, reuse, step)
        if step == 0 and change.size:
            reuse.weigh(weigh(last, end, tokens, change, settings))
        x = x + (end - x) / ((1 - t) * reuse.steps)
        if checkpoint is not None:
            checkpoint()
    return x


def _end(
    generator: Generator,
    x: Tensor,
    t: float,
    last: Tensor,
    tokens: Tensor,
    reuse: Reuse,
    step: int,
) -> Tensor:
    """End point of the flow as computed, or as reused, for each frame."""
    blocks, chunks = len(generator.blocks), len(x)
    times = x.new_full((chunks,), t)
    computed: Tensor | None = None
    reuse.tally.total += blocks * chunks
    if reuse.policy.reuses == "step":
        rows = reuse.rows(step, x)
        if len(rows) == chunks:
            computed = generator(x, times, last, tokens)
        elif rows:
            computed = generator(x[rows], times[rows], last[rows], tokens[rows])
        end = reuse.fill(computed)
    else:
        h, condition, skips = generator.enter(x, times, last, tokens)
        modulated = None
        if "modulated" in reuse.policy.needs:
            modulated = _modulated(generator, h, condition)
        rows = reuse.rows(step, x, modulated)
        if rows:
            computed = h[rows]
            for block in generator.blocks:
                computed = block(computed, condition[rows])
            computed = computed - h[rows]
        end = generator.leave(h + reuse.fill(computed), skips, last)
    reuse.tally.computed += blocks * len(rows)
    return end


def _modulated(generator: Generator, h: Tensor, condition: Tensor) -> Tensor:
    """The first block's modulated input."""
    first = generator.blocks[0]
    shift, scale = first.modulation(condition)[:, None].chunk(6, -1)[:2]  # type: ignore[operator]
    modulated: Tensor = first.norm1(h) * (1 + scale) + shift  # type: ignore[operator]
    return modulated


def weigh(
    last: Tensor, end: Tensor, tokens: Tensor, change: Array, settings: WeightSettings
) -> NDArray[np.float64]:
    """Activity (M,) of frames whose end points `end` the first step has told."""
    analysis, moved = analysis_of(last, end, tokens, change.shape[1:])
    need = settled(analysis.importance(settings.semantics), settings.window)  # (M, R, K)
    return activity(moved, need * restless(change).max(0), settings.sensitivity)


def analysis_of(
    last: Tensor, end: Tensor, tokens: Tensor, grid: Sequence[int]
) -> tuple[Analysis, Array]:
    """What changes from the last frame to the predicted ones, and what in it matters.

    The second value (M, R, K): root mean square change of each region, in grey levels. Motion is
    change over gradient. Semantics is how far the predicted token of a region is from the others:
    the background is alike, hands and objects are not.
    """
    rows, columns = grid
    squares = (end - last).square().mean(1, keepdim=True)
    moved = F.adaptive_avg_pool2d(squares, (rows, columns))[:, 0].sqrt().cpu().numpy() * 127.5
    luma = last[:1].mean(1).cpu().numpy() * 127.5  # one frame, the same for all
    steep = gradients(luma, (rows, columns))[0]
    patches = tokens[:, : rows * columns]
    novel = (patches - patches.mean(1, keepdim=True)).norm(dim=-1).cpu().numpy()
    semantics = (novel / novel.max(1, keepdims=True).clip(1e-12)).reshape(moved.shape)
    shape = moved.shape
    analysis = Analysis(
        motion=moved / (steep + 1) / max(last.shape[-2:]),
        texture=np.broadcast_to(2 * steep, shape),
        semantics=semantics,
        dependency=1 - moved / (moved + 2 * steep + 1),
        first=np.arange(len(moved)),
    )
    return analysis, moved


def block_change(
    generator: Generator, last: Tensor, tokens: Tensor, noise: Tensor, steps: int
) -> Array:
    """How much what each block adds changes from step to step, relative to its size (B, R, K)."""
    x = last + NOISE * noise
    grid = generator.grid
    before: list[Tensor] = []
    total = np.zeros((len(generator.blocks), grid, grid), np.float32)
    for step in range(steps):
        t = step / steps
        h, condition, skips = generator.enter(x, x.new_full((len(x),), t), last, tokens)
        added = []
        for block in generator.blocks:
            out = block(h, condition)
            added.append(out - h)
            h = out
        for index, (new, old) in enumerate(zip(added, before, strict=False)):
            moved = (new - old).abs().mean(-1) / old.abs().mean(-1).clamp_min(1e-9)  # (M, N)
            total[index] += moved.mean(0).view(grid, grid).cpu().numpy() / (steps - 1)
        before = added
        x = x + (generator.leave(h, skips, last) - x) / ((1 - t) * steps)
    return total
