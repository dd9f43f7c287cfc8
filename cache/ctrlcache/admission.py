"""Which couplets may answer for a neighbour, and how far away.

Two policies. `fixed` is the original scheme: two score thresholds and one Euclidean distance.
`trust` gives every couplet the radius within which its calibrated error bound holds. Both fail
closed: without a calibration for these very weights nothing approximate is ever served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ctrlcache.calibration import TrustModel
from ctrlcache.errors import CalibrationError, ConfigError
from ctrlcache.scores import Scores
from ctrlcache.tiers.base import Candidate

__all__ = ["POLICIES", "AdaptiveThreshold", "Admission", "Fixed", "Policy", "Trust", "make_policy"]


@dataclass(frozen=True)
class Admission:
    """admit: whether lower tiers keep the couplet. radius: how far it may answer, 0 = exact only.

    reason: `trusted`, `exact-only`, `uncalibrated`, `unstable`, `untransferable`.
    """

    admit: bool
    reason: str
    radius: float


class Policy(Protocol):
    """Decides once per couplet, when it is scored, and once per candidate, when it is found."""

    @property
    def name(self) -> str: ...

    def decide(self, scores: Scores) -> Admission: ...

    def accept(self, candidate: Candidate, max_error: float) -> float | None:
        """The error bound of answering from `candidate`, or None where it may not answer."""
        ...


class AdaptiveThreshold:
    """A threshold that follows what it sees.

    Starts at `initial`; after every `every` observed values it becomes the given percentile of the
    last `window` of them. Not thread-safe; the scoring thread owns it.
    """

    def __init__(
        self, initial: float, percentile: float = 25.0, every: int = 1_000, window: int = 1_000
    ) -> None:
        if not (0 <= percentile <= 100 and every >= 1 and window >= 1):
            raise ConfigError(
                "percentile in [0, 100], every >= 1 and window >= 1 are needed, got "
                f"{percentile}, {every}, {window}"
            )
        self.value = initial
        self._percentile, self._every = percentile, every
        self._recent: deque[float] = deque(maxlen=window)
        self._since = 0

    def observe(self, value: float) -> bool:
        """Take a value in; True when the threshold was set anew. Not-finite ones are ignored."""
        if not np.isfinite(value):
            return False
        self._recent.append(float(value))
        self._since += 1
        if self._since < self._every:
            return False
        self._since = 0
        self.value = float(np.percentile(self._recent, self._percentile))
        return True

    def state(self) -> dict[str, Any]:
        """Plain numbers, to go on after a restart."""
        return {"value": self.value, "recent": list(self._recent), "since": self._since}

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state`; CalibrationError, with nothing changed, for anything else."""
        try:
            value, since = float(state["value"]), int(state["since"])
            recent = [float(v) for v in state["recent"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CalibrationError(f"no state of an adaptive threshold: {error}") from error
        self.value, self._since = value, since
        self._recent.clear()
        self._recent.extend(recent)


class Fixed:
    """Admit where CS and ST exceed their thresholds; answer within one Euclidean distance.

    The thresholds start from calibration and adapt. `reach` is the original's 0.03.
    """

    name = "fixed"

    def __init__(self, trust: TrustModel | None, max_error: float, reach: float = 0.03) -> None:
        self._trust = trust
        self._reach = reach
        self.stability = AdaptiveThreshold(trust.stability_threshold if trust else 0.0)
        self.transferability = AdaptiveThreshold(trust.transferability_threshold if trust else 0.0)

    def decide(self, scores: Scores) -> Admission:
        if self._trust is None:
            return Admission(True, "uncalibrated", 0.0)
        stable = scores.stability > self.stability.value
        transferable = scores.transferability > self.transferability.value
        self.stability.observe(scores.stability)
        self.transferability.observe(scores.transferability)
        if not stable:
            return Admission(False, "unstable", 0.0)
        if not transferable:
            return Admission(False, "untransferable", 0.0)
        if len(scores.jacobian) > self._trust.horizon:
            return Admission(True, "exact-only", 0.0)
        return Admission(True, "trusted", self._reach)

    def accept(self, candidate: Candidate, max_error: float) -> float | None:
        """Distance decides; the bound that is stated with the answer must fit the budget too."""
        if candidate.distance >= self._reach:
            return None
        return _within(self._trust, candidate, max_error)


class Trust:
    """Every couplet answers as far as its own bound stays within the budget.

    `max_error` is the largest budget that will be served: it sets the radius under which a couplet
    is indexed. Exact reuse is always right, so a couplet that may not answer for any neighbour is
    still kept, as `exact-only`; eviction weighs what it is worth.
    """

    name = "trust"

    def __init__(self, trust: TrustModel | None, max_error: float) -> None:
        self._trust = trust
        self._max_error = max_error

    def decide(self, scores: Scores) -> Admission:
        if self._trust is None:
            return Admission(True, "uncalibrated", 0.0)
        if len(scores.jacobian) > self._trust.horizon:  # errors grow with the steps
            return Admission(True, "exact-only", 0.0)
        radius = self._trust.radius(scores.curvature, self._max_error)
        return Admission(True, "trusted" if radius > 0 else "exact-only", radius)

    def accept(self, candidate: Candidate, max_error: float) -> float | None:
        return _within(self._trust, candidate, max_error)


def _within(trust: TrustModel | None, candidate: Candidate, max_error: float) -> float | None:
    if trust is None or not max_error > 0 or candidate.distance > candidate.radius:
        return None
    bound = trust.bound(candidate.curvature, candidate.distance)
    return bound if bound <= max_error else None


POLICIES: dict[str, Callable[[TrustModel | None, float], Policy]] = {
    "fixed": Fixed,
    "trust": Trust,
}


def make_policy(
    name: str, trust: TrustModel | None, max_error: float, migration: str | None = None
) -> Policy:
    """The policy called `name`; ConfigError names the known ones.

    `migration`: name of the migration in use; CalibrationError where `trust` was calibrated for
    another one, because its bounds would not hold.
    """
    try:
        build = POLICIES[name]
    except KeyError:
        raise ConfigError(
            f"policy must be one of {', '.join(sorted(POLICIES))}, got {name!r}"
        ) from None
    if not 0 <= max_error < float("inf"):
        raise ConfigError(f"max_error must be a finite number >= 0, got {max_error}")
    if trust is not None and migration is not None and trust.migration != migration:
        raise CalibrationError(
            f"trust was calibrated for migration {trust.migration!r}, {migration!r} is in use; "
            "calibrate again with `ctrlcache calibrate model --migration`"
        )
    return build(trust, max_error)
