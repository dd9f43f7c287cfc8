"""Pairs of a couplet and a query nearby, and whether bounds on their errors hold in all groups.

What must hold is not coverage over all pairs but over the uses that a budget *accepts*, in every
distance bin, every curvature third, both kinds of direction and every family of scenes. Pairs of
one context are no independent samples: the finite-sample correction (v m + 1) / (m + 1) of a share
v counts the m contexts, not the pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BUDGETS",
    "Double",
    "Flags",
    "Groups",
    "Ints",
    "Judge",
    "Pairs",
    "Tally",
    "enough",
    "fails",
    "tally_of",
]

Double = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: Relative state errors that users are expected to allow.
BUDGETS = (0.003, 0.005, 0.01, 0.02, 0.05)
_DISTANCE_BINS = (10, 8, 6, 5, 4, 3, 2)  # as many as the contexts can fill
_CURVATURES = ("low", "middle", "high")
_DIRECTIONS = ("one axis", "several axes")
_ONE_AXIS = 0.9  # share of the squared distance along its main axis, from which on it is one
_TARGET = 0.8  # of delta: users go other distances and directions than the sample


@dataclass(frozen=True, eq=False)
class Pairs:
    """n pairs of a scored couplet and a query in the same context; all arrays (n,).

    context: number of the scene. curvature, sensitivity, transferability: of the couplet. distance:
    Euclidean, between the controls. main_axis: share of the squared distance along its largest
    component, 1 for a change of one axis only. error: true relative state error of the migrated
    couplet (`scores.relative_error`). psnr_db: of the couplet's frames against the query's own, the
    worst frame of the horizon; NaN where no frames were made. family: of the scene, such as the
    suite it is from; empty where there is none.
    """

    context: Ints
    curvature: Double
    sensitivity: Double
    transferability: Double
    distance: Double
    main_axis: Double
    error: Double
    psnr_db: Double
    family: NDArray[np.str_] | None = None

    def __post_init__(self) -> None:
        if self.family is None:
            object.__setattr__(self, "family", np.full(len(self.context), ""))

    def __len__(self) -> int:
        return len(self.context)

    def take(self, chosen: Flags) -> Pairs:
        return Pairs(*(getattr(self, f.name)[chosen] for f in fields(self)))

    @classmethod
    def join(cls, parts: Sequence[Pairs]) -> Pairs:
        """All of `parts`; contexts of different parts stay different ones if numbered so."""
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)))


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of a pair: everything (0), a distance bin, a curvature third, a direction, and the
    family of its scene where there are several."""

    edges: Double  # of the distance bins
    thirds: Double  # of curvature
    families: tuple[str, ...] = ()

    @classmethod
    def of(cls, pairs: Pairs, least_contexts: int = 0) -> Groups:
        """As many distance bins as have `least_contexts` contexts each."""
        thirds = np.quantile(pairs.curvature, (1 / 3, 2 / 3))
        found = tuple(str(family) for family in np.unique(_families(pairs)))
        families = found if len(found) > 1 else ()
        for bins in _DISTANCE_BINS:
            edges = np.quantile(pairs.distance, np.linspace(0, 1, bins + 1))
            groups = cls(edges, thirds, families)
            everyone = np.zeros(len(pairs))
            tally = tally_of(pairs, groups.membership(pairs), len(groups.names), everyone, np.inf)
            if tally.contexts[1 : 1 + bins].min() >= least_contexts:
                break
        return groups

    @property
    def bins(self) -> int:
        return len(self.edges) - 1

    @property
    def names(self) -> list[str]:
        spans = itertools.pairwise(self.edges)
        distances = [f"distance {a:.3f}-{b:.3f}" for a, b in spans]
        touchy = (f"curvature {c}" for c in _CURVATURES)
        return ["all", *distances, *touchy, *_DIRECTIONS, *self.families]

    def membership(self, pairs: Pairs) -> Ints:
        """(4 or 5, n): group numbers of each pair."""
        near = np.searchsorted(self.edges[1:-1], pairs.distance, side="left")
        calm = np.searchsorted(self.thirds, pairs.curvature, side="left")
        everything = np.zeros(len(pairs), dtype=np.int64)
        across = 1 + self.bins + len(_CURVATURES) + (pairs.main_axis < _ONE_AXIS)
        rows = [everything, 1 + near, 1 + self.bins + calm, across]
        if self.families:
            place = np.searchsorted(self.families, _families(pairs))
            rows.append(len(self.names) - len(self.families) + place)
        groups: Ints = np.stack(rows)
        return groups


def _families(pairs: Pairs) -> NDArray[np.str_]:
    assert pairs.family is not None  # Pairs sees to it
    return pairs.family


class Tally(NamedTuple):
    """Per group (G,): accepted uses, those over their bound, contexts they come from."""

    accepted: Ints
    over: Ints
    contexts: Ints

    def corrected(self) -> Double:
        """Share over the bound, corrected for the number of contexts."""
        share = self.over / np.maximum(self.accepted, 1)
        corrected: Double = (share * self.contexts + 1) / (self.contexts + 1)
        return corrected


def tally_of(pairs: Pairs, member: Ints, groups: int, bounds: Double, budget: float) -> Tally:
    """What a budget accepts of the pairs under these bounds (n,); member: `Groups.membership`."""
    accepted = bounds <= budget
    over = accepted & (pairs.error > bounds)
    scenes = int(pairs.context.max()) + 1 if len(pairs) else 1
    seen = member[:, accepted] * scenes + pairs.context[accepted]
    contexts = np.bincount(seen.ravel(), minlength=groups * scenes).reshape(groups, scenes) > 0
    return Tally(
        np.bincount(member[:, accepted].ravel(), minlength=groups),
        np.bincount(member[:, over].ravel(), minlength=groups),
        contexts.sum(axis=1),
    )


def fails(
    pairs: Pairs,
    member: Ints,
    groups: int,
    bounds: Double,
    budget: float,
    delta: float,
    all_judged: int | None = None,
) -> bool:
    """Whether too many uses exceed their bound, in any group that has enough contexts; all_judged:
    how many are enough for all uses together."""
    tally = tally_of(pairs, member, groups, bounds, budget)
    judged = tally.contexts >= enough(delta)
    if all_judged is not None:
        judged[0] = tally.contexts[0] >= all_judged
    return bool((tally.corrected()[judged] > _TARGET * delta).any())


def enough(delta: float) -> int:
    """Contexts that a group must have to be judged: with fewer, chance decides, not the bound."""
    return int(np.ceil(4 / delta))


class Judge:
    """Tells of bounds for some pairs whether they hold, in every group that can be judged, at every
    budget."""

    def __init__(self, pairs: Pairs, delta: float, budgets: Sequence[float] = BUDGETS) -> None:
        self._usable = np.isfinite(pairs.curvature) & np.isfinite(pairs.error)
        self._pairs = pairs.take(self._usable)
        self._delta, self._budgets = delta, budgets
        groups = Groups.of(self._pairs, enough(delta))
        self._member, self._count = groups.membership(self._pairs), len(groups.names)

    def holds(self, bounds: Double) -> bool | None:
        """bounds (n,): of all pairs. None where the accepted uses come from too few contexts to
        tell."""
        bounds = bounds[self._usable]
        # All uses of a budget together are judged even where they are few: nothing else would be.
        accepted, least = bounds <= max(self._budgets), enough(self._delta) // 2
        if len(np.unique(self._pairs.context[accepted])) < least:
            return None
        return not any(
            fails(self._pairs, self._member, self._count, bounds, budget, self._delta, least)
            for budget in self._budgets
        )
