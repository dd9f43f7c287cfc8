"""Memory that all processes of one server share: the hot tier, and small tables beside it.

One LMDB environment in a directory under /dev/shm. Whatever belongs together (a session's record,
its slices, their pins) is written in one transaction, and outlives the process that wrote it; the
memory is given back when the directory is removed. The file is never mapped for writing, so a full
/dev/shm is an error that a write reports, not a SIGBUS.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from ctrlcache.errors import InvalidInput, TierUnavailable
from ctrlcache.metrics import Evicted, Sink, ignore
from ctrlcache.tiers.base import Record
from ctrlcache.tiers.hot import DATABASES, HotTier, batches_of
from ctrlcache.tiers.ledger import occupied_bytes

__all__ = ["SharedMemory", "Table", "Transaction"]

T = TypeVar("T")

MAX_READERS = 1024
#: Of the directory's bytes, what records may occupy. The rest is for the trees above them, pages
#: that a running transaction replaces, and gaps too small for a large record.
RECORD_SHARE = 0.8
#: Waits between attempts when the map is full: for a reader that was suspended in the middle of a
#: look-up, and keeps all pages that were freed since, to go on.
_WAITS_S = (0.001, 0.003, 0.01, 0.03, 0.1)
_SCAN_BATCH = 256


class Transaction:
    """Writes that become visible together, or not at all; valid inside `SharedMemory.transact`."""

    def __init__(self, hot: HotTier, rows: Any, txn: lmdb.Transaction) -> None:
        self._hot = hot
        self._rows = rows
        self._txn = txn

    def get(self, id: bytes) -> bytes | None:
        """The payload of a record."""
        return self._hot.get_in(self._txn, id)

    def put(self, records: Iterable[Record]) -> None:
        """Store records; TierUnavailable where pinned records leave no room for one."""
        for record in records:
            self._hot.put_in(self._txn, record)

    def delete(self, ids: Iterable[bytes]) -> int:
        return sum(self._hot.delete_in(self._txn, id) for id in ids)

    def pin(self, owner: bytes, ids: Iterable[bytes]) -> int:
        """As `HotTier.pin`. Pinning twice for one owner is pinning once."""
        return self._hot.ledger.pin(self._txn, owner, ids)

    def unpin(self, owner: bytes, ids: Iterable[bytes] | None = None) -> int:
        """As `HotTier.unpin`."""
        return self._hot.ledger.unpin(self._txn, owner, ids)

    def pins_of(self, owner: bytes) -> list[bytes]:
        """The ids that `owner` pins."""
        return self._hot.ledger.pins_of(self._txn, owner)

    def read(self, table: str, key: bytes) -> bytes | None:
        """The value of a table's key, as this transaction sees it."""
        found = self._txn.get(_row(table, key), db=self._rows)
        return None if found is None else bytes(found)

    def write(self, table: str, key: bytes, value: bytes) -> None:
        """Store a value; TierUnavailable where there is no room."""
        self.erase(table, key)
        size = occupied_bytes(len(value))
        self._hot.ledger.make_room(self._txn, size)
        self._txn.put(_row(table, key), value, db=self._rows)
        self._hot.ledger.count(self._txn, size)

    def erase(self, table: str, key: bytes) -> bool:
        """Remove a value; whether there was one."""
        found = self._txn.pop(_row(table, key), db=self._rows)
        if found is not None:
            self._hot.ledger.count(self._txn, -occupied_bytes(len(found)))
        return found is not None


class Table:
    """Small values by key (at most 400 bytes), counted against the hot tier's limit, never evicted.

    Each call is a transaction of its own; `SharedMemory.transact` joins several.
    """

    def __init__(self, memory: SharedMemory, env: lmdb.Environment, rows: Any, name: str) -> None:
        self._memory = memory
        self._env = env
        self._rows = rows
        self._name = name
        self._strip = len(_row(name, b""))

    def get(self, key: bytes) -> bytes | None:
        """The value, or None. TierUnavailable where the memory cannot be read."""
        try:
            with self._env.begin() as txn:
                found = txn.get(_row(self._name, key), db=self._rows)
        except lmdb.Error as error:
            raise TierUnavailable(f"cannot read {self._memory.path}: {error}") from error
        return None if found is None else bytes(found)

    def put(self, key: bytes, value: bytes) -> None:
        """Store; TierUnavailable where there is no room."""
        self._memory.transact(lambda tx: tx.write(self._name, key, value))

    def delete(self, key: bytes) -> bool:
        return self._memory.transact(lambda tx: tx.erase(self._name, key))

    def scan(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """(key, value) in the order of keys. Reads in batches: not a snapshot, never in the way."""
        start = _row(self._name, prefix)
        for row, value in batches_of(self._env, self._rows, start, _SCAN_BATCH):
            yield row[self._strip :], value


def _row(table: str, key: bytes) -> bytes:
    name = table.encode()
    if not 0 < len(name) <= 60 or b"\0" in name:
        raise InvalidInput(f"a table's name must be 1 to 60 bytes without NUL, got {table!r}")
    if len(key) > 400:
        raise InvalidInput(f"a key may be 400 bytes long, got {len(key)}")
    return name + b"\0" + key


class SharedMemory:
    """The environment, its hot tier and its tables. Safe in several processes and threads; a
    process opens a path once (LMDB's locks are the process's), and a forked child opens anew."""

    def __init__(
        self,
        path: str | Path,
        size_bytes: int,
        eviction: str = "cost",
        now: Callable[[], float] = time.time,
        on_event: Sink = ignore,
    ) -> None:
        """Open or create the directory `path`, of at most `size_bytes`: the same in every process.

        Opened with less than before, records are evicted at once, but the file shrinks only when
        the directory is removed. TierUnavailable where it cannot be made or used.
        """
        if size_bytes < 1 << 20:
            raise InvalidInput(f"size_bytes must be at least 1 MiB, got {size_bytes}")
        self.path = Path(path)
        self._on_event = on_event
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _allocate_lock(self.path / "lock.mdb")
            self._env = lmdb.open(
                str(path),
                map_size=_map_bytes(self.path / "data.mdb", size_bytes),
                max_dbs=DATABASES + 1,
                max_readers=MAX_READERS,
                max_spare_txns=16,
                metasync=False,
                sync=False,
                readahead=False,
            )
        except (OSError, lmdb.Error) as error:
            raise TierUnavailable(f"cannot open shared memory at {path}: {error}") from error
        try:
            self._env.reader_check()
            self._rows = self._env.open_db(b"rows")
            limit_bytes = int(size_bytes * RECORD_SHARE)
            self.hot = HotTier(self._env, self._run, limit_bytes, eviction, now)
        except BaseException as error:
            self._env.close()
            if isinstance(error, lmdb.Error):
                raise TierUnavailable(f"cannot use shared memory at {path}: {error}") from error
            raise

    @classmethod
    def open(
        cls, path: str | Path, size_bytes: int, eviction: str = "cost", on_event: Sink = ignore
    ) -> SharedMemory:
        """As the constructor, with the time of day."""
        return cls(path, size_bytes, eviction, on_event=on_event)

    def table(self, name: str) -> Table:
        """The table of that name (1 to 60 bytes); it exists once something is in it."""
        return Table(self, self._env, self._rows, name)

    def transact(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in one write transaction: committed as it returns, undone where it raises.

        Writers of all processes take turns. `work` may run again, from the start, where room had
        to be made first. TierUnavailable where there is none, or the memory cannot be written.
        """
        return self._run(lambda txn: work(Transaction(self.hot, self._rows, txn)))

    def _run(self, work: Callable[[lmdb.Transaction], T]) -> T:
        failure: lmdb.Error | None = None
        for attempt, wait_s in enumerate((0.0, *_WAITS_S)):
            try:
                if attempt:
                    time.sleep(wait_s)
                    self._make_room(evict=attempt > 1)
                return self._once(work)
            except lmdb.MapFullError as error:
                failure = error
            except lmdb.Error as error:
                raise TierUnavailable(f"cannot write {self.path}: {self._why(error)}") from error
        raise TierUnavailable(f"shared memory at {self.path} is full") from failure

    def _why(self, error: lmdb.Error) -> str:
        """The cause; LMDB reports a write that found no space left as an input/output error."""
        try:
            room = os.statvfs(self.path)
        except OSError as gone:
            return f"{error} ({gone})"
        if room.f_bavail * room.f_frsize < 1 << 20:
            return f"{error} (its file system is full: free some space)"
        return str(error)

    def _once(self, work: Callable[[lmdb.Transaction], T]) -> T:
        ledger = self.hot.ledger
        with self._env.begin(write=True) as txn:
            ledger.begin()
            result = work(txn)
            evicted = ledger.evicted
        if evicted:
            self._on_event(Evicted("hot", "bytes", evicted))
        return result

    def _make_room(self, evict: bool) -> None:
        """The map is full although records keep to their limit: dead readers keep freed pages, or
        what is free is too fragmented for a large record."""
        self._env.reader_check()
        ledger = self.hot.ledger
        # LMDB hands out a page again two transactions after it was freed: free in three.
        for _ in range(3 if evict else 0):
            self._once(
                lambda txn: ledger.evict_to(
                    txn, max(0, ledger.counters(txn).used_bytes - ledger.limit_bytes // 32)
                )
            )

    @property
    def file_bytes(self) -> int:
        """What the data file occupies, at most `size_bytes`."""
        try:
            return os.stat(self.path / "data.mdb").st_blocks * 512
        except OSError:
            return 0

    def reader_check(self) -> int:
        """Free the reader slots of processes that died; returns how many."""
        return int(self._env.reader_check())

    def close(self) -> None:
        """Let go of it. What it holds stays until `remove`."""
        self.hot.close()

    @staticmethod
    def remove(path: str | Path) -> None:
        """Give the memory back: delete the directory. For the last one to leave."""
        shutil.rmtree(path, ignore_errors=True)


def _map_bytes(data: Path, size_bytes: int) -> int:
    """The size of the map: `size_bytes`, or what a file that is larger already needs to work in."""
    present = data.stat().st_size if data.exists() else 0
    return size_bytes if present <= size_bytes else present + size_bytes // 4


def _allocate_lock(path: Path) -> None:
    """Create the lock file with its pages allocated. LMDB maps it for writing, and touching a page
    that a full /dev/shm cannot provide would be a SIGBUS. Only a file that nobody has open yet may
    be touched: closing any descriptor of it would drop this process's locks on it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return
    try:
        os.posix_fallocate(descriptor, 0, 64 * (MAX_READERS + 4))
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
