"""Policies fail closed, keep within budgets, and follow what they see."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrlcache.admission import (
    POLICIES,
    AdaptiveThreshold,
    Admission,
    Fixed,
    Trust,
    make_policy,
)
from ctrlcache.calibration import TrustModel
from ctrlcache.errors import CalibrationError, ConfigError
from ctrlcache.scores import Scores
from ctrlcache.tiers.base import Candidate

TRUST = TrustModel(
    weights_digest="w",
    migration="jacobian",
    delta=0.05,
    q=0.8,
    kappa0=0.1,
    curvature_power=1.0,
    distance_power=2.0,
    floor=1e-5,
    max_distance=0.4,
    probe_radius=0.05,
    horizon=8,
    rho_max=0.5,
    stability_threshold=0.3,
    transferability_threshold=85.0,
    frame_psnr_db=35.0,
    frame_distance=0.1,
    frame_change=0.02,
    pairs=1000,
    contexts=100,
    created="2024-01-01T00:00:00+00:00",
)


def scores(stability: float = 0.4, transferability: float = 100, curvature: float = 1.0) -> Scores:
    jacobian = np.zeros((2, 3, 4), np.float16)
    return Scores(0.5 - stability, stability, transferability, curvature, jacobian)


def candidate(distance: float, radius: float = 1.0, curvature: float = 1.0) -> Candidate:
    return Candidate(b"i" * 16, np.zeros(4, np.float32), radius, curvature, distance)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_without_calibration_nothing_approximate_is_served(name: str) -> None:
    """Uncalibrated couplets are kept for exact use and never answer for a neighbour."""
    policy = make_policy(name, None, 0.05)
    assert policy.decide(scores()) == Admission(True, "uncalibrated", 0.0)
    assert policy.accept(candidate(1e-4), 0.05) is None


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(
    st.floats(0, 1), st.floats(0, 50), st.floats(0, 1), st.sampled_from([0, 1e-3, 0.01, 0.05, -1])
)
def test_stated_bounds_fit_the_budget(
    name: str, distance: float, curvature: float, radius: float, budget: float
) -> None:
    """Whatever is accepted lies within its radius and states a bound within the budget."""
    bound = make_policy(name, TRUST, 0.05).accept(candidate(distance, radius, curvature), budget)
    if bound is not None:
        assert bound <= budget
        assert bound == TRUST.bound(curvature, distance)
        assert distance <= radius


@given(st.floats(0, 1e3), st.floats(1e-4, 0.2))
def test_trust_reaches_as_far_as_the_bound_allows(curvature: float, budget: float) -> None:
    """The radius is the largest distance that the policy accepts, up to the calibrated range."""
    policy = Trust(TRUST, budget)
    made = policy.decide(scores(curvature=curvature))
    assert made.radius > 0
    inside = candidate(made.radius * (1 - 1e-6), made.radius, curvature)
    assert policy.accept(inside, budget) is not None
    outside = candidate(made.radius * 1.001, 1.0, curvature)
    assert policy.accept(outside, budget) is None


def test_trust_keeps_untrusted_couplets_for_exact_use() -> None:
    """A couplet whose probes were unusable may still answer for its very own control."""
    made = Trust(TRUST, 0.05).decide(scores(curvature=np.inf))
    assert made == Admission(True, "exact-only", 0.0)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_longer_trajectories_than_calibrated_are_exact_only(name: str) -> None:
    """Errors grow with the horizon: beyond the calibrated one there is no bound to state."""
    long = dataclasses.replace(scores(), jacobian=np.zeros((9, 3, 4), np.float16))
    assert make_policy(name, TRUST, 0.05).decide(long) == Admission(True, "exact-only", 0.0)


def test_fixed_applies_both_thresholds_and_one_distance() -> None:
    """The original scheme: unstable or untransferable couplets stay out, 0.03 is the end."""
    policy = Fixed(TRUST, 0.05)
    assert policy.decide(scores()) == Admission(True, "trusted", 0.03)
    assert policy.decide(scores(stability=0.3)).reason == "unstable"
    assert policy.decide(scores(transferability=85)).reason == "untransferable"
    assert policy.accept(candidate(0.0299, 0.03), 0.05) is not None
    assert policy.accept(candidate(0.03, 0.03), 0.05) is None


def test_fixed_thresholds_adapt() -> None:
    """After 1,000 couplets the threshold is the 25th percentile of what was seen."""
    policy = Fixed(TRUST, 0.05)
    for value in np.random.default_rng(0).permutation(np.linspace(0.1, 0.5, 1_000)):
        policy.decide(scores(stability=value))
    assert policy.stability.value == pytest.approx(0.2, abs=1e-3)


def test_adaptive_threshold_moves_only_at_its_turn() -> None:
    """Between turns it stands still; at a turn it is the percentile of the sliding window."""
    threshold = AdaptiveThreshold(7.0, percentile=25, every=10, window=20)
    turns = [threshold.observe(v) for v in range(30)]
    assert [i for i, t in enumerate(turns) if t] == [9, 19, 29]
    assert threshold.value == np.percentile(np.arange(10, 30), 25)
    assert not any(threshold.observe(v) for v in [np.nan, np.inf] * 20)


def test_adaptive_threshold_goes_on_after_a_restart() -> None:
    """A restored threshold turns at the same moment to the same value."""
    values = np.random.default_rng(0).normal(size=25)
    first = AdaptiveThreshold(0.0, every=10, window=15)
    for v in values[:13]:
        first.observe(v)
    second = AdaptiveThreshold(5.0, every=10, window=15)
    second.restore(first.state())
    for v in values[13:]:
        assert first.observe(v) == second.observe(v)
    assert first.value == second.value
    with pytest.raises(CalibrationError):
        second.restore({"value": 1.0, "since": 0, "recent": ["x"]})
    assert first.value == second.value


def test_unknown_policy_and_bad_budget_are_named() -> None:
    """Configuration errors tell what would be right."""
    with pytest.raises(ConfigError, match="fixed, trust"):
        make_policy("lucky", TRUST, 0.05)
    with pytest.raises(ConfigError, match="max_error"):
        make_policy("trust", TRUST, float("nan"))
    with pytest.raises(ConfigError, match="percentile"):
        AdaptiveThreshold(0.0, percentile=101)


def test_bounds_of_another_migration_do_not_hold() -> None:
    """Trust calibrated for first order says nothing about plain reuse."""
    assert make_policy("trust", TRUST, 0.05, "jacobian").name == "trust"
    with pytest.raises(CalibrationError, match="'jacobian', 'reuse' is in use"):
        make_policy("trust", TRUST, 0.05, "reuse")


def test_calibration_with_impossible_numbers_is_refused() -> None:
    """Numbers that would make bounds meaningless cannot be built at all."""
    for change in ({"q": float("nan")}, {"q": 0.0}, {"kappa0": -1.0}, {"delta": 1.0}):
        with pytest.raises(CalibrationError):
            dataclasses.replace(TRUST, **change)
