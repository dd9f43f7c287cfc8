"""The background thread: order, giving way, dropping, draining."""

from __future__ import annotations

import threading

import pytest

from ctrlcache.errors import InvalidInput
from worldserve.background import Background, Urgency


@pytest.fixture
def background():
    made = Background(most=4)
    yield made
    made.close()


def test_more_urgent_work_goes_first(background):
    """Work that waits is done in the order of urgency, then of arrival."""
    done = []
    with background.floor():
        for urgency in (Urgency.PREFETCH, Urgency.SCORE, Urgency.COMMIT, Urgency.SCORE):
            background.submit(urgency, lambda _, u=urgency: done.append(u))
    assert background.drain(10)
    assert done == sorted(done)
    assert len(done) == 4


def test_work_rests_while_a_request_has_the_floor(background):
    """Between two checkpoints nothing happens until the floor is free again."""
    started, steps = threading.Event(), []

    def work(checkpoint):
        for step in range(1_000_000):
            checkpoint()
            steps.append(step)
            started.set()
            if stop.is_set():
                return

    stop = threading.Event()
    background.submit(Urgency.SCORE, work)
    assert started.wait(10)
    with background.floor():
        # One step may be under way; after it, the work stands still.
        seen = len(steps)
        for _ in range(50):
            threading.Event().wait(0.002)
            assert len(steps) <= seen + 1
    stop.set()
    assert background.drain(10)


def test_urgent_work_overtakes_running_work(background):
    """A commit is done in the midst of a scoring that already runs."""
    order, started = [], threading.Event()

    def scoring(checkpoint):
        started.set()
        assert queued.wait(10)
        checkpoint()
        order.append("score")

    queued = threading.Event()
    background.submit(Urgency.SCORE, scoring)
    assert started.wait(10)
    background.submit(Urgency.COMMIT, lambda _: order.append("commit"))
    queued.set()
    assert background.drain(10)
    assert order == ["commit", "score"]


def test_keeping_does_not_wait_for_the_floor(background):
    """What was computed is written down even while requests keep coming."""
    done = threading.Event()
    with background.floor():
        background.submit(Urgency.KEEP, lambda _: done.set())
        assert done.wait(10)


def test_keeping_goes_on_while_other_work_rests(background):
    """A resting prefetch does not keep what was computed from being written down."""
    started, done = threading.Event(), threading.Event()

    def prefetch(checkpoint):
        started.set()
        while not done.is_set():
            checkpoint()

    background.submit(Urgency.PREFETCH, prefetch)
    assert started.wait(10)
    with background.floor():
        background.submit(Urgency.KEEP, lambda _: done.set())
        assert done.wait(10)
    assert background.drain(10)


def test_newer_work_of_a_key_replaces_older(background):
    """Only the newest prefetch of a session is done, and a running one gives up."""
    done, started = [], threading.Event()

    def endless(checkpoint):
        started.set()
        while True:
            checkpoint()

    background.submit(Urgency.PREFETCH, endless, key="session")
    assert started.wait(10)
    for number in range(3):
        background.submit(Urgency.PREFETCH, lambda _, n=number: done.append(n), key="session")
    assert background.drain(10)
    assert done[-1] == 2


def test_a_full_queue_drops_what_the_user_left_behind(background):
    """Of more work than fits, the oldest prefetches go; commits all stay."""
    done = []
    with background.floor():
        for number in range(6):
            background.submit(Urgency.PREFETCH, lambda _, n=number: done.append(("prefetch", n)))
        for number in range(6):
            background.submit(Urgency.COMMIT, lambda _, n=number: done.append(("commit", n)))
    assert background.drain(10)
    assert [item for item in done if item[0] == "commit"] == [("commit", n) for n in range(6)]
    assert [n for kind, n in done if kind == "prefetch"] == [5, 4, 3, 2]
    assert background.dropped == 2


def test_postponed_work_comes_last(background):
    """What was urgent and is no more lets everything else pass, even while it is being done."""
    order, started, go_on = [], threading.Event(), threading.Event()

    def scoring(checkpoint):
        started.set()
        assert go_on.wait(10)
        checkpoint()
        order.append("score")

    handle = background.submit(Urgency.SCORE, scoring)
    assert started.wait(10)
    background.submit(Urgency.PREFETCH, lambda _: order.append("prefetch"))
    handle.postpone()
    assert handle.alive
    go_on.set()
    assert background.drain(10)
    assert order == ["prefetch", "score"]
    assert not handle.alive


def test_failing_work_does_not_end_the_thread(background, caplog):
    """An exception is logged, and the next work is done."""
    done = threading.Event()
    background.submit(Urgency.SCORE, lambda _: 1 / 0)
    assert background.drain(10)
    background.submit(Urgency.SCORE, lambda _: done.set())
    assert done.wait(10)
    assert "ZeroDivisionError" in caplog.text


def test_what_is_known_to_be_impossible_is_counted(background, caplog):
    """A session that cannot be restored any more does not fill the log with tracebacks."""

    def impossible(_):
        raise InvalidInput("frame 8 cannot be restored exactly any more")

    with caplog.at_level("INFO"):
        for _ in range(3):
            background.submit(Urgency.COMMIT, impossible)
        assert background.drain(10)
    assert background.refused == 3
    assert caplog.text.count("cannot be restored") == 1
    assert "Traceback" not in caplog.text


def test_close_finishes_commits_and_drops_the_rest():
    """What must not be lost is done before the thread ends."""
    background, done = Background(), []
    with background.floor():
        background.submit(Urgency.SCORE, lambda _: done.append("score"))
        background.submit(Urgency.COMMIT, lambda _: done.append("commit"))
        background.submit(Urgency.KEEP, lambda _: done.append("keep"))
        background.close()
    assert "score" not in done
    assert set(done) == {"commit", "keep"}
