"""Sessions as values, and the store that makes them true."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrlcache.couplet import encode_array
from ctrlcache.errors import ConfigError, CorruptRecord, InvalidInput
from ctrlcache.key import frame_id
from ctrlcache.shared import SharedMemory
from ctrlcache.tiers.base import Entry, Record
from worldserve.session import Session, decode_session, encode_session, session_key, tokens_id
from worldserve.session_store import (
    SessionConflict,
    SessionLimits,
    SessionNotFound,
    SessionsFull,
    SessionStore,
    capacity,
)

PROVENANCE = b"p" * 16
LIMITS = SessionLimits(ttl_s=100, displace_s=50, most=3, history=8, window=4, touch_s=1)


def begin(id="s", tenant="", mark=0):
    return Session(
        tenant=tenant,
        id=id,
        prompt="push",
        view="",
        device="",
        created_s=0.0,
        touched_s=0.0,
        first=0,
        present=0,
        digests=(bytes([mark]) * 16,),
        controls=np.full((1, 2), np.nan, np.float32),
        observed=np.ones(1, bool),
        times=np.zeros(1),
    )


def controls(count, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (count, 2)).astype(np.float32)


def frames(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), np.uint8)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("observe"), st.integers(1, 4), st.integers(0, 3)),
        st.tuples(st.just("advance"), st.integers(1, 3), st.integers(0, 3)),
        st.tuples(st.just("seek"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("trim"), st.integers(2, 9), st.just(0)),
    ),
    max_size=8,
)


def walk(session, program):
    for kind, number, seed in program:
        if kind == "observe":
            session = session.observe(controls(number, seed), frames(number, seed), None)
        elif kind == "advance":
            session = session.advance(controls(number, seed), 0.1)
        elif kind == "seek":
            session = session.seek(min(max(number, session.first), session.end - 1))
        else:
            session = session.trimmed(number)
    return session


@given(steps)
def test_a_session_round_trips(program):
    """What is stored is what is read, after any history."""
    session = walk(begin(), program)
    again = decode_session(encode_session(session, PROVENANCE), PROVENANCE)
    for name in ("digests", "first", "present", "anchor", "id", "tenant", "prompt", "version"):
        assert getattr(again, name) == getattr(session, name)
    for name in ("controls", "observed", "times"):
        assert np.array_equal(getattr(again, name), getattr(session, name), equal_nan=True)


@given(steps, st.data())
def test_any_damage_is_noticed(program, data):
    """A session with a flipped bit is no session."""
    stored = bytearray(encode_session(walk(begin(), program), PROVENANCE))
    bit = data.draw(st.integers(0, len(stored) * 8 - 1))
    stored[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptRecord):
        decode_session(bytes(stored), PROVENANCE)


@given(steps)
def test_a_session_is_consistent(program):
    """Its arrays have one entry per frame; every frame that was left has a control."""
    session = walk(begin(), program)
    count = session.end - session.first
    assert len(session.controls) == len(session.observed) == len(session.times) == count
    assert session.first <= session.present < session.end
    assert np.isfinite(session.controls[:-1]).all()
    assert np.isnan(session.controls[-1]).all()


@given(steps)
def test_the_same_history_has_the_same_context(program):
    """Contexts name what happened, however the session is called."""
    one, two = walk(begin("a"), program), walk(begin("b"), program)
    assert one.digests == two.digests


def test_seeing_and_predicting_differ():
    """A frame that was seen, one that was predicted, and other controls are other contexts."""
    base = begin()
    contexts = {
        base.observe(controls(1), frames(1), None).context,
        base.observe(controls(1), frames(1, 1), None).context,
        base.observe(controls(1, 1), frames(1), None).context,
        base.advance(controls(1), 0.1).context,
        base.advance(controls(1, 1), 0.1).context,
    }
    assert len(contexts) == 5


def test_what_lies_beyond_a_seek_stays_until_replaced():
    """One can go back and forth; moving on from an earlier frame drops what came after it."""
    session = begin().advance(controls(5), 0.1)
    back = session.seek(2)
    assert back.seek(5).context == session.context
    branch = back.advance(controls(1, 9), 0.1)
    assert branch.end == 4
    with pytest.raises(InvalidInput, match="0 to 3, got 5"):
        branch.seek(5)


def test_times_go_on_through_predictions():
    """A predicted frame is one interval after the one before it; unknown stays unknown."""
    seen = begin().observe(controls(1), frames(1), np.array([7.5]))
    assert seen.advance(controls(2), 0.1).present_time == pytest.approx(7.7)
    assert begin().observe(controls(1), frames(1), None).present_time is None


def test_the_last_seen_frame_is_remembered_beyond_the_history():
    """Predicted frames are drawn from the last seen one, even when it has left the history."""
    session = begin().advance(controls(9), 0.1)
    assert session.base == session.digests[0]
    trimmed = session.trimmed(4)
    assert len(trimmed.digests) == 4
    assert trimmed.base == session.digests[0]
    assert (session.digests[0], True) in trimmed.frames_kept()


def test_ids_of_other_kinds_and_tenants_are_other_sessions():
    """A number and a text that looks like it, and the same id of two tenants, never meet."""
    keys = {session_key(tenant, id) for tenant in ("", "a", "b") for id in (7, "7")}
    assert len(keys) == 6


# --- the store ----------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 1_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def memory(shm):
    made = SharedMemory(shm, 16 << 20)
    yield made
    made.close()


@pytest.fixture
def store(memory, clock):
    return SessionStore(memory, PROVENANCE, LIMITS, now=clock)


def pixels(session, seed=0):
    for index, frame in enumerate(frames(session.end - session.first, seed)):
        id = frame_id(session.digests[index])
        yield Record(Entry(id, id, None, 0, 0, 0, 0), encode_array(frame, PROVENANCE))


def test_sessions_are_found_by_tenant_and_id(store):
    """And by nothing else."""
    store.commit(None, begin("a", "x"))
    assert store.load("x", "a").id == "a"
    for tenant, id in (("", "a"), ("y", "a"), ("x", "b")):
        with pytest.raises(SessionNotFound, match="no session"):
            store.load(tenant, id)


def test_another_models_sessions_are_not_found(store, memory):
    """Other weights, other sessions, though the memory is the same."""
    store.commit(None, begin("a"))
    other = SessionStore(memory, b"q" * 16, LIMITS)
    with pytest.raises(SessionNotFound):
        other.load("", "a")


def test_only_one_of_two_writers_wins(store):
    """A change on top of an outdated version is refused and leaves no trace."""
    first = store.commit(None, begin("a"))
    second = store.commit(first, first.advance(controls(1), 0.1))
    with pytest.raises(SessionConflict, match="changed by another request"):
        store.commit(first, first.advance(controls(1, 5), 0.1))
    assert store.load("", "a").context == second.context


def test_a_new_session_of_the_same_id_ends_the_old_one(store, memory):
    """The old one's requests under way are refused, and its pins are gone."""
    old = store.commit(None, begin("a"), pixels(begin("a")))
    new = store.commit(None, begin("a", mark=1))
    assert store.load("", "a").context == new.context
    with pytest.raises(SessionConflict):
        store.commit(old, old.advance(controls(1), 0.1))
    pinned = memory.transact(lambda tx: tx.pins_of(store._prefix + new.key))
    assert frame_id(old.context) not in pinned


def test_pins_follow_the_session(store, memory):
    """Pixels of seen frames, tokens of predicted ones, slices of the window: nothing else."""
    session = store.commit(None, begin("a"))
    session = store.commit(session, session.observe(controls(3), frames(3), None))
    session = store.commit(session, session.advance(controls(9), 0.1))
    assert session.end - session.first == LIMITS.history
    expected = {tokens_id(digest) for digest in session.digests}
    expected |= {frame_id(session.anchor)}
    expected |= {session.slice_at(index) for index in range(session.end - 4, session.end - 1)}
    pinned = memory.transact(lambda tx: tx.pins_of(store._prefix + session.key))
    assert set(pinned) == expected


def test_a_session_is_forgotten_after_its_time(store, clock, memory):
    """Each request counts; afterwards nothing of it is left."""
    session = store.commit(None, begin("a"))
    clock.now += 99
    session = store.commit(session, session)
    clock.now += 99
    assert store.load("", "a").version == 1
    clock.now += 2
    with pytest.raises(SessionNotFound):
        store.load("", "a")
    assert store.collect() == 1
    assert store.count() == 0
    assert memory.transact(lambda tx: tx.pins_of(store._prefix + session.key)) == []


def test_full_is_said_at_once(store, clock):
    """One more than the stated number is refused, unless one expired or was ended."""
    for id in "abc":
        store.commit(None, begin(id))
        clock.now += 1
    with pytest.raises(SessionsFull, match="all 3 sessions are taken"):
        store.commit(None, begin("d"))
    store.commit(None, begin("a"))  # one of the three begins anew
    ended = store.load("", "b")
    store.commit(ended, replace(ended, ended=True))
    store.commit(None, begin("d"))
    with pytest.raises(SessionNotFound):
        store.load("", "b")
    clock.now += 101
    store.commit(None, begin("e"))
    assert store.count() == 1


def test_the_longest_idle_one_makes_room(store, clock):
    """Not expired, but nobody has asked for it for a long time, and somebody else is here."""
    for id in "abc":
        store.commit(None, begin(id))
        clock.now += 1
    clock.now += 30
    first = store.load("", "a")
    store.commit(first, first)
    clock.now += 25
    store.commit(None, begin("d"))
    assert store.load("", "a")
    assert store.load("", "c")
    with pytest.raises(SessionNotFound):
        store.load("", "b")


def test_an_ended_session_can_be_resumed(store):
    """END says that the place may be taken, not that the session is over."""
    session = store.commit(None, begin("a"))
    store.commit(session, replace(session, ended=True))
    assert store.load("", "a").ended


def test_a_session_can_be_taken_under_another_id(store, memory):
    """The old id is gone, the pins have moved."""
    old = store.commit(None, begin("a"), pixels(begin("a")))
    store.commit(None, replace(old, id="b", taken_from=old.key), taken=old)
    with pytest.raises(SessionNotFound):
        store.load("", "a")
    moved = store.load("", "b")
    assert moved.context == old.context
    assert memory.transact(lambda tx: tx.pins_of(store._prefix + moved.key))
    with pytest.raises(SessionConflict):
        store.commit(None, replace(old, id="c"), taken=old)


def test_pinned_pixels_survive_pressure(store, memory):
    """What a session needs is not evicted, whatever else is put beside it."""
    session = store.commit(None, begin("a"), pixels(begin("a")))
    filler = np.zeros(1 << 20, np.uint8)
    for number in range(40):
        id = number.to_bytes(16, "little")
        entry = Entry(id, id, None, 0, 0, 1e6, 0)
        memory.hot.put([Record(entry, encode_array(filler, PROVENANCE))])
    assert memory.hot.evictions > 0
    assert memory.hot.get(frame_id(session.context)) is not None


def test_the_stated_number_fits_the_memory():
    """Full sessions of that number take no more than two thirds of it."""
    limits = SessionLimits(history=256, window=32)
    most = capacity(2 << 30, 50_000, 405_504, limits)
    assert 40 <= most <= 70
    assert most * (256 * 50_000 + 32 * 405_504) < 2 / 3 * (2 << 30)


@pytest.mark.parametrize("wrong", [{"ttl_s": 0}, {"most": 0}, {"history": 3, "window": 4}])
def test_limits_are_checked(wrong):
    """A history that is shorter than the window cannot work."""
    with pytest.raises(ConfigError):
        SessionLimits(**wrong)
