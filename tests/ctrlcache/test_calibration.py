"""Calibrated bounds hold on unseen data, and only for the weights they were made for."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrlcache.calibration import TrustModel, trust_path
from ctrlcache.conformal import BUDGETS, Pairs, coverage, fit
from ctrlcache.errors import CalibrationError


def make_pairs(
    seed: int,
    contexts: int = 900,
    each: int = 10,
    power: float = 2.0,
    spread: float = 0.5,
    farthest: float = 0.4,
    noise: float = 0.0,
) -> Pairs:
    """Errors of curvature x distance^power x luck of the scene x luck of the pair (+ noise)."""
    rng = np.random.default_rng(seed)
    context = np.repeat(np.arange(contexts), each)
    curvature = rng.lognormal(-0.5, 0.8, contexts)
    sensitivity = rng.lognormal(-2, 0.5, contexts)
    scene = rng.lognormal(0, spread, contexts)
    distance = np.exp(rng.uniform(np.log(0.01), np.log(farthest), contexts * each))
    luck = rng.lognormal(-1, spread, contexts * each)
    error = curvature[context] * scene[context] * luck * distance**power + noise * rng.uniform(
        size=distance.size
    )
    change = sensitivity[context] * distance
    psnr = 45 - 400 * change + rng.normal(0, 1, distance.size)
    return Pairs(
        context,
        curvature[context],
        sensitivity[context],
        1 / curvature[context],
        distance,
        rng.uniform(0.3, 1, distance.size),
        error,
        psnr,
    )


def fitted(pairs: Pairs, **changes: object) -> TrustModel:
    arguments: dict[str, object] = {
        "weights_digest": "w1",
        "migration": "jacobian",
        "probe_radius": 0.05,
        "horizon": 8,
    }
    return fit(pairs, **(arguments | changes))  # type: ignore[arg-type]


@functools.cache
def usual() -> TrustModel:
    return fitted(make_pairs(1))


@pytest.mark.parametrize(
    "world",
    [
        {},
        {"power": 1.0},
        {"spread": 1.2},
        {"noise": 1e-4},
    ],
    ids=["second order", "first order", "heavy tails", "noisy"],
)
def test_bounds_hold_on_unseen_scenes(world: dict[str, float]) -> None:
    """On fresh scenes at most delta of accepted uses exceed the bound: per budget, per distance."""
    trust = fitted(make_pairs(1, **world))  # type: ignore[arg-type]
    fresh = make_pairs(2, contexts=3_000, **world)  # type: ignore[arg-type]
    rows = coverage(trust, fresh)
    judged = [r for r in rows if r.contexts >= 300]
    assert len(judged) >= 10
    assert all(r.share <= 1.1 * trust.delta for r in judged), judged
    assert all(r.share <= trust.delta for r in judged if r.group == "all"), judged


def test_bounds_are_no_wider_than_they_must_be() -> None:
    """Coverage is not bought with a bound that accepts next to nothing; its form is found."""
    trust = usual()
    fresh = make_pairs(2, contexts=2_000)
    assert trust.distance_power == 2.0
    accepted = trust.bounds(fresh.curvature, fresh.distance) <= 0.01
    possible = fresh.error <= 0.01
    assert accepted.sum() > 0.4 * possible.sum()


def test_coverage_survives_other_distances() -> None:
    """Users who stay near, or go far, get the same promise: distances are judged bin by bin."""
    trust = usual()
    for farthest in (0.02, 0.1):
        rows = coverage(trust, make_pairs(3, contexts=2_000, farthest=farthest))
        assert all(r.share <= 1.1 * trust.delta for r in rows if r.contexts >= 300)


def test_stated_coverage_is_measured_on_scenes_apart() -> None:
    """The table that is stored comes from scenes that shaped neither form nor factor."""
    trust = usual()
    everything = next(r for r in trust.coverage if r.group == "all" and r.budget == BUDGETS[-1])
    assert 0 < everything.contexts <= 0.31 * trust.contexts
    assert everything.share <= 1.3 * trust.delta


def test_coverage_can_be_measured_on_other_clips() -> None:
    """Given pairs to measure on, all scenes calibrate and the table tells of the others."""
    other = make_pairs(7, contexts=400)
    trust = fitted(make_pairs(1, contexts=300), measured=other)
    assert trust.coverage == coverage(trust, other)
    assert trust.coverage[0].contexts > 300


def test_unusable_couplets_are_never_trusted() -> None:
    """Couplets with infinite curvature neither disturb the calibration nor get a radius."""
    pairs = make_pairs(1)
    bad = pairs.context % 5 == 0
    pairs.curvature[bad], pairs.sensitivity[bad], pairs.transferability[bad] = np.inf, np.inf, 0
    pairs.error[bad] = 1.0
    trust = fitted(pairs)
    assert trust.radius(np.inf, 0.05) == 0
    assert trust.bound(np.inf, 0.01) == math.inf
    rows = coverage(trust, pairs)
    assert all(r.share <= 1.1 * trust.delta for r in rows if r.contexts >= 100)
    assert math.isfinite(trust.rho_max)


def test_too_few_scenes_are_refused() -> None:
    """Thousands of pairs from few scenes do not make a calibration."""
    with pytest.raises(CalibrationError, match=r"at least 178 contexts, got 60 .of 60"):
        fitted(make_pairs(0, contexts=60, each=200))


def test_fewer_scenes_make_wider_bins_not_silence() -> None:
    """With the fewest scenes allowed there is still a radius, judged in fewer distance bins."""
    trust = fitted(make_pairs(0, contexts=180, each=8))
    assert trust.max_distance > 0.05
    assert trust.radius(0.5, 0.02) > 0.01


def test_a_model_that_nobody_can_trust_is_refused() -> None:
    """Where every answer errs beyond all budgets, there is no calibration to store."""
    pairs = make_pairs(0)
    pairs.error[:] += 1.0
    with pytest.raises(CalibrationError, match="no bound can be stated"):
        fitted(pairs)


def test_frames_are_lent_as_far_as_they_hold() -> None:
    """Within the frame radius 95 % of neighbours keep 35 dB; calm couplets lend farther."""
    trust, fresh = usual(), make_pairs(2, contexts=3_000)
    flat = fresh.distance <= trust.frame_radius()
    assert (fresh.psnr_db[flat] < 35).mean() <= 0.06
    stability = trust.rho_max - fresh.sensitivity
    own = fresh.distance <= np.array([trust.frame_radius(s) for s in stability])
    assert (fresh.psnr_db[own] < 35).mean() <= 0.06
    assert own.sum() > flat.sum() > 0
    assert trust.frame_radius(trust.rho_max) == trust.max_distance
    assert trust.frame_radius(-math.inf) == 0


def test_no_frames_no_frame_radius() -> None:
    """Where no frames were compared, none are lent."""
    pairs = make_pairs(1)
    pairs.psnr_db[:] = np.nan
    trust = fitted(pairs)
    assert (trust.frame_radius(), trust.frame_radius(trust.rho_max - 0.1)) == (0, 0)


TRUST = fitted(make_pairs(1, contexts=300))


@given(st.floats(0, 1e6), st.floats(0, 1))
def test_radius_inverts_the_bound(curvature: float, budget: float) -> None:
    """At the radius the bound meets the budget, unless the calibrated range ends first."""
    radius = TRUST.radius(curvature, budget)
    assert 0 <= radius <= TRUST.max_distance
    if radius == 0:
        assert TRUST.bound(curvature, 1e-3) > budget
    else:
        assert TRUST.bound(curvature, radius) <= budget * (1 + 1e-9)
        if radius < TRUST.max_distance:
            assert TRUST.bound(curvature, radius) == pytest.approx(budget, rel=1e-6)


@given(st.floats(0, 1e3), st.floats(0, 0.6))
def test_bounds_of_arrays_are_the_bounds(curvature: float, distance: float) -> None:
    """The vectorised bound is the scalar one."""
    made = TRUST.bounds(np.array([curvature]), np.array([distance]))
    assert made.tolist() == pytest.approx([TRUST.bound(curvature, distance)])


def test_beyond_the_calibrated_range_nothing_is_bounded() -> None:
    """Distances that calibration did not judge have an infinite bound."""
    assert TRUST.bound(0.0, TRUST.max_distance * 1.01) == math.inf
    assert TRUST.bound(0.0, -0.1) == math.inf
    assert TRUST.bound(math.nan, 0.01) == math.inf


def test_calibration_survives_saving(tmp_path: Path) -> None:
    """What is loaded is what was saved, coverage table included."""
    path = trust_path(tmp_path)
    TRUST.save(path)
    assert TrustModel.load(path, "w1") == TRUST


def test_calibration_of_other_weights_is_refused(tmp_path: Path) -> None:
    """The error names both digests and what to do."""
    path = trust_path(tmp_path)
    TRUST.save(path)
    with pytest.raises(CalibrationError, match=r"weights w1, this model has w2; calibrate with"):
        TrustModel.load(path, "w2")
    with pytest.raises(CalibrationError, match="is not there"):
        TrustModel.load(tmp_path / "absent.json", "w1")


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"q": float("nan")},
        {"q": "1"},
        {"q": True},
        {"kappa0": -1},
        {"surplus": 1},
        {"coverage": [{"group": "all"}]},
    ],
)
def test_damaged_calibration_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """No file that is not whole yields trust."""
    path = tmp_path / "trust.json"
    TRUST.save(path)
    record = json.loads(path.read_text()) | change
    path.write_text(json.dumps(record))
    with pytest.raises(CalibrationError):
        TrustModel.load(path, "w1")
    for text in ("", "[]", "{", '{"format": 1, "weights_digest": "w1"}'):
        path.write_text(text)
        with pytest.raises(CalibrationError):
            TrustModel.load(path, "w1")


def test_joined_pairs_keep_their_rows() -> None:
    """Joining and taking apart changes nothing."""
    a, b = make_pairs(1, 20), make_pairs(2, 20)
    both = Pairs.join([a, dataclasses.replace(b, context=b.context + 20)])
    again = both.take(both.context >= 20)
    assert (again.error == b.error).all()
    assert len(both) == len(a) + len(b)


def test_every_family_of_scenes_must_hold() -> None:
    """A tenth of the scenes errs thirty times as much; told apart, they get the promise, too."""

    def mixed(seed: int, contexts: int, told: bool) -> Pairs:
        pairs = make_pairs(seed, contexts=contexts)
        rough = pairs.context % 10 == 0
        error = np.where(rough, 30.0, 1.0) * pairs.error
        family = np.where(rough, "rough", "calm") if told else None
        return dataclasses.replace(pairs, error=error, family=family)

    def share_of_rough(trust: TrustModel) -> float:
        rows = coverage(trust, mixed(2, 3_000, told=True))
        return max(r.share for r in rows if r.group == "rough" and r.contexts >= 200)

    blind, told = (fitted(mixed(1, 2_000, told)) for told in (False, True))
    assert share_of_rough(blind) > 2 * blind.delta
    assert share_of_rough(told) <= 1.1 * told.delta
