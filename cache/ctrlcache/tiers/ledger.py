"""What the hot tier knows of its records' use, and which of them to give up.

All of it lives in the tier's LMDB environment and changes in the transaction of whoever changes a
record, so that sizes and pins are true after any crash. A record's use is one row in `idle` or,
while somebody pins it, in `pinned`: only idle records are ever looked at for eviction. A pin is on
an id, not on a record: it may come first, and it outlasts a deletion.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice

import lmdb

from ctrlcache.errors import InvalidInput, TierUnavailable
from ctrlcache.eviction import Policy, Usage, gdsf, used
from ctrlcache.key import DIGEST_BYTES

__all__ = ["Counters", "Ledger", "occupied_bytes"]

DATABASES = 4
#: Records looked at for each one evicted. The lowest of a random sample this large is nearly
#: always among the lowest few per cent of all, and costs the same however many there are.
SAMPLE = 24
_PAGE = 4096
_ROWS_BYTES = 600  # what a record occupies beside its payload: rows and index, measured

_USE = struct.Struct("<QdddddI")  # size (0: no record), cost, created, last used, hits, clock, pins
_COUNTERS = struct.Struct("<QQQd")


@dataclass
class Counters:
    """used_bytes: occupied by records and tables. clock: the highest `gdsf` priority evicted."""

    used_bytes: int = 0
    entries: int = 0
    evictions: int = 0
    clock: float = 0.0


def occupied_bytes(length: int) -> int:
    """What a value of `length` bytes takes in LMDB: whole pages when it is large, else a part of a
    page that random insertion leaves two thirds full."""
    if length > 2000:
        return -(-(length + 16) // _PAGE) * _PAGE + _ROWS_BYTES
    return length * 3 // 2 + _ROWS_BYTES


class Ledger:
    """Counters, uses and pins. `take_out` removes what is stored of a record, given its id."""

    def __init__(
        self,
        env: lmdb.Environment,
        limit_bytes: int,
        priority: Policy,
        now: Callable[[], float],
        take_out: Callable[[lmdb.Transaction, bytes], None],
    ) -> None:
        self.limit_bytes = limit_bytes
        # Of this process's present write transaction.
        self.evicted = 0
        self._fresh: set[bytes] = set()
        self._priority = priority
        self._now = now
        self._take_out = take_out
        self._idle = env.open_db(b"idle")
        self._pinned = env.open_db(b"pinned")
        self._owners = env.open_db(b"owners", dupsort=True, dupfixed=True)
        self._meta = env.open_db(b"meta")

    def begin(self) -> None:
        """A write transaction begins. What it stores, it does not evict: its caller may go on to
        pin it, and counts on the whole of a batch."""
        self.evicted = 0
        self._fresh.clear()

    def meta(self, txn: lmdb.Transaction, name: bytes, default: bytes) -> bytes:
        """A constant of this directory: stored on first sight, returned as first stored."""
        found = txn.get(name, db=self._meta)
        if found is None:
            txn.put(name, default, db=self._meta)
            return default
        return bytes(found)

    def counters(self, txn: lmdb.Transaction) -> Counters:
        found = txn.get(b"counters", db=self._meta)
        return Counters(*_COUNTERS.unpack(found)) if found else Counters()

    def count(
        self, txn: lmdb.Transaction, size: int, entries: int = 0, evicted: Usage | None = None
    ) -> None:
        """Add to what is occupied and held (negative: take away)."""
        counters = self.counters(txn)
        evictions, clock = counters.evictions, counters.clock
        if evicted is not None:
            evictions, clock = evictions + 1, max(clock, gdsf(evicted, self._now()))
        packed = _COUNTERS.pack(
            max(counters.used_bytes + size, 0), max(counters.entries + entries, 0), evictions, clock
        )
        txn.put(b"counters", packed, db=self._meta)

    # -- uses -----------------------------------------------------------------------------------

    def stored(
        self,
        txn: lmdb.Transaction,
        id: bytes,
        size: int,
        cost_ms: float,
        created_s: float,
        before: Usage | None,
    ) -> None:
        """Enter a record that was just stored; `before`: the use of the one that it replaces."""
        now, clock = self._now(), self.counters(txn).clock
        if before is None:
            usage = Usage(size, cost_ms, created_s, now, clock=clock)
        else:
            usage = replace(used(before, now, clock), size_bytes=size, cost_ms=cost_ms)
        _, pins = self._use(txn, id)
        self._set_use(txn, id, usage, pins)
        self.count(txn, size, 1)
        self._fresh.add(id)

    def removed(self, txn: lmdb.Transaction, id: bytes) -> Usage | None:
        """Strike a record out; returns its use, None where it is unknown. Pins remain."""
        usage, pins = self._use(txn, id)
        if usage is not None:
            self._set_use(txn, id, None, pins)
            self.count(txn, -usage.size_bytes, -1)
        return usage

    def touched(self, txn: lmdb.Transaction, uses: dict[bytes, int]) -> None:
        now, clock = self._now(), self.counters(txn).clock
        for id, count in uses.items():
            usage, pins = self._use(txn, id)
            if usage is not None:
                self._set_use(txn, id, used(usage, now, clock, count), pins)

    def _use(self, txn: lmdb.Transaction, id: bytes) -> tuple[Usage | None, int]:
        found = txn.get(id, db=self._idle) or txn.get(id, db=self._pinned)
        return _unpack(found) if found else (None, 0)

    def _set_use(self, txn: lmdb.Transaction, id: bytes, usage: Usage | None, pins: int) -> None:
        stays = self._pinned if pins else self._idle
        for db in (self._idle, self._pinned):
            if db is not stays or (usage is None and not pins):
                txn.delete(id, db=db)
        if usage is not None or pins:
            txn.put(id, _pack(usage, pins), db=stays)

    # -- pins -----------------------------------------------------------------------------------

    def pin(self, txn: lmdb.Transaction, owner: bytes, ids: Iterable[bytes]) -> int:
        """Pin for `owner`; returns how many of the ids have a record."""
        present = 0
        for id in ids:
            usage, pins = self._use(txn, id)
            present += usage is not None
            if txn.put(_checked(owner), id, dupdata=False, db=self._owners):
                self._set_use(txn, id, usage, pins + 1)
        return present

    def unpin(self, txn: lmdb.Transaction, owner: bytes, ids: Iterable[bytes] | None) -> int:
        """Let go of ids, or of all (None); returns how many were held."""
        freed = 0
        for id in self.pins_of(txn, owner) if ids is None else ids:
            if txn.delete(_checked(owner), id, db=self._owners):
                usage, pins = self._use(txn, id)
                self._set_use(txn, id, usage, max(pins - 1, 0))
                freed += 1
        return freed

    def pins_of(self, txn: lmdb.Transaction, owner: bytes, limit: int | None = None) -> list[bytes]:
        with txn.cursor(self._owners) as cursor:
            if not cursor.set_key(_checked(owner)):
                return []
            return [bytes(id) for id in islice(cursor.iternext_dup(), limit)]

    def pin_count(self, txn: lmdb.Transaction, owner: bytes) -> int:
        with txn.cursor(self._owners) as cursor:
            return int(cursor.count()) if cursor.set_key(_checked(owner)) else 0

    # -- eviction -------------------------------------------------------------------------------

    def make_room(self, txn: lmdb.Transaction, size: int) -> None:
        """Evict until `size` more bytes fit; TierUnavailable where they cannot."""
        if size > self.limit_bytes:
            raise TierUnavailable(f"{size} bytes do not fit a limit of {self.limit_bytes}")
        self.evict_to(txn, self.limit_bytes - size)

    def evict_to(self, txn: lmdb.Transaction, target_bytes: int) -> None:
        """Give up records, the least worth first, until at most `target_bytes` are occupied."""
        occupied = self.counters(txn).used_bytes
        now = self._now()
        pool: dict[bytes, tuple[float, Usage]] = {}
        while occupied > target_bytes:
            for id, usage in self._sample(txn):
                pool[id] = (self._priority(usage, now), usage)
            if not pool:
                raise TierUnavailable(
                    f"pinned records, tables and what is just being stored occupy {occupied} of "
                    f"{self.limit_bytes} bytes"
                )
            ranked = sorted(pool, key=lambda id: pool[id][0])
            victim, usage = ranked[0], pool[ranked[0]][1]
            self._take_out(txn, victim)
            self.evicted += 1
            self._set_use(txn, victim, None, 0)
            self.count(txn, -usage.size_bytes, -1, evicted=usage)
            occupied -= usage.size_bytes
            # The best candidates stay in the running, as if the next sample were larger.
            pool = {id: pool[id] for id in ranked[1:SAMPLE]}

    def _sample(self, txn: lmdb.Transaction) -> list[tuple[bytes, Usage]]:
        """Some records that may go. Ids are digests, so a run from a random one is random."""
        found: list[tuple[bytes, Usage]] = []
        with txn.cursor(self._idle) as cursor:
            more = cursor.set_range(os.urandom(DIGEST_BYTES))
            wrapped = False
            while len(found) < SAMPLE:
                if not more:
                    if wrapped or not cursor.first():
                        break
                    wrapped = True
                id, (usage, _) = bytes(cursor.key()), _unpack(cursor.value())
                if usage is not None and id not in self._fresh:
                    found.append((id, usage))
                more = cursor.next()
        return found


def _checked(owner: bytes) -> bytes:
    if not 0 < len(owner) <= 400:
        raise InvalidInput(f"an owner must be 1 to 400 bytes, got {len(owner)}")
    return owner


def _pack(usage: Usage | None, pins: int) -> bytes:
    if usage is None:
        return _USE.pack(0, 0.0, 0.0, 0.0, 0.0, 0.0, pins)
    return _USE.pack(
        usage.size_bytes,
        usage.cost_ms,
        usage.created_s,
        usage.last_used_s,
        usage.hits,
        usage.clock,
        pins,
    )


def _unpack(packed: bytes | memoryview) -> tuple[Usage | None, int]:
    size, cost_ms, created_s, last_used_s, hits, clock, pins = _USE.unpack(packed)
    if not size:
        return None, pins
    return Usage(size, cost_ms, created_s, last_used_s, hits, clock), pins
