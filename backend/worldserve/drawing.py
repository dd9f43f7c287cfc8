"""Frames for an approximate answer: a neighbour's own, or drawn anew from its migrated tokens.

The scoring probes of a couplet also tell how its predicted tokens change with the control. Moved
along that slope, they give frames for a neighbouring control at the price of the generator alone.
How far that is good enough is calibrated (`ctrlcache.lending`), also for slopes that were probed
some frames ago; without a calibration nothing is drawn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctrlcache.calibration import TrustModel
from ctrlcache.couplet import Couplet
from ctrlcache.key import digest
from worldserve.models.protocol import Float

__all__ = ["Drawing", "slope_id", "token_slope"]

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

    trust: the calibration, which says how far; without it, nothing does.
    """

    def __init__(self, store: _Store, trust: TrustModel | None) -> None:
        self._store = store
        self._trust = trust
        self._borrowed: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()

    def borrow(self, couplet: bytes, from_: Sequence[Couplet], frames: int) -> None:
        """Use the slope of the first of these that has one, in a context `frames` frames before,
        for a couplet that has none yet."""
        for other in from_:
            lender, age = self._borrowed.get(other.id, (other.id, 0))
            if self._store.get_blob(slope_id(lender)) is not None:
                self._borrowed[couplet] = lender, age + frames
                break
        while len(self._borrowed) > _BORROWED:
            self._borrowed.popitem(last=False)

    def _slope(self, couplet: bytes) -> tuple[NDArray[np.float16] | None, int]:
        """The slope to be used for a couplet, and how many frames ago it was probed."""
        own = self._store.get_blob(slope_id(couplet))
        if own is not None or couplet not in self._borrowed:
            return own, 0
        lender, age = self._borrowed[couplet]
        return self._store.get_blob(slope_id(lender)), age

    def shows(self, couplet: Couplet, distance: float) -> bool:
        """Whether the couplet's own frames are good enough at this distance."""
        if couplet.frames is None or self._trust is None:
            return False
        return distance <= self._trust.frame_radius(couplet.stability)

    def tokens(self, space: bytes, control: Float) -> Float | None:
        """Tokens (H, N, D) to draw the frames for `control` from, or None where nobody is near."""
        if self._trust is None:
            return None
        for couplet in self._store.trusted_near(space, control):
            delta = control - couplet.control
            distance = float(np.linalg.norm(delta))
            if distance > self._trust.drawn_radius(couplet.stability):
                continue
            slope, age = self._slope(couplet.id)
            if slope is None or distance > self._trust.drawn_radius(couplet.stability, age):
                continue
            whole = self._store.fetch(couplet.id, ("tokens",))
            if whole is None or whole.tokens is None or whole.lossy:
                continue
            moved: Float = whole.tokens + slope.astype(np.float32) @ delta
            return moved
        return None
