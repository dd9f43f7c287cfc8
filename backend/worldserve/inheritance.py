"""Trust without probing: from a neighbour in the same context, or from one in the context before.

A couplet is trusted near its control because probes have shown how its states change there. Probing
costs eight rollouts; but how states change with the control hardly changes from one frame to the
next, or from one control to its neighbour. So a new, exact couplet can take over the Jacobian of a
scored one: its states stay its own, only the slope is borrowed, and taken to be more curved than it
was, by factors that calibration has measured (`ctrlcache.lending`); without these, nothing is lent.
Probes, when there is time for them, replace what was borrowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ctrlcache.calibration import TrustModel
from ctrlcache.couplet import Couplet
from ctrlcache.templates import adopt, lineage, task_of
from ctrlcache.tiered import ADOPTED
from ctrlcache.transfer import Migration
from worldserve.models.protocol import Float

__all__ = ["Inheritance", "age_of"]

_LENT = "lent"


def age_of(couplet: Couplet) -> int | None:
    """How many frames before the couplet's own context its slope was probed, as its lineage says;
    None for one that a template of the cold tier has lent."""
    kind = couplet.lineage.partition(":")[0]
    if kind == ADOPTED:
        return None
    number = kind.removeprefix(_LENT)
    return int(number) if number != kind and number.isdigit() else 0


def _aged(couplet: Couplet, age: int) -> str:
    kind = f"{_LENT}{age}" if age else "session"
    return lineage(kind, task_of(couplet.lineage))


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

    @property
    def generations(self) -> int:
        """Over how many frames anything is lent."""
        return len(self._trust.lent_curvature) if self._trust else 0

    def from_neighbour(self, neighbours: Sequence[Couplet], couplet: Couplet) -> Couplet | None:
        """An exact, unscored couplet with the trust of one that has foretold it, as far as that
        verifies it (`ctrlcache.templates.adopt`); None where there is none."""
        made = []
        for other in neighbours:
            adopted = adopt(
                [other], couplet, self._migration, self._trust, self._scale, self._max_error
            )
            if adopted is not None:
                # What was lent does not become younger by being handed on.
                kind = _aged(couplet, age_of(other) or 0)
                made.append(replace(adopted, lineage=kind))
        return max(made, key=lambda one: one.radius, default=None)

    def from_past(self, scored: Sequence[Couplet], couplet: Couplet, frames: int) -> Couplet | None:
        """An exact, unscored couplet with the slope of a scored one in the context `frames` frames
        before its own; None where there is none of its shape, or nothing is left of its trust."""
        if self._trust is None or couplet.jacobian is not None or not couplet.held:
            return None
        made = [self._lent(self._trust, before, couplet, frames) for before in scored]
        return max(
            (one for one in made if one is not None), key=lambda one: one.radius, default=None
        )

    def _lent(
        self, trust: TrustModel, before: Couplet, couplet: Couplet, frames: int
    ) -> Couplet | None:
        age = age_of(before)
        if age is None or before.jacobian is None:
            return None
        if before.states.shape != couplet.states.shape:
            return None
        older = trust.lent_factor(age + frames) / trust.lent_factor(age)
        curvature = max(before.curvature, 1e-6) * older
        # The slope is known to hold in a ball around the other's control: not beyond its rim.
        away = float(np.linalg.norm(before.control - couplet.control))
        radius = min(trust.radius(curvature, self._max_error), before.radius - away)
        if not radius > 0:
            return None
        return replace(
            couplet,
            jacobian=before.jacobian,
            stability=before.stability,
            transferability=before.transferability,
            curvature=curvature,
            radius=radius,
            lineage=_aged(couplet, age + frames),
        )
