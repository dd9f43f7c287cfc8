"""What is told every few seconds: each loss of background work once."""

from __future__ import annotations

from ctrlcache.errors import InvalidInput
from ctrlcache.metrics import BackgroundLost, SessionCount
from worldserve.background import Background, Urgency
from worldserve.vitals import Vitals


def test_background_work_that_was_lost_is_told_once(serve):
    """What was dropped and what could not be done, since the report before."""
    events = []
    service = serve().service
    background = Background(most=2)
    vitals = Vitals(service.cache, service.sessions, background, {}, events.append)

    def lost() -> list[BackgroundLost]:
        vitals.report()
        found = [event for event in events if isinstance(event, BackgroundLost)]
        assert [event for event in events if isinstance(event, SessionCount)]
        events.clear()
        return found

    def impossible(_) -> None:
        raise InvalidInput("the session is gone")

    assert lost() == []
    with background.floor():
        for _ in range(5):
            background.submit(Urgency.PREFETCH, lambda _: None)
    background.submit(Urgency.COMMIT, impossible)
    assert background.drain(10)
    assert lost() == [BackgroundLost("dropped", 3), BackgroundLost("refused", 1)]
    assert lost() == []
    background.submit(Urgency.COMMIT, impossible)
    assert background.drain(10)
    assert lost() == [BackgroundLost("refused", 1)]
    background.close()
