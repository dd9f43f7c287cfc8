"""From held-out pairs of controls to a calibrated bound: split-conformal, by context.

The contexts are divided. The first part chooses the form of the bound (powers, offset, floor), the
second sets its factor q, and what came out is measured on scenes that did neither. What must hold
is not coverage over all pairs but over the uses that a budget *accepts*, so q is the smallest
factor for which, at every budget, in every distance bin, every curvature third and both kinds of
direction, at most a share 0.8 delta of the accepted pairs exceeds the bound; the rest of delta is
for users whose controls are distributed otherwise. Pairs of one context are no independent samples:
the finite-sample correction (v m + 1) / (m + 1) of a share v counts the m contexts, not the pairs.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ctrlcache.calibration import CoverageRow, TrustModel
from ctrlcache.errors import CalibrationError
from ctrlcache.judging import BUDGETS, Double, Flags, Groups, Ints, Pairs, enough, fails, tally_of

__all__ = ["BUDGETS", "Pairs", "coverage", "fit", "frames_hold"]

_FRAME_BINS = (8, 6, 5, 4, 3, 2)  # as many as the contexts can fill
_SHARES = (0.25, 0.45)  # of contexts: form, factor; the rest measures
_SHARES_MEASURED_APART = (0.3, 0.7)
_NO_DISTANCE = 1e-6


class _Form(NamedTuple):
    """bound = floor + q (curvature + kappa0)^a distance^p, without its q."""

    kappa0: float
    curvature_power: float
    distance_power: float
    floor: float

    def growth(self, pairs: Pairs) -> Double:
        touchy: Double = (pairs.curvature + self.kappa0) ** self.curvature_power
        return touchy * pairs.distance**self.distance_power


class _Search:
    """Looks for the factor of a form: whether one holds, the smallest roughly, and for certain."""

    def __init__(
        self,
        pairs: Pairs,
        form: _Form,
        member: Ints,
        groups: int,
        budgets: Sequence[float],
        delta: float,
    ) -> None:
        self._pairs, self._form, self._member, self._groups = pairs, form, member, groups
        self._budgets, self._delta = budgets, delta
        self._growth = form.growth(pairs)
        ratio = np.maximum(pairs.error - form.floor, 1e-12) / np.maximum(self._growth, 1e-300)
        self._high = float(ratio.max() * (1 + 1e-9))  # nothing exceeds its bound
        self._low = max(float(np.quantile(ratio, 1 - 2 * delta)), self._high * 1e-6)

    def holds(self, q: float) -> bool:
        """Coverage in every group that has enough contexts, at every budget."""
        bounds = self._form.floor + q * self._growth
        return all(
            not fails(self._pairs, self._member, self._groups, bounds, budget, self._delta)
            for budget in self._budgets
        )

    def roughly(self) -> float:
        """By bisection, as if coverage could only grow with q: to compare forms."""
        low, high = self._low, self._high
        for _ in range(9):
            middle = float(np.sqrt(low * high))
            low, high = (low, middle) if self.holds(middle) else (middle, high)
        return high

    def surely(self) -> float:
        """The smallest q from which on coverage holds, step by step from safe to bold.

        A larger q accepts fewer uses, so that coverage need not grow with it everywhere.
        """
        chosen = self._high
        for q in np.geomspace(self._high, self._low, 240):
            if not self.holds(float(q)):
                break
            chosen = float(q)
        return chosen


def _forms(pairs: Pairs) -> list[_Form]:
    typical = float(np.median(pairs.curvature))
    nearest = pairs.distance <= np.quantile(pairs.distance, 0.1)
    floors = (0.0, float(np.quantile(pairs.error[nearest], 0.95)))
    powers = itertools.product((1.0, 1.5, 1.75, 2.0), floors)
    made = []
    for distance_power, floor in powers:
        made.append(_Form(0.0, 0.0, distance_power, floor))  # one radius for all couplets
        made += [
            _Form(share * typical, power, distance_power, floor)
            for share in (0.1, 0.3, 1.0, 3.0)
            for power in (0.5, 0.75, 1.0)
        ]
    return made


def _reach(pairs: Pairs, form: _Form, q: float, budgets: Sequence[float]) -> float:
    """Mean trust radius over couplets and budgets: what a form is good for."""
    touchy = q * (pairs.curvature + form.kappa0) ** form.curvature_power
    allowed = np.maximum(np.array(budgets)[:, None] - form.floor, 0)
    radius = (allowed / np.maximum(touchy, 1e-300)) ** (1 / form.distance_power)
    return float(np.minimum(radius, pairs.distance.max()).mean())


def fit(
    pairs: Pairs,
    *,
    weights_digest: str,
    migration: str,
    probe_radius: float,
    horizon: int,
    delta: float = 0.05,
    budgets: Sequence[float] = BUDGETS,
    frame_psnr_db: float = 35.0,
    measured: Pairs | None = None,
    seed: int = 0,
) -> TrustModel:
    """Calibrate on `pairs`; the coverage table is measured on `measured`, or on a part set aside.

    CalibrationError where the pairs cannot carry a statement about delta.
    """
    scored = pairs.take(_first_of_each(pairs.context))
    sound = _usable(pairs)
    scenes = np.unique(sound.context)
    shares = _SHARES if measured is None else _SHARES_MEASURED_APART
    needed = int(np.ceil(enough(delta) / shares[1]))
    if len(scenes) < needed:
        raise CalibrationError(
            f"calibration to delta = {delta} needs usable pairs from at least {needed} contexts, "
            f"got {len(scenes)} (of {len(np.unique(pairs.context))} probed)"
        )
    shuffled = np.random.default_rng(seed).permutation(scenes)
    first, second = (round(x * len(scenes)) for x in np.cumsum(shares))
    choose, factor, rest = (
        sound.take(np.isin(sound.context, part))
        for part in (shuffled[:first], shuffled[first:second], shuffled[second:])
    )
    rough = Groups.of(choose, enough(delta))
    member, count = rough.membership(choose), len(rough.names)

    def worth(form: _Form) -> float:
        q = _Search(choose, form, member, count, budgets, delta).roughly()
        return _reach(choose, form, q, budgets)

    form = max(_forms(choose), key=worth)
    groups = Groups.of(factor, enough(delta))
    member, count = groups.membership(factor), len(groups.names)
    q = _Search(factor, form, member, count, budgets, delta).surely()
    reach = _farthest(factor, form, q, groups, max(budgets), delta)
    if reach <= 0:
        raise CalibrationError(
            f"no bound can be stated: within {max(budgets):g}, at the nearest distances, answers "
            f"from fewer than {enough(delta)} contexts are left to judge; calibrate on more "
            "contexts, or nearer ones"
        )
    trust = TrustModel(
        weights_digest=weights_digest,
        migration=migration,
        delta=delta,
        q=q,
        kappa0=form.kappa0,
        curvature_power=form.curvature_power,
        distance_power=form.distance_power,
        floor=form.floor,
        max_distance=reach,
        probe_radius=probe_radius,
        horizon=horizon,
        rho_max=float(np.quantile(_finite(scored.sensitivity), 0.99)),
        stability_threshold=0.0,
        transferability_threshold=float(np.quantile(scored.transferability, 0.25)),
        frame_psnr_db=frame_psnr_db,
        frame_distance=frames_hold(pairs, pairs.distance, frame_psnr_db, delta),
        frame_change=frames_hold(pairs, pairs.distance * pairs.sensitivity, frame_psnr_db, delta),
        pairs=len(pairs),
        contexts=len(np.unique(pairs.context)),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    return dataclasses.replace(
        trust,
        stability_threshold=float(np.quantile(trust.rho_max - _finite(scored.sensitivity), 0.25)),
        coverage=coverage(trust, rest if measured is None else measured, budgets),
    )


def coverage(
    trust: TrustModel, pairs: Pairs, budgets: Sequence[float] = BUDGETS
) -> tuple[CoverageRow, ...]:
    """How often accepted uses among `pairs` exceed their bound, per budget and group."""
    pairs = _usable(pairs)
    groups = Groups.of(pairs)
    member, names = groups.membership(pairs), groups.names
    bounds = trust.bounds(pairs.curvature, pairs.distance)
    rows = []
    for budget in budgets:
        tally = tally_of(pairs, member, len(names), bounds, budget)
        rows += [
            CoverageRow(name, budget, int(accepted), int(over), int(contexts))
            for name, accepted, over, contexts in zip(names, *tally, strict=True)
        ]
    return tuple(rows)


def _farthest(
    pairs: Pairs, form: _Form, q: float, groups: Groups, budget: float, delta: float
) -> float:
    """The end of the last distance bin, counted from the nearest, in which coverage was judged."""
    bounds = form.floor + q * form.growth(pairs)
    tally = tally_of(pairs, groups.membership(pairs), len(groups.names), bounds, budget)
    judged = tally.contexts[1 : 1 + groups.bins] >= enough(delta)
    bins = groups.bins if judged.all() else int(judged.argmin())
    return float(groups.edges[bins]) if bins else 0.0


def frames_hold(pairs: Pairs, measure: Double, psnr_db: float, delta: float) -> float:
    """The largest value of `measure` up to which frames keep `psnr_db` in a share 1 - delta.

    Bin by bin, from the smallest values on, with the same correction as the bound; 0 where even
    the smallest values do not, or where too few frames were made to tell.
    """
    made = np.isfinite(pairs.psnr_db) & np.isfinite(measure)
    if not made.any():
        return 0.0
    values, bad = measure[made], pairs.psnr_db[made] < psnr_db
    scenes = pairs.context[made]
    for bins in _FRAME_BINS:
        edges = np.quantile(values, np.linspace(0, 1, bins + 1))
        place = np.searchsorted(edges[1:-1], values, side="left")
        contexts = [len(np.unique(scenes[place == b])) for b in range(bins)]
        # With fewer, not even flawless frames could make up for the correction.
        if min(contexts) > 1 / delta:
            break
    held = 0.0
    for b, m in enumerate(contexts):
        inside = place == b
        if not inside.any() or (bad[inside].mean() * m + 1) / (m + 1) > delta:
            break
        held = float(edges[b + 1])
    return held


def _usable(pairs: Pairs) -> Pairs:
    """Without couplets that are never trusted, and without queries of the very same control."""
    return pairs.take(
        np.isfinite(pairs.curvature) & np.isfinite(pairs.error) & (pairs.distance > _NO_DISTANCE)
    )


def _first_of_each(context: Ints) -> Flags:
    chosen = np.zeros(len(context), dtype=bool)
    chosen[np.unique(context, return_index=True)[1]] = True
    return chosen


def _finite(values: Double) -> Double:
    finite: Double = values[np.isfinite(values)]
    return finite
