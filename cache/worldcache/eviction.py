"""Which feature leaves first: one function, a weighted score of four things, each in [0, 1].

    score = 0.5 · recompute cost + 0.2 · recency + 0.2 · content importance + 0.1 · dependency

Recompute cost is what keeping a feature can be expected to save, per byte: its cost, times how
likely it is to be asked for again, against what is usual in the store. Recency halves with the time
that usually lies between two uses. So neither units nor a model's or a user's speed are built in.
Content importance is what is known of the content (the weights of the analysed regions, say) or,
where nothing is, how often features of its kind that were used as often have been used again.
Dependency: how many others are useless without it. `benchmarks/worldcache_eviction.py` replays
traces against LRU and the offline optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ctrlcache.errors import ConfigError

__all__ = ["Importance", "Scale", "Standing", "Usual", "Weights", "score"]

#: Features, and uses, that count in what is usual.
_MEMORY = 500
_MOST_USES = 4
#: Half of the recency is gone after so many of the usual intervals.
_INTERVALS = 1.0
_FLOOR = 0.02
#: How likely a feature of which nothing is known is taken to be asked for.
_UNTRIED = 0.5 + _FLOOR


@dataclass(slots=True)
class Standing:
    """What eviction knows of a feature. cost_ms: 0 where it is not known, and then taken to be as
    usual for its size. importance: of its content, 0 to 1. uses: how often it was asked for.
    dependents: how many others are useless without it."""

    size_bytes: int
    cost_ms: float
    importance: float
    last_used_s: float
    uses: int = 0
    dependents: int = 0


@dataclass(frozen=True)
class Weights:
    """Of the four parts; they add up to 1."""

    recompute: float = 0.5
    recency: float = 0.2
    importance: float = 0.2
    dependency: float = 0.1

    def __post_init__(self) -> None:
        parts = (self.recompute, self.recency, self.importance, self.dependency)
        if min(parts) < 0 or not math.isclose(sum(parts), 1.0, abs_tol=1e-6):
            raise ConfigError(f"eviction weights must be at least 0 and add up to 1, got {parts}")


_WEIGHTS = Weights()


@dataclass(frozen=True, slots=True)
class Usual:
    """Of a store: expected milliseconds saved per byte, and seconds between two uses."""

    per_byte: float = 1e-3
    interval_s: float = 60.0


class Scale:
    """What is usual in a store. Not thread-safe: its store's lock covers it."""

    def __init__(self) -> None:
        self._now = Usual()
        self._log_per_byte = 0.0
        self._stored = 0
        self._interval_s = self._now.interval_s
        self._uses = 0

    def stored(self, standing: Standing) -> None:
        """A feature came in."""
        if standing.cost_ms <= 0:
            return  # nobody knows its cost
        self._stored += 1
        share = 1 / min(self._stored, _MEMORY)
        value = math.log(_expected(standing, 1.0, self._now))
        self._log_per_byte += share * (value - self._log_per_byte)
        self._now = Usual(math.exp(self._log_per_byte), self._interval_s)

    def used(self, idle_s: float) -> None:
        """A feature was asked for again after `idle_s`. What is kept is a running median."""
        self._uses += 1
        idle_s = max(idle_s, 1e-3)
        if self._uses == 1:
            self._interval_s = idle_s
        step = max(0.02, 1 / self._uses)
        self._interval_s *= math.exp(step if idle_s > self._interval_s else -step)
        self._now = Usual(self._now.per_byte, self._interval_s)

    def __call__(self) -> Usual:
        return self._now


class Importance:
    """How often features of a kind that were used n times are used once more; [0, 1]."""

    def __init__(self) -> None:
        self._reached: dict[tuple[str, int], float] = {}
        self._left: dict[tuple[str, int], float] = {}

    def stored(self, kind: str) -> None:
        """A feature came in. What lies far back counts less."""
        self._reach(kind, 0)

    def used(self, kind: str, uses: int) -> None:
        """A feature that had been used `uses` times was used again."""
        at = (kind, min(uses, _MOST_USES))
        self._left[at] = self._left.get(at, 0.0) + 1
        self._reach(kind, uses + 1)

    def _reach(self, kind: str, uses: int) -> None:
        at = (kind, min(uses, _MOST_USES))
        keep = 1 - 1 / _MEMORY
        self._reached[at] = self._reached.get(at, 0.0) * keep + 1
        self._left[at] = self._left.get(at, 0.0) * keep

    def __call__(self, kind: str, uses: int = 0) -> float:
        at = (kind, min(uses, _MOST_USES))
        # Two imagined features of which one was used: nothing is known at the start.
        return min(1.0, (self._left.get(at, 0.0) + 1) / (self._reached.get(at, 0.0) + 2))


def score(standing: Standing, now_s: float, usual: Usual, weights: Weights = _WEIGHTS) -> float:
    """What the feature is worth keeping, 0 to 1; the lowest leaves first. usual: of `Scale`."""
    idle_s = max(0.0, now_s - standing.last_used_s)
    recency = 1 / (1 + idle_s / (_INTERVALS * usual.interval_s))
    expected = _expected(standing, recency, usual)
    recompute = expected / (expected + usual.per_byte)
    dependency = 1 - 1 / (1 + standing.dependents)
    return (
        weights.recompute * recompute
        + weights.recency * recency
        + weights.importance * standing.importance
        + weights.dependency * dependency
    )


#: (standing, now in seconds, what is usual) -> priority; the lowest leaves first.
Priority = Callable[[Standing, float, Usual], float]


def _expected(standing: Standing, recency: float, usual: Usual) -> float:
    """Milliseconds per byte that keeping it can be expected to save."""
    likely = recency * (standing.importance + _FLOOR)
    if standing.cost_ms <= 0:
        return likely / _UNTRIED * usual.per_byte
    return likely * max(standing.cost_ms, 1e-3) / max(standing.size_bytes, 1)
