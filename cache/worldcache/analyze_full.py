"""The thorough analysis: dense optical flow between all frames, and the DCT of all their blocks.

Farnebäck's flow ("Two-Frame Motion Estimation Based on Polynomial Expansion", 2003) as OpenCV
has it, and the 8 x 8 DCT, at full resolution. `worldcache.analyze` is the fast one.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import InvalidInput
from worldcache.analyze import (
    Analysis,
    AnalyzeConfig,
    check_size,
    chunked,
    dependency,
    grey,
    saliency,
)

__all__ = ["analyze_full"]

Array = NDArray[np.float32]
_BLOCK = 8
_ANGLES = np.outer(np.arange(_BLOCK), 2 * np.arange(_BLOCK) + 1) * np.pi / (2 * _BLOCK)
#: of the orthonormal DCT-II, one row per frequency
_COSINES = (np.cos(_ANGLES) * np.where(np.arange(_BLOCK) == 0, 1, 2**0.5)[:, None]).astype(
    np.float32
) / np.float32(_BLOCK**0.5)


def analyze_full(
    frames: NDArray[np.uint8], config: AnalyzeConfig | None = None, semantics: Array | None = None
) -> Analysis:
    """As `worldcache.analyze.analyze`, with dense flow and full DCT. Needs OpenCV."""
    try:
        import cv2
    except ImportError as error:
        raise InvalidInput(
            "the full analysis needs OpenCV: pip install 'ctrlcache[analyze]'"
        ) from error
    config = config or AnalyzeConfig()
    luma = grey(frames)
    check_size(luma, config.grid)
    # As wide as a region, so that motion is not smeared over its neighbours.
    window = int(np.clip(min(luma.shape[1:]) // max(config.grid), 5, 31))
    flows = [_flow(cv2, a, b, window) for a, b in itertools.pairwise(luma)]
    energies = [_dct_energy(frame) for frame in luma]
    first = np.arange(0, len(luma), config.chunk)
    motion, texture, alike, salient = [], [], [], []
    for at in first:
        part = luma[at : at + config.chunk + 1]
        speed = flows[at : at + config.chunk] or [np.zeros(luma.shape[1:], np.float32)]
        motion.append(chunked(np.mean(speed, axis=0), config.grid) / max(luma.shape[1:]))
        energy = np.mean(energies[at : at + config.chunk], axis=0)
        texture.append(np.sqrt(_spread(energy, luma.shape[1:], config.grid)))
        alike.append(dependency(part, config.grid))
        if semantics is None:
            salient.append(saliency(part[len(part) // 2].astype(np.float32), config.grid))
    return Analysis(
        motion=np.stack(motion).astype(np.float32),
        texture=np.stack(texture).astype(np.float32),
        semantics=np.stack(salient) if semantics is None else semantics,
        dependency=np.stack(alike),
        first=first,
    )


def _flow(cv2: Any, before: NDArray[np.uint8], after: NDArray[np.uint8], window: int) -> Array:
    """Speed of every pixel (h, w), in pixels per frame."""
    flow = cv2.calcOpticalFlowFarneback(before, after, None, 0.5, 3, window, 3, 5, 1.1, 0)
    speed: Array = np.hypot(flow[..., 0], flow[..., 1])
    return speed


def _dct_energy(frame: NDArray[np.uint8]) -> Array:
    """Mean square of the AC coefficients of each block (h / 8, w / 8)."""
    height, width = (-(-n // _BLOCK) for n in frame.shape)
    missing = ((0, height * _BLOCK - frame.shape[0]), (0, width * _BLOCK - frame.shape[1]))
    padded = np.pad(frame.astype(np.float32), missing, "edge")
    blocks = padded.reshape(height, _BLOCK, width, _BLOCK).transpose(0, 2, 1, 3)
    spectrum = _COSINES @ blocks @ _COSINES.T
    spectrum[..., 0, 0] = 0
    energy: Array = np.square(spectrum).mean((2, 3))
    return energy


def _spread(energy: Array, size: tuple[int, ...], grid: tuple[int, int]) -> Array:
    """Block energies to the regions they lie in."""
    pixels = energy.repeat(_BLOCK, 0).repeat(_BLOCK, 1)[: size[0], : size[1]]
    return chunked(pixels, grid)
