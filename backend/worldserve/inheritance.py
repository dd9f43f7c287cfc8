"""Trust without probing: from a neighbour in the same context, or from one in the context before.

A couplet is trusted near its control because probes have shown how its states change there. Probing
costs eight rollouts; but how states change with the control hardly changes from one frame to the
next, or from one control to its neighbour. So a new, exact couplet can take over the Jacobian of a
scored one: its states stay its own, only the slope is borrowed, with more curvature than it had.
Probes, when there is time for them, replace what was borrowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ctrlcache.calibration import TrustModel
from ctrlcache.couplet import Couplet
from ctrlcache.templates import adopt
from ctrlcache.transfer import Migration
from worldserve.models.protocol import Float

__all__ = ["GENERATION", "GENERATIONS", "Inheritance"]

#: With every frame that lies between, a borrowed slope is taken to be this much more curved.
#: `benchmarks/borrowed.py` measures what share of answers is then over its bound.
GENERATION = 2.0
#: Farther back than this, nothing is borrowed.
GENERATIONS = 3


class Inheritance:
    """trust, migration, scale, max_error: of the model's approximate answers; without trust, nobody
    inherits any."""

    def __init__(
        self, trust: TrustModel | None, migration: Migration, scale: Float, max_error: float
    ) -> None:
        self._trust = trust
        self._migration = migration
        self._scale = scale
        self._max_error = max_error

    def from_neighbour(self, neighbours: Sequence[Couplet], couplet: Couplet) -> Couplet | None:
        """An exact, unscored couplet with the trust of one that has foretold it, as far as that
        verifies it (`ctrlcache.templates.adopt`); None where there is none."""
        if not neighbours:
            return None
        return adopt(
            neighbours, couplet, self._migration, self._trust, self._scale, self._max_error
        )

    def from_past(self, scored: Sequence[Couplet], couplet: Couplet, frames: int) -> Couplet | None:
        """An exact, unscored couplet with the slope of a scored one in the context `frames` frames
        before its own; None where there is none of its shape, or nothing is left of its trust."""
        if self._trust is None or couplet.jacobian is not None or not couplet.held:
            return None
        made = [self._lent(before, couplet, frames) for before in scored]
        return max(
            (one for one in made if one is not None), key=lambda one: one.radius, default=None
        )

    def _lent(self, before: Couplet, couplet: Couplet, frames: int) -> Couplet | None:
        if before.jacobian is None or before.states.shape != couplet.states.shape:
            return None
        assert self._trust is not None
        curvature = max(before.curvature, 1e-6) * GENERATION**frames
        # The slope is known to hold in a ball around the other's control: not beyond its rim.
        away = float(np.linalg.norm(before.control - couplet.control))
        radius = min(self._trust.radius(curvature, self._max_error), before.radius - away)
        if not radius > 0:
            return None
        return replace(
            couplet,
            jacobian=before.jacobian,
            stability=before.stability,
            transferability=before.transferability,
            curvature=curvature,
            radius=radius,
        )
