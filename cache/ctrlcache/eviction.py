"""Which record leaves first: one function per policy, each returning a sortable priority.

A tier that needs room takes some records (all, or a random sample), asks the policy for each one's
priority now, and lets those with the lowest go. Priorities of one policy compare with each other
and with nothing else. `benchmarks/eviction.py` replays traces against the offline optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ctrlcache.errors import ConfigError

__all__ = ["POLICIES", "Policy", "Usage", "cost", "gdsf", "lru", "policy", "used", "weighted"]

#: A use counts half once this many seconds have passed without another one.
HALF_LIFE_S = 1_800.0
_HALF_LIVES = 20.0
#: Where half of the recency, and half of the recompute cost, are reached in `weighted`.
_RECENCY_S = 60.0
_COST_MS_PER_BYTE = 2e-3


@dataclass(frozen=True, slots=True)
class Usage:
    """What eviction knows of a record.

    hits: uses, insertion included, each decayed with HALF_LIFE_S up to `last_used_s`. clock: the
    tier's eviction clock at the last use (the highest `gdsf` priority evicted by then, 0 in a tier
    that never evicted). dependents: records that are useless without this one.
    """

    size_bytes: int
    cost_ms: float
    created_s: float
    last_used_s: float
    hits: float = 1.0
    clock: float = 0.0
    dependents: int = 0


#: (usage, now in seconds) -> priority; the lowest leaves first.
Policy = Callable[[Usage, float], float]


def used(usage: Usage, now_s: float, clock: float = 0.0, count: int = 1) -> Usage:
    """`usage` after `count` more uses at `now_s`."""
    return replace(
        usage,
        hits=_decayed(usage, now_s) + count,
        last_used_s=max(now_s, usage.last_used_s),
        clock=max(clock, usage.clock),
    )


def cost(usage: Usage, now_s: float) -> float:
    """Recompute-milliseconds saved per byte and second, as the past lets one expect it.

    The expected rate of uses falls with the time since the last one; uses count by their square
    root, since a burst during one drag of the hand says less about a return than its length.
    """
    idle_s = max(0.0, now_s - usage.last_used_s)
    return math.sqrt(_decayed(usage, now_s)) / (1.0 + idle_s) * _per_byte(usage)


def gdsf(usage: Usage, now_s: float) -> float:
    """Greedy-Dual-Size-Frequency (Cherkasova 1998): clock + frequency · cost / size."""
    return usage.clock + usage.hits * _per_byte(usage)


def lru(usage: Usage, now_s: float) -> float:
    """Least recently used first."""
    return usage.last_used_s


def weighted(usage: Usage, now_s: float) -> float:
    """0.5 · cost per byte + 0.2 · recency + 0.2 · frequency + 0.1 · dependency, each in [0, 1]."""
    recency = 1.0 / (1.0 + max(0.0, now_s - usage.last_used_s) / _RECENCY_S)
    frequency = 1.0 - 1.0 / (1.0 + usage.hits)
    recompute = 1.0 - 1.0 / (1.0 + _per_byte(usage) / _COST_MS_PER_BYTE)
    dependency = 1.0 - 1.0 / (1.0 + usage.dependents)
    return 0.5 * recompute + 0.2 * recency + 0.2 * frequency + 0.1 * dependency


POLICIES: Mapping[str, Policy] = {"cost": cost, "gdsf": gdsf, "lru": lru, "weighted": weighted}


def policy(name: str) -> Policy:
    """The policy of that name; ConfigError names the choices."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigError(
            f"eviction policy {name!r} is not known, choose one of {', '.join(POLICIES)}"
        ) from None


def _decayed(usage: Usage, now_s: float) -> float:
    # Never down to nothing: among what is long idle, cost and size still decide.
    half_lives = min(_HALF_LIVES, max(0.0, now_s - usage.last_used_s) / HALF_LIFE_S)
    return usage.hits * math.exp2(-half_lives)


def _per_byte(usage: Usage) -> float:
    return max(usage.cost_ms, 1e-3) / max(usage.size_bytes, 1)
