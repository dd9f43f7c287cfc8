"""Which feature leaves first: one function, a weighted score of four things, each in [0, 1].

    score = 0.5 · recompute cost + 0.2 · recency + 0.2 · content importance + 0.1 · dependency

Recompute cost is what losing the feature costs per byte, against what is usual in the store, so
that no unit and no model's speed is built in. Content importance is what is known of the content
(the weights of the analysed regions, say) or, where nothing is, how often features of its kind have
been asked for again. Dependency: how many others are useless without it.
`benchmarks/worldcache_eviction.py` replays traces against LRU and the offline optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ctrlcache.errors import ConfigError

__all__ = ["Importance", "Scale", "Standing", "Weights", "score"]

#: A feature that has not been used for this long has half of the recency.
RECENCY_S = 60.0
_NEUTRAL = 0.5


@dataclass(slots=True)
class Standing:
    """What eviction knows of a feature. importance: of its content, 0 to 1. uses: how often it was
    asked for. dependents: how many others are useless without it."""

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


class Scale:
    """What recomputing usually costs per byte: the running mean of its logarithm. Not thread-safe:
    its store's lock covers it."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._count = 0

    def note(self, size_bytes: int, cost_ms: float) -> None:
        self._count += 1
        share = 1 / min(self._count, 1_000)
        self._mean += share * (math.log(_per_byte(size_bytes, cost_ms)) - self._mean)

    def __call__(self) -> float:
        """Milliseconds per byte."""
        return math.exp(self._mean)


class Importance:
    """How often features of each kind are asked for again, as the past shows; [0, 1]."""

    def __init__(self, memory: float = 500.0) -> None:
        self._memory = memory
        self._stored: dict[str, float] = {}
        self._used: dict[str, float] = {}

    def stored(self, kind: str) -> None:
        """A feature came in; what lies further back than some hundred of them counts less."""
        keep = 1 - 1 / self._memory
        self._stored[kind] = self._stored.get(kind, 0.0) * keep + 1
        self._used[kind] = self._used.get(kind, 0.0) * keep

    def used_first(self, kind: str) -> None:
        """A stored feature was asked for the first time."""
        self._used[kind] = self._used.get(kind, 0.0) + 1

    def __call__(self, kind: str) -> float:
        stored = self._stored.get(kind, 0.0)
        # Two imagined features of which one was used: nothing is known at the start.
        return min(1.0, (self._used.get(kind, 0.0) + 2 * _NEUTRAL) / (stored + 2))


def score(standing: Standing, now_s: float, usual: float, weights: Weights = _WEIGHTS) -> float:
    """What the feature is worth keeping, 0 to 1; the lowest leaves first. usual: of `Scale`."""
    per_byte = _per_byte(standing.size_bytes, standing.cost_ms) * (1 + standing.uses)
    recompute = per_byte / (per_byte + usual)
    recency = 1 / (1 + max(0.0, now_s - standing.last_used_s) / RECENCY_S)
    dependency = 1 - 1 / (1 + standing.dependents)
    return (
        weights.recompute * recompute
        + weights.recency * recency
        + weights.importance * standing.importance
        + weights.dependency * dependency
    )


#: (standing, now in seconds, usual ms per byte) -> priority; the lowest leaves first.
Priority = Callable[[Standing, float, float], float]


def _per_byte(size_bytes: int, cost_ms: float) -> float:
    return max(cost_ms, 1e-3) / max(size_bytes, 1)
