"""Pictures of an experiment: the plane of the stage seen through a pinhole camera."""

from __future__ import annotations

import math

import numpy as np
import pymunk
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from worldserve.data.edudemo_scenes import FLOOR, STAGE, Line, Scene
from worldserve.data.suites import Camera

__all__ = ["Painter"]

_WALL, _GROUND, _GRID = (226, 231, 236), (150, 140, 128), (205, 212, 220)
_HAND, _HAND_HOLDS = (20, 150, 160), (10, 95, 110)
_ROUND = [(math.cos(a), math.sin(a)) for a in np.linspace(0, 2 * math.pi, 18, endpoint=False)]
Point = tuple[float, float]


class Painter:
    """Draws from one camera; size_px (height, width), each pixel averaged over `scale` each way.

    A camera at azimuth 90 looks at the stage straight on; the plane of the stage is the scene's
    y = 0.65 m. Its field of view is 57 degrees: 0.54 m at a distance of half a metre.
    """

    def __init__(self, camera: Camera, size_px: tuple[int, int], scale: int = 3) -> None:
        self._height, self._width = (side * scale for side in size_px)
        self._scale = scale
        turn = math.radians(camera.azimuth_deg - 90)
        tilt = math.radians(camera.elevation_deg)
        self._turn = math.cos(turn), math.sin(turn)
        self._tilt = math.cos(tilt), math.sin(tilt)
        self._aim = 100 * camera.lookat_m[0], 100 * camera.lookat_m[2]
        self._distance = 100 * camera.distance_m
        self._zoom = 1.85 * camera.distance_m / 0.5
        self._backdrop = self._draw_backdrop()

    def paint(
        self, space: pymunk.Space, scene: Scene, hand: Point, opening: float, holds: bool
    ) -> NDArray[np.uint8]:
        """(h, w, 3); opening: of the hand, 0 to 1."""
        image = self._backdrop.copy()
        pen = ImageDraw.Draw(image)
        for shape in space.shapes:
            colour = getattr(shape, "colour", None)
            if colour is not None:
                self._shape(pen, shape, colour)
        for line in scene.lines:
            self._line(pen, line)
        self._hand(pen, hand, opening, holds)
        if self._scale > 1:
            image = image.reduce(self._scale)
        return np.asarray(image)

    def _project(self, x: float, z: float) -> Point:
        """Centimetres on the stage to pixels."""
        across, up = x - self._aim[0], z - self._aim[1]
        right, depth = across * self._turn[0], across * self._turn[1]
        height = up * self._tilt[0] - depth * self._tilt[1]
        depth = depth * self._tilt[0] + up * self._tilt[1]
        factor = self._zoom * 0.5 / (self._distance + depth)
        return (
            self._width * (0.5 + factor * right),
            self._height * (0.5 - factor * height),
        )

    def _draw_backdrop(self) -> Image.Image:
        image = Image.new("RGB", (self._width, self._height), _WALL)
        pen = ImageDraw.Draw(image)
        half = STAGE / 2
        for x in range(-20, 21, 10):
            pen.line([self._project(x, 0), self._project(x, STAGE)], _GRID, self._scale)
        for z in range(13, 51, 10):
            pen.line([self._project(-half, z), self._project(half, z)], _GRID, self._scale)
        ground = [
            (-2 * half, -2 * half),
            (2 * half, -2 * half),
            (2 * half, FLOOR),
            (-2 * half, FLOOR),
        ]
        pen.polygon([self._project(*p) for p in ground], _GROUND)
        return image

    def _shape(
        self, pen: ImageDraw.ImageDraw, shape: pymunk.Shape, colour: tuple[int, int, int]
    ) -> None:
        body = shape.body
        assert body is not None
        if isinstance(shape, pymunk.Circle):
            x, z = body.position
            r = shape.radius
            pen.polygon([self._project(x + r * c, z + r * s) for c, s in _ROUND], colour)
            mark = body.local_to_world((r * 0.85, 0))
            darker = tuple(v * 6 // 10 for v in colour)
            pen.line([self._project(x, z), self._project(*mark)], darker, self._scale)
        elif isinstance(shape, pymunk.Poly):
            corners = [body.local_to_world(v) for v in shape.get_vertices()]
            pen.polygon([self._project(*corner) for corner in corners], colour)

    def _line(self, pen: ImageDraw.ImageDraw, line: Line) -> None:
        a, b = line.a.local_to_world(line.at_a), line.b.local_to_world(line.at_b)
        points = [(a.x, a.y), (b.x, b.y)]
        if line.kind == "spring":
            along = b - a
            across = along.perpendicular_normal() * 1.5
            points = [
                (a + along * (i / 12) + across * (0 if i in (0, 12) else (-1) ** i))
                for i in range(13)
            ]
        width = self._scale * (1 if line.kind == "rope" else 2) * self._height // (64 * self._scale)
        pen.line([self._project(*p) for p in points], (70, 60, 50), max(1, width))

    def _hand(self, pen: ImageDraw.ImageDraw, hand: Point, opening: float, holds: bool) -> None:
        x, z = hand
        colour = _HAND_HOLDS if holds else _HAND
        spread = 0.5 + 1.6 * opening
        arm = [(x - 0.9, z + 3.4), (x + 0.9, z + 3.4), (x + 0.9, z + 14), (x - 0.9, z + 14)]
        palm = [(x - 2.6, z + 1.6), (x + 2.6, z + 1.6), (x + 2.6, z + 3.6), (x - 2.6, z + 3.6)]
        fingers = [
            [
                (x + s * spread - 0.55, z - 1.8),
                (x + s * spread + 0.55, z - 1.8),
                (x + s * spread + 0.55, z + 1.8),
                (x + s * spread - 0.55, z + 1.8),
            ]
            for s in (-1, 1)
        ]
        for part in (arm, palm, *fingers):
            pen.polygon([self._project(*p) for p in part], colour)
