"""The cache weight matrix, block x region: where features must be computed anew, and where not.

Three things make a weight, each between 0 and 1: how complex a region is, how much it matters
(`worldcache.analyze`), and how much a block's features change there from step to step. A weight of
1 says that this block must see every change of this region, 0 that nobody will notice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from worldcache.analyze import Analysis

__all__ = ["WeightMatrix", "WeightSettings", "activity", "colours", "restless", "settled"]

Array = NDArray[np.float32]
_CELL, _MARGIN = 24, 18


@dataclass(frozen=True)
class WeightSettings:
    """sensitivity: how much more an important region counts than an unimportant one; 0.6 to 0.8 is
    where it pays. window: chunks over which importance is carried on, longer for long clips.
    semantics: weight of what matters against what moves, higher where there is much text. What each
    of them changes is measured in docs/worldcache.md.
    """

    sensitivity: float = 0.7
    window: int = 2
    semantics: float = 0.3

    def __post_init__(self) -> None:
        for name in ("sensitivity", "semantics"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")


@dataclass(frozen=True, eq=False)
class WeightMatrix:
    """values (B, R, K) in [0, 1]: one map of regions for each block, in the order of `blocks`."""

    values: Array
    blocks: tuple[str, ...]
    settings: WeightSettings

    @classmethod
    def build(
        cls,
        analysis: Analysis,
        change: Array,
        blocks: Sequence[str],
        settings: WeightSettings | None = None,
    ) -> WeightMatrix:
        """change (B, R, K): of each block's features from step to step, relative to their size."""
        settings = settings or WeightSettings()
        if change.shape != (len(blocks), *analysis.motion.shape[1:]):
            raise ValueError(
                f"change must be {(len(blocks), *analysis.motion.shape[1:])}, got {change.shape}"
            )
        need = settled(analysis.importance(settings.semantics), settings.window)[-1]
        values = np.clip(need[None] * restless(change), 0, 1).astype(np.float32)
        return cls(values, tuple(blocks), settings)

    @property
    def regions(self) -> Array:
        """The most that any block needs of each region (R, K)."""
        most: Array = self.values.max(0)
        return most

    def save(self, path: Path) -> None:
        """As .npz with the settings beside the numbers."""
        text = json.dumps({"blocks": self.blocks, "settings": asdict(self.settings)})
        np.savez_compressed(path, values=self.values, about=np.array(text))

    @classmethod
    def load(cls, path: Path) -> WeightMatrix:
        with np.load(path, allow_pickle=False) as data:
            about = json.loads(str(data["about"]))
            values = data["values"].astype(np.float32)
        settings = WeightSettings(**about["settings"])
        return cls(values, tuple(about["blocks"]), settings)

    def picture(self) -> Image.Image:
        """One heat map per block, side by side, dark for 0 and bright for 1."""
        blocks, rows, columns = self.values.shape
        width = columns * _CELL + _MARGIN
        image = Image.new("RGB", (blocks * width + _MARGIN, rows * _CELL + 3 * _MARGIN), "white")
        draw = ImageDraw.Draw(image)
        for index, name in enumerate(self.blocks):
            left = _MARGIN + index * width
            heat = Image.fromarray(colours(self.values[index])).resize(
                (columns * _CELL, rows * _CELL), Image.Resampling.NEAREST
            )
            image.paste(heat, (left, 2 * _MARGIN))
            draw.text((left, _MARGIN // 2), f"{name}: {self.values[index].mean():.2f}", "black")
        return image


def restless(change: Array) -> Array:
    """Changes of features (B, R, K) relative to the largest of them."""
    relative: Array = change / max(float(change.max()), 1e-12)
    return relative


def settled(importance: Array, window: int) -> Array:
    """Importance (C, R, K), each chunk as important as the most important of the last `window`."""
    out = importance.copy()
    for back in range(1, min(window, len(importance))):
        out[back:] = np.maximum(out[back:], importance[:-back])
    return out


def activity(change: Array, regions: Array, sensitivity: float) -> NDArray[np.float64]:
    """How much chunks change where it matters: change (M, R, K) in grey levels (rms of a region),
    regions (M, R, K) or (R, K): weights. (M,), grey levels; plain rms where all weights are equal.
    """
    mean = np.maximum(regions.mean((-2, -1), keepdims=True), 1e-12)
    counts = (1 - sensitivity) + sensitivity * regions / mean
    weighed: NDArray[np.float64] = np.sqrt((counts * np.square(change)).mean((-2, -1)))
    return weighed.astype(np.float64)


def colours(values: Array) -> NDArray[np.uint8]:
    """Values in [0, 1] -> RGB (..., 3) from dark blue over red to bright yellow."""
    stops = np.array([[13, 8, 60], [120, 28, 109], [229, 92, 48], [252, 255, 164]], np.float32)
    at = np.clip(values, 0, 1)[..., None] * (len(stops) - 1)
    low = np.minimum(at.astype(int), len(stops) - 2)
    mixed = stops[low[..., 0]] * (1 - (at - low)) + stops[low[..., 0] + 1] * (at - low)
    rgb: NDArray[np.uint8] = mixed.astype(np.uint8)
    return rgb
