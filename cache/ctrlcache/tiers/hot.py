"""The hot tier: raw payloads in shared memory, common to all processes of the server.

An exact look-up is one short LMDB read transaction, a few microseconds. A record is a row in
`payloads` (and one in `tails`, where it is split), one in `entries`, one in the ledger and one in
the control hash index, all changed in one transaction: what is visible is whole, in every process,
whenever another one dies.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import lmdb
import numpy as np
from numpy.typing import NDArray

from ctrlcache import index
from ctrlcache.errors import InvalidInput, TierUnavailable
from ctrlcache.eviction import policy
from ctrlcache.index import ControlHashIndex
from ctrlcache.key import DIGEST_BYTES
from ctrlcache.tiers import ledger
from ctrlcache.tiers.base import Candidate, Entry, Record, TierStats
from ctrlcache.tiers.ledger import Ledger, occupied_bytes

__all__ = ["DATABASES", "HotTier", "batches_of"]

T = TypeVar("T")
#: Gives the second part of a payload.
Rest = Callable[[], memoryview | bytes]

DATABASES = 3 + index.DATABASES + ledger.DATABASES
FORMAT = b"ctrlcache-hot-2"
_BATCH_BYTES = 8 << 20  # of a put, per transaction
_SCAN_BATCH = 256
_HEAD_BYTES = 1024
_MOST_NOTED = 65_536
_ENTRY = struct.Struct(f"<{DIGEST_BYTES}sdddd")  # then the control


class Transact(Protocol):
    """Runs a function in a write transaction of the environment, and again where room had to be
    made; TierUnavailable where it cannot be done."""

    def __call__(self, work: Callable[[lmdb.Transaction], T]) -> T: ...


class HotTier:
    """Implements `tiers.base.Tier`. Safe in several processes and threads.

    Made by `ctrlcache.shared.SharedMemory`, which owns the environment. `limit_bytes` bounds
    records and table rows; `eviction` names a policy of `ctrlcache.eviction`; now: Unix time. The
    methods that end in `_in` work inside a caller's transaction.
    """

    name = "hot"

    def __init__(
        self,
        env: lmdb.Environment,
        transact: Transact,
        limit_bytes: int,
        eviction: str = "cost",
        now: Callable[[], float] = time.time,
    ) -> None:
        self._env = env
        self._transact = transact
        self._payloads = env.open_db(b"payloads")
        self._tails = env.open_db(b"tails")
        self._entries = env.open_db(b"entries")
        self._index = ControlHashIndex(env, "hot")
        self.ledger = Ledger(env, limit_bytes, policy(eviction), now, self._take_out)
        self._noted: deque[bytes] = deque(maxlen=_MOST_NOTED)
        with env.begin(write=True) as txn:
            found = self.ledger.meta(txn, b"format", FORMAT)
            if found != FORMAT:
                raise TierUnavailable(
                    f"shared memory was laid out by another version ({found!r}, this is "
                    f"{FORMAT!r}): stop its servers and delete the directory"
                )
            # Whatever does not fit a limit that was lowered goes now, unless it is pinned.
            with contextlib.suppress(TierUnavailable):
                self.ledger.make_room(txn, 0)

    # -- reading ------------------------------------------------------------------------------

    def get(self, id: bytes) -> bytes | None:
        """The payload (a copy), or None."""
        return self.read(id, lambda head, rest: b"".join((head, rest())))

    def read(self, id: bytes, take: Callable[[memoryview, Rest], T]) -> T | None:
        """What `take` makes of the payload, which it sees in place: it must copy what it keeps.

        It gets the first part, and a function that gives the rest where the record was split.
        (A value is paged in as a whole before it is seen: hence two of them.)
        """
        try:
            with self._env.begin(buffers=True) as txn:
                found = txn.get(id, db=self._payloads)
                if found is None:
                    return None
                return take(found, lambda: txn.get(id, b"", db=self._tails))
        except lmdb.Error:
            return None

    def contains(self, ids: Iterable[bytes]) -> list[bool]:
        """For each id, whether its record is here."""
        wanted = list(ids)
        try:
            with self._env.begin() as txn, txn.cursor(self._entries) as cursor:
                return [cursor.set_key(id) for id in wanted]
        except lmdb.Error:
            return [False] * len(wanted)

    def entry(self, id: bytes) -> Entry | None:
        """What is known of a record beside its payload."""
        try:
            with self._env.begin() as txn:
                found = txn.get(id, db=self._entries)
        except lmdb.Error:
            return None
        return None if found is None else _entry(id, found)

    def neighbours(
        self, space: bytes, control: NDArray[np.float32], limit: int = 16
    ) -> list[Candidate]:
        try:
            with self._env.begin(buffers=True) as txn:
                return self._index.query(txn, space, control, limit)
        except lmdb.Error:
            return []

    def space(self, space: bytes) -> list[bytes]:
        """Ids of all records of a space that have a control."""
        try:
            with self._env.begin() as txn:
                return list(self._index.members(txn, space))
        except lmdb.Error:
            return []

    def scan(self) -> Iterator[Entry]:
        """All entries, by id. Reads in batches: not a snapshot, and never in a writer's way."""
        for id, value in batches_of(self._env, self._entries, b"", _SCAN_BATCH):
            yield _entry(id, value)

    def stats(self) -> TierStats:
        counters = self._counters()
        return TierStats(counters.entries, counters.used_bytes, self.ledger.limit_bytes)

    @property
    def evictions(self) -> int:
        """Records evicted since the directory was made, by any process."""
        return self._counters().evictions

    def _counters(self) -> ledger.Counters:
        try:
            with self._env.begin() as txn:
                return self.ledger.counters(txn)
        except lmdb.Error:
            return ledger.Counters()

    # -- writing ------------------------------------------------------------------------------

    def put(self, records: Iterable[Record]) -> int:
        """Store, in transactions of some megabytes each. Visible to all processes on return.

        Records larger than the tier are passed over. Fewer than given where room ran out on the
        way; TierUnavailable where none could be stored.
        """
        limit = self.ledger.limit_bytes
        # Pages that a transaction replaces (some six per record) are free again only two
        # transactions later: keep it small beside the limit.
        batch_bytes = min(_BATCH_BYTES, limit // 16)
        batch_records = max(16, min(256, limit // 400_000))
        stored = 0
        refused = False
        fitting: list[Record] = []
        size = 0
        self.flush_touches()
        try:
            for record in records:
                if _occupied(record) > limit:
                    refused = True
                    continue
                fitting.append(record)
                size += len(record.payload)
                if size >= batch_bytes or len(fitting) >= batch_records:
                    stored += self._put_batch(fitting)
                    fitting, size = [], 0
            stored += self._put_batch(fitting)
        except TierUnavailable:
            if not stored:
                raise
        if refused and not stored:
            raise TierUnavailable(f"the hot tier's limit is {limit} bytes, less than the record")
        return stored

    def _put_batch(self, batch: list[Record]) -> int:
        def work(txn: lmdb.Transaction) -> int:
            for record in batch:
                self.put_in(txn, record)
            return len(batch)

        return self._transact(work) if batch else 0

    def unpin_unchanged(self, owner: bytes, payloads: Mapping[bytes, bytes]) -> int:
        """Let go of those ids whose payload still begins as the given one does, or is absent where
        that is empty; returns how many. (Records begin with their checksums.)"""

        def work(txn: lmdb.Transaction) -> int:
            same = []
            for id, payload in payloads.items():
                found = txn.get(id, b"", db=self._payloads)
                shared = min(len(found), _HEAD_BYTES)  # a split leaves the header in one piece
                if found[:shared] == payload[:shared] and bool(found) == bool(payload):
                    same.append(id)
            return self.ledger.unpin(txn, owner, same)

        return self._transact(work)

    def pinned(self, owner: bytes, limit: int | None = None) -> list[bytes]:
        """The ids that `owner` pins, at most `limit`."""
        try:
            with self._env.begin() as txn:
                return self.ledger.pins_of(txn, owner, limit)
        except lmdb.Error:
            return []

    def pin_count(self, owner: bytes) -> int:
        """How many ids `owner` pins."""
        try:
            with self._env.begin() as txn:
                return self.ledger.pin_count(txn, owner)
        except lmdb.Error:
            return 0

    def delete(self, ids: Iterable[bytes]) -> int:
        """Remove records, pinned or not."""
        doomed = list(ids)
        return self._transact(lambda txn: sum(self.delete_in(txn, id) for id in doomed))

    def pin(self, owner: bytes, ids: Iterable[bytes]) -> int:
        """Keep what is stored under `ids`, now or later, from eviction until `owner` (1 to 400
        bytes) lets go, in this process or another; returns how many have a record now."""
        held = list(ids)
        return self._transact(lambda txn: self.ledger.pin(txn, owner, held))

    def unpin(self, owner: bytes, ids: Iterable[bytes] | None = None) -> int:
        """Let go of some ids, or of all (None); returns how many were held."""
        freed = None if ids is None else list(ids)
        return self._transact(lambda txn: self.ledger.unpin(txn, owner, freed))

    def touch(self, ids: Iterable[bytes]) -> None:
        """Note a use. Kept in this process until the next write, so that reading never writes."""
        self._noted.extend(ids)

    def flush_touches(self) -> dict[bytes, int]:
        """Write the noted uses; returns them, how many of each id."""
        noted: dict[bytes, int] = {}
        with contextlib.suppress(IndexError):  # empty; another thread may be emptying it, too
            while True:
                id = self._noted.popleft()
                noted[id] = noted.get(id, 0) + 1
        if noted:
            self._transact(lambda txn: self.ledger.touched(txn, noted))
        return noted

    def close(self) -> None:
        """Write the noted uses and close the environment; what it holds stays."""
        with contextlib.suppress(TierUnavailable):  # only the memory of some uses is lost
            self.flush_touches()
        self._env.close()

    # -- inside a caller's transaction --------------------------------------------------------

    def get_in(self, txn: lmdb.Transaction, id: bytes) -> bytes | None:
        found = txn.get(id, db=self._payloads)
        return None if found is None else b"".join((found, txn.get(id, b"", db=self._tails)))

    def put_in(self, txn: lmdb.Transaction, record: Record) -> None:
        """Store one record, evicting others as needed; TierUnavailable where there is no room."""
        entry = record.entry
        if len(entry.id) != DIGEST_BYTES or len(entry.space) != DIGEST_BYTES:
            raise InvalidInput(
                f"id and space must be {DIGEST_BYTES} bytes, "
                f"got {len(entry.id)} and {len(entry.space)}"
            )
        size = _occupied(record)
        self._take_out(txn, entry.id)
        before = self.ledger.removed(txn, entry.id)
        self.ledger.make_room(txn, size)
        if 0 < record.split < len(record.payload):
            whole = memoryview(record.payload)
            txn.put(entry.id, whole[: record.split], db=self._payloads)
            txn.put(entry.id, whole[record.split :], db=self._tails)
        else:
            txn.put(entry.id, record.payload, db=self._payloads)
        txn.put(entry.id, _entry_bytes(entry), db=self._entries)
        self._index.add(txn, [entry])
        self.ledger.stored(txn, entry.id, size, entry.cost_ms, entry.created_s, before)

    def delete_in(self, txn: lmdb.Transaction, id: bytes) -> int:
        self._take_out(txn, id)
        return int(self.ledger.removed(txn, id) is not None)

    def _take_out(self, txn: lmdb.Transaction, id: bytes) -> None:
        """Remove what is stored of a record, not what the ledger knows of it."""
        found = txn.get(id, db=self._entries)
        if found is not None:
            self._index.remove(txn, _entry(id, found))
            txn.delete(id, db=self._entries)
            txn.delete(id, db=self._payloads)
            txn.delete(id, db=self._tails)


def batches_of(
    env: lmdb.Environment, db: Any, prefix: bytes, batch: int
) -> Iterator[tuple[bytes, bytes]]:
    """All rows whose key starts with `prefix`, in short read transactions of `batch` rows."""
    last: bytes | None = None
    while True:
        rows: list[tuple[bytes, bytes]] = []
        try:
            with env.begin() as txn, txn.cursor(db) as cursor:
                found = cursor.set_range(prefix if last is None else last)
                if found and cursor.key() == last:
                    found = cursor.next()
                while found and len(rows) < batch and cursor.key().startswith(prefix):
                    rows.append(cursor.item())
                    found = cursor.next()
        except lmdb.Error:
            return
        if not rows:
            return
        yield from rows
        last = rows[-1][0]


def _occupied(record: Record) -> int:
    length = len(record.payload)
    if 0 < record.split < length:
        return occupied_bytes(record.split) + occupied_bytes(length - record.split)
    return occupied_bytes(length)


def _entry_bytes(entry: Entry) -> bytes:
    head = _ENTRY.pack(entry.space, entry.radius, entry.curvature, entry.cost_ms, entry.created_s)
    if entry.control is None:
        return head
    return head + np.asarray(entry.control, "<f4").tobytes()


def _entry(id: bytes, packed: bytes | memoryview) -> Entry:
    space, radius, curvature, cost_ms, created_s = _ENTRY.unpack_from(packed)
    control = None
    if len(packed) > _ENTRY.size:
        control = np.frombuffer(bytes(packed), "<f4", offset=_ENTRY.size)
    return Entry(id, space, control, radius, curvature, cost_ms, created_s)
