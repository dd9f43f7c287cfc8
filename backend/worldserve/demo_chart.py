"""A chart of a demo: what each interaction took, with the cache and without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from worldserve.demo_checks import Played, Summary

__all__ = ["chart"]

_SCALE = 2  # drawn larger and reduced: smooth edges
_STEP, _BAR, _GAP = 18, 12, 26  # pixels: from bar to bar, a bar's width, between clips
_LEFT, _RIGHT, _TOP, _HEIGHT, _FOOT = 64, 24, 64, 240, 92
_INK, _FAINT, _GRID, _PAPER = "#1d2129", "#6b7280", "#e5e7eb", "white"
_COLOURS = {"hot": "#16a34a", "warm": "#ca8a04", "cold": "#2563eb", "none": "#9ca3af"}
_LABELS = {"hot": "from the hot tier", "warm": "warm", "cold": "cold", "none": "computed"}
_OFF = "#ea580c"


def chart(played: Sequence[Played], summary: Summary, path: Path) -> None:
    """Bars: the cached session, coloured by tier; marks: the same interaction with cache=off."""
    steps = [step for scene in played for step in scene.steps]
    took = [a.latency_ms for step in steps for a in (step.cached, step.plain)]
    low, high = math.floor(math.log10(min(took))), math.ceil(math.log10(max(took)))
    span = max(1, high - low)
    width = _LEFT + _RIGHT + len(steps) * _STEP + (len(played) - 1) * _GAP
    height = _TOP + _HEIGHT + _FOOT
    image = Image.new("RGB", (width * _SCALE, height * _SCALE), _PAPER)
    pen = _Pen(image)

    def y(ms: float) -> float:
        return _TOP + _HEIGHT * (1 - (math.log10(ms) - low) / span)

    for power in range(low, high + 1):
        pen.line(_LEFT - 6, y(10.0**power), width - _RIGHT, y(10.0**power), _GRID)
        pen.text(_LEFT - 12, y(10.0**power) - 8, f"{10.0**power:g} ms", _FAINT, 12, "ra")
    x = float(_LEFT)
    for scene in played:
        pen.text(x, height - 24, f"{scene.scene.prompt}", _INK, 13)
        for step in scene.steps:
            colour = _COLOURS.get(step.cached.tier, _INK)
            pen.box(x, y(step.cached.latency_ms), x + _BAR, _TOP + _HEIGHT, colour)
            mark = y(step.plain.latency_ms)
            pen.box(x - 2, mark - 1.5, x + _BAR + 2, mark + 1.5, _OFF)
            pen.upright(x, _TOP + _HEIGHT + 6, step.interaction.kind, _FAINT, 11)
            x += _STEP
        x += _GAP
    _legend(pen, summary)
    image.resize((width, height), Image.Resampling.LANCZOS).save(path)


def _legend(pen: _Pen, summary: Summary) -> None:
    cached, plain = summary.cached, summary.plain
    pen.text(
        _LEFT,
        8,
        f"{summary.interactions} interactions, median {cached.p50_ms:.1f} ms with the cache, "
        f"{plain.p50_ms:.1f} ms without",
        _INK,
        15,
    )
    x = float(_LEFT)
    for tier, colour in _COLOURS.items():
        if tier in summary.tiers:
            pen.box(x, 38, x + 12, 50, colour)
            text = f"{_LABELS[tier]} ({summary.tiers[tier]})"
            pen.text(x + 18, 36, text, _FAINT, 12)
            x += 40 + pen.width(text, 12)
    pen.box(x - 2, 42.5, x + 14, 45.5, _OFF)
    pen.text(x + 20, 36, "the same with cache=off", _FAINT, 12)


class _Pen:
    """Draws in unscaled pixels."""

    def __init__(self, image: Image.Image) -> None:
        self._image = image
        self._draw = ImageDraw.Draw(image)

    def line(self, x0: float, y0: float, x1: float, y1: float, colour: str) -> None:
        ends = [value * _SCALE for value in (x0, y0, x1, y1)]
        self._draw.line((ends[0], ends[1], ends[2], ends[3]), colour, _SCALE)

    def box(self, x0: float, y0: float, x1: float, y1: float, colour: str) -> None:
        ends = [value * _SCALE for value in (x0, min(y0, y1), x1, max(y0, y1))]
        self._draw.rectangle((ends[0], ends[1], ends[2], ends[3]), colour)

    def text(
        self, x: float, y: float, text: str, colour: str, size: int, anchor: str = "la"
    ) -> None:
        self._draw.text((x * _SCALE, y * _SCALE), text, colour, _font(size), anchor)

    def upright(self, x: float, y: float, text: str, colour: str, size: int) -> None:
        """Text that reads upwards and ends at y."""
        length = round(self.width(text, size) * _SCALE) + 2
        lying = Image.new("RGB", (length, 2 * size * _SCALE), _PAPER)
        ImageDraw.Draw(lying).text((0, 0), text, colour, _font(size))
        standing = lying.crop((0, 0, length, int(1.3 * size * _SCALE))).rotate(90, expand=True)
        self._image.paste(standing, (round(x * _SCALE), round(y * _SCALE)))

    def width(self, text: str, size: int) -> float:
        return float(self._draw.textlength(text, _font(size))) / _SCALE


def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size * _SCALE)
