"""Traces of real hands: mouse recordings that drive the controls of a session.

The format is that of the Balabit Mouse Dynamics Challenge data set (Fülöp, Kovács, Kurics,
Windhager-Pokol, 2016; github.com/balabit/Mouse-Dynamics-Challenge): CSV with the columns `record
timestamp`, `client timestamp` (seconds), `button`, `state`, `x`, `y` (pixels). x and y become the
first two controls over the range that the recording uses, dragging moves the third one with y, a
pressed button closes the hand.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ctrlcache.errors import InvalidInput
from worldserve.bench.workload import Action, Clip, Controls, Habits, opening

__all__ = ["Recording", "hand_actions", "read_recording"]

_COLUMNS = ("client timestamp", "button", "state", "x", "y")
_REACH = 0.9
#: A hand that moves asks at this pace, as an interface does that follows it.
_INTERVAL_S = 0.12
#: Longer pauses than this are cut: the user went away.
_MOST_S = 5.0
#: Below this, the hand has not moved.
_STILL = 1e-3
#: Resting for this long while the video could go on lets it run.
_WATCHES_S = 1.5


@dataclass(frozen=True, eq=False)
class Recording:
    """times_s (n,) from 0; controls (n, 4)."""

    name: str
    times_s: Controls
    controls: Controls

    def part(self, index: int, of: int) -> Recording:
        """The index-th of `of` equal stretches: another user for each."""
        edges = np.linspace(0, len(self.times_s), of + 1).astype(int)
        here = slice(edges[index], edges[index + 1])
        return replace(self, times_s=self.times_s[here], controls=self.controls[here])


def read_recording(path: Path) -> Recording:
    """InvalidInput names the file, the line and what was expected there."""
    rows: list[tuple[float, float, float, bool, bool]] = []
    pressed = False
    if not path.is_file():
        raise InvalidInput(f"{path}: no such recording")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise InvalidInput(f"{path}: no column {missing[0]!r}; got {reader.fieldnames}")
        for number, row in enumerate(reader, 2):
            if row["button"] == "Scroll":
                continue  # carries no position worth having
            try:
                time_s, x, y = (float(row[name]) for name in ("client timestamp", "x", "y"))
            except (TypeError, ValueError):
                raise InvalidInput(
                    f"{path}, line {number}: time, x and y must be numbers"
                ) from None
            if row["state"] in ("Pressed", "Released"):
                pressed = row["state"] == "Pressed"
            # Positions beyond any screen mark the moments at which the recording lost the mouse.
            if 0 <= x < 20_000 and 0 <= y < 20_000:
                rows.append((time_s, x, y, row["state"] == "Drag", pressed))
    if len(rows) < 2:
        raise InvalidInput(f"{path}: fewer than two positions")
    table = np.array(rows, np.float64)
    time = np.maximum.accumulate(table[:, 0])
    place = table[:, 1:3]
    low, high = np.percentile(place, [1, 99], axis=0)
    xy = np.clip(2 * (place - low) / np.maximum(high - low, 1) - 1, -1, 1) * _REACH
    # While the button drags, y pulls the third axis; it stays where it was let go.
    moves = np.diff(xy[:, 1], prepend=xy[0, 1]) * table[:, 3]
    z = np.clip(np.cumsum(moves), -_REACH, _REACH)
    grip = np.where(table[:, 4] > 0, _REACH, -_REACH)
    controls = np.column_stack((xy, z, grip)).astype(np.float32)
    return Recording(path.stem, (time - time[0]).astype(np.float32), controls)


def hand_actions(clip: Clip, habits: Habits, recording: Recording) -> list[Action]:
    """A session on `clip`: a question each time the hand has moved, at most one per interval; the
    video runs on while the hand rests for long."""
    sampled = _resting_points(recording)
    shown = habits.lead
    actions: list[Action] = []
    for number, (time_s, control) in enumerate(sampled[: habits.asks]):
        after = sampled[number + 1][0] if number + 1 < len(sampled) else time_s + 1
        pause_s = float(np.clip(after - time_s, 0.02, _MOST_S))
        held = tuple(float(c) for c in control)
        if not actions:
            actions.append(opening(habits, held))
        actions.append(Action("hand", "probe", held, pause_s))
        if pause_s > _WATCHES_S and shown < len(clip.frames):
            last = min(shown + int(10 * pause_s), len(clip.frames))
            actions.append(Action("hand", "watch", held, 0.0, (shown, last)))
            shown = last
    return actions


def _resting_points(recording: Recording) -> list[tuple[float, Controls]]:
    """(time, control) at which an interface would ask: moved since the last, an interval later."""
    points: list[tuple[float, Controls]] = []
    for time_s, control in zip(recording.times_s, recording.controls, strict=True):
        if points:
            last_s, last = points[-1]
            if time_s - last_s < _INTERVAL_S or np.abs(control - last).max() < _STILL:
                continue
        points.append((float(time_s), control))
    return points
