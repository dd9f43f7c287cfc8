"""FastAnalyze: how much a picture moves, how fine it is, and what in it matters, by region.

The fast analyser looks at frames that were shrunk to `side` pixels: motion by least squares in each
region (Lucas and Kanade, 1981, one level), texture by the energy of its gradients, which is DCT
energy weighted by frequency. `worldcache.analyze_full` computes both the thorough way; the two
agree in rank (benchmarks/step_reuse.py measures how well, and how much faster this is).

Shape letters: T frames, C chunks of frames, R rows and K columns of regions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import InvalidInput

__all__ = [
    "Analysis",
    "AnalyzeConfig",
    "analyze",
    "check_size",
    "chunked",
    "complexity",
    "dependency",
    "gradients",
    "grey",
    "saliency",
    "shrink",
]

Array = NDArray[np.float32]
#: Motion and texture at which complexity is half of what it can be: share of the picture's side
#: per frame; standard deviation of grey levels.
HALF_MOTION, HALF_TEXTURE = 0.004, 12.0
_RIM = 0.06


@dataclass(frozen=True)
class AnalyzeConfig:
    """grid: regions (R, K). chunk: frames that are judged together. side: longest side of the
    frames that the fast analyser looks at, in pixels. every: it looks at each n-th pair of frames.
    """

    grid: tuple[int, int] = (8, 8)
    chunk: int = 8
    side: int = 96
    every: int = 2

    def __post_init__(self) -> None:
        for name in ("chunk", "side", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if min(self.grid) < 1 or self.side < 2 * max(self.grid):
            raise ValueError(f"grid must fit a side of {self.side} pixels, got {self.grid}")


@dataclass(frozen=True, eq=False)
class Analysis:
    """Of each chunk and region, arrays (C, R, K).

    motion: pixels per frame over the longer side of the picture. texture: standard deviation in
    grey levels. semantics: importance, 0 to 1. dependency: how alike the region stays from its
    chunk's first frame to the last, 0 to 1. first: index of each chunk's first frame (C,).
    """

    motion: Array
    texture: Array
    semantics: Array
    dependency: Array
    first: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def complexity(self) -> Array:
        """Motion and texture as one number in [0, 1)."""
        return complexity(self.motion, self.texture)

    def importance(self, semantics_weight: float) -> Array:
        """What a region needs, 0 to 1: complexity and semantics, the latter with this weight."""
        need: Array = (1 - semantics_weight) * self.complexity + semantics_weight * self.semantics
        return need


def complexity(motion: Array, texture: Array) -> Array:
    """Both halves saturate, so that no single one can hide the other."""
    moving, fine = motion / (motion + HALF_MOTION), texture / (texture + HALF_TEXTURE)
    both: Array = (0.5 * (moving + fine)).astype(np.float32)
    return both


def analyze(
    frames: NDArray[np.uint8], config: AnalyzeConfig | None = None, semantics: Array | None = None
) -> Analysis:
    """The fast analysis of frames (T, h, w, 3) or grey ones (T, h, w).

    semantics (C, R, K): importance by a model; without it, what stands out in the spectrum.
    InvalidInput where there is no frame or a frame has fewer pixels than regions.
    """
    config = config or AnalyzeConfig()
    small = shrink(frames, config.side)  # (T, h, w)
    check_size(small, config.grid)
    first = np.arange(0, len(small), config.chunk)
    motion, texture, alike, salient = [], [], [], []
    for at in first:
        part = small[at : at + config.chunk + 1].astype(np.float32)
        moved, fine = _motion_and_texture(part, config)
        motion.append(moved)
        texture.append(fine)
        alike.append(dependency(part, config.grid))
        if semantics is None:
            salient.append(saliency(part[len(part) // 2], config.grid))
    return Analysis(
        motion=np.stack(motion),
        texture=np.stack(texture),
        semantics=np.stack(salient) if semantics is None else semantics,
        dependency=np.stack(alike),
        first=first,
    )


def grey(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Luma of frames (T, h, w, 3); grey ones (T, h, w) as they are."""
    if frames.ndim == 3:
        return frames
    if frames.ndim != 4 or frames.shape[-1] != 3:
        raise InvalidInput(f"frames must be (T, h, w, 3) or (T, h, w), got {frames.shape}")
    r, g, b = (frames[..., channel].astype(np.uint16) for channel in range(3))
    luma: NDArray[np.uint8] = ((77 * r + 150 * g + 29 * b) >> 8).astype(np.uint8)
    return luma


def shrink(frames: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Grey frames of at most `side` pixels: the mean of whole blocks of pixels."""
    factor = -(-max(frames.shape[1:3]) // side)
    if factor == 1:
        return grey(frames)
    height, width = (n // factor * factor for n in frames.shape[1:3])
    if not height or not width:
        return grey(frames)
    # Every second pixel of a block is enough for its mean, and half the work.
    step = 2 if factor >= 4 else 1
    rows = grey(frames[:, :height:step, :width:step])
    blocks = rows.reshape(len(rows), height // factor, factor // step, width // factor, -1)
    small: NDArray[np.uint8] = blocks.mean((2, 4), dtype=np.float32).astype(np.uint8)
    return small


def check_size(frames: NDArray[np.uint8], grid: tuple[int, int]) -> None:
    if not len(frames):
        raise InvalidInput("there must be at least one frame, got none")
    if frames.shape[1] < 2 * grid[0] or frames.shape[2] < 2 * grid[1]:
        raise InvalidInput(
            f"frames of {frames.shape[2]} x {frames.shape[1]} pixels are too small for "
            f"{grid[1]} x {grid[0]} regions of at least two pixels each way"
        )


def chunked(values: NDArray[Any], grid: tuple[int, int]) -> Array:
    """Means over regions: (..., h, w) -> (..., R, K); regions differ by at most a pixel."""
    rows, columns = (
        np.arange(n) * size // n for n, size in zip(grid, values.shape[-2:], strict=True)
    )
    sums = np.add.reduceat(np.add.reduceat(values, rows, -2), columns, -1)
    heights = np.diff(np.append(rows, values.shape[-2]))
    widths = np.diff(np.append(columns, values.shape[-1]))
    means: Array = (sums / np.outer(heights, widths)).astype(np.float32)
    return means


def _motion_and_texture(part: Array, config: AnalyzeConfig) -> tuple[Array, Array]:
    """Of one chunk with the frame that follows it (T, h, w): (R, K) each."""
    before, after = part[: -1 : config.every], part[1 :: config.every]
    if not len(before):
        before = after = part
    gx, gy = _slopes(before)
    gt = after - before
    sums = [
        chunked(a * b, config.grid) for a, b in ((gx, gx), (gy, gy), (gx, gy), (gx, gt), (gy, gt))
    ]
    fine = np.sqrt((sums[0] + sums[1]).mean(0))
    xx, yy, xy, xt, yt = (_blurred(each) for each in sums)
    noise = 4.0  # grey levels squared: where there is less gradient, motion cannot be told
    det = (xx + noise) * (yy + noise) - xy * xy
    u = (xy * yt - (yy + noise) * xt) / det
    v = (xy * xt - (xx + noise) * yt) / det
    speed = np.hypot(u, v).mean(0) / max(part.shape[1:])
    return speed.astype(np.float32), (2 * fine).astype(np.float32)


def gradients(frames: Array, grid: tuple[int, int]) -> Array:
    """Root mean square gradient by region: (T, h, w) -> (T, R, K), grey levels per pixel."""
    gx, gy = _slopes(frames)
    steep: Array = np.sqrt(chunked(gx * gx + gy * gy, grid))
    return steep


def _slopes(frames: Array) -> tuple[Array, Array]:
    """Central differences along x and y, 0 at the rim."""
    gx, gy = np.zeros_like(frames), np.zeros_like(frames)
    gx[..., 1:-1] = 0.5 * (frames[..., 2:] - frames[..., :-2])
    gy[..., 1:-1, :] = 0.5 * (frames[..., 2:, :] - frames[..., :-2, :])
    return gx, gy


def _blurred(values: Array) -> Array:
    """Regions (..., R, K) with a share of their neighbours: motion does not end at a border."""
    wide = np.pad(values, [(0, 0)] * (values.ndim - 2) + [(1, 1), (1, 1)], "edge")
    tall = _RIM * (wide[..., :-2, :] + wide[..., 2:, :]) + (1 - 2 * _RIM) * wide[..., 1:-1, :]
    both: Array = _RIM * (tall[..., :-2] + tall[..., 2:]) + (1 - 2 * _RIM) * tall[..., 1:-1]
    return both


def dependency(part: NDArray[Any], grid: tuple[int, int]) -> Array:
    """How alike regions stay from the first to the last of frames or features (T, h, w)."""
    first, last = part[0].astype(np.float32), part[-1].astype(np.float32)
    change = chunked(np.abs(last - first), grid)
    size = chunked(np.abs(first - first.mean()) + np.abs(last - last.mean()), grid)
    return np.asarray(1 - np.minimum(change / (size + 1), 1), np.float32)


def saliency(frame: Array, grid: tuple[int, int]) -> Array:
    """What stands out of one frame (h, w) by the residual of its spectrum, 0 to 1 (R, K).

    Hou and Zhang, "Saliency Detection: A Spectral Residual Approach", 2007.
    """
    spectrum = np.fft.fft2(frame)
    amplitude = np.log(np.abs(spectrum) + 1e-6)
    padded = np.pad(amplitude, 1, mode="wrap")
    smooth = sum(
        padded[dy : dy + frame.shape[0], dx : dx + frame.shape[1]]
        for dy in range(3)
        for dx in range(3)
    )
    residual = amplitude - smooth / 9
    back = np.abs(np.fft.ifft2(np.exp(residual + 1j * np.angle(spectrum)))) ** 2
    means = chunked(back.astype(np.float32), grid)
    return np.asarray(means / max(float(means.max()), 1e-12), np.float32)
