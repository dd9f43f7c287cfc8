"""Frames for an approximate answer: a neighbour's own, or drawn anew from its migrated tokens.

The scoring probes of a couplet also tell how its predicted tokens change with the control. Moved
along that slope, they give frames for a neighbouring control at the price of the generator alone:
at the distance where a neighbour's own frames are down to 35 dB against the full computation, drawn
ones have more than 55 (`benchmarks/borrowed.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctrlcache.couplet import Couplet
from ctrlcache.key import digest
from worldserve.models.protocol import Float

__all__ = ["Drawing", "slope_id", "token_slope"]

#: How many times as far as its frames a couplet's migrated tokens may carry.
MIGRATED_REACH = 3.0
_BORROWED = 1_024


def slope_id(couplet: bytes) -> bytes:
    """Name of the token slope of a couplet, given by its id."""
    return digest(b"token-slope", couplet)


def token_slope(
    tokens: Float, control: Float, probes: Float, probe_tokens: Sequence[Float]
) -> NDArray[np.float16]:
    """d(tokens)/d(control): (H, N, D, C), from tokens (H, N, D) at `control` (C,) and at `probes`
    (2 C, C), two along each axis, as `ctrlcache.scores.probe_controls` gives them."""
    slopes = []
    for axis in range(len(control)):
        one, two = 2 * axis, 2 * axis + 1
        a, b = probes[one, axis] - control[axis], probes[two, axis] - control[axis]
        at_a, at_b = probe_tokens[one] - tokens, probe_tokens[two] - tokens
        # The tangent of the parabola through the three points.
        slopes.append((at_b * (a / b) - at_a * (b / a)) / (a - b))
    slope: NDArray[np.float16] = np.stack(slopes, axis=-1).astype(np.float16)
    return slope


class _Store(Protocol):
    def get_blob(self, id: bytes) -> NDArray[Any] | None: ...
    def fetch(self, id: bytes, fields: Sequence[str]) -> Couplet | None: ...
    def trusted_near(
        self, space: bytes, control: Float, fields: Sequence[str] = ()
    ) -> list[Couplet]: ...


class Drawing:
    """Decides what may stand for the frames of a control that was not computed.

    frame_reach: by stability, how far (in control units) a couplet's frames may stand for a
    neighbour's; calibrated.
    """

    def __init__(self, store: _Store, frame_reach: Callable[[float], float]) -> None:
        self._store = store
        self._frame_reach = frame_reach
        self._borrowed: OrderedDict[bytes, bytes] = OrderedDict()

    def borrow(self, couplet: bytes, from_: Sequence[Couplet]) -> None:
        """Use the slope of the first of these that has one for a couplet that has none yet."""
        for other in from_:
            lender = self._borrowed.get(other.id, other.id)
            if self._store.get_blob(slope_id(lender)) is not None:
                self._borrowed[couplet] = lender
                break
        while len(self._borrowed) > _BORROWED:
            self._borrowed.popitem(last=False)

    def _slope(self, couplet: bytes) -> NDArray[np.float16] | None:
        slope = self._store.get_blob(slope_id(couplet))
        if slope is None and couplet in self._borrowed:
            slope = self._store.get_blob(slope_id(self._borrowed[couplet]))
        return slope

    def shows(self, couplet: Couplet, distance: float) -> bool:
        """Whether the couplet's own frames are good enough at this distance."""
        return couplet.frames is not None and distance <= self._frame_reach(couplet.stability)

    def tokens(self, space: bytes, control: Float) -> Float | None:
        """Tokens (H, N, D) to draw the frames for `control` from, or None where nobody is near."""
        for couplet in self._store.trusted_near(space, control):
            delta = control - couplet.control
            reach = MIGRATED_REACH * self._frame_reach(couplet.stability)
            if np.linalg.norm(delta) > reach:
                continue
            slope = self._slope(couplet.id)
            if slope is None:
                continue
            whole = self._store.fetch(couplet.id, ("tokens",))
            if whole is None or whole.tokens is None or whole.lossy:
                continue
            moved: Float = whole.tokens + slope.astype(np.float32) @ delta
            return moved
        return None
