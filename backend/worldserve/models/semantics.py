"""What the reference model's encoder looks at: importance for `ctrlcache analyze --weights`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from worldcache.analyze import chunked
from worldserve.images import resize_frames
from worldserve.models.reference import ReferenceWorldModel

__all__ = ["load"]

_AT_ONCE = 16


def load(
    directory: Path,
) -> Callable[[NDArray[np.uint8], tuple[int, int]], NDArray[np.float32]]:
    """Frames (T, h, w, 3) of any size -> importance (T, R, K) in [0, 1].

    How much the semantic heads (positions, flags, operation) would change with each patch token:
    gradient times token of what a single frame tells.
    """
    model = ReferenceWorldModel.load(directory)
    embedder, px = model.network.embedder, model.spec.frame_px

    def saliency(frames: NDArray[np.uint8], grid: tuple[int, int]) -> NDArray[np.float32]:
        small = resize_frames(frames, px)
        maps = []
        for first in range(0, len(small), _AT_ONCE):
            pixels = torch.from_numpy(small[first : first + _AT_ONCE]).permute(0, 3, 1, 2)
            tokens = embedder(pixels.float() / 127.5 - 1).detach().requires_grad_()
            embedder.read(tokens).square().sum().backward()  # type: ignore[no-untyped-call]
            assert tokens.grad is not None
            weight = (tokens.grad * tokens.detach()).abs().sum(-1)[:, :-1]  # (T, patches)
            maps.append(weight.view(-1, embedder.grid, embedder.grid).numpy())
        regions = chunked(np.concatenate(maps).astype(np.float32), grid)
        peak = regions.max((1, 2), keepdims=True).clip(1e-12)
        return np.asarray(regions / peak, np.float32)

    return saliency
