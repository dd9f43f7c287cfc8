"""How many requests may wait: the rest is told at once, instead of waiting for nothing."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from ctrlcache.errors import CtrlCacheError
from worldserve.request import RawRequest

__all__ = ["Gate", "Overloaded"]

#: Questions of whoever looks after the server are let in even where everything is full.
_MOST_CANARIES = 16

Deliver = Callable[[Any], None]


class Overloaded(CtrlCacheError):
    """So many requests wait already that another one would wait in vain."""


class Gate:
    """Counts the requests that were let in and not answered yet; safe in several threads.

    most: of all of them together. most_of_session: of one session, so that none takes all places.
    """

    def __init__(self, most: int, most_of_session: int) -> None:
        self._most = most
        self._most_of_session = most_of_session
        self._lock = threading.Lock()
        self._waiting = 0
        self._canaries = 0
        self._of_session: Counter[Hashable] = Counter()

    def enter(self, raw: RawRequest, deliver: Deliver) -> Deliver:
        """`deliver`, which now also gives the place back; Overloaded where there is none."""
        if raw.parameters.get("canary") is True:
            return self._enter_canary(deliver)
        key = (str(raw.parameters.get("tenant", "")), raw.correlation_id)
        with self._lock:
            if self._waiting >= self._most:
                raise Overloaded(
                    f"{self._waiting} requests are waiting already, as many as this instance takes "
                    "(max_waiting): try again in a moment, or ask fewer at a time"
                )
            if self._of_session[key] >= self._most_of_session:
                raise Overloaded(
                    f"{self._most_of_session} requests of session {raw.correlation_id!r} are "
                    "waiting already, as many as one may have (max_waiting_of_session)"
                )
            self._waiting += 1
            self._of_session[key] += 1

        def leave(result: Any) -> None:
            with self._lock:
                self._waiting -= 1
                self._of_session[key] -= 1
                if not self._of_session[key]:
                    del self._of_session[key]
            deliver(result)

        return leave

    def _enter_canary(self, deliver: Deliver) -> Deliver:
        with self._lock:
            if self._canaries >= _MOST_CANARIES:
                raise Overloaded(f"{_MOST_CANARIES} canaries are waiting already")
            self._canaries += 1

        def leave(result: Any) -> None:
            with self._lock:
                self._canaries -= 1
            deliver(result)

        return leave
