"""Episodes of a suite read back from their shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from worldserve.data.suites import Suite

__all__ = ["Clip", "Episodes", "clips", "load_episodes"]


@dataclass(frozen=True)
class Clip:
    """One episode from one camera: frames (T, h, w, 3), controls (T - 1, 4), physics (T, P)."""

    frames: NDArray[np.uint8]
    controls: NDArray[np.float32]
    physics: NDArray[np.float32]
    operation: str
    prompt: str
    view: str


@dataclass(frozen=True)
class Episodes:
    """All episodes of one split, stacked: frames (E, T, h, w, 3), operation (E,) indices."""

    frames: NDArray[np.uint8]
    controls: NDArray[np.float32]
    physics: NDArray[np.float32]
    operation: NDArray[np.int64]
    prompts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.frames)


def load_episodes(root: Path, suite: Suite, split: str, camera: int = 0) -> Episodes:
    """Everything generated so far of `split`; FileNotFoundError says how to make it."""
    parts: list[tuple[int, dict[str, NDArray[np.generic]]]] = []
    for index, operation in enumerate(suite.operations):
        for path in sorted(
            (root / suite.name / split).glob(f"{operation.name}-[0-9][0-9][0-9].npz")
        ):
            with np.load(path) as shard:
                arrays = {name: shard[name] for name in ("controls", "physics")}
                arrays["frames"] = shard["frames"][:, :, camera]
            parts.append((index, arrays))
    if not parts:
        raise FileNotFoundError(
            f"no {split} episodes of suite {suite.name!r} below {root}; "
            f"make them with: worldserve data generate --suite {suite.name} --root {root}"
        )
    operation_index = [np.full(len(a["frames"]), index, np.int64) for index, a in parts]
    return Episodes(
        frames=np.concatenate([a["frames"] for _, a in parts]).astype(np.uint8, copy=False),
        controls=np.concatenate([a["controls"] for _, a in parts]).astype(np.float32, copy=False),
        physics=np.concatenate([a["physics"] for _, a in parts]).astype(np.float32, copy=False),
        operation=np.concatenate(operation_index),
        prompts=tuple(operation.prompt for operation in suite.operations),
    )


def clips(root: Path, suite: Suite, split: str, camera: int = 0) -> Iterator[Clip]:
    """The episodes of a split one by one, operations in turn."""
    episodes = load_episodes(root, suite, split, camera)
    rank = np.zeros(len(episodes), np.int64)
    for index in range(len(suite.operations)):
        mine = episodes.operation == index
        rank[mine] = np.arange(mine.sum())
    for e in np.lexsort((episodes.operation, rank)):
        operation = suite.operations[episodes.operation[e]]
        yield Clip(
            episodes.frames[e],
            episodes.controls[e],
            episodes.physics[e],
            operation.name,
            operation.prompt,
            suite.cameras[camera].name,
        )
