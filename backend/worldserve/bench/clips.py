"""The suites' test clips, as the benchmark plays them."""

from __future__ import annotations

from pathlib import Path

from ctrlcache.errors import InvalidInput
from worldserve.bench.workload import Clip
from worldserve.data.clips import CLIPS, clip_plan, load_suite_clips
from worldserve.data.suites import get_suite

__all__ = ["load_clips"]


def load_clips(suite: str, most: int | None = None, directory: Path = CLIPS) -> list[Clip]:
    """The first `most` test clips of a suite, all by default.

    InvalidInput tells how to make them where they are missing.
    """
    try:
        packed = load_suite_clips(suite, directory, most)
    except FileNotFoundError as error:
        raise InvalidInput(str(error)) from error
    views = [camera.name for camera in get_suite(suite).cameras]
    numbers = {name: index for name, _, index in clip_plan(get_suite(suite))}
    return [
        Clip(
            name=clip.name,
            suite=suite,
            operation=clip.operation,
            prompt=clip.prompt,
            frames=clip.frames[views[0]],
            controls=clip.controls,
            physics=clip.physics,
            view=views[0],
            other=clip.frames[views[1]] if len(views) > 1 else None,
            other_view=views[1] if len(views) > 1 else "",
            number=numbers.get(clip.name, -1),
        )
        for clip in packed
    ]
