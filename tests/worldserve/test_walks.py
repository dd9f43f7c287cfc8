"""Random sessions against the model alone: whatever happens, exact answers are the model's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hunting import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_world import HELD, TINY, Client, Truth, clip, controls, equal

from ctrlcache.admission import Admission
from ctrlcache.errors import InvalidInput
from ctrlcache.key import frame_id
from worldserve.models.tiny import TinyWorldModel
from worldserve.service import WorldService
from worldserve.session import tokens_id
from worldserve.session_store import SessionNotFound

FRAMES = clip(64)


class Diary:
    """What happened to a session, from which the truth at any frame can be computed."""

    def __init__(self):
        self.frames, self.controls, self.present = [FRAMES[0]], [], 0

    def moved(self, frame, control):
        """The present was left under a control; frame None: what followed was predicted."""
        del self.frames[self.present + 1 :], self.controls[self.present :]
        self.frames.append(frame)
        self.controls.append(control)
        self.present += 1

    def truth(self):
        truth = Truth(self.frames[0][None])
        for frame, control in zip(
            self.frames[1 : self.present + 1], self.controls[: self.present], strict=True
        ):
            truth.leave(control)
            if frame is not None:
                truth.tokens, truth.base = truth.model.embed(frame[None])[0], frame
        return truth


class Loose:
    """Lets anything scored answer for anything near."""

    name = "loose"

    def decide(self, scores):
        return Admission(True, "trusted", 0.3)

    def accept(self, candidate, max_error):
        return 0.01


moves = st.lists(
    st.tuples(
        st.sampled_from(["observe", "advance", "probe", "seek", "seek and observe", "lose"]),
        st.integers(1, 3),
        st.integers(0, 30),
        st.sampled_from(["on", "on", "off", "refresh"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=16,
)


@pytest.fixture(scope="module", params=[("256", "true"), ("8", "true"), ("256", "false")])
def service(request, tmp_path_factory):
    """With a long history, with a very short one, and with nothing of it used that is stored."""
    history, resume = request.param
    shm = Path(f"/dev/shm/ctrlcache-test-walks-{os.getpid()}")
    settings = {
        "world_model_class": TINY,
        "shm_dir": str(shm),
        "hot_size_bytes": "128MiB",
        "history_frames": history,
        "resume": resume,
    }
    service = WorldService(settings, tmp_path_factory.mktemp("w"), model=TinyWorldModel())
    service.cache._policy = Loose()
    yield Client(service)
    service.close()
    shutil.rmtree(shm, ignore_errors=True)


def step(client, id, diary, kind, count, number, cache):
    """One thing that happens to a session; an exact answer must be the model's."""
    draw = controls(count, number)
    if kind == "lose":
        session = client.service.sessions.load("", id)
        if session.first > 0:
            return  # slices that are lost without their past are lost for good
        doomed = [session.slice_at(i) for i in range(session.first, session.present)][
            number % 3 :: 2
        ]
        observed = [d for d, seen in zip(session.digests, session.observed, strict=True) if seen]
        client.service._memory.hot.delete([*doomed, *map(tokens_id, observed)])
        client.service._scheduler._engine._recall._ready.clear()
        return
    if kind in ("seek", "seek and observe"):
        first = client.service.sessions.load("", id).first
        wanted = first + number % (len(diary.frames) - first)
        try:
            client.ask(HELD, id, outputs=["TIMING_MS"], mode="seek", frame=wanted)
        except InvalidInput as error:
            # So near to where its history begins that it cannot be computed any more.
            if "restored exactly" not in str(error):
                raise
            return
        diary.present = wanted
    options = {"mode": "seek", "frame": diary.present} if kind.startswith("seek") else {}
    if kind in ("observe", "seek and observe"):
        frames = FRAMES[number + 1 : number + 1 + count]
        got = client.ask(np.vstack([draw, HELD]), id, frames=frames, cache=cache, **options)
        for frame, control in zip(frames, draw, strict=True):
            diary.moved(frame, control)
        asked = HELD
    elif kind == "advance":
        got = client.ask(draw, id, mode="advance", cache=cache)
        asked = np.concatenate([draw, np.repeat(draw[-1:], 8 - count, 0)])
    else:
        asked = np.clip(draw[0] * (number % 3), -1, 1)
        got = client.ask(asked, id, cache=cache, **options)
    if got["EXACT"][0]:
        assert equal(got, diary.truth().predict(asked))
    if kind == "advance":
        for control in draw:
            diary.moved(None, control)


def walk(client, program):
    """A session that goes through `program`, from its start to its end."""
    id, diary = "walk", Diary()
    client.ask(HELD, id, frames=FRAMES[:1], start=True)
    for kind, count, number, cache, drain in program:
        step(client, id, diary, kind, count, number, cache)
        if drain:
            assert client.service.drain()
    assert equal(client.ask(HELD, id, cache="off", end=True), diary.truth().predict(HELD))


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves)
def test_any_session_is_the_models(service, program):
    """Seen, predicted, sought and lost in any order, with approximate answers in between, and
    whatever thinking time has done or not: the session ends where the model alone ends."""
    walk(service, program)


@pytest.mark.parametrize("last", ["observe", "advance"])
def test_forgetting_never_takes_what_the_present_needs(service, last):
    """Answers come from the cache, slices of the past are lost, and the session's first frames
    leave its history: they were what its present could be computed from."""
    program = [
        (kind, count, number, "on", False)
        for kind, count, number in [
            ("observe", 2, 0),
            ("observe", 2, 0),
            ("observe", 1, 0),
            ("lose", 1, 1),
            (last, 3, 0),
        ]
    ]
    walk(service, program)
    assert service.service.drain()
    with service.service.background.floor():
        # The same answers again, and no thinking time to compute anything in.
        walk(service, program)


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ((0, 1), "frame [01] of the session is"),
        ((2,), "(the session's last observed frame|frame 2 of the session) is"),
    ],
)
def test_a_session_whose_frames_are_lost_is_told_so(service, lost, named):
    """What was shown cannot be computed again: its session is refused by name, others go on."""
    service.ask(HELD, "lost", frames=FRAMES[:3], start=True)
    service.ask(HELD, "well", frames=FRAMES[3:5], start=True)
    assert service.service.drain()
    session = service.service.sessions.load("", "lost")
    contexts = [session.context_at(i) for i in lost]
    tokens = [tokens_id(session.context_at(i)) for i in (0, 1)]
    computed = [*tokens, *map(session.slice_at, (0, 1))]
    service.service._memory.hot.delete([*map(frame_id, contexts), *computed])
    service.service._scheduler._engine._recall._ready.clear()
    with pytest.raises(SessionNotFound, match=f"{named} not in memory any more: begin a new"):
        service.ask(-HELD, "lost", cache="off")
    assert service.ask(-HELD, "well", cache="off", end=True)["EXACT"][0]
    assert service.ask(HELD, "lost", frames=FRAMES[:3], start=True, end=True)["EXACT"][0]
