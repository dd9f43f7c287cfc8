"""Policies of step reuse: what they decide, and that deciding changes nothing."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldcache.content import Content, Rung, ladder_of
from worldcache.policies import (
    Always,
    Chunkwise,
    Controlled,
    EasyCache,
    Schedule,
    TeaCache,
    kinds,
    thresholds,
)
from worldcache.reuse_calibration import make
from worldcache.steps import Measured, Observation, Scope, State, forced

LADDER = (Rung((0, 7), 1.0), Rung((0, 1, 7), 0.3), Rung((0, 1, 3, 7), 0.1))
EAGER = [
    TeaCache(threshold=1e9),
    EasyCache(threshold=1e9),
    Controlled(period=100),
    Chunkwise(period=100),
    Content(ladder=LADDER, quality_db=1.0),
    Schedule(),
]
LAZY = [Always(), TeaCache(threshold=0.0), EasyCache(threshold=0.0), Content(ladder=())]


def seen(step, **changes):
    known = {"moved": 0.1, "modulated": 0.1, "activity": 1.0, "neighbour": True, "chunk": 1}
    return Observation(step=step, steps=8, **{**known, **changes})


def walk(policy, steps=8, **changes):
    """Steps that a scope computes, when every one changes its output a little."""
    scope, computed = Scope(policy), []
    for step in range(steps):
        now = seen(step, **{k: v[step] if isinstance(v, list) else v for k, v in changes.items()})
        if scope.decide(now) == "compute":
            computed.append(step)
            scope.computed(now, Measured(size=1.0, change=0.1))
        else:
            scope.reused(now)
    return computed


@pytest.mark.parametrize("policy", EAGER, ids=lambda p: p.name)
def test_first_and_last_step_are_always_computed(policy):
    """Even a policy that would reuse everything computes the ends of the flow."""
    computed = walk(policy)
    assert computed[0] == 0
    assert computed[-1] == 7
    assert len(computed) < 8


@pytest.mark.parametrize("policy", LAZY, ids=lambda p: p.name)
def test_without_reason_to_reuse_everything_is_computed(policy):
    assert walk(policy) == list(range(8))


@pytest.mark.parametrize("policy", EAGER, ids=lambda p: p.name)
def test_a_changed_control_outranks_similarity(policy):
    """Where the control is not the one the history was made under, the step is computed."""
    changed = [False] * 4 + [True] + [False] * 3
    assert 4 in walk(policy, control_changed=changed)


@pytest.mark.parametrize("policy", EAGER, ids=lambda p: p.name)
def test_declared_writes_are_not_skipped(policy):
    """A step that writes what the policy may not skip is computed, and reused where it may."""
    writes = [frozenset()] * 3 + [frozenset({"kv"})] + [frozenset()] * 4
    assert 3 in walk(policy, writes=writes)
    allowed = dataclasses.replace(policy, may_skip=frozenset({"kv"}))
    assert walk(allowed, writes=writes) == walk(policy)


@pytest.mark.parametrize("policy", [*EAGER, *LAZY], ids=lambda p: p.name)
@given(st.integers(0, 7), st.floats(0, 10), st.floats(0, 2), st.floats(0, 100))
def test_deciding_changes_nothing(policy, step, drift, rate, activity):
    """`decide`, `slope` and `follow` give the same again, and neither policy nor state changes."""
    state = State((0,), drift=drift, rate=rate, size=1.0)
    now = seen(step, activity=activity)
    before = (hash(state), repr(policy))
    first = [policy.decide(state, now), policy.slope(state, now), policy.follow(state, now, None)]
    again = [policy.decide(state, now), policy.slope(state, now), policy.follow(state, now, None)]
    assert first == again
    assert (hash(state), repr(policy)) == before
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError, AttributeError)):
        policy.name = "other"


def test_a_reset_scope_has_forgotten():
    """After a reset, a scope decides as a new one."""
    scope = Scope(EasyCache(threshold=1e9))
    for step in range(4):
        scope.computed(seen(step), Measured(1.0, 0.1))
    scope.reset()
    assert scope.state == State()
    assert forced(scope.policy, scope.state, seen(3))


def test_teacache_sums_up_changes_until_the_threshold():
    """At 0.1 a step and a threshold of 0.25, every third step is computed."""
    assert walk(TeaCache(threshold=0.25)) == [0, 3, 6, 7]
    assert walk(TeaCache(threshold=0.25, polynomial=(2.0, 0.0))) == [0, 2, 4, 6, 7]


def test_easycache_follows_the_rate_of_change():
    """A rate is known after two computed steps; then 0.1 of change is promised for each step."""
    assert walk(EasyCache(threshold=0.25)) == [0, 1, 4, 7]
    assert walk(EasyCache(threshold=0.25), moved=0.0001) == [0, 1, 4, 7]  # the rate is relative


def test_controls_alone_class_chunks():
    """At rest, setting out, going on, turning, jumping."""
    rest, x, y = np.zeros(2), np.array([0.1, 0.0]), np.array([0.0, 0.1])
    path = np.cumsum([rest, rest, rest, x, x, y, rest, 9 * y], axis=0)
    assert kinds(path) == (
        "initial",
        "steady",
        "steady",
        "transition",
        "steady",
        "turning",
        "transition",
        "transition",
    )
    assert kinds(path[:1], before=path[0]) == ("steady",)
    assert kinds(np.zeros((8, 2)), chunk=4) == ("initial", "steady")
    with pytest.raises(ValueError, match="shape"):
        kinds(np.zeros(4))


def test_control_reuses_in_calm_chunks_only():
    assert walk(Controlled(period=3), kind="steady") == [0, 3, 6, 7]
    for kind in ("initial", "transition", "turning"):
        assert walk(Controlled(period=3), kind=kind) == list(range(8))


def test_chunk_needs_somebody_to_borrow_from():
    assert walk(Chunkwise(period=2), chunk=1) == [0, 7]
    assert walk(Chunkwise(period=2), chunk=1, neighbour=False) == list(range(8))
    assert walk(Chunkwise(period=2), chunk=2) == list(range(8))


@given(st.floats(0, 50), st.floats(20, 60))
def test_content_follows_the_cheapest_schedule_that_keeps_the_budget(activity, budget):
    """The bound of what is chosen keeps the budget, and nothing cheaper would have."""
    policy = Content(ladder=LADDER, quality_db=budget)
    rung = policy.rung(activity)
    cheaper = LADDER if rung is None else LADDER[: LADDER.index(rung)]
    assert all(other.bound_db(activity) < budget for other in cheaper)
    expected = list(range(8)) if rung is None else list(rung.steps)
    given_first = [None] + [activity] * 7
    assert walk(policy, activity=given_first) == expected


def test_content_computes_what_it_knows_nothing_of():
    policy = Content(ladder=LADDER, quality_db=20)
    for unknown in (None, math.nan, math.inf):
        assert walk(policy, activity=unknown) == list(range(8))


def test_a_ladder_keeps_only_what_no_other_beats():
    """Rungs that compute more and bound less are dropped."""
    rungs = [Rung((0, 7), 1.0), Rung((0, 4, 7), 2.0), Rung((0, 1, 7), 0.5), Rung((0, 1, 2, 7), 0.5)]
    assert ladder_of(rungs, 8, 5.0) == (rungs[0], rungs[2])


def test_slopes_are_those_of_the_last_two_computed_steps():
    policy = Content(ladder=LADDER, slopes={(0, 1, 3): 0.25})
    assert policy.slope(State((0, 1)), seen(3)) == 0.25
    assert policy.slope(State((0,)), seen(3)) == 0.0
    assert policy.slope(State((0, 1)), seen(4)) == 0.0


@pytest.mark.parametrize("name", ["none", "teacache", "easycache", "control", "chunk"])
def test_every_knob_makes_its_policy(name):
    assert {make(name, knob).name for knob in thresholds(name)} == {name}
    with pytest.raises(ValueError, match="no knob"):
        make("content", 1)
