"""How far what was probed some frames ago may be trusted now: calibrated, like the bound itself.

Probes tell how states and tokens change with the control. A few frames later they still do, less
exactly. For each age, held-out contexts show by what factor the curvature must be raised for the
bound to hold (in every group that can be judged, at every budget, see `ctrlcache.judging`), and
how far frames that are drawn along the old slope stay good enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ctrlcache.calibration import TrustModel
from ctrlcache.conformal import frames_hold
from ctrlcache.judging import BUDGETS, Judge, Pairs

__all__ = ["with_lending"]

#: Tried from the largest on; what needs more than that is not lent.
_FACTORS = np.geomspace(64.0, 1.0, 97)


def with_lending(
    trust: TrustModel, by_age: Sequence[Pairs], budgets: Sequence[float] = BUDGETS
) -> TrustModel:
    """`trust` with what may be taken over from k frames ago, from pairs whose scores are k frames
    older than their context: by_age[k]. Their psnr_db is that of frames drawn along the slope of
    that age (NaN where none were drawn).

    Something older is never trusted farther; an age at which nothing holds ends the list.
    """
    changes: list[float] = []
    for pairs in by_age:
        held = frames_hold(
            pairs, pairs.distance * pairs.sensitivity, trust.drawn_psnr_db, trust.delta
        )
        if held == 0:
            break
        changes.append(min([held, *changes]))
    factors: list[float] = []
    for pairs in by_age[1:]:
        factor = _factor(trust, pairs, budgets)
        if factor is None:
            break
        factors.append(max([factor, *factors]))
    return replace(trust, drawn_change=tuple(changes), lent_curvature=tuple(factors))


def _factor(trust: TrustModel, pairs: Pairs, budgets: Sequence[float]) -> float | None:
    """The smallest factor from which on the bound holds, step by step from safe to bold."""
    judge, found = Judge(pairs, trust.delta, budgets), None
    for factor in _FACTORS:
        bounds = trust.bounds(pairs.curvature * factor, pairs.distance)
        holds = judge.holds(bounds)
        if holds is False:
            break
        if holds:
            found = float(factor)
    return found
