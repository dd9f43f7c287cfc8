"""Who opens what in a product: popular scenes, users who come back, and looks that nobody repeats.

The workload of `record_trace.py --workload popular`, seeded. Scenes are stretches of the suites'
test clips, in an order of popularity (Zipf, exponent 0.9) that mixes the suites. A session is one
of three kinds:

    new      a user who has not been here before, on a scene drawn by popularity
    return   a user who was here before, drawn alike from all earlier visits, goes through the same
             once more, as after a pause or to show it to somebody
    scan     a stretch of a clip that nobody else ever opens, watched from end to end with a few
             questions on the way: the one-time use that pushes everything else out of an LRU

Within a session the hand is that of `worldserve.bench.workload`, with the habits of its suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from worldserve.bench.workload import HABITS, Clip, Habits

__all__ = ["Visit", "scenes", "visits"]

_LENGTH = 72
_LEAD = 8
_ZIPF = 0.9
_SCAN = {"play": 0.5, "drag": 0.5}


@dataclass(frozen=True, eq=False)
class Visit:
    """One session: kind as above; user tells hands on one clip apart."""

    kind: str
    clip: Clip
    habits: Habits
    user: int


def scenes(clips: Sequence[Clip], each: int = 2) -> list[Clip]:
    """`each` stretches of every clip, the suites in turn; most popular first."""
    by_suite: dict[str, list[Clip]] = {}
    for clip in clips:
        starts = np.linspace(0, len(clip.frames) - _LENGTH, each).astype(int)
        by_suite.setdefault(clip.suite, []).extend(_stretch(clip, int(at)) for at in starts)
    turns = max(len(found) for found in by_suite.values())
    return [found[n] for n in range(turns) for found in by_suite.values() if n < len(found)]


def visits(
    clips: Sequence[Clip],
    sessions: int,
    asks: int = 8,
    returns: float = 0.3,
    scans: float = 0.3,
    seed: int = 0,
) -> list[Visit]:
    """The sessions in the order in which they begin. returns, scans: shares of these kinds."""
    draw = np.random.default_rng(seed)
    places = scenes(clips)
    weights = 1.0 / np.arange(1, len(places) + 1) ** _ZIPF
    weights /= weights.sum()
    made: list[Visit] = []
    earlier: list[Visit] = []
    for number in range(sessions):
        kind = str(draw.choice(("return", "scan", "new"), p=(returns, scans, 1 - returns - scans)))
        if kind == "return" and earlier:
            made.append(replace(earlier[draw.integers(len(earlier))], kind="return"))
        elif kind == "scan":
            made.append(_scan(clips, number, asks, draw))
        else:
            clip = places[draw.choice(len(places), p=weights)]
            habits = replace(HABITS[clip.suite], lead=_LEAD, asks=asks)
            made.append(Visit("new", clip, habits, number))
            earlier.append(made[-1])
    return made


def _scan(clips: Sequence[Clip], number: int, asks: int, draw: np.random.Generator) -> Visit:
    clip = clips[draw.integers(len(clips))]
    scene = _stretch(clip, int(draw.integers(1, len(clip.frames) - _LENGTH)))
    # Nobody else's, also where two scans fall on the same stretch: one level of one pixel differs.
    frames = scene.frames.copy()
    frames[:, 0, 0] = number % 256
    frames[:, 0, 1] = number // 256
    habits = replace(HABITS[clip.suite], lead=_LEAD, asks=asks, weights=_SCAN)
    scene = replace(scene, name=f"{scene.name} scan {number}", frames=frames)
    return Visit("scan", scene, habits, number)


def _stretch(clip: Clip, first: int) -> Clip:
    last = first + _LENGTH
    return replace(
        clip,
        name=f"{clip.name} from {first}",
        frames=clip.frames[first:last],
        controls=clip.controls[first : last - 1],
        physics=clip.physics[first:last],
        other=None,
    )
