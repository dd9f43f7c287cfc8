"""From its start to its end: sessions that are resumed, forked, bounded, refused and cancelled."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tiny_world import HELD, Truth, clip, controls, equal

from ctrlcache.errors import InvalidInput
from worldserve.engine import Abandonment
from worldserve.models.tiny import TinyWorldModel
from worldserve.session_store import SessionNotFound, SessionsFull


def test_resume_after_a_restart(serve):
    """The process dies, the memory stays: the session goes on with the same predictions."""
    client, frames = serve(), clip(6)
    truth = Truth(frames, [HELD] * 5)
    client.ask(HELD, frames=frames, start=True)
    client.ask(HELD, mode="advance", end=True)
    truth.leave(HELD)
    client.service.drain()
    serve.stop(client)
    client = serve()
    got = client.ask(HELD * 2, "s2", start=True, resume="s")
    assert equal(got, truth.predict(HELD * 2))
    with pytest.raises(SessionNotFound):
        client.ask(HELD, "s")
    # The client did not get the reply and asks again.
    assert equal(client.ask(HELD * 2, "s2", start=True, resume="s"), truth.predict(HELD * 2))


def test_resume_of_nothing(serve):
    """An unknown session, another tenant's, or a number that is a text, cannot be resumed."""
    client = serve()
    client.ask(HELD, "1", frames=clip(1), start=True, tenant="a")
    for wrong in ({"resume": "1"}, {"resume": 1, "tenant": "a"}, {"fork_of": "2", "tenant": "a"}):
        with pytest.raises(SessionNotFound, match="START"):
            client.ask(HELD, "x", start=True, **wrong)


def test_a_fork_leaves_the_original_alone(serve):
    """Two sessions from one past."""
    client, frames = serve(), clip(3)
    client.ask(HELD, "a", frames=frames, start=True)
    client.ask(HELD, "b", start=True, fork_of="a", mode="advance")
    truth = Truth(frames, [HELD, HELD])
    assert equal(client.ask(-HELD, "a"), truth.predict(-HELD))
    truth.leave(HELD)
    assert equal(client.ask(-HELD, "b"), truth.predict(-HELD))


def test_start_on_a_live_id_is_a_new_session(serve):
    """Nothing of the old one shows."""
    client = serve()
    client.ask(HELD, frames=clip(4), start=True)
    client.ask(HELD, mode="advance")
    got = client.ask(HELD, frames=clip(2, seed=7), start=True)
    assert equal(got, Truth(clip(2, seed=7), [HELD]).predict(HELD))
    with pytest.raises(InvalidInput, match="0 to 1, got 3"):
        client.ask(HELD, mode="seek", frame=3)


def test_what_a_session_began_with_is_fixed(serve):
    """Prompt and view may be said again, not changed."""
    client = serve()
    client.ask(HELD, frames=clip(1), start=True, prompt="push", view="top")
    client.ask(HELD, prompt="push")
    with pytest.raises(InvalidInput, match="'prompt' is fixed"):
        client.ask(HELD, prompt="pull")
    with pytest.raises(InvalidInput, match="view 'side'"):
        client.ask(HELD, "other", frames=clip(1), start=True, view="side")


def test_sessions_are_bounded(serve):
    """One too many is refused at once."""
    client = serve(max_sessions=2)
    for id in "ab":
        client.ask(HELD, id, frames=clip(1), start=True)
    with pytest.raises(SessionsFull):
        client.ask(HELD, "c", frames=clip(1), start=True)
    client.ask(HELD, "a", end=True)
    client.ask(HELD, "c", frames=clip(1), start=True)


REFUSED = {
    "seek": {"mode": "seek", "frame": 99},
    "prompt": {"prompt": "else"},
    "device": {"device": "joystick"},
    "too many samples": {"control": controls(9)},
    "times without frame times": {"frames": clip(1, 3), "CONTROL_TIMES": np.zeros(1)},
    "frame times in the past": {"frames": clip(1, 3), "FRAME_TIMES": np.array([-5.0])},
    "times backwards": {"control": controls(2), "CONTROL_TIMES": np.array([1.0, 0.5])},
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("mode", ["probe", "advance"])
def test_a_refused_request_leaves_the_session_alone(serve, case, mode):
    """Not a bit of it changes."""
    client, frames = serve(), clip(3)
    client.ask(HELD, frames=frames, start=True, FRAME_TIMES=np.arange(3.0), mode="advance")
    before = client.service.sessions.load("", "s")
    options = {"mode": mode, **REFUSED[case]}
    with pytest.raises(InvalidInput):
        client.ask(options.pop("control", HELD), **options)
    after = client.service.sessions.load("", "s")
    assert (after.version, after.digests, after.present) == (
        before.version,
        before.digests,
        before.present,
    )


def test_cancelled_and_late_requests_change_nothing(serve):
    """Who does not wait for the answer has not moved the session."""
    client, frames = serve(), clip(2)
    client.ask(HELD, frames=frames, start=True)
    with pytest.raises(Abandonment, match="cancelled"):
        client.ask(HELD * 2, mode="advance", cancelled=lambda: True)
    with pytest.raises(Abandonment, match="time is up"):
        client.ask(HELD * 2, mode="advance", timeout_s=1e-6)
    assert equal(client.ask(-HELD), Truth(frames, [HELD]).predict(-HELD))


def test_a_cancelled_request_is_its_own_affair(serve):
    """Computed as one batch with others, of which one has hung up: the others are answered."""
    client, frames = serve(model=TinyWorldModel(step_ms=20), batch_wait_ms=500), clip(2)
    for id in ("a", "b", "c", "d"):
        client.ask(HELD, id, frames=frames, start=True, cache="off")
    gone = threading.Event()
    first = client.send(HELD, "d", cache="off")  # the others wait behind it, and go together
    hung_up = client.send(HELD, "b", cache="off", cancelled=gone.is_set)
    others = [client.send(HELD, id, cache="off") for id in ("a", "c")]
    gone.set()
    truth = Truth(frames, [HELD]).predict(HELD)
    assert all(equal(outcome(), truth) for outcome in (first, *others))
    with pytest.raises(Abandonment, match="cancelled"):
        hung_up()


def test_a_model_that_fails_hurts_one_request(serve):
    """The error is the request's; the session and the service go on."""
    model = TinyWorldModel()
    client, frames = serve(model=model), clip(2)
    client.ask(HELD, frames=frames, start=True)
    client.service.drain()
    sound = model.rollout

    def broken(inputs, checkpoint=None):
        raise MemoryError("no room for this rollout")

    model.rollout = broken
    with pytest.raises(MemoryError):
        client.ask(-HELD, mode="advance")
    model.rollout = sound
    assert equal(client.ask(HELD * 2), Truth(frames, [HELD]).predict(HELD * 2))
