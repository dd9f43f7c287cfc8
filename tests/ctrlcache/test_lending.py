"""What was probed some frames ago is trusted as far as it was seen to hold, and no more."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from test_calibration import fitted, make_pairs

from ctrlcache.calibration import TrustModel, trust_path
from ctrlcache.conformal import Pairs
from ctrlcache.errors import CalibrationError
from ctrlcache.lending import with_lending


def aged(seed: int, factor: float, contexts: int = 900, decibels: float = 0.0) -> Pairs:
    """Pairs whose errors are larger by `factor` than their curvature says."""
    pairs = make_pairs(seed, contexts)
    return dataclasses.replace(
        pairs, error=pairs.error * factor, psnr_db=pairs.psnr_db + 10 - decibels
    )


@pytest.fixture(scope="module")
def trust() -> TrustModel:
    return with_lending(
        fitted(make_pairs(1)), [aged(2, 1.0), aged(3, 1.5, decibels=1), aged(4, 4.0, decibels=3)]
    )


def test_lent_bounds_hold_on_unseen_scenes(trust: TrustModel) -> None:
    """At every age, the raised curvature makes the bound hold, and not much more than that."""
    assert len(trust.lent_curvature) == 2
    for age, factor in ((1, 1.5), (2, 4.0)):
        raised = trust.lent_factor(age)
        assert factor * 0.6 < raised < factor * 1.7
        fresh = aged(10 + age, factor, contexts=1_500)
        bounds = trust.bounds(fresh.curvature * raised, fresh.distance)
        for budget in (0.01, 0.05):
            accepted = bounds <= budget
            assert accepted.sum() > 100
            assert (fresh.error[accepted] > bounds[accepted]).mean() <= 1.2 * trust.delta
        plain = trust.bounds(fresh.curvature, fresh.distance)
        if age == 2:
            assert (fresh.error > plain)[plain <= 0.05].mean() > trust.delta


def test_drawn_frames_keep_what_is_stated(trust: TrustModel) -> None:
    """Within the drawing reach of each age, 95 % of drawn frames keep the stated PSNR."""
    assert len(trust.drawn_change) == 3
    assert list(trust.drawn_change) == sorted(trust.drawn_change, reverse=True)
    for age in range(3):
        fresh = aged(20 + age, 1.0, 1_500, decibels=(0, 1, 3)[age])
        stability = trust.rho_max - fresh.sensitivity
        within = fresh.distance <= [trust.drawn_radius(s, age) for s in stability]
        assert within.sum() > 500
        assert (fresh.psnr_db[within] < trust.drawn_psnr_db).mean() <= 1.2 * trust.delta


def test_what_was_not_calibrated_is_not_lent(trust: TrustModel) -> None:
    """Without pairs, beyond the ages that were measured, and where nothing holds: nothing."""
    plain = fitted(make_pairs(1))
    assert plain.drawn_radius(plain.rho_max - 0.1) == 0
    assert plain.lent_factor(0) == 1
    assert plain.lent_factor(1) == math.inf
    assert trust.lent_factor(3) == math.inf
    assert trust.drawn_radius(trust.rho_max - 0.1, 3) == 0
    hopeless = with_lending(plain, [aged(2, 1.0, decibels=60), aged(3, 1_000.0), aged(4, 1.0)])
    assert (hopeless.drawn_change, hopeless.lent_curvature) == ((), ())
    few = with_lending(plain, [aged(2, 1.0), aged(3, 1.0, contexts=30)])
    assert few.lent_curvature == ()


def test_older_is_never_trusted_farther(trust: TrustModel) -> None:
    """By chance, old slopes may look better than young ones: they are not treated so."""
    made = with_lending(
        trust, [aged(2, 1.0, decibels=3), aged(3, 3.0, decibels=1), aged(4, 1.0, decibels=0)]
    )
    assert made.lent_curvature[1] == made.lent_curvature[0]
    assert made.drawn_change[2] == made.drawn_change[1] == made.drawn_change[0]


def test_lending_survives_saving(trust: TrustModel, tmp_path: Path) -> None:
    """It is part of trust.json; one that says less than nothing is refused."""
    path = trust_path(tmp_path)
    trust.save(path)
    assert TrustModel.load(path, trust.weights_digest) == trust
    path.write_text(path.read_text().replace('"lent_curvature": [', '"lent_curvature": [0.5,'))
    with pytest.raises(CalibrationError, match="lent_curvature"):
        TrustModel.load(path, trust.weights_digest)
