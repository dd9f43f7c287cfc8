"""A world model that hangs when it is told to: its process lives, its engine never answers."""

from __future__ import annotations

import threading

from worldserve.models.tiny import TinyWorldModel

__all__ = ["HANG", "HangingWorldModel"]

#: The first control that makes it hang; within the range that controls are clipped to.
HANG = 0.8125


class HangingWorldModel(TinyWorldModel):
    """The tiny model but for that."""

    def rollout(self, inputs, *more):
        if any(float(one.controls[0][0]) == HANG for one in inputs):
            threading.Event().wait()
        return super().rollout(inputs, *more)
