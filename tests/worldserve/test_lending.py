"""What is taken over from earlier frames on the served tiny model, and what is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_adapter import MODEL, SAMPLING, make_clips
from tiny_world import HELD, clip, trust_the_tiny_model

from ctrlcache.templates import lineage
from ctrlcache.tiered import ADOPTED
from ctrlcache.transfer import Jacobian
from worldserve.calibrate import calibrate_model
from worldserve.inheritance import Inheritance, age_of
from worldserve.lending import AGEING, collect_ages

LENDING = {"drawn_change": (1.2, 1.2, 1.2), "lent_curvature": (1.0, 1.0)}
OUTPUTS = ("STATE", "EXACT", "SCORES")


def near_after(client, frames):
    """A scored session that has moved `frames` frames on, whose new present was asked once, without
    any time to think since; asked again nearby."""
    client.ask(HELD, frames=clip(3), start=True)
    assert client.service.drain()
    with client.service.background.floor():
        client.ask(np.tile(HELD, (frames, 1)), mode="advance", outputs=OUTPUTS)
        client.ask(HELD, outputs=OUTPUTS)
        return client.ask(HELD + np.float32(0.01), outputs=OUTPUTS, max_error=1.0)


@pytest.mark.parametrize(
    ("lending", "frames", "lent"),
    [(LENDING, 1, True), (LENDING, 2, True), (LENDING, 3, False), ({}, 1, False)],
    ids=["one frame on", "two", "beyond what was calibrated", "without calibration"],
)
def test_a_slope_is_lent_as_far_as_calibrated(serve, tmp_path, lending, frames, lent):
    """Without probes of its own, a couplet answers for a neighbour with the slope of one that was
    probed so many frames ago as the calibration allows."""
    trust_the_tiny_model(tmp_path, **lending)
    client = serve(prefetch="false", trust_max_error=1)
    assert near_after(client, frames)["EXACT"][0] == (not lent)


@pytest.fixture
def couplets(serve, tmp_path):
    """(trust, a scored couplet, an unscored one of the same context)."""
    trust = trust_the_tiny_model(tmp_path, **LENDING)
    client = serve(prefetch="false", trust_max_error=1)
    client.ask(HELD, frames=clip(3), start=True)
    assert client.service.drain()
    cache = client.service.cache
    [id] = [e.id for e in cache._hot.scan() if e.control is not None and e.radius > 0]
    scored = cache.fetch(id)
    blank = replace(scored, jacobian=None, radius=0.0, curvature=0.0, lineage="session:push")
    return trust, scored, blank


def test_what_was_lent_grows_older(couplets):
    """Handed on, it counts from where it was probed, with the factor of its age; too old, or lent
    by a template, it goes no farther."""
    trust, scored, blank = couplets
    trust = replace(trust, lent_curvature=(1.5, 4.0))
    inheritance = Inheritance(trust, Jacobian(), np.full(12, 0.3, np.float32), 1.0)
    once = inheritance.from_past([scored], blank, 1)
    assert (age_of(scored), age_of(once), once.lineage) == (0, 1, "lent1:push")
    assert once.curvature == pytest.approx(1.5 * scored.curvature)
    twice = inheritance.from_past([once], blank, 1)
    assert age_of(twice) == 2
    assert twice.curvature == pytest.approx(4.0 * scored.curvature)
    assert twice.radius <= once.radius <= scored.radius
    assert inheritance.from_past([twice], blank, 1) is None
    elsewhere = replace(blank, plan=blank.plan + np.float32(0.02))
    assert age_of(inheritance.from_neighbour([once], elsewhere) or once) == 1
    adopted = replace(scored, lineage=lineage(ADOPTED, "push"))
    assert inheritance.from_past([adopted], blank, 1) is None


@pytest.fixture(scope="module")
def calibrated():
    clips = [make_clips(40, seed) for seed in (1, 2, 3)]
    trust, _ = calibrate_model(MODEL, *clips, contexts=250, sampling=SAMPLING)
    return trust


def test_ages_are_measured_as_sessions_use_them(calibrated):
    """Pairs of every age, within the radius of where they were probed; old slopes are worse than
    own ones; frames are drawn for two queries of each context."""
    trust = calibrated
    pairs = collect_ages(MODEL, make_clips(10, 1), 40, trust, Jacobian(), sampling=SAMPLING)
    assert len(pairs) == 4
    assert set(pairs[0].context) == set(range(40))
    assert all(p.distance.max() <= trust.max_distance for p in pairs)
    for each in pairs:
        drawn = np.bincount(each.context, np.isfinite(each.psnr_db))
        assert np.array_equal(drawn, np.minimum(np.bincount(each.context), 2))
    medians = [float(np.median(p.error)) for p in pairs]
    assert medians[0] <= min(medians[1:])


def test_calibration_says_what_is_lent(calibrated):
    """Given clips for it, the calibration of a model holds what may be drawn and lent, and it holds
    for other clips."""
    trust = calibrated
    assert 1 <= len(trust.lent_curvature) <= 3
    assert 1 <= len(trust.drawn_change) <= 4
    sampling = replace(AGEING, horizon=SAMPLING.horizon)
    fresh = collect_ages(MODEL, make_clips(60, 9), 400, trust, Jacobian(), sampling=sampling)
    for age in range(1, len(trust.lent_curvature) + 1):
        pairs = fresh[age]
        bounds = trust.bounds(pairs.curvature * trust.lent_factor(age), pairs.distance)
        for budget in (0.005, 0.05):
            assert (pairs.error > bounds)[bounds <= budget].mean() <= 1.5 * trust.delta
