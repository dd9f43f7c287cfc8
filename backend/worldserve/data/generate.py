"""Generate a suite's episodes into shards; a shard that exists is not made again.

One shard holds the episodes of one operation and one block of episode numbers: `frames`
(E, T, V, px, px, 3) uint8, `controls` (E, T - 1, 4) and `physics` (E, T, P) float32,
`configurations` (E, C) float32.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from worldserve.data.episode import open_simulator
from worldserve.data.suites import Operation, Split, Suite

__all__ = ["generate_suite", "shard_path"]


EPISODES_PER_SHARD = 8


def shard_path(root: Path, suite: str, split: str, operation: str, block: int) -> Path:
    return root / suite / split / f"{operation}-{block:03d}.npz"


def generate_suite(suite: Suite, root: Path) -> dict[str, int]:
    """Make every missing shard of `suite` below `root`; returns the frames made per split."""
    plan = [
        (split, operation, block)
        for split in suite.splits
        for block in range(-(-split.episodes // EPISODES_PER_SHARD))
        for operation in suite.operations
    ]
    missing = [
        job
        for job in plan
        if not shard_path(root, suite.name, job[0].name, job[1].name, job[2]).exists()
    ]
    made = {split.name: 0 for split in suite.splits}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task(f"{suite.name} episodes", total=0)
        progress.update(bar, total=sum(_block_size(split, block) for split, _, block in missing))
        for split, operation, block in missing:
            path = shard_path(root, suite.name, split.name, operation.name, block)
            count = _block_size(split, block)
            progress.update(bar, description=f"{suite.name} {split.name} {operation.name}")
            made[split.name] += _write_shard(suite, operation, split, block, count, path)
            progress.advance(bar, count)
    return made


def _block_size(split: Split, block: int) -> int:
    return min(EPISODES_PER_SHARD, split.episodes - block * EPISODES_PER_SHARD)


def _write_shard(
    suite: Suite, operation: Operation, split: Split, block: int, count: int, path: Path
) -> int:
    simulator = open_simulator(suite, operation)
    try:
        first = block * EPISODES_PER_SHARD
        episodes = [
            simulator.episode(split.seed, first + i, suite.frames_per_episode) for i in range(count)
        ]
    finally:
        simulator.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial.npz")
    np.savez_compressed(
        partial,
        frames=np.stack([e.frames for e in episodes]),
        controls=np.stack([e.controls for e in episodes]),
        physics=np.stack([e.physics for e in episodes]),
        configurations=np.stack([e.configuration for e in episodes]),
    )
    partial.replace(path)
    return count * suite.frames_per_episode
