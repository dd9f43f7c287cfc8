"""The policy `content`: where and for how long to reuse, from what is in the picture.

After the first step it is known how much each region changes and how much that matters; the weight
matrix sums it up as the chunk's *activity*. A calibration knows, for a ladder of schedules (which
steps are computed, between which the output goes on along a measured slope), how large the error
becomes per unit of activity. Of the schedules whose bound keeps the budget, the one that computes
least is followed. A calm chunk skips nearly everything, a busy one little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from worldcache.policies import Plain
from worldcache.steps import Decision, Observation, Reuses, State

__all__ = ["Content", "Rung", "Slopes", "ladder_of", "peak_db"]

#: (second last computed step, last computed step, step) -> how far to go on
Slopes = Mapping[tuple[int, int, int], float]


def peak_db(rmse: float) -> float:
    """Root mean square error in 8-bit levels -> PSNR in dB."""
    return 20 * math.log10(255 / max(rmse, 1e-3))


@dataclass(frozen=True, slots=True)
class Rung:
    """One schedule: the steps it computes. factor, floor: rmse <= floor + factor x activity, in
    8-bit levels, for the calibrated share of chunks."""

    steps: tuple[int, ...]
    factor: float
    floor: float = 0.0

    def bound_db(self, activity: float) -> float:
        return peak_db(self.floor + self.factor * activity)


@dataclass(frozen=True, slots=True)
class Content(Plain):
    """ladder: rungs, the one that computes least first. quality_db: PSNR against the
    generation without reuse that a chunk must promise to keep."""

    ladder: tuple[Rung, ...] = ()
    slopes: Slopes = field(default_factory=dict, hash=False)
    quality_db: float = 35.0
    name: str = "content"
    needs: frozenset[str] = frozenset({"activity"})
    reuses: Reuses = "step"

    def decide(self, state: State, seen: Observation) -> Decision:
        rung = self.rung(seen.activity)
        return "compute" if rung is None or seen.step in rung.steps else "reuse"

    def rung(self, activity: float | None) -> Rung | None:
        """The schedule for a chunk; None: compute everything."""
        if activity is None or not math.isfinite(activity):
            return None
        kept = (rung for rung in self.ladder if rung.bound_db(activity) >= self.quality_db)
        return next(kept, None)

    def slope(self, state: State, seen: Observation) -> float:
        if len(state.computed) < 2:
            return 0.0
        return self.slopes.get((state.computed[-2], state.computed[-1], seen.step), 0.0)


def ladder_of(rungs: Sequence[Rung], steps: int, reference: float) -> tuple[Rung, ...]:
    """The rungs that no other beats with as few steps or fewer, cheapest first; activity
    `reference` is where they are compared."""
    kept: list[Rung] = []
    best = -math.inf
    for rung in sorted(rungs, key=lambda r: (len(r.steps), -r.bound_db(reference))):
        if rung.bound_db(reference) > best and len(rung.steps) < steps:
            kept.append(rung)
            best = rung.bound_db(reference)
    return tuple(kept)
