"""A session's history as the client knows it: what was shown and done, up to the present."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from worldserve.bench.workload import Action, Clip, Controls

__all__ = ["PREDICTED", "Stretch", "Timeline"]

PREDICTED = -1


@dataclass(frozen=True, eq=False)
class Stretch:
    """Frames of one sort in a row. controls (n, C): each row led to its frame; the very first frame
    of a history was reached under none, and has NaN. clip_frames: their numbers, or PREDICTED."""

    observed: bool
    clip_frames: tuple[int, ...]
    controls: Controls


@dataclass
class Timeline:
    """frames: of the clip, or PREDICTED; reached[i]: the control that led to frame i."""

    frames: list[int] = field(default_factory=list)
    reached: list[Controls] = field(default_factory=list)
    present: int = -1

    def follow(self, clip: Clip, action: Action) -> None:
        """After `action`."""
        if action.mode == "seek":
            self.present = action.seek
        first, last = action.watched
        if first < last:
            unknown = np.full(clip.controls.shape[1], np.nan, np.float32)
            self._append(
                range(first, last),
                [clip.controls[i - 1] if i else unknown for i in range(first, last)],
            )
        if action.mode == "advance":
            held = np.array(action.control, np.float32)
            self._append([PREDICTED] * action.steps, [held] * action.steps)

    def _append(self, frames: range | list[int], reached: list[Controls]) -> None:
        del self.frames[self.present + 1 :], self.reached[self.present + 1 :]
        self.frames += frames
        self.reached += [np.asarray(control, np.float32) for control in reached]
        self.present = len(self.frames) - 1

    def stretches(self, most: int) -> list[Stretch]:
        """The last `most` frames up to the present, and as many more as it takes to begin with one
        that was observed."""
        start = max(0, self.present - most + 1)
        while self.frames[start] == PREDICTED:
            start -= 1
        found: list[Stretch] = []
        begin = start
        for index in range(start + 1, self.present + 2):
            ends = index > self.present or (self.frames[index] < 0) != (self.frames[begin] < 0)
            if ends:
                found.append(
                    Stretch(
                        self.frames[begin] >= 0,
                        tuple(self.frames[begin:index]),
                        np.stack(self.reached[begin:index]),
                    )
                )
                begin = index
        return found

    def digest(self) -> bytes:
        """Of all that led to the present."""
        seen = hashlib.sha256()
        for index in range(self.present + 1):
            seen.update(self.frames[index].to_bytes(4, "little", signed=True))
            seen.update(np.nan_to_num(self.reached[index], nan=9.0).tobytes())
        return seen.digest()

    @property
    def base(self) -> int:
        """The clip's frame that was seen last."""
        return next(f for f in reversed(self.frames[: self.present + 1]) if f >= 0)
