"""Test clips of a suite, for the benchmark."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ctrlcache.errors import InvalidInput
from worldserve.bench.workload import Clip

__all__ = ["load_clips", "load_folder"]


def load_folder(folder: Path, suite: str) -> list[Clip]:
    """Clips as `worldserve data export` writes them, one .npz each; InvalidInput where none is."""
    clips = [_load(path, suite) for path in sorted(folder.glob("*.npz"))]
    if not clips:
        raise InvalidInput(f"no .npz clips in {folder}")
    return clips


def load_clips(suite: str, most: int | None = None) -> list[Clip]:
    """The first `most` shipped test clips of a suite."""
    return load_folder(Path("client_examples/clips"), suite)[:most]


def _load(path: Path, suite: str) -> Clip:
    with np.load(path, allow_pickle=False) as clip:
        try:
            return Clip(
                name=path.stem,
                suite=suite,
                operation=str(clip["operation"]),
                prompt=str(clip["prompt"]),
                frames=clip["frames"],
                controls=clip["controls"].astype(np.float32),
                physics=clip["physics"].astype(np.float32),
                view=str(clip["view"]),
            )
        except KeyError as error:
            raise InvalidInput(
                f"{path}: {error}; expected a clip of `worldserve data export`"
            ) from None
