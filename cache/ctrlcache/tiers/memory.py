"""A tier in the memory of one process: the reference that the others are compared with.

Everything is done in the plainest way (all entries are looked at, for neighbours and for eviction
alike), so it shows what a tier means. It serves tests, and servers of a single process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import TierUnavailable
from ctrlcache.eviction import Usage, gdsf, policy, used
from ctrlcache.tiers.base import Candidate, Entry, Record, TierStats, reaching

__all__ = ["MemoryTier"]


class MemoryTier:
    """Implements `tiers.base.Tier`. Safe in several threads, lost with the process.

    `limit_bytes` bounds the payloads; now: Unix time.
    """

    name = "memory"
    #: Whether `put` can be expected to work now.
    writable = True

    def __init__(
        self, limit_bytes: int, eviction: str = "cost", now: Callable[[], float] = time.time
    ) -> None:
        self._limit = limit_bytes
        self._priority = policy(eviction)
        self._now = now
        self._records: dict[bytes, Record] = {}
        self._uses: dict[bytes, Usage] = {}
        self._size = 0
        self._clock = 0.0
        self._lock = threading.RLock()

    def get(self, id: bytes) -> bytes | None:
        record = self._records.get(id)
        return None if record is None else record.payload

    def neighbours(
        self, space: bytes, control: NDArray[np.float32], limit: int = 16
    ) -> list[Candidate]:
        with self._lock:
            entries = [record.entry for record in self._records.values()]
        return reaching(entries, space, control, limit)

    def entry(self, id: bytes) -> Entry | None:
        """What is known of a record beside its payload."""
        record = self._records.get(id)
        return None if record is None else record.entry

    def space(self, space: bytes) -> list[bytes]:
        """Ids of all records of a space that have a control."""
        with self._lock:
            entries = [record.entry for record in self._records.values()]
        return [e.id for e in entries if e.space == space and e.control is not None]

    def put(self, records: Iterable[Record]) -> int:
        stored = refused = 0
        with self._lock:
            for record in records:
                if len(record.payload) > self._limit:
                    refused += 1
                    continue
                self._put(record)
                stored += 1
        if refused and not stored:
            raise TierUnavailable(f"record exceeds the limit of {self._limit} bytes")
        return stored

    def _put(self, record: Record) -> None:
        entry, size, now = record.entry, len(record.payload), self._now()
        before = self._remove(entry.id)
        while self._size + size > self._limit:
            victim = min(self._uses, key=lambda id: self._priority(self._uses[id], now))
            self._clock = max(self._clock, gdsf(self._uses[victim], now))
            self._remove(victim)
        usage = Usage(size, entry.cost_ms, entry.created_s, now, clock=self._clock)
        if before is not None:
            again = used(before, now, self._clock)
            usage = Usage(size, entry.cost_ms, again.created_s, now, again.hits, again.clock)
        self._records[entry.id] = record
        self._uses[entry.id] = usage
        self._size += size

    def _remove(self, id: bytes) -> Usage | None:
        record = self._records.pop(id, None)
        if record is None:
            return None
        self._size -= len(record.payload)
        return self._uses.pop(id)

    def delete(self, ids: Iterable[bytes]) -> int:
        with self._lock:
            return sum(self._remove(id) is not None for id in ids)

    def touch(self, ids: Iterable[bytes]) -> None:
        with self._lock:
            for id in ids:
                if id in self._uses:
                    self._uses[id] = used(self._uses[id], self._now(), self._clock)

    def scan(self) -> Iterator[Entry]:
        with self._lock:
            entries = [record.entry for record in self._records.values()]
        return iter(entries)

    def stats(self) -> TierStats:
        return TierStats(len(self._records), self._size, self._limit)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._records.clear()
            self._uses.clear()
            self._size = 0
