"""Episodes of a suite read back from their shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from worldserve.data.suites import Operation, Suite

__all__ = ["Clip", "Episodes", "clips", "load_episodes", "load_suites", "operations_of"]


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
    """Episodes of one split, one row for each camera, stacked: frames (E, T, h, w, 3).

    operation, view, suite (E,): indices; twin (E,): the row that shows the same episode from
    another camera, -1 where there is none; prompts: of each operation, the plain one first.
    """

    frames: NDArray[np.uint8]
    controls: NDArray[np.float32]
    physics: NDArray[np.float32]
    operation: NDArray[np.int64]
    view: NDArray[np.int64]
    twin: NDArray[np.int64]
    suite: NDArray[np.int64]
    prompts: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.frames)


def operations_of(suites: Sequence[Suite]) -> tuple[Operation, ...]:
    """All operations, in the order of their indices in `load_suites`."""
    return tuple(operation for suite in suites for operation in suite.operations)


def load_episodes(root: Path, suite: Suite, split: str, camera: int = 0) -> Episodes:
    """Everything generated so far of `split`, seen from one camera of the suite."""
    return load_suites(root, [suite], split, (camera,))


def load_suites(
    root: Path, suites: Sequence[Suite], split: str, cameras: Sequence[int] = (0, 1)
) -> Episodes:
    """Everything generated so far of `split`; FileNotFoundError says how to make it.

    A shard that was made when the suite had fewer cameras gives the views that it has.
    """
    shards = [shard for suite in suites for shard in _shards(root, suite, split)]
    first = [0, *np.cumsum([len(s.operations) for s in suites])]
    rows: list[tuple[int, int, int, int, dict[str, NDArray[np.generic]]]] = []
    for suite, operation, path in shards:
        with np.load(path) as raw:
            shared = {"controls": raw["controls"], "physics": raw["physics"]}
            seen = [camera for camera in cameras if camera < raw["frames"].shape[2]]
            whole = raw["frames"]
        number = suites.index(suite)
        index = int(first[number]) + suite.operations.index(operation)
        for camera in seen:
            arrays = shared | {"frames": np.ascontiguousarray(whole[:, :, camera])}
            other = len(seen) == 2 and (1 if camera == seen[0] else -1)
            rows.append((index, camera, number, int(other) * len(whole), arrays))
    if not rows:
        raise FileNotFoundError(f"no {split} episodes from cameras {list(cameras)} below {root}")
    counts = [len(arrays["frames"]) for *_, arrays in rows]
    starts = np.cumsum([0, *counts[:-1]])
    twin = [
        np.arange(start, start + count) + other if other else np.full(count, -1)
        for (_, _, _, other, _), start, count in zip(rows, starts, counts, strict=True)
    ]

    def repeated(column: int) -> NDArray[np.int64]:
        return np.repeat(np.array([row[column] for row in rows], np.int64), counts)

    return Episodes(
        frames=_joined(rows[i][4].pop("frames") for i in range(len(rows))).astype(
            np.uint8, copy=False
        ),
        controls=_joined(row[4]["controls"] for row in rows).astype(np.float32, copy=False),
        physics=_joined(row[4]["physics"] for row in rows).astype(np.float32, copy=False),
        operation=repeated(0),
        view=repeated(1),
        suite=repeated(2),
        twin=np.concatenate(twin).astype(np.int64),
        prompts=tuple((o.prompt, *o.paraphrases) for o in operations_of(suites)),
    )


def _shards(root: Path, suite: Suite, split: str) -> list[tuple[Suite, Operation, Path]]:
    directory = root / suite.name / split
    found = [
        (suite, operation, path)
        for operation in suite.operations
        for path in sorted(directory.glob(f"{operation.name}-[0-9][0-9][0-9].npz"))
    ]
    if not found:
        raise FileNotFoundError(
            f"no {split} episodes of suite {suite.name!r} below {root}; "
            f"make them with: worldserve data generate --suite {suite.name} --root {root}"
        )
    return found


def _joined(parts: Iterable[NDArray[np.generic]]) -> NDArray[np.generic]:
    return np.concatenate(list(parts))


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
