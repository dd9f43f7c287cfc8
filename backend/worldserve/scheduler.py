"""Between the server's thread, which brings requests, and the engine, which answers them.

Triton hands a model without a batch dimension one request at a time. So `execute` only puts it
here, and the engine's own thread takes all that wait, at most one of each session, and computes
them as one batch. While it works, background work rests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from worldserve.background import Background
from worldserve.engine import Engine, Reply
from worldserve.request import Request
from worldserve.session import session_key

__all__ = ["Scheduler"]

_log = logging.getLogger(__name__)
#: A session counts as active for this long after its last request.
_ACTIVE_S = 0.5

Deliver = Callable[[Reply | Exception], None]


class Scheduler:
    """batch_wait_s: how long a batch that must be computed waits for a request of a session that
    was active a moment ago; nobody else active, no wait. most: requests in one batch. when_idle:
    calls what it is given when nothing is left of thinking time, the background's by default."""

    def __init__(
        self,
        engine: Engine,
        background: Background,
        batch_wait_s: float = 0.002,
        most: int = 16,
        when_idle: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._engine = engine
        self._when_idle = when_idle or background.when_idle
        self._background = background
        self._batch_wait_s = batch_wait_s
        self._most = most
        self._condition = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._deliver: dict[int, Deliver] = {}
        self._active: dict[bytes, float] = {}
        self._step: set[bytes] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def put(self, request: Request, deliver: Deliver) -> None:
        """Have a request answered; `deliver` is called once, from another thread."""
        with self._condition:
            if self._closed:
                deliver(RuntimeError("the model is being unloaded"))
                return
            self._deliver[id(request)] = deliver
        if request.drain:
            # Behind everything that thinking time is for, without keeping others waiting.
            self._when_idle(lambda: self._enqueue(request))
        else:
            self._enqueue(request)

    def close(self, timeout_s: float = 5.0) -> None:
        """Answer what waits, then end the thread."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join(timeout_s)

    def _enqueue(self, request: Request) -> None:
        with self._condition:
            self._waiting.append(request)
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._step.clear()
                while not self._waiting:
                    if self._closed:
                        return
                    self._condition.wait()
            with self._background.floor():
                self._answer(self._take())

    def _answer(self, requests: Sequence[Request]) -> None:
        try:
            self._engine.step(requests, self._send, self._more)
        except Exception as error:
            # A fault of ours that no single request is to blame for: whoever waits is told.
            _log.exception("a step failed")
            for request in requests:
                self._send(request, error)

    def _send(self, request: Request, result: Reply | Exception) -> None:
        with self._condition:
            deliver = self._deliver.pop(id(request), None)
        if deliver is not None:
            deliver(result)

    def _take(self) -> list[Request]:
        """Waiting requests of different sessions, that this step has not taken one of yet."""
        now = time.monotonic()
        taken: list[Request] = []
        left: deque[Request] = deque()
        with self._condition:
            while self._waiting:
                request = self._waiting.popleft()
                keys = _sessions_of(request)
                if keys & self._step or len(self._step) >= self._most:
                    left.append(request)
                    # Later requests of the same sessions stay behind this one.
                    self._step |= keys
                    continue
                self._step |= keys
                for key in keys:
                    self._active[key] = now
                taken.append(request)
            self._waiting = left
        return taken

    def _more(self) -> list[Request]:
        """Requests that came meanwhile, or come at once where others are likely to."""
        with self._condition:
            now = time.monotonic()
            self._active = {k: t for k, t in self._active.items() if now - t < _ACTIVE_S}
            if not self._waiting and not self._active.keys() <= self._step and not self._closed:
                self._condition.wait(self._batch_wait_s)
        return self._take()


def _sessions_of(request: Request) -> set[bytes]:
    ids = (request.correlation_id, request.resume, request.fork_of)
    return {session_key(request.tenant, id) for id in ids if id is not None}
