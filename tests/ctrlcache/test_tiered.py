"""The main path over the tiers: what answers, and what must not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cache_setting import (
    PROVENANCE,
    SPACE,
    C,
    H,
    Setting,
    ask,
    couplet,
    frames,
    scores_of,
    world,
)

from ctrlcache.admission import Trust
from ctrlcache.couplet import encode
from ctrlcache.errors import InvalidInput
from ctrlcache.key import digest
from ctrlcache.metrics import Admitted, Corrupt, Lookup
from ctrlcache.tiered import ADOPTED, TEMPLATE, Query
from ctrlcache.tiers.base import Record
from ctrlcache.upkeep import entry_of

# -- what answers ---------------------------------------------------------------------------------


def test_the_same_plan_is_answered_exactly(setting: Setting) -> None:
    """Bit for bit what was admitted, at once, with bound 0."""
    made = couplet([0.1, 0.2, 0.3])
    assert setting.cache.lookup(ask(made.control)) is None
    setting.cache.admit(made)
    hit = setting.cache.lookup(ask(made.control))
    assert hit is not None
    assert (hit.tier, hit.exact, hit.bound, hit.distance) == ("hot", True, 0.0, 0.0)
    assert hit.states.tobytes() == made.states.tobytes()
    assert hit.has == {"tokens", "slice"}
    assert hit.couplet.tokens is None  # not asked for, not read
    full = setting.cache.fetch(made.id)
    assert full is not None
    assert full.slice is not None
    assert full.slice.tobytes() == made.slice.tobytes()


def test_a_neighbour_answers_within_its_bound(setting: Setting) -> None:
    """Its states are moved to the plan that was asked for, and truly lie within the bound."""
    rng = np.random.default_rng(1)
    centres = rng.uniform(-0.5, 0.5, (20, C))
    for centre in centres:
        setting.cache.admit(couplet(centre), scores_of(couplet(centre)))
    answered = 0
    for centre in centres:
        query = (centre + rng.normal(size=C) * 0.03).astype(np.float32)
        hit = setting.cache.lookup(ask(query, max_error=0.05))
        if hit is None:
            continue
        answered += 1
        truth = world(query)
        error = np.linalg.norm(hit.states - truth, axis=1) / np.linalg.norm(truth, axis=1)
        assert not hit.exact
        assert 0.0 < hit.bound <= 0.05
        assert error.max() <= hit.bound
        assert np.abs(hit.states - hit.couplet.states).max() > 0
    assert answered > 10


def test_the_budget_decides(setting: Setting) -> None:
    """A budget below the bound gets nothing; no budget gets only exact answers."""
    made = couplet([0.0, 0.0, 0.0])
    setting.cache.admit(made, scores_of(made))
    query = np.float32([0.1, 0.0, 0.0])
    hit = setting.cache.lookup(ask(query, max_error=0.1))
    assert hit is not None
    assert setting.cache.lookup(ask(query, max_error=hit.bound)) is not None
    assert setting.cache.lookup(ask(query, max_error=hit.bound * 0.99)) is None
    assert setting.cache.lookup(ask(query, max_error=0.0)) is None


def test_the_smallest_bound_wins(setting: Setting) -> None:
    """Not the nearest couplet but the most trustworthy one answers."""
    near, calm = couplet([0.05, 0.0, 0.0]), couplet([-0.08, 0.0, 0.0])
    scored = scores_of(near)
    setting.cache.admit(near, replace(scored, curvature=scored.curvature * 9))
    setting.cache.admit(calm, replace(scores_of(calm), curvature=scored.curvature))
    hit = setting.cache.lookup(ask([0.0, 0.0, 0.0], max_error=0.1))
    assert hit is not None
    assert hit.couplet.id == calm.id
    assert hit.distance == pytest.approx(0.08, abs=1e-6)


def test_frames_are_preferred_where_they_are_wanted(setting: Setting) -> None:
    """Of several neighbours one with frames; a couplet without any still answers."""
    bare, drawn = couplet([0.02, 0, 0]), couplet([0.04, 0, 0], frames=frames(7))
    setting.cache.admit(bare, scores_of(bare))
    wanting = ask([0.0, 0.0, 0.0], max_error=0.1, want_frames=True)
    hit = setting.cache.lookup(wanting)
    assert hit is not None
    assert (hit.couplet.id, hit.couplet.frames) == (bare.id, None)
    assert hit.couplet.tokens is not None  # what frames can be drawn from
    setting.cache.admit(drawn, scores_of(drawn))
    hit = setting.cache.lookup(wanting)
    assert hit is not None
    assert hit.couplet.id == drawn.id
    assert hit.couplet.frames is not None
    assert (hit.couplet.frames == 7).all()
    without = setting.cache.lookup(ask([0.0, 0.0, 0.0], max_error=0.1))
    assert without is not None
    assert without.couplet.id == bare.id
    assert without.couplet.frames is None


# -- what must not --------------------------------------------------------------------------------


def test_other_spaces_and_horizons_never_answer(setting: Setting) -> None:
    """The same control in another scene is another couplet."""
    made = couplet([0.1, 0.1, 0.1], space=digest(b"elsewhere"))
    setting.cache.admit(made, scores_of(made))
    assert setting.cache.lookup(ask(made.control, max_error=1.0)) is None
    shorter = Query(made.space, made.plan[:2], 1.0)
    hit = setting.cache.lookup(shorter)
    assert hit is None


def test_varied_plans_answer_only_themselves(setting: Setting) -> None:
    """A plan whose control changes is found by its own id, and never by neighbourhood."""
    plan = np.linspace(0, 0.1, H * C, dtype=np.float32).reshape(H, C)
    varied = couplet([0, 0, 0], plan=plan)
    setting.cache.admit(varied, scores_of(couplet(plan[0])))
    hit = setting.cache.lookup(Query(SPACE, plan, 0.1))
    assert hit is not None
    assert hit.exact
    assert setting.cache.lookup(ask(plan[0], max_error=1.0)) is None
    held = couplet([0, 0, 0])
    setting.cache.admit(held, scores_of(held))
    assert setting.cache.lookup(Query(SPACE, plan + np.float32(1e-3), 1.0)) is None


def test_unscored_couplets_answer_no_neighbour(setting: Setting) -> None:
    """Until the probes have spoken, a couplet answers only its own plan."""
    made = couplet([0.0, 0.0, 0.0])
    assert setting.cache.admit(made).reason == "unscored"
    assert setting.cache.lookup(ask([1e-4, 0, 0], max_error=1.0)) is None
    assert setting.cache.lookup(ask([0.0, 0, 0], max_error=1.0)) is not None


def test_without_calibration_nothing_approximate_is_served(setting: Setting) -> None:
    """The policy fails closed; exact answers are not touched by that."""
    closed = setting.make(policy=Trust(None, 0.1))
    made = couplet([0.0, 0.0, 0.0])
    setting.cache.admit(made, scores_of(made))
    assert closed.lookup(ask([1e-4, 0, 0], max_error=1.0)) is None
    assert closed.lookup(ask([0.0, 0, 0], max_error=1.0)) is not None


def test_another_provenance_never_answers(setting: Setting) -> None:
    """Even under the same id, a record of another provenance is damage, not an answer."""
    other = setting.make(provenance=digest(b"other weights"))
    made = couplet([0.0, 0.0, 0.0])
    other.admit(made, scores_of(made))
    assert setting.cache.lookup(ask([0.0, 0.0, 0.0], max_error=1.0)) is None
    assert setting.cache.lookup(ask([0.01, 0.0, 0.0], max_error=1.0)) is None


def test_templates_answer_nothing(setting: Setting) -> None:
    """A couplet from another context never answers here, not even for the very same control, and
    leaves nothing behind in the exact one that takes its place."""
    made = replace(couplet([0.0, 0.0, 0.0]), lineage=f"{TEMPLATE}:door-open")
    admission = setting.cache.admit(made, scores_of(made))
    assert admission.radius > 0
    for control in (made.control, made.control + np.float32(0.01)):
        assert setting.cache.lookup(ask(control, max_error=0.1)) is None
    exact = couplet([0.0, 0.0, 0.0])
    setting.cache.admit(exact)
    replaced = setting.cache.lookup(ask(made.control))
    assert replaced is not None
    assert replaced.couplet.lineage == "session"
    assert replaced.couplet.radius == 0.0


def test_borrowed_trust_is_named(setting: Setting) -> None:
    """Where a template lent the trust that a neighbour's answer rests on, the tier is `cold`; the
    couplet's own plan is answered exactly, and hot."""
    made = replace(couplet([0.0, 0.0, 0.0]), lineage=f"{ADOPTED}:door-open")
    setting.cache.admit(made, scores_of(made))
    exact = setting.cache.lookup(ask(made.control, max_error=0.1))
    near = setting.cache.lookup(ask([0.01, 0.0, 0.0], max_error=0.1))
    assert exact is not None
    assert near is not None
    assert (exact.tier, exact.exact) == ("hot", True)
    assert (near.tier, near.exact) == ("cold", False)
    assert 0 < near.bound <= 0.1


def test_damage_in_the_hot_tier_is_a_counted_miss(setting: Setting) -> None:
    """Flipped bits in shared memory: a miss each, an event each, and the record is removed."""
    made = couplet([0.0, 0.0, 0.0])
    payload = encode(made, PROVENANCE, "raw")
    for position in (0, 5, 40, 200, len(payload) // 8):
        damaged = bytearray(payload)
        damaged[position] ^= 4
        setting.memory.hot.put([Record(entry_of(made), bytes(damaged))])
        setting.events.clear()
        hit = setting.cache.lookup(ask(made.control))
        if hit is not None:  # the damage is in a part that was not read: it is found when it is
            assert hit.states.tobytes() == made.states.tobytes()
            assert setting.cache.fetch(made.id) is None
        assert setting.of(Corrupt) == [Corrupt("hot")]
        setting.cache.upkeep.tick()
        assert setting.memory.hot.contains([made.id]) == [False]


@pytest.mark.parametrize("plan", [np.zeros(3, "f4"), np.zeros((0, 3), "f4")])
def test_impossible_plans_are_refused(setting: Setting, plan: np.ndarray) -> None:
    """A plan that is no (H, C) array, or no number, or of another width, is the caller's error."""
    with pytest.raises(InvalidInput, match="plan"):
        setting.cache.lookup(Query(SPACE, plan, 0.1))
    with pytest.raises(InvalidInput, match="finite"):
        setting.cache.lookup(ask([0.0, np.nan, 0.0]))
    setting.cache.admit(couplet([0, 0, 0]))
    with pytest.raises(InvalidInput, match=r"\(3,\).*\(2,\)"):
        setting.cache.lookup(Query(SPACE, np.zeros((H, 2), np.float32), 0.1))


def test_look_ups_are_reported(setting: Setting) -> None:
    """One event per tier that was asked, with what came of it."""
    made = couplet([0.0, 0.0, 0.0])
    setting.cache.lookup(ask(made.control, 0.05))
    setting.cache.admit(made, scores_of(made))
    setting.cache.lookup(ask(made.control, 0.05))
    setting.cache.lookup(ask([0.01, 0, 0], 0.05))
    seen = [(event.tier, event.result) for event in setting.of(Lookup)]
    assert seen == [("hot", "miss"), ("memory", "miss"), ("hot", "exact"), ("hot", "near")]
    assert all(event.seconds > 0 for event in setting.of(Lookup))
    assert [event.decision for event in setting.of(Admitted)] == ["trusted"]
