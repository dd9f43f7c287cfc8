"""Idle instances that think for busy ones: who is asked, what is done, what is lost."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
from test_session import PROVENANCE, begin

from worldserve.background import Background, Urgency
from worldserve.models.protocol import Rendering
from worldserve.models.tiny import TinyWorldModel
from worldserve.scoring import Place
from worldserve.siblings import Siblings

COUPLET = bytes(range(16))


class Instance:
    """One of several in a directory; `probed` is what it was asked to do."""

    def __init__(self, directory, work=lambda: None):
        self.background = Background()
        self.probed = []
        self._work = work
        self.siblings = Siblings(
            directory, PROVENANCE, TinyWorldModel(), self.background, self._probe
        )

    def _probe(self, place, couplet, lineage, checkpoint):
        self.probed.append((place, couplet, lineage))
        self._work()

    def settled(self):
        """Wait until nothing is left to do, here or elsewhere for this one."""
        done = threading.Event()
        self.background.when_idle(lambda: self.siblings.when_done(done.set))
        assert done.wait(10)

    def close(self):
        self.siblings.close()
        self.background.close()


@pytest.fixture
def start(shm):
    shm.mkdir()
    with ExitStack() as stack:

        def one(**how):
            instance = Instance(shm / "siblings", **how)
            stack.callback(instance.close)
            return instance

        yield one


def place(**changes):
    session = begin(tenant="t")
    return Place(session, None, 8, 3, True, Rendering(steps=4, reuse="content"), **changes)


def idle(instance, want=True):
    """Instances say so within a moment."""
    until = time.monotonic() + 10
    while instance.siblings.idle() != want:
        assert time.monotonic() < until
        time.sleep(0.002)


def test_an_idle_sibling_does_what_is_asked(start):
    """It gets the place as it was, and the asking one learns when it is done."""
    busy, helper = start(), start()
    idle(busy)
    errand = busy.siblings.ask(place(), COUPLET, "session:pour")
    busy.settled()
    assert errand.done
    assert not errand.alive
    assert not busy.probed
    [(asked, couplet, lineage)] = helper.probed
    assert (couplet, lineage) == (COUPLET, "session:pour")
    assert (asked.horizon, asked.seed, asked.with_frames) == (8, 3, True)
    assert asked.rendering == place().rendering
    assert asked.session.key == place().session.key
    assert asked.space == place().space
    np.testing.assert_array_equal(asked.session.controls, place().session.controls)


def test_the_floor_and_work_make_an_instance_busy(start):
    """Whoever answers a request, or thinks himself, is not asked."""
    one, other = start(), start()
    idle(one)
    with other.background.floor():
        idle(one, want=False)
    idle(one)
    going, go_on = threading.Event(), threading.Event()
    other.background.submit(Urgency.LATER, lambda _: (going.set(), go_on.wait(10)))
    assert going.wait(10)
    assert not one.siblings.idle()
    go_on.set()
    idle(one)


def test_alone_nothing_is_handed_over(start):
    """An instance does not help itself, and an errand that nobody took is over at once."""
    one = start()
    assert not one.siblings.idle()
    errand = one.siblings.ask(place(), COUPLET, "")
    one.settled()
    assert not errand.alive
    assert not one.probed


def test_a_sibling_takes_one_errand_at_a_time(start):
    """While it works, it is not idle: the next errand is done by another, or lost."""
    go_on = threading.Event()
    one, helper = start(), start(work=lambda: go_on.wait(10))
    idle(one)
    with helper.background._condition:  # before it has come to say that it is busy now
        first = one.siblings.ask(place(), COUPLET, "")
        second = one.siblings.ask(place(), COUPLET, "")
        one.background.drain(10)
    assert first.alive
    assert not second.alive
    go_on.set()
    one.settled()
    assert len(helper.probed) == 1


def test_what_was_taken_is_waited_for(start, monkeypatch):
    """Longer than for an answer from a sibling that is not there: it may have much to do."""
    monkeypatch.setattr("worldserve.siblings._PATIENCE_S", 0.5)
    go_on = threading.Event()
    one, helper = start(), start(work=lambda: go_on.wait(10))
    idle(one)
    errand = one.siblings.ask(place(), COUPLET, "")
    over = threading.Event()
    one.background.when_idle(lambda: one.siblings.when_done(over.set))
    assert not over.wait(1.5)
    assert errand.alive
    go_on.set()
    assert over.wait(10)
    assert len(helper.probed) == 1


def test_a_killed_sibling_is_forgotten(start, shm):
    """Its socket stays behind and refuses: the errand is over, and it is not asked again."""
    one, helper = start(), start()
    idle(one)
    helper.siblings._closed = True
    helper.siblings._thread.join()
    helper.siblings._socket.close()  # as the kernel does it for a killed process
    errand = one.siblings.ask(place(), COUPLET, "")
    one.background.drain(10)
    assert not errand.alive
    assert not one.siblings.idle()
    assert len(list((shm / "siblings").iterdir())) == 2  # its own


def test_rubbish_from_a_sibling_is_refused(start, caplog):
    """A record that was damaged on its way is no errand; the listener goes on."""
    one, helper = start(), start()
    idle(one)
    job = bytearray(one.siblings._job(1, place(), COUPLET, ""))
    job[-1] ^= 1
    for data in (bytes(job), b"J", b""):
        one.siblings._socket.sendto(data, helper.siblings._path)
    one.siblings.ask(place(), COUPLET, "")
    one.settled()
    assert len(helper.probed) == 1
    assert "cannot be read" in caplog.text
