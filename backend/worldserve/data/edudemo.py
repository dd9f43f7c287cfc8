"""Suite *edudemo*: physics experiments in two dimensions, by pymunk, drawn with PIL.

A control says where the hand goes (x and height on the stage, absolute), how hard it pushes or
pulls, and how: open (-1) or closed (1); a closing hand takes hold of what is under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pymunk
from numpy.typing import NDArray

from worldserve.data.edudemo_hand import Experimenter
from worldserve.data.edudemo_scenes import FLOOR, GRAVITY, SCENES, STAGE, Scene
from worldserve.data.edudemo_view import Painter
from worldserve.data.episode import Episode, Moment, collect
from worldserve.data.suites import Operation, Suite

__all__ = ["EduDemoSimulator", "place"]

_STEPS_PER_FRAME = 20
_DEPTH_M = 0.65  # the stage is this plane
_REACH = 2.6  # cm: how near the hand must be to take hold
_FASTEST = 6.0  # cm per frame
_WEAKEST, _STRONGEST = 60.0, 1500.0  # cm kg / s^2
_OPENING_M = 0.1


def place(control: NDArray[Any]) -> tuple[float, float]:
    """Where on the stage (cm) a control sends the hand."""
    return 23.0 * float(control[0]), FLOOR + 2 + 21.0 * (float(control[1]) + 1)


class EduDemoSimulator:
    """One experiment; implements `worldserve.data.episode.Simulator`."""

    def __init__(
        self, suite: Suite, operation: Operation, size_px: tuple[int, int] | None = None
    ) -> None:
        self._suite, self._build = suite, SCENES[operation.environment]
        self._configuration = np.zeros(0, np.float32)
        size, scale = (size_px, 1) if size_px else ((suite.frame_px, suite.frame_px), 3)
        self._painters = [Painter(camera, size, scale) for camera in suite.cameras]

    def episode(self, seed: int, index: int, frames: int | None = None) -> Episode:
        """Record episode `index` of the split with `seed`; the same pair gives the same episode."""
        moments = list(self.moments(seed, index, frames or self._suite.frames_per_episode))
        return collect(moments, self._configuration)

    def moments(self, seed: int, index: int, frames: int) -> Iterator[Moment]:
        """The same frame by frame."""
        rng = np.random.default_rng((seed, index))
        stage = _Stage(self._build, rng)
        self._configuration = np.array(stage.scene.configuration, np.float32)
        experimenter = Experimenter(stage.scene, rng)
        for _ in range(frames - 1):
            images, physics = stage.paint(self._painters), stage.physics()
            control = experimenter.control(stage.hand, stage.holds)
            yield Moment(images, physics, control)
            stage.advance(control)
        yield Moment(stage.paint(self._painters), stage.physics(), None)

    def outcomes(
        self,
        seed: int,
        index: int,
        controls: NDArray[np.float32],
        asked: Sequence[tuple[int, NDArray[np.float32]]],
    ) -> list[NDArray[np.float32]]:
        """Physics (H, P) under each plan of `asked`, (frame, controls (H, 4)), from where
        `controls` lead in that many frames."""
        found = []
        for frame, plan in asked:
            stage = _Stage(self._build, np.random.default_rng((seed, index)))
            for control in controls[:frame]:
                stage.advance(control)
            physics = []
            for control in plan:
                stage.advance(control)
                physics.append(stage.physics())
            found.append(np.stack(physics))
        return found

    def close(self) -> None:
        """Nothing to give back."""


class _Stage:
    """The experiment and the hand in it."""

    def __init__(
        self, build: Callable[[pymunk.Space, np.random.Generator], Scene], rng: np.random.Generator
    ) -> None:
        self._space = pymunk.Space()
        self._space.gravity = 0, -GRAVITY
        self._space.iterations = 15
        half = STAGE / 2
        walls = [
            ((-99, FLOOR - 5), (99, FLOOR - 5)),
            ((-half - 5, 0), (-half - 5, 99)),
            ((half + 5, 0), (half + 5, 99)),
            ((-99, STAGE + 5), (99, STAGE + 5)),
        ]
        for a, b in walls:
            wall = pymunk.Segment(self._space.static_body, a, b, 5)
            wall.friction, wall.elasticity = 0.5, 0.9
            self._space.add(wall)
        self.scene: Scene = build(self._space, rng)
        self._anchor = pymunk.Body(body_type=pymunk.Body.KINEMATIC)
        self._hand = pymunk.Body(0.5, float("inf"))
        start = place(rng.uniform((-0.9, -0.2), (0.9, 1.0)))
        self._hand.position = self._anchor.position = start
        self._hand.velocity_func = _weightless
        fist = pymunk.Circle(self._hand, 1.5)
        fist.friction, fist.elasticity = 0.6, 0.1
        self._drive = pymunk.PivotJoint(self._anchor, self._hand, (0, 0), (0, 0))
        self._space.add(self._anchor, self._hand, fist, self._drive)
        self._opening = 1.0
        self._grip: pymunk.PivotJoint | None = None
        self._held: pymunk.Body | None = None

    @property
    def hand(self) -> tuple[float, float]:
        return self._hand.position.x, self._hand.position.y

    @property
    def holds(self) -> bool:
        return self._held is not None

    def advance(self, control: NDArray[np.float32]) -> None:
        """One frame, a tenth of a second, under `control`."""
        target = pymunk.Vec2d(*place(control))
        way = 0.6 * (target - self._anchor.position)
        way = way * min(1.0, _FASTEST / max(way.length, 1e-9))
        self._drive.max_force = _WEAKEST * (_STRONGEST / _WEAKEST) ** ((float(control[2]) + 1) / 2)
        wanted = (1 - float(control[3])) / 2
        for _ in range(_STEPS_PER_FRAME):
            self._opening += (wanted - self._opening) * 2.0 / _STEPS_PER_FRAME
            self._take_or_let_go()
            self._anchor.position += way / _STEPS_PER_FRAME
            self._space.step(0.1 / _STEPS_PER_FRAME)
            self.scene.after_step(self._held)
        # A hand that was held back does not jump when it comes free.
        lag = self._hand.position - self._anchor.position
        if lag.length > _FASTEST:
            self._anchor.position = self._hand.position - lag * (_FASTEST / lag.length)

    def physics(self) -> NDArray[np.float32]:
        hand, main = self._hand.position / 100, self.scene.main.position / 100
        opening = _OPENING_M * self._opening
        flags = float(self.holds), float(self.scene.succeeded())
        values = (hand.x, _DEPTH_M, hand.y, opening, main.x, _DEPTH_M, main.y, *flags)
        return np.array(values, np.float32)

    def paint(self, painters: list[Painter]) -> NDArray[np.uint8]:
        views = [
            p.paint(self._space, self.scene, self.hand, self._opening, self.holds) for p in painters
        ]
        return np.stack(views)

    def _take_or_let_go(self) -> None:
        if self._grip is not None and self._opening > 0.5:
            self._space.remove(self._grip)
            self._held = self._grip = None
        elif self._held is None and self._opening < 0.5:
            found = self._space.point_query(self._hand.position, _REACH, pymunk.ShapeFilter())
            near = [
                (hit.distance, handle)
                for hit in found
                for handle in self.scene.handles
                if hit.shape is not None and hit.shape.body is handle
            ]
            if near:
                _, body = min(near, key=lambda pair: pair[0])
                self._grip = pymunk.PivotJoint(self._hand, body, self._hand.position)
                self._grip.collide_bodies = False
                self._held = body
                self._space.add(self._grip)


def _weightless(body: pymunk.Body, gravity: tuple[float, float], damping: float, dt: float) -> None:
    pymunk.Body.update_velocity(body, (0, 0), damping, dt)
