"""Who gets what others have computed, and what is encoded again: nothing that is known."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_world import HELD, Truth, clip, controls, counting, equal

from worldserve.models.tiny import TinyWorldModel
from worldserve.session_store import SessionNotFound


@pytest.mark.parametrize(
    "other",
    [
        {"frames": clip(4, seed=1)},
        {"tenant": "b"},
        {"prompt": "other"},
        {"view": "top"},
        {"controls": controls(3, 9)},
    ],
)
def test_the_same_control_elsewhere_is_never_a_hit(serve, other):
    """Another scene, tenant, prompt, view or past: another couplet."""
    client = serve()
    steps = controls(3)
    client.ask(np.vstack([steps, HELD]), "a", frames=clip(4), start=True)
    client.service.drain()
    frames, steps = other.pop("frames", clip(4)), other.pop("controls", steps)
    got = client.ask(np.vstack([steps, HELD]), "b", frames=frames, start=True, **other)
    assert got["CACHE_TIER"][0] == b"none"
    truth = Truth(frames, steps, other.get("prompt", ""))
    assert ("view" in other) or equal(got, truth.predict(HELD))


def test_other_weights_are_never_a_hit(serve):
    """A model of other weights on the same memory finds neither couplets nor sessions."""
    one = serve()
    one.ask(HELD, "a", frames=clip(2), start=True)
    one.service.drain()
    serve.stop(one)
    two = serve(model=TinyWorldModel(seed=5))
    with pytest.raises(SessionNotFound):
        two.ask(HELD, "a")
    got = two.ask(HELD, "a", frames=clip(2), start=True)
    assert got["CACHE_TIER"][0] == b"none"
    assert equal(got, Truth(clip(2), [HELD], model=TinyWorldModel(seed=5)).predict(HELD))


def test_a_second_session_on_the_same_clip_encodes_nothing(serve):
    """Slices and tokens are shared by content; the answer is the same, bit for bit."""
    model = TinyWorldModel()
    client, frames, steps = serve(model=model), clip(9), controls(8)
    client.ask(np.vstack([steps, HELD]), "a", frames=frames, start=True)
    client.service.drain()
    counts = counting(model)
    got = client.ask(np.vstack([steps, -HELD]), "b", frames=frames, start=True)
    assert got["CACHE_TIER"][0] == b"none"
    assert (counts["embed"], counts["absorb"]) == (0, 0)
    assert equal(got, Truth(frames, steps).predict(-HELD))
    got = client.ask(np.vstack([steps, HELD]), "c", frames=frames, start=True)
    assert got["CACHE_TIER"][0] == b"hot"


def test_without_resume_a_known_context_is_encoded_again(serve):
    """Neither stored slices and tokens nor another session's memory; the session's own stays."""
    model = TinyWorldModel()
    client, frames, steps = serve(model=model, resume="false"), clip(9), controls(8)
    client.ask(np.vstack([steps, HELD]), "a", frames=frames, start=True)
    client.service.drain()
    counts = counting(model)
    got = client.ask(np.vstack([steps, -HELD]), "b", frames=frames, start=True)
    assert counts["embed"] > 0
    assert counts["absorb"] > 0
    assert equal(got, Truth(frames, steps).predict(-HELD))
    # Couplets are not slices: they are found.
    assert client.ask(HELD, "b")["CACHE_TIER"][0] == b"hot"
    counts.update(embed=0, absorb=0)
    got = client.ask(HELD / 2, "b")
    assert (counts["embed"], counts["absorb"]) == (0, 0)
    assert equal(got, Truth(frames, steps).predict(HELD / 2))


def test_scrubbing_encodes_nothing(serve):
    """Back and forth through the history, each present is put together from what is kept."""
    model = TinyWorldModel()
    client, frames, steps = serve(model=model, background="false"), clip(12), controls(11)
    client.ask(np.vstack([steps, HELD]), frames=frames, start=True, cache="off")
    client.service.drain()
    counts = counting(model)
    for index in (3, 11, 0, 7, 6):
        got = client.ask(HELD, mode="seek", frame=index, cache="off")
        truth = Truth(frames[: index + 1], steps[:index])
        assert equal(got, truth.predict(HELD))
        client.service.drain()
    assert (counts["embed"], counts["absorb"]) == (0, 0)


def test_a_lost_slice_is_computed_again_exactly(serve):
    """Nothing but time is lost where the memory had to give slices up."""
    client, frames, steps = serve(), clip(12), controls(11)
    client.ask(np.vstack([steps, HELD]), frames=frames, start=True)
    client.ask(HELD, mode="advance")
    client.service.drain()
    session = client.service.sessions.load("", "s")
    hot = client.service._memory.hot
    doomed = [session.slice_at(i) for i in range(session.first, session.present)][5::2]
    assert hot.delete(doomed) == len(doomed)
    truth = Truth(frames, steps)
    truth.leave(HELD)
    serve.stop(client)
    again = serve()
    assert equal(again.ask(HELD, cache="off"), truth.predict(HELD))
