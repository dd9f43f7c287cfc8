"""Eviction policies: what each one lets go first."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrlcache.errors import ConfigError
from ctrlcache.eviction import HALF_LIFE_S, POLICIES, Usage, policy, used

NOW = 10_000.0
BASE = Usage(size_bytes=1000, cost_ms=100.0, created_s=NOW - 50, last_used_s=NOW - 20, hits=3.0)

usages = st.builds(
    Usage,
    size_bytes=st.integers(0, 1 << 28),
    cost_ms=st.floats(0, 1e6),
    created_s=st.floats(0, 1e9),
    last_used_s=st.floats(0, 1e9),
    hits=st.floats(0, 1e6),
    clock=st.floats(0, 1e6),
    dependents=st.integers(0, 1000),
)


@given(usage=usages, now=st.floats(0, 1e9), name=st.sampled_from(sorted(POLICIES)))
def test_priorities_are_finite_for_any_usage(usage: Usage, now: float, name: str) -> None:
    """Clocks that run backwards and empty records never give a priority that cannot be sorted."""
    assert math.isfinite(policy(name)(usage, now))


@pytest.mark.parametrize("name", ["cost", "gdsf", "weighted"])
def test_value_policies_prefer_what_saves_more_per_byte(name: str) -> None:
    """Dearer, smaller and more used records all outrank a record that differs in that alone."""
    rank = policy(name)
    base = rank(BASE, NOW)
    assert rank(replace(BASE, cost_ms=200.0), NOW) > base
    assert rank(replace(BASE, size_bytes=500), NOW) > base
    assert rank(replace(BASE, hits=6.0), NOW) > base


def test_cost_ages_what_is_no_longer_used() -> None:
    """A once popular record falls behind a new one when nobody has asked for it for hours."""
    rank = policy("cost")
    veteran = replace(BASE, hits=50.0, last_used_s=NOW - 4 * HALF_LIFE_S)
    newcomer = replace(BASE, hits=1.0, last_used_s=NOW)
    assert rank(veteran, NOW) < rank(newcomer, NOW)


def test_cost_still_decides_among_what_is_long_idle() -> None:
    """Years after the last use, what is dear still outranks what is cheap."""
    rank, later = policy("cost"), NOW + 1e8
    assert rank(replace(BASE, cost_ms=200.0), later) > rank(BASE, later) > 0.0


def test_gdsf_clock_ages_old_records() -> None:
    """A use under a higher eviction clock outranks more uses under a lower one."""
    rank = policy("gdsf")
    assert rank(used(BASE, NOW, clock=10.0), NOW) > rank(replace(BASE, hits=50.0), NOW)


def test_lru_looks_at_the_last_use_alone() -> None:
    """Cost, size and frequency are nothing to lru."""
    rank = policy("lru")
    assert rank(replace(BASE, cost_ms=1e6, hits=1e3), NOW) == rank(BASE, NOW)
    assert rank(used(BASE, NOW), NOW) > rank(BASE, NOW)


def test_weighted_gives_recompute_cost_half_of_the_weight() -> None:
    """The dearest idle record reaches exactly the sum of cost and nothing else."""
    idle = Usage(size_bytes=1, cost_ms=1e12, created_s=0, last_used_s=-1e15, hits=0.0)
    assert policy("weighted")(idle, NOW) == pytest.approx(0.5, abs=1e-6)
    assert policy("weighted")(replace(idle, dependents=10**9), NOW) == pytest.approx(0.6, abs=1e-6)


def test_used_decays_and_counts() -> None:
    """After one half-life without use, hits have halved before the new use is added."""
    later = used(replace(BASE, hits=4.0, last_used_s=NOW), NOW + HALF_LIFE_S, count=2)
    assert later.hits == pytest.approx(4.0)
    assert later.last_used_s == NOW + HALF_LIFE_S


def test_an_unknown_policy_is_refused_with_the_choices() -> None:
    """The error lists what could have been meant."""
    with pytest.raises(ConfigError, match=r"'fifo'.*cost, gdsf, lru, weighted"):
        policy("fifo")
