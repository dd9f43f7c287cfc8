"""The warm tier: admitted records in append-only segments on a fast disk.

Reads go through an index in shared memory and never wait for the writer. There is one writer per
directory, by file lock; everyone else follows, and takes over when the lock becomes free. What a
`put` has returned survives a killed process, and (with `durable`) a power loss.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import lmdb
import numpy as np
from numpy.typing import NDArray

from ctrlcache import eviction
from ctrlcache.errors import ConfigError, CorruptRecord, TierUnavailable
from ctrlcache.metrics import Corrupt, Evicted, Sink, ignore
from ctrlcache.tiers import segments
from ctrlcache.tiers.base import Candidate, Entry, Record, TierStats
from ctrlcache.tiers.places import Place, same_place
from ctrlcache.tiers.warm_checks import cause_of, checked
from ctrlcache.tiers.warm_files import Quarantine, WriterLock, disk_bytes, store_id
from ctrlcache.tiers.warm_index import WarmIndex
from ctrlcache.tiers.warm_recovery import Progress, Survey, reconcile
from ctrlcache.tiers.warm_writer import Room, WarmWriter

__all__ = ["WarmTier"]

log = logging.getLogger(__name__)
T = TypeVar("T")

MIN_LIMIT_BYTES = 1 << 18
_ATTEMPTS = 3
_REBUILD = "rebuild"


class WarmTier:
    """Implements `Tier`. Safe in several threads and processes; open it anew after a fork.

    directory: on the disk; its own, no other files in it. index_directory: in shared memory, the
    same for all processes of one server and for no other server; a process opens it once.
    limit_bytes: of all files in `directory`, held before, during and after every call. durable:
    `put` and `delete` wait for the disk itself. index_bytes: the most the index may grow to.
    follow_s: seconds between looks at what other processes did (None: only in `maintain`).
    read_only: never write, whoever else does. clock: seconds, for the ages that eviction sees.

    Opening never fails for what may mend itself (no directory, no room): the tier then misses, its
    `put` raises TierUnavailable with the cause, and `trouble` says what is wrong until it is over.
    """

    name = "warm"

    def __init__(
        self,
        directory: str | Path,
        index_directory: str | Path,
        *,
        limit_bytes: int,
        segment_bytes: int = 64 << 20,
        durable: bool = True,
        policy: str = "cost",
        index_bytes: int = 4 << 30,
        follow_s: float | None = 1.0,
        read_only: bool = False,
        on_event: Sink = ignore,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if limit_bytes < MIN_LIMIT_BYTES:
            raise ConfigError(f"limit_bytes must be {MIN_LIMIT_BYTES} or more, got {limit_bytes}")
        if not 4096 <= segment_bytes <= 1 << 30:
            raise ConfigError(f"segment_bytes must be 4 KiB to 1 GiB, got {segment_bytes}")
        if index_bytes < 1 << 20:
            raise ConfigError(f"index_bytes must be 1 MiB or more, got {index_bytes}")
        self.directory = Path(directory)
        self.index_directory = Path(index_directory)
        self.trouble: str | None = None
        self._room = Room(limit_bytes, min(segment_bytes, limit_bytes // 16))
        self._durable = durable
        self._policy = eviction.policy(policy)
        self._index_bytes = index_bytes
        self._read_only = read_only
        self._on_event = on_event
        self._progress = progress
        self._now = clock
        self._quarantine = Quarantine(self.directory)
        self._rights = WriterLock(self.directory, self.index_directory)
        self._lock = threading.RLock()  # of this process's writing and following
        self._index: WarmIndex | None = None
        self._writer: WarmWriter | None = None
        self._clock = 0.0  # of `gdsf`
        self._uses: dict[bytes, tuple[int, float]] = {}
        self._uses_lock = threading.Lock()
        self._existed = False
        self._said = ""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.maintain()
        if follow_s is not None:
            self._thread = threading.Thread(
                target=self._follow, args=(follow_s,), name="ctrlcache-warm", daemon=True
            )
            self._thread.start()

    # --- reading ------------------------------------------------------------------------------

    def get(self, id: bytes) -> bytes | None:
        index = self._index
        if index is None:
            return None
        try:
            place = index.place(id)
            for _ in range(_ATTEMPTS):
                if place is None:
                    return None
                try:
                    return self._read(place)
                except FileNotFoundError:
                    # Compacted since we asked, then the index knows better now; or all is gone.
                    place = index.place(id)
                except CorruptRecord as error:
                    now = index.place(id)
                    if now is None or same_place(now, place):
                        self._damaged(place, str(error))
                        return None
                    place = now
        except lmdb.Error as error:
            self._say(f"the index cannot be read: {error}")
        except OSError as error:
            self._say(f"cannot read {self.directory}: {error}")
        return None

    def neighbours(
        self, space: bytes, control: NDArray[np.float32], limit: int = 16
    ) -> list[Candidate]:
        index = self._index
        if index is None:
            return []
        try:
            return index.neighbours(space, control, limit)
        except lmdb.Error as error:
            self._say(f"the index cannot be read: {error}")
            return []

    def space(self, space: bytes) -> list[bytes]:
        """Ids of the couplets of a space, for prefetching."""
        try:
            return [] if self._index is None else self._index.space(space)
        except lmdb.Error as error:
            self._say(f"the index cannot be read: {error}")
            return []

    def entry(self, id: bytes) -> Entry | None:
        """What is known of a record beside its payload."""
        try:
            place = None if self._index is None else self._index.place(id)
        except lmdb.Error as error:
            self._say(f"the index cannot be read: {error}")
            return None
        return None if place is None else place.entry

    def scan(self) -> Iterator[Entry]:
        if self._index is not None:
            for place in self._index.scan():
                yield place.entry

    def stats(self) -> TierStats:
        entries = 0 if self._index is None else self._index.count()
        try:
            size = disk_bytes(self.directory)
        except OSError:
            size = 0
        return TierStats(entries, size, self._room.limit_bytes)

    @property
    def writable(self) -> bool:
        """Whether this process is the one writer now."""
        return self._writer is not None and self._rights.held()

    @property
    def index(self) -> WarmIndex | None:
        """For tools; None while it cannot be opened."""
        return self._index

    # --- writing ------------------------------------------------------------------------------

    def put(self, records: Iterable[Record]) -> int:
        """Store records; those already there in the same form count as stored.

        Returns how many are stored, durably and findable. Fewer than given only where the disk
        failed on the way, or where a record is larger than a quarter of the limit allows.
        """
        batch = {record.entry.id: checked(record) for record in records}
        if not batch:
            return 0
        with self._lock:
            self._note_uses()
            stored, error = self._attempt(lambda w: w.put(list(batch.values())))
            if error is not None:
                self._resign()
                self._say(cause_of(error, self.directory))
            return stored

    def delete(self, ids: Iterable[bytes]) -> int:
        """Forget records for good: at once in this server, on disk when the call returns.

        Where another process writes, it makes the deletion durable within moments if it belongs to
        this server; else whoever of this server becomes the writer does.
        """
        wanted = list(dict.fromkeys(ids))
        with self._lock:
            if self.writable:
                return self._attempt(lambda w: w.delete(wanted))
            return self._require_index().forget_for_good(wanted)

    def touch(self, ids: Iterable[bytes]) -> None:
        """Counted in memory; `maintain` writes it to the index, never the caller of this."""
        now_s = self._now()
        with self._uses_lock:
            for id in ids:
                self._uses[id] = (self._uses.get(id, (0, 0.0))[0] + 1, now_s)

    def maintain(self) -> None:
        """Open what could not be opened before, take the writer's lock if it is free, follow who
        has it; write use counts; compact what is mostly dead. Troubles end up in `trouble`."""
        with self._lock:
            try:
                self._settle()
                self._note_uses()
                if self._writer is not None:
                    self._attempt(WarmWriter.upkeep)
                self.trouble = None
            except (OSError, TierUnavailable, lmdb.Error) as error:
                self._say(cause_of(error, self.directory))

    def rebuild(self, progress: Progress | None = None) -> int:
        """Make the index anew from the segments; returns how many records it holds then.

        TierUnavailable where another process of this server maintains the index; `request_rebuild`
        asks that one.
        """
        with self._lock:
            index = self._require_index()
            if not self._rights.acquire_local():
                raise TierUnavailable("another process of this server maintains the index")
            self._resign()
            before, self._progress = self._progress, progress or self._progress
            try:
                index.clear()
                self._rights.release_local()
                self._settle()
            finally:
                self._progress = before
            return index.count()

    def request_rebuild(self) -> None:
        """Have the process that maintains this server's index make it anew within moments."""
        self._require_index().set_note(_REBUILD, b"1")

    @property
    def rebuild_pending(self) -> bool:
        return self._require_index().note(_REBUILD) is not None

    def close(self) -> None:
        """Stop, keep use counts, release the lock. The index stays for the server's others."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            try:
                self._note_uses()
                if self._writer is not None and self._rights.held():
                    self._writer.save_uses()
            except (OSError, TierUnavailable, lmdb.Error) as error:
                log.warning("warm tier: use counts are lost: %s", error)
            self._resign()
            self._rights.release()
            if self._index is not None:
                self._index.close()
                self._index = None

    @staticmethod
    def remove_index(index_directory: str | Path) -> None:
        """Give the index's memory back, when the last process of the server has closed it."""
        shutil.rmtree(index_directory, ignore_errors=True)

    # --- roles --------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Be the writer if the lock is free, else follow."""
        index = self._require_index()
        if self._writer is not None and self._rights.held():
            if index.note(_REBUILD) is not None:
                self.rebuild()
            return
        self._resign()
        if not self._read_only:
            try:
                if self._acquire():
                    self._take_over(index)
                    return
            except OSError as error:
                self._follow_others(index)
                cause = cause_of(error, self.directory)
                raise TierUnavailable(f"{cause}; what is there can still be read") from error
            self._say_once(
                f"{self.directory} is written by {self._rights.holder()}: reading along, and "
                "taking over when that ends"
            )
        self._follow_others(index)
        index.reap()

    def _acquire(self) -> bool:
        if not self._existed:
            self.directory.mkdir(parents=True, exist_ok=True)
        # A directory that vanishes later is not made again: perhaps its disk is not mounted.
        self._existed = True
        return self._rights.acquire()

    def _take_over(self, index: WarmIndex) -> None:
        store_id(self.directory, create=True)
        survey = self._reconcile(index, exclusive=True)
        self._writer = WarmWriter(
            self.directory,
            index,
            survey,
            self._room,
            durable=self._durable,
            policy=self._policy,
            now=self._now,
            clock=self._clock,
            quarantine=self._quarantine,
            on_corrupt=self._damaged,
            on_evicted=self._evicted,
        )
        self._said = ""
        log.info("warm tier: writing %s, %d records", self.directory, index.count())

    def _follow_others(self, index: WarmIndex) -> None:
        # A sibling that holds the local lock keeps the index we share up to date.
        if self._rights.acquire_local():
            try:
                self._reconcile(index, exclusive=False)
            finally:
                self._rights.release_local()

    def _reconcile(self, index: WarmIndex, exclusive: bool) -> Survey:
        store = store_id(self.directory)
        if index.note("store") != store or index.note(_REBUILD) is not None:
            index.clear()
            index.set_note("store", store)
        survey = reconcile(
            index,
            self.directory,
            exclusive=exclusive,
            quarantined=self._quarantine.load(),
            progress=self._progress,
        )
        for damage in survey.damage:
            self._count_damage(damage.segment, damage.offset, b"", damage.reason)
        return survey

    def _resign(self) -> None:
        """Put the pen down; the lock stays ours, the next writer starts from what is on disk."""
        if self._writer is not None:
            self._clock = self._writer.clock
            self._writer.abandon()
            self._writer = None

    def _attempt(self, work: Callable[[WarmWriter], T]) -> T:
        """Run `work` as the writer; whatever fails becomes TierUnavailable with its cause."""
        try:
            self._settle()
            if self._writer is None:
                reason = (
                    "was opened for reading only"
                    if self._read_only
                    else f"is written by {self._rights.holder()}"
                )
                raise TierUnavailable(f"{self.directory} {reason}")
            return work(self._writer)
        except (OSError, TierUnavailable, lmdb.Error) as error:
            self._resign()
            cause = cause_of(error, self.directory)
            self._say(cause)
            raise TierUnavailable(cause) from error

    def _require_index(self) -> WarmIndex:
        if self._index is None:
            if self._closed.is_set():
                raise TierUnavailable("the warm tier is closed")
            self._index = WarmIndex(self.index_directory, self._index_bytes)
        return self._index

    # --- details ------------------------------------------------------------------------------

    def _read(self, place: Place) -> bytes:
        # Opened for each read: no descriptor keeps a compacted file's bytes on the disk, and a
        # directory that was gone and came back needs no care. It costs microseconds.
        path = segments.segment_path(self.directory, place.segment)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            header, payload = segments.read_record(
                fd, place.segment, place.offset, place.header_bytes, place.payload_bytes
            )
        finally:
            os.close(fd)
        if header.entry.id != place.entry.id or header.tombstone:
            raise CorruptRecord("another record stands here")
        return payload

    def _damaged(self, place: Place, reason: str) -> None:
        """Count a damaged record once, and let nobody look at it again."""
        index = self._index
        if index is None or store_id(self.directory) != index.note("store"):
            return  # another store was put here (a restore): the next look at it rebuilds
        try:
            found_first = index.forget([place.entry.id], expect={place.entry.id: place}) > 0
        except TierUnavailable:
            found_first = True
        if found_first:
            self._count_damage(place.segment, place.offset, place.entry.id, reason)

    def _count_damage(self, segment: int, offset: int, id: bytes, reason: str) -> None:
        self._quarantine.add(segment, offset, id, reason)
        self._on_event(Corrupt(self.name))
        log.warning(
            "warm tier: segment %d is damaged at %d (%s): record %s is lost",
            segment,
            offset,
            reason,
            id.hex() or "unknown",
        )

    def _evicted(self, count: int) -> None:
        if count:
            self._on_event(Evicted(self.name, "bytes", count))

    def _note_uses(self) -> None:
        with self._uses_lock:
            uses, self._uses = self._uses, {}
        if uses and self._index is not None:
            clock = self._clock if self._writer is None else self._writer.clock
            self._index.add_uses(uses, clock)

    def _follow(self, interval_s: float) -> None:
        while not self._closed.wait(interval_s):
            self.maintain()

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            log.warning("warm tier: %s", text)

    def _say(self, cause: str) -> None:
        self.trouble = cause
        self._say_once(cause)
