"""Pictures of a played scene: a sheet of true and predicted frames, and a film of the dream."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from worldserve.demo_checks import Played
from worldserve.demo_script import HORIZON

__all__ = ["film", "sheet"]

Pixels = NDArray[np.uint8]

_CELL = 128
_GAP = 4
_LABEL = 176
_HEAD = 24
_INK, _FAINT, _PAPER, _SEEN, _DREAMED = "#1d2129", "#6b7280", "white", "#16a34a", "#ea580c"


def sheet(played: Played, path: Path) -> None:
    """One row per prediction: what happened, what was predicted for it, what if otherwise."""
    scene = played.scene
    present = scene.frames[scene.present]
    rows: list[tuple[str, str, Pixels]] = []
    for step in played.steps:
        interaction = step.interaction
        if interaction.kind == "replay":
            truth = scene.frames[interaction.truth :][:HORIZON]
            rows[:0] = [
                ("what happened", "the clip", truth),
                ("predicted", "under the same controls", step.cached.frames),
            ]
        elif interaction.keep and interaction.mode == "probe":
            rows.append(("what if", _control(interaction.samples[-1]), step.cached.frames))
    width = _LABEL + (HORIZON + 1) * (_CELL + _GAP)
    image = Image.new("RGB", (width, _HEAD + len(rows) * (_CELL + _GAP)), _PAPER)
    draw = ImageDraw.Draw(image)
    small, large = _font(13), _font(16)
    draw.text((8, 4), scene.prompt, _INK, small)
    for column in range(HORIZON + 1):
        text = "seen last" if column == 0 else f"+{column / 10:.1f} s"
        draw.text((_column(column), 4), text, _FAINT, small)
    for row, (title, note, frames) in enumerate(rows):
        top = _HEAD + row * (_CELL + _GAP)
        draw.text((8, top + 44), title, _INK, large)
        draw.text((8, top + 66), note, _FAINT, small)
        for column, frame in enumerate([present, *frames]):
            image.paste(_enlarge(frame, _CELL), (_column(column), top))
    image.save(path)


def film(played: Played, path: Path) -> None:
    """Left the clip, right what the session holds: frames it saw, then those it dreamed."""
    scene = played.scene
    dreamed = [
        frame
        for step in played.steps
        if step.interaction.mode == "advance" and step.interaction.keep
        for frame in step.cached.frames
    ]
    first = max(0, scene.present - 9)
    seen = scene.frames[first : scene.present + 1]
    right = [*seen, *dreamed]
    left = scene.frames[first : first + len(right)]
    images = [
        _pair(true, shown, alone=index >= len(seen))
        for index, (true, shown) in enumerate(zip(left, right, strict=True))
    ]
    # One palette for the whole film, so that nothing flickers.
    palette = _montage(images[:: max(1, len(images) // 8)]).quantize(255)
    indexed = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    durations = [120] * (len(indexed) - 1) + [1200]
    indexed[0].save(
        path, save_all=True, append_images=indexed[1:], duration=durations, loop=0, disposal=1
    )


def _pair(true: Pixels, shown: Pixels, alone: bool) -> Image.Image:
    size = 2 * _CELL
    image = Image.new("RGB", (2 * size + 3 * _GAP, size + 2 * _GAP + _HEAD), _PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((_GAP + 2, 4), "what happened", _INK, _font(14))
    text, colour = ("dreamed", _DREAMED) if alone else ("seen", _SEEN)
    left = size + 2 * _GAP
    draw.text((left + 2, 4), text, colour, _font(14))
    draw.rectangle((left - 3, _HEAD + _GAP - 3, left + size + 2, _HEAD + _GAP + size + 2), colour)
    image.paste(_enlarge(true, size), (_GAP, _HEAD + _GAP))
    image.paste(_enlarge(shown, size), (left, _HEAD + _GAP))
    return image


def _montage(images: Sequence[Image.Image]) -> Image.Image:
    made = Image.new("RGB", (images[0].width, images[0].height * len(images)))
    for index, image in enumerate(images):
        made.paste(image, (0, index * image.height))
    return made


def _column(index: int) -> int:
    return _LABEL + index * (_CELL + _GAP)


def _enlarge(frame: Pixels, size: int) -> Image.Image:
    return Image.fromarray(frame).resize((size, size), Image.Resampling.BICUBIC)


def _control(control: NDArray[np.float32]) -> str:
    return " ".join(f"{value:+.1f}" for value in control)


def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)
