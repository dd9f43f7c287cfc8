"""Importance by a CLIP vision model on this machine; nothing is ever downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from worldcache.analyze import chunked

__all__ = ["load"]

_MEAN = np.array([0.4815, 0.4578, 0.4082], np.float32)
_STD = np.array([0.2686, 0.2613, 0.2758], np.float32)


def load(
    directory: Path,
) -> Callable[[NDArray[np.uint8], tuple[int, int]], NDArray[np.float32]]:
    """What the last class token attends to: frames (T, h, w, 3) -> (T, R, K) in [0, 1].

    directory: a CLIP model in the layout of `transformers`. ImportError without that package.
    """
    import torch
    from transformers import CLIPVisionModel

    model: Any = CLIPVisionModel.from_pretrained(
        str(directory), local_files_only=True, attn_implementation="eager"
    )
    model.eval()
    px = model.config.image_size

    def saliency(frames: NDArray[np.uint8], grid: tuple[int, int]) -> NDArray[np.float32]:
        pictures = [np.asarray(Image.fromarray(frame).resize((px, px))) for frame in frames]
        pixels = (np.stack(pictures).astype(np.float32) / 255 - _MEAN) / _STD
        with torch.no_grad():
            out = model(
                pixel_values=torch.from_numpy(pixels.transpose(0, 3, 1, 2)), output_attentions=True
            )
        seen = out.attentions[-1][:, :, 0, 1:].mean(1).numpy()  # (T, patches)
        side = int(seen.shape[1] ** 0.5)
        maps = chunked(seen.reshape(-1, side, side), grid)
        return np.asarray(maps / maps.max((1, 2), keepdims=True).clip(1e-12), np.float32)

    return saliency
