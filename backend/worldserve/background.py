"""One thread that works while the user thinks, in order of urgency, and gives way to any request.

The thread that answers requests holds the floor (`with background.floor():`); long work calls the
checkpoint it was given between its small steps, and waits there until the floor is free.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum

from ctrlcache.errors import CtrlCacheError
from worldserve.models.protocol import Checkpoint

__all__ = ["Abandoned", "Background", "Handle", "Urgency", "Work"]

_log = logging.getLogger(__name__)
#: Lower priority than the threads that answer, should both want the same core.
_NICENESS = 10

#: A piece of background work; it calls the checkpoint between small steps.
Work = Callable[[Checkpoint], None]


class Urgency(IntEnum):
    """KEEP is short (it writes down what was computed) and does not wait for the floor. IDLE: when
    nothing else is left. SCORE, PREFETCH and LATER may be dropped."""

    KEEP = 0
    COMMIT = 1
    SCORE = 2
    PREFETCH = 3
    LATER = 4
    IDLE = 5


_OPTIONAL = (Urgency.SCORE, Urgency.PREFETCH, Urgency.LATER)


class Abandoned(Exception):
    """Raised by a checkpoint: the work is not wanted any more."""


@dataclass(order=True)
class _Task:
    urgency: Urgency
    order: int
    number: int = field(compare=False)
    work: Work = field(compare=False)
    key: object = field(compare=False)
    dropped: bool = field(default=False, compare=False)
    done: bool = field(default=False, compare=False)


class Handle:
    """A piece of work that was submitted."""

    def __init__(self, background: Background, task: _Task) -> None:
        self._background = background
        self._task = task

    @property
    def alive(self) -> bool:
        """Whether it waits or is being done."""
        return not (self._task.done or self._task.dropped)

    def postpone(self) -> None:
        """Make it LATER, where it is more urgent; also while it is being done."""
        self._background._postpone(self._task)


class Background:
    """The thread and its queue, of at most `most` pieces of work that are not necessary.

    When there are more, the least urgent and, of these, the oldest one is dropped: it would serve a
    question that the user has left behind.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._condition = threading.Condition()
        self._queue: list[_Task] = []
        self._numbers = itertools.count()
        self._running: list[_Task] = []  # the last one runs, in the midst of those before it
        self._talking = 0
        self._closed = False
        #: Pieces of work that there was no room for, and that could not be done (a session that
        #: cannot be restored any more, a tier that is gone).
        self.dropped = self.refused = 0
        #: Told, often, whether there is nothing to do; quick.
        self.on_idle: Callable[[bool], None] | None = None
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)
        self._thread.start()

    # -- giving way --------------------------------------------------------------------------------

    @contextmanager
    def floor(self) -> Iterator[None]:
        """Background work (but KEEP) rests while any thread is in here."""
        with self._condition:
            self._talking += 1
            self._tell()
        try:
            yield
        finally:
            with self._condition:
                self._talking -= 1
                self._tell()
                self._condition.notify_all()

    def give_way(self, at_most_s: float = 0.02) -> None:
        """For work of other threads, between its small steps: wait while the floor is taken, but
        not for ever, so that it gets done even where requests never cease."""
        if self._talking:
            with self._condition:
                self._condition.wait_for(lambda: not self._talking, at_most_s)

    # -- work --------------------------------------------------------------------------------------

    def submit(self, urgency: Urgency, work: Work, key: object = None) -> Handle:
        """Queue work. Waiting work of the same urgency and key (not None) is replaced by it, and
        such work that runs gives up at its next checkpoint."""
        with self._condition:
            if self._closed:
                return Handle(self, _Task(urgency, 0, 0, work, key, dropped=True))
            if key is not None:
                for task in (*self._queue, *self._running):
                    if (task.urgency, task.key) == (urgency, key):
                        task.dropped = True
            number = next(self._numbers)
            # Of what is optional, the newest first: it is nearest to where the hand is now.
            order = -number if urgency in _OPTIONAL else number
            task = _Task(urgency, order, number, work, key)
            heapq.heappush(self._queue, task)
            self._shed()
            self._tell()
            self._condition.notify_all()
            return Handle(self, task)

    def _postpone(self, task: _Task) -> None:
        with self._condition:
            if task.urgency < Urgency.LATER:
                task.urgency = Urgency.LATER
                heapq.heapify(self._queue)

    def drain(self, timeout_s: float = 60.0) -> bool:
        """Wait until nothing is left to do and nobody has the floor; whether that was in time."""
        done = threading.Event()
        self.when_idle(done.set)
        return done.wait(timeout_s)

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call `call` (quick) from the background thread when nothing else is left to do."""
        self.submit(Urgency.IDLE, lambda _: call())

    def close(self, timeout_s: float = 5.0) -> None:
        """Do what must not be lost, drop scores and prefetches, end the thread."""
        with self._condition:
            for task in (*self._queue, *self._running):
                if task.urgency in _OPTIONAL:
                    task.dropped = True
            self._closed = True
            self._condition.notify_all()
        self._thread.join(timeout_s)

    def _tell(self) -> None:
        if self.on_idle is not None:
            self.on_idle(not (self._talking or self._queue or self._running))

    def _shed(self) -> None:
        waiting = [t for t in self._queue if t.urgency in _OPTIONAL and not t.dropped]
        if len(waiting) > self._most:
            victim = max(waiting, key=lambda task: (task.urgency, -task.number))
            victim.dropped = True
            self._queue = [task for task in self._queue if task is not victim]
            heapq.heapify(self._queue)
            self.dropped += 1

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            # The threads that a model computes with are children of this one, and inherit it.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            with self._condition:
                while (task := self._take(Urgency.IDLE)) is None:
                    if self._closed and not self._queue:
                        return
                    self._condition.wait()
            self._perform(task)

    def _take(self, at_most: Urgency) -> _Task | None:
        """The next task, where it may run now and is of that urgency or a higher one."""
        while self._queue and self._queue[0].dropped:
            heapq.heappop(self._queue)
        if not self._queue or self._queue[0].urgency > at_most:
            return None
        if self._talking and not self._closed and self._queue[0].urgency > Urgency.KEEP:
            return None
        task = heapq.heappop(self._queue)
        self._running.append(task)
        return task

    def _perform(self, task: _Task) -> None:
        try:
            task.work(lambda: self._checkpoint(task))
        except Abandoned:
            pass
        except CtrlCacheError as error:
            # What a request for it would be told; each one is counted, the first one is named.
            self.refused += 1
            level = logging.INFO if self.refused == 1 else logging.DEBUG
            _log.log(level, "background work is not possible (%s): %s", task.urgency.name, error)
        except Exception:
            # Nobody waits for this; a lost piece of work costs time later, never an answer.
            _log.exception("background work failed (%s)", task.urgency.name)
        with self._condition:
            task.done = True
            self._running = [other for other in self._running if other is not task]
            self._tell()
            self._condition.notify_all()

    def _checkpoint(self, task: _Task) -> None:
        # Looked at without the lock first: this is called thousands of times a second.
        if not (self._talking or task.dropped or self._overtaken(task)):
            return
        while True:
            with self._condition:
                if task.dropped:
                    raise Abandoned
                # More urgent work that came meanwhile is done here, in the midst of this one.
                urgent = self._take(Urgency(task.urgency - 1)) if task.urgency else None
                if urgent is None:
                    if not self._talking or self._closed:
                        return
                    self._condition.wait()
                    continue
            self._perform(urgent)

    def _overtaken(self, task: _Task) -> bool:
        return any(first.urgency < task.urgency for first in self._queue[:1])
