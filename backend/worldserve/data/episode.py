"""What every simulator records, and the one interface behind which they stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from worldserve.data.suites import Operation, Suite

__all__ = ["Episode", "Moment", "Simulator", "collect", "open_simulator"]


@dataclass(frozen=True)
class Episode:
    """One recorded episode of T frames.

    frames (T, V, h, w, 3) uint8 with V cameras; controls (T - 1, 4) float32 in [-1, 1], the one
    applied between frame t and t + 1; physics (T, P) float32, see PHYSICS_NAMES.
    """

    frames: NDArray[np.uint8]
    controls: NDArray[np.float32]
    physics: NDArray[np.float32]
    configuration: NDArray[np.float32]


@dataclass(frozen=True)
class Moment:
    """One frame of an episode: frames (V, h, w, 3), physics (P,), and the control (4,) that is
    applied next; None at the end."""

    frames: NDArray[np.uint8]
    physics: NDArray[np.float32]
    control: NDArray[np.float32] | None


class Simulator(Protocol):
    """One operation of a suite; the same seed and index give the same episode."""

    def moments(self, seed: int, index: int, frames: int) -> Iterator[Moment]: ...

    def episode(self, seed: int, index: int, frames: int) -> Episode: ...

    def outcomes(
        self,
        seed: int,
        index: int,
        controls: NDArray[np.float32],
        asked: Sequence[tuple[int, NDArray[np.float32]]],
    ) -> list[NDArray[np.float32]]:
        """What would have happened: physics (H, P) under each plan (H, 4) from each frame."""
        ...

    def close(self) -> None: ...


def collect(moments: Iterable[Moment], configuration: NDArray[np.float32]) -> Episode:
    """The whole episode."""
    seen = list(moments)
    return Episode(
        np.stack([moment.frames for moment in seen]),
        np.stack([moment.control for moment in seen if moment.control is not None]),
        np.stack([moment.physics for moment in seen]),
        configuration,
    )


def open_simulator(
    suite: Suite, operation: Operation, size_px: tuple[int, int] | None = None
) -> Simulator:
    """The simulator that `suite` names; size_px: (height, width) of the frames, where not square.

    Importing a simulator needs the extra `train`; serving and testing with shipped clips does not.
    """
    if suite.simulator == "metaworld":
        from worldserve.data.metaworld import MetaWorldSimulator

        return MetaWorldSimulator(suite, operation, size_px=size_px)
    if suite.simulator == "pymunk":
        from worldserve.data.edudemo import EduDemoSimulator

        return EduDemoSimulator(suite, operation, size_px=size_px)
    raise ValueError(f"suite {suite.name!r} names the unknown simulator {suite.simulator!r}")
