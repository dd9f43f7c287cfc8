"""The engine against the model itself: whatever the cache does, exact answers are the model's."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tiny_world import HELD, Truth, clip, controls, counting, equal

from ctrlcache.admission import Admission
from worldserve.models.tiny import TinyWorldModel
from worldserve.session import tokens_id

# --- exactness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["on", "off", "refresh"])
def test_predictions_are_the_models(serve, cache):
    """First, again from the cache, and again after thinking time."""
    client, frames, steps = serve(), clip(5), controls(4)
    truth = Truth(frames, steps)
    plan = np.concatenate([steps, HELD[None]])
    first = client.ask(plan, frames=frames, start=True, cache=cache)
    assert equal(first, truth.predict(HELD))
    assert first["CACHE_TIER"][0] == b"none"
    again = client.ask(HELD, cache=cache)
    assert equal(again, truth.predict(HELD))
    assert again["CACHE_TIER"][0] == (b"hot" if cache == "on" else b"none")
    assert client.service.drain()
    assert equal(client.ask(HELD, cache=cache), truth.predict(HELD))


def test_a_varied_plan_is_answered_and_found_again(serve):
    """Plans that are not held are exact couplets of their own."""
    client, frames, plan = serve(), clip(1), controls(8)
    first = client.ask(plan, frames=frames, start=True)
    assert equal(first, Truth(frames).predict(plan))
    assert client.ask(plan)["CACHE_TIER"][0] == b"hot"
    assert client.ask(plan[:7])["CACHE_TIER"][0] == b"none"


@pytest.mark.parametrize("cache", ["on", "off"])
@pytest.mark.parametrize("think", [True, False])
def test_a_long_session_is_the_models(serve, cache, think):
    """Observations, advances of several steps, probes: past the window, the states are equal."""
    client, frames = serve(history_frames=12), clip(40)
    draw = np.random.default_rng(3)
    truth = Truth(frames[:2], controls(1))
    client.ask(controls(1), frames=frames[:2], start=True, cache=cache)
    seen = 2
    for round in range(25):
        kind = draw.integers(3)
        if kind == 0 and seen < 38:
            count = int(draw.integers(1, 3))
            steps = controls(count, round)
            client.ask(
                np.concatenate([steps, HELD[None]]),
                frames=frames[seen : seen + count],
                cache=cache,
            )
            truth.see(frames[seen : seen + count], steps)
            seen += count
        elif kind == 1:
            steps = controls(int(draw.integers(1, 4)), round)
            got = client.ask(steps, mode="advance", cache=cache)
            plan = np.concatenate([steps, np.repeat(steps[-1:], 8 - len(steps), 0)])
            assert equal(got, truth.predict(plan))
            for step in steps:
                truth.leave(step)
        else:
            got = client.ask(HELD * (round % 3), cache=cache)
            assert equal(got, truth.predict(HELD * (round % 3)))
        if think:
            assert client.service.drain()
    assert equal(client.ask(HELD, cache="off"), truth.predict(HELD))


def test_advancing_along_a_hit_commits_the_same(serve):
    """An advance whose answer was cached leaves the session where a computed one would."""
    client, frames = serve(), clip(3)
    truth = Truth(frames, [HELD, HELD])
    client.ask(HELD, frames=frames, start=True)
    client.service.drain()
    got = client.ask(HELD, mode="advance")
    assert got["CACHE_TIER"][0] == b"hot"
    truth.leave(HELD)
    assert equal(client.ask(HELD * 2), truth.predict(HELD * 2))


class LoosePolicy:
    """Lets anything scored answer for anything near, to be wrong on purpose."""

    name = "loose"

    def decide(self, scores):
        return Admission(True, "trusted", 0.5)

    def accept(self, candidate, max_error):
        return 0.01


def test_what_is_committed_is_exact_though_answers_are_not(serve):
    """300 probes and 30 advances with approximate answers end where the exact session ends."""
    client, frames = serve(error_samples=1.0), clip(4)
    client.service.cache._policy = LoosePolicy()
    truth, draw = Truth(frames, [HELD] * 3), np.random.default_rng(0)
    client.ask(HELD, frames=frames, start=True)
    approximate = 0
    for number in range(30):
        center = draw.uniform(-0.8, 0.8, 2).astype(np.float32)
        for _ in range(10):
            near = center + draw.uniform(-0.1, 0.1, 2).astype(np.float32)
            got = client.ask(near, outputs=("STATE", "EXACT", "ERROR_BOUND"))
            approximate += not got["EXACT"][0]
            assert got["ERROR_BOUND"][0] == (0 if got["EXACT"][0] else np.float32(0.01))
            if number % 3 == 0:
                client.service.drain()
        step = center + draw.uniform(-0.1, 0.1, 2).astype(np.float32)
        got = client.ask(step, mode="advance", outputs=("STATE", "EXACT"))
        approximate += not got["EXACT"][0]
        truth.leave(step)
    assert approximate > 50
    assert equal(client.ask(HELD, max_error=0, cache="off"), truth.predict(HELD))


def test_a_budget_of_zero_is_exact(serve):
    """Whatever the policy would accept, max_error=0 gets the model's own answer."""
    client, frames = serve(), clip(1)
    client.service.cache._policy = LoosePolicy()
    client.ask(HELD, frames=frames, start=True)
    client.service.drain()
    assert not client.ask(HELD + 0.01, outputs=("EXACT",))["EXACT"][0]
    got = client.ask(HELD + 0.01, max_error=0)
    assert got["EXACT"][0]
    assert equal(got, Truth(frames).predict(HELD + np.float32(0.01)))


def test_without_calibration_nothing_approximate_is_served(serve):
    """No trust.json beside the weights: every answer is exact, however large the budget."""
    client, frames = serve(), clip(1)
    client.ask(HELD, frames=frames, start=True)
    client.service.drain()
    for distance in (0.001, 0.01, 0.1):
        assert client.ask(HELD + distance, max_error=10.0)["EXACT"][0]


def test_the_cache_switched_off_is_neither_read_nor_written(serve):
    """`off` computes; what it computed answers nobody."""
    client, frames = serve(), clip(1)
    client.ask(HELD, frames=frames, start=True, cache="off")
    client.service.drain()
    assert client.ask(HELD)["CACHE_TIER"][0] == b"none"
    assert client.ask(HELD, cache="off")["CACHE_TIER"][0] == b"none"
    assert client.ask(HELD)["CACHE_TIER"][0] == b"hot"


# --- many at once ---------------------------------------------------------------------------------


def test_sessions_are_computed_together(serve):
    """Requests that wait are one rollout, and each gets its own answer."""
    model = TinyWorldModel()
    client = serve(model=model)
    ids = list("abcdef")
    for number, id in enumerate(ids):
        client.ask(HELD, id, frames=clip(2, seed=number), start=True)
    client.service.drain()
    sizes, sound, entered, go_on = [], model.rollout, threading.Event(), threading.Event()

    def slow(inputs, checkpoint=None):
        sizes.append(len(inputs))
        entered.set()
        go_on.wait(30)
        return sound(inputs, checkpoint)

    model.rollout = slow
    first = client.send(-HELD, ids[0], cache="off")
    assert entered.wait(30)
    outcomes = [first, *(client.send(-HELD, id, cache="off") for id in ids[1:])]
    go_on.set()
    for number, outcome in enumerate(outcomes):
        assert equal(outcome(), Truth(clip(2, seed=number), [HELD]).predict(-HELD))
    assert sum(sizes) == 6
    assert max(sizes) >= 4


def test_requests_of_one_session_are_answered_in_order(serve):
    """However many come at once, each advance begins where the one before it ended."""
    client, frames, steps = serve(), clip(1), controls(20)
    client.ask(HELD, frames=frames, start=True)
    outcomes = [client.send(step, mode="advance") for step in steps]
    truth = Truth(frames)
    for step, outcome in zip(steps, outcomes, strict=True):
        assert equal(outcome(), truth.predict(step))
        truth.leave(step)


def test_drain_waits_for_thinking_time(serve):
    """A request that asks for it is answered when all background work is done."""
    client = serve()
    client.ask(HELD, frames=clip(2), start=True)
    assert np.isfinite(client.ask(HELD, drain=True)["SCORES"]).all()


def test_the_hand_is_followed(serve):
    """After two controls in a row, the third along the line is known before it is asked for."""
    client, step = serve(), np.array([0.1, 0.05], np.float32)
    client.ask(step, frames=clip(2), start=True)
    client.ask(2 * step)
    client.service.drain()
    expected = np.clip(2 * (2 * step) - step, -1, 1)
    assert client.ask(expected)["CACHE_TIER"][0] == b"hot"


def test_only_what_was_asked_for_is_computed(serve):
    """States need no generator; showing a frame needs no prediction."""
    model = TinyWorldModel()
    client = serve(model=model, background="false")
    counts, drawn = counting(model), []
    sound = model.generate
    model.generate = lambda *args: drawn.append(1) or sound(*args)
    got = client.ask(HELD, frames=clip(1), start=True, outputs=("STATE",))
    assert set(got) == {"STATE"}
    assert not drawn
    rollouts = counts["rollout"]
    got = client.ask(HELD, frames=clip(1, 5), outputs=("TIMING_MS",))
    assert set(got) == {"TIMING_MS"}
    assert counts["rollout"] == rollouts
    truth = Truth(np.concatenate([clip(1), clip(1, 5)]), [HELD])
    assert equal(client.ask(HELD), truth.predict(HELD))


def test_times_align_controls_to_frames(serve):
    """A fast controller's samples are interpolated at the frames' times."""
    client, frames = serve(), clip(3)
    times = np.arange(0, 1.2, 1 / 120)
    samples = np.stack([times / 2, -times / 2], -1).astype(np.float32)
    got = client.ask(
        samples,
        frames=frames,
        start=True,
        CONTROL_TIMES=times,
        FRAME_TIMES=np.array([0.1, 0.2, 0.3]),
        HORIZON=np.array([4], np.int32),
    )
    session = client.service.sessions.load("", "s")
    assert np.allclose(session.controls[:2], [[0.05, -0.05], [0.1, -0.1]], atol=1e-6)
    assert got["STATE"].shape == (4, 12)


def test_an_uncalibrated_device_is_learnt(serve):
    """With device=auto the window's statistics become the unit, and stay it."""
    client, draw = serve(), np.random.default_rng(0)
    client.ask(HELD, frames=clip(1), start=True, device="auto")
    for _ in range(15):
        client.ask(draw.normal(50, 10, (8, 2)).astype(np.float32))
    got = client.ask(np.array([50, 50], np.float32), mode="advance")
    assert got["EXACT"][0]
    session = client.service.sessions.load("", "s")
    assert np.abs(session.controls[0]).max() < 0.2


@pytest.mark.parametrize("lost", ["slices", "slices and tokens"])
def test_a_long_session_is_restored_from_pixels(serve, lost):
    """Replayed without its distant past, from seen and predicted frames, it is the same session."""
    client, frames, steps = serve(), clip(30), controls(29)
    client.ask(np.vstack([steps[:19], HELD]), frames=frames[:20], start=True)
    truth = Truth(frames[:20], steps[:19])
    for number in range(20, 28):
        client.ask(steps[number], mode="advance")
        truth.leave(steps[number])
    client.ask(np.vstack([steps[28], HELD]), frames=frames[28:29])
    truth.see(frames[28:29], steps[28:29])
    client.service.drain()
    session, hot = client.service.sessions.load("", "s"), client.service._memory.hot
    doomed = [session.slice_at(i) for i in range(session.present)]
    if lost == "slices and tokens":
        doomed += [tokens_id(context) for context in session.digests]
    hot.delete(doomed)
    serve.stop(client)
    client = serve()
    assert equal(client.ask(HELD, cache="off"), truth.predict(HELD))
    # Nothing inexact was kept on the way: earlier frames are what they were.
    client.service.drain()
    serve.stop(client)
    client = serve()
    for index in (16, 12, 18):
        got = client.ask(HELD, mode="seek", frame=index, cache="off")
        assert equal(got, Truth(frames[: index + 1], steps[:index]).predict(HELD))
        client.service.drain()
