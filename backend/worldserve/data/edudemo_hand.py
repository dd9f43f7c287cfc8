"""Who does the experiments: takes hold, moves, lets go, waits, pushes, and wanders at random."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from worldserve.data.edudemo_scenes import FLOOR, Scene

__all__ = ["Experimenter"]

_NEAR = 1.2  # cm


class Experimenter:
    """Scripted stretches with noise and smooth random stretches, so that controls are covered."""

    def __init__(self, scene: Scene, rng: np.random.Generator) -> None:
        self._scene, self._rng = scene, rng
        self._hand, self._holds = (0.0, 0.0), False
        self._sigma = 0.0
        self._script = self._play()

    def control(self, hand: tuple[float, float], holds: bool) -> NDArray[np.float32]:
        """The next control (4,), for a hand at `hand` (cm)."""
        self._hand, self._holds = hand, holds
        x, z, hard, how = next(self._script)
        wanted = np.array([x / 23, (z - FLOOR - 2) / 21 - 1, hard, how])
        noise = self._sigma * self._rng.normal(size=4) * (1, 1, 1, 0.5)
        control: NDArray[np.float32] = np.clip(wanted + noise, -1, 1).astype(np.float32)
        return control

    def _play(self) -> Iterator[tuple[float, float, float, float]]:
        rng = self._rng
        while True:
            self._sigma = float(rng.choice([0.0, 0.03, 0.1]))
            kind = rng.random()
            if kind < 0.25:
                yield from self._wander(int(rng.integers(8, 22)))
            elif kind < 0.5 and self._scene.pushes:
                yield from self._push()
            else:
                yield from self._carry()
            yield from self._withdraw()

    def _carry(self) -> Iterator[tuple[float, float, float, float]]:
        """Take hold of something, move it to a goal, let it go."""
        rng = self._rng
        hard = float(rng.uniform(0.0, 1.0))
        body = self._scene.handles[int(rng.integers(len(self._scene.handles)))]
        for _ in range(18):
            x, z = body.position
            yield x, z, hard, -1.0
            if np.hypot(self._hand[0] - x, self._hand[1] - z) < _NEAR + 2:
                break
        for _ in range(3):
            yield body.position.x, body.position.y, hard, 1.0
        for _ in range(int(rng.integers(1, 4))):
            x_low, x_high, z_low, z_high = self._scene.goals
            goal = float(rng.uniform(x_low, x_high)), float(rng.uniform(z_low, z_high))
            for _ in range(int(rng.integers(5, 13))):
                yield (*goal, hard, 1.0)

    def _push(self) -> Iterator[tuple[float, float, float, float]]:
        """Go beside something and push through it, the hand open."""
        rng = self._rng
        hard = float(rng.uniform(-0.3, 1.0))
        body = self._scene.handles[int(rng.integers(len(self._scene.handles)))]
        side = -1.0 if rng.random() < 0.75 else 1.0
        x, z = body.position
        beside = x + side * float(rng.uniform(5, 8)), z + float(rng.uniform(0, 2))
        for high in (beside[1] + 8, beside[1]):
            for _ in range(6):
                yield beside[0], high, hard, -1.0
        for _ in range(int(rng.integers(6, 12))):
            yield x - side * float(rng.uniform(4, 12)), z, hard, -1.0

    def _withdraw(self) -> Iterator[tuple[float, float, float, float]]:
        """Let go, move off and watch."""
        rng = self._rng
        x, z = self._hand
        aside = x + float(rng.uniform(-10, 10)), min(z + float(rng.uniform(4, 14)), 44.0)
        for _ in range(int(rng.integers(6, 18))):
            yield (*aside, 0.0, -1.0)

    def _wander(self, frames: int) -> Iterator[tuple[float, float, float, float]]:
        walk = self._rng.uniform(-0.6, 0.6, 4)
        for _ in range(frames):
            walk = 0.85 * walk + 0.35 * self._rng.normal(size=4)
            x, z = 23 * np.clip(walk[0], -1, 1), FLOOR + 2 + 21 * (np.clip(walk[1], -1, 1) + 1)
            yield float(x), float(z), float(walk[2]), float(walk[3])
