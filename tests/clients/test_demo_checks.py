"""The demo must fail where something is wrong: each check is shown a fault it has to find."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from worldserve.demo import PRESENTS
from worldserve.demo_checks import Played, Step, summarise
from worldserve.demo_script import HORIZON, load_scene, script
from worldserve.sequence_client import Reply

CLIPS = Path(__file__).resolve().parents[2] / "client_examples" / "clips"
SCALE = np.ones(16, np.float32)


def answer(seed: int, **changes) -> Reply:
    """What a server might say: drawn from a seed, exact, computed."""
    draw = np.random.default_rng(seed)
    made = Reply(
        latency_ms=10.0,
        frames=draw.integers(0, 256, (HORIZON, 64, 64, 3), np.uint8),
        states=draw.standard_normal((HORIZON, 16)).astype(np.float32),
        physics=np.zeros((HORIZON, 9), np.float32),
        tier="none",
        exact=True,
        bound=0.0,
        stages_ms=np.array([0, 4, 0, 3, 2, 9], np.float32),
    )
    return dataclasses.replace(made, **changes)


@pytest.fixture
def played() -> Played:
    """A faultless play of the door clip."""
    scene = load_scene(CLIPS / "door-open.npz", PRESENTS["door-open"])
    steps = [Step(one, answer(n), answer(n)) for n, one in enumerate(script(scene))]
    return Played(scene, steps, (answer(99), answer(99)), answer(0))


def with_cached(played: Played, number: int, **changes) -> Played:
    """The same play, but for one answer of the cached session."""
    steps = list(played.steps)
    changed = dataclasses.replace(steps[number].cached, **changes)
    steps[number] = dataclasses.replace(steps[number], cached=changed)
    return dataclasses.replace(played, steps=steps)


def test_faultless_play_has_no_faults(played):
    """Nothing is reported where nothing is wrong, and the figures add up."""
    summary = summarise([played], SCALE)
    assert summary.faults == ()
    assert summary.interactions == summary.exact == summary.exact_same == len(played.steps)
    assert summary.memory_same == 1
    assert summary.tiers == {"none": len(played.steps)}
    assert summary.cached.total_ms == pytest.approx(10.0 * len(played.steps))
    assert summary.encode_first_ms == summary.encode_second_ms == (4.0,)


def test_error_within_its_bound_is_measured_and_accepted(played):
    """An approximate answer may differ; its error is taken against the twin."""
    twin = played.steps[3].plain.states
    good = with_cached(played, 3, exact=False, tier="hot", bound=0.02, states=twin * 1.01)
    summary = summarise([good], SCALE)
    assert summary.faults == ()
    assert summary.errors == pytest.approx((0.01,), rel=1e-3)
    assert summary.over_bound == 0


def test_error_somewhat_over_its_bound_is_counted(played):
    """One use in twenty may exceed its bound: counted, not a fault."""
    twin = played.steps[3].plain.states
    over = with_cached(played, 3, exact=False, tier="hot", bound=0.009, states=twin * 1.01)
    summary = summarise([over], SCALE)
    assert summary.faults == ()
    assert summary.over_bound == 1


FAULTS = {
    "far over the bound": {"exact": False, "bound": 0.001},
    "said to be exact": {},
    "not finite": {"states": np.full((HORIZON, 16), np.nan, np.float32)},
    "states are missing": {"states": np.zeros((HORIZON - 1, 16), np.float32)},
    "frames are missing": {"frames": np.zeros((1, 64, 64, 3), np.uint8)},
    "have shape": {"frames": np.zeros((HORIZON, 32, 32, 3), np.uint8)},
    "blank": {"frames": np.zeros((HORIZON, 64, 64, 3), np.uint8)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_an_answer_is_found(played, fault):
    """A wrong, incomplete or blank answer is named with the clip and the interaction."""
    bad = with_cached(played, 4, **{"states": answer(77).states, "tier": "hot", **FAULTS[fault]})
    [first, *_] = [text for text in summarise([bad], SCALE).faults if fault in text]
    assert "door-open, interaction 5 (drag)" in first


def test_fault_of_the_memory_is_found(played):
    """One bit of difference between what the two sessions remember is a fault."""
    states = answer(99).states.copy()
    states[0, 0] = np.nextafter(states[0, 0], np.float32(9))
    bad = dataclasses.replace(played, last=(answer(99, states=states), answer(99)))
    assert any("memory differs" in fault for fault in summarise([bad], SCALE).faults)


def test_fault_of_the_second_session_is_found(played):
    """A second session that sees something else on the same clip is a fault."""
    bad = dataclasses.replace(played, second=answer(5))
    assert any("second session" in fault for fault in summarise([bad], SCALE).faults)


def test_answer_from_the_cache_where_it_is_off_is_found(played):
    """The twin must compute: otherwise it is no yardstick."""
    steps = list(played.steps)
    steps[2] = dataclasses.replace(steps[2], plain=answer(2, tier="hot"))
    bad = dataclasses.replace(played, steps=steps)
    assert any("cache=off was answered" in fault for fault in summarise([bad], SCALE).faults)


@pytest.mark.parametrize("name", PRESENTS)
def test_script_stays_within_clip_and_controls(name):
    """Over 40 interactions on the three clips, every control in range, every kind there."""
    scene = load_scene(CLIPS / f"{name}.npz", PRESENTS[name])
    steps = script(scene)
    assert len(steps) * len(PRESENTS) >= 40
    kinds = {step.kind for step in steps}
    assert kinds >= {"open", "drag", "correct", "jump", "repeat", "scrub", "advance", "observe"}
    assert all(np.abs(step.samples).max() <= 1 for step in steps)
    for step in steps:
        if step.truth is not None:
            assert step.truth + HORIZON <= len(scene.frames)
