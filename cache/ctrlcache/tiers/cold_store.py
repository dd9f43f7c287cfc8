"""Templates of tasks on their way from the object store into memory, behind everyone's back.

Asking is free: `resident` tells what is here, `fetch_async` notes what is wanted, and one thread
does the waiting. When the store fails, a circuit breaker keeps it from being asked for a while that
grows from one failure to the next; what was wanted is tried again by itself.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ctrlcache.errors import CorruptRecord
from ctrlcache.metrics import ColdRequest, Sink, ignore
from ctrlcache.tiers.base import Record
from ctrlcache.tiers.cold import ColdTier
from ctrlcache.tiers.objects import ObjectError, Objects

__all__ = ["Breaker", "ColdStore", "Templates"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Templates:
    """What the store holds for a task, the most typical first; loaded_s: monotonic time."""

    task: str
    records: tuple[Record, ...]
    loaded_s: float

    @property
    def size_bytes(self) -> int:
        return sum(len(record.payload) for record in self.records)


class Breaker:
    """Says when the store may be asked again: after 1 s, 2 s, 4 s ... up to `longest_s`."""

    def __init__(self, longest_s: float = 60.0, seed: int | None = None) -> None:
        self._longest_s = longest_s
        self._rng = random.Random(seed)
        self.failures = 0
        self.retry_at_s = 0.0

    def failed(self, now_s: float) -> None:
        self.failures += 1
        pause_s = min(self._longest_s, 2.0 ** min(self.failures - 1, 30))
        # Spread, so that the servers of a fleet do not come back all at once.
        self.retry_at_s = now_s + pause_s * self._rng.uniform(0.75, 1.0)

    def succeeded(self) -> None:
        self.failures = 0
        self.retry_at_s = 0.0


class ColdStore:
    """Loads the templates of tasks in the background. Methods never wait and never raise.

    objects: None where there is no cold tier. prefix: whose templates; see `templates.prefix`.
    resident_bytes: the least recently asked for leave memory beyond that. record_bytes: larger
    templates are passed over. refresh_s: templates older than that are loaded again when asked for;
    a task without templates is asked for again after that time too.
    """

    def __init__(
        self,
        objects: Objects | None,
        prefix: str,
        *,
        resident_bytes: int = 64 << 20,
        record_bytes: int = 4 << 20,
        refresh_s: float = 600.0,
        longest_pause_s: float = 60.0,
        queue_tasks: int = 64,
        on_event: Sink = ignore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects = objects
        self._prefix = prefix
        self._resident_bytes = resident_bytes
        self._record_bytes = record_bytes
        self._refresh_s = refresh_s
        self._queue_tasks = queue_tasks
        self._on_event = on_event
        self._clock = clock
        self._breaker = Breaker(longest_pause_s)
        self._changed = threading.Condition()
        self._wanted: OrderedDict[str, None] = OrderedDict()
        self._resident: OrderedDict[str, Templates] = OrderedDict()
        self._closed = False
        #: Why the last request failed, until one succeeds.
        self.trouble: str | None = None
        self._thread = threading.Thread(target=self._run, name="ctrlcache-cold", daemon=True)
        if objects is not None:
            self._thread.start()

    def resident(self, task: str) -> Templates | None:
        """The templates of a task, if they are in memory."""
        with self._changed:
            found = self._resident.get(task)
            if found is not None:
                self._resident.move_to_end(task)
            return found

    def fetch_async(self, task: str) -> bool:
        """Have the templates of a task loaded; whether that was necessary and noted."""
        if self._objects is None or not task:
            return False
        with self._changed:
            known = self._resident.get(task)
            fresh = known is not None and self._clock() - known.loaded_s < self._refresh_s
            if self._closed or fresh or task in self._wanted:
                return False
            if len(self._wanted) >= self._queue_tasks:
                self._wanted.popitem(last=False)
            self._wanted[task] = None
            self._changed.notify_all()
            return True

    def wait(self, task: str, timeout_s: float) -> Templates | None:
        """For callers that asked to wait (and for tests): the templates once they are here."""
        deadline = time.monotonic() + timeout_s
        self.fetch_async(task)
        with self._changed:
            while task not in self._resident or task in self._wanted:
                if self._closed or not self._changed.wait(deadline - time.monotonic()):
                    break
            return self._resident.get(task)

    def close(self) -> None:
        """Stop; a request under way ends by its time-out, nobody waits for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                loaded = self._load(task)
            except CorruptRecord as error:
                # The store works, what it holds for this task does not: as if it held nothing.
                log.warning("cold tier: %s", error)
                self._loaded(Templates(task, (), self._clock()), "garbage")
            except ObjectError as error:
                self._failed(task, error.result, str(error))
            except Exception as error:
                # Whatever a reply did to us must not end the only thread there is.
                log.exception("cold tier: loading %r failed", task)
                self._failed(task, "error", type(error).__name__)
            else:
                self._loaded(loaded, "hit" if loaded.records else "miss")
        if self._objects is not None:
            self._objects.close()

    def _next(self) -> str | None:
        """The task to load, when the time has come; None to end."""
        with self._changed:
            while not self._closed:
                pause_s = self._breaker.retry_at_s - self._clock()
                if self._wanted and pause_s <= 0:
                    return next(iter(self._wanted))
                self._changed.wait(min(pause_s, 1.0) if self._wanted else None)
            return None

    def _load(self, task: str) -> Templates:
        assert self._objects is not None
        tier = ColdTier(self._objects, self._prefix, task, on_event=self._on_event)
        records: list[Record] = []
        if tier.refresh():
            size = 0
            for held in tier.held(self._record_bytes):
                if size + held.size_bytes > self._resident_bytes:
                    break
                payload = tier.fetch(held)  # raises where the store fails
                if payload is not None:
                    records.append(Record(held.entry, payload))
                    size += held.size_bytes
        return Templates(task, tuple(records), self._clock())

    def _loaded(self, loaded: Templates, result: str) -> None:
        with self._changed:
            self._breaker.succeeded()
            if self.trouble is not None:
                log.warning("cold tier: works again")
            self.trouble = None
            self._wanted.pop(loaded.task, None)
            self._resident[loaded.task] = loaded
            self._resident.move_to_end(loaded.task)
            while (
                len(self._resident) > 1
                and sum(t.size_bytes for t in self._resident.values()) > self._resident_bytes
            ):
                self._resident.popitem(last=False)
            self._changed.notify_all()
        self._on_event(ColdRequest(result))

    def _failed(self, task: str, result: str, text: str) -> None:
        with self._changed:
            self._breaker.failed(self._clock())
            if self.trouble is None:
                log.warning("cold tier: %s; serving goes on without it, trying again later", text)
            self.trouble = text
            # To the end of the queue: one bad task must not keep the others from being loaded.
            if task in self._wanted:
                self._wanted.move_to_end(task)
            self._changed.notify_all()
        self._on_event(ColdRequest(result))
