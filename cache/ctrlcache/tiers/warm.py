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

import lmdb
import numpy as np
from numpy.typing import NDArray

from ctrlcache import eviction
from ctrlcache.errors import ConfigError, CorruptRecord, TierUnavailable
from ctrlcache.metrics import Sink, ignore
from ctrlcache.tiers import segments
from ctrlcache.tiers.base import Candidate, Entry, Record, TierStats
from ctrlcache.tiers.places import Place, same_place
from ctrlcache.tiers.warm_checks import cause_of, checked
from ctrlcache.tiers.warm_files import disk_bytes
from ctrlcache.tiers.warm_index import WarmIndex
from ctrlcache.tiers.warm_keeper import Keeper, Settings
from ctrlcache.tiers.warm_recovery import Progress
from ctrlcache.tiers.warm_writer import Room, WarmWriter

__all__ = ["WarmTier"]

log = logging.getLogger(__name__)

MIN_LIMIT_BYTES = 1 << 18
_ATTEMPTS = 3


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
        self._keeper = Keeper(
            Settings(
                self.directory,
                self.index_directory,
                index_bytes,
                Room(limit_bytes, min(segment_bytes, limit_bytes // 16)),
                durable,
                eviction.policy(policy),
                read_only,
                on_event,
                clock,
            ),
            progress,
        )
        self._now = clock
        self._lock = threading.RLock()  # of this process's writing and following
        self._uses: dict[bytes, tuple[int, float]] = {}
        self._uses_lock = threading.Lock()
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
        index = self._keeper.index
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
                        self._keeper.damaged(place, str(error))
                        return None
                    place = now
        except lmdb.Error as error:
            self._keeper.say(f"the index cannot be read: {error}")
        except OSError as error:
            self._keeper.say(f"cannot read {self.directory}: {error}")
        return None

    def neighbours(
        self, space: bytes, control: NDArray[np.float32], limit: int = 16
    ) -> list[Candidate]:
        index = self._keeper.index
        if index is None:
            return []
        try:
            return index.neighbours(space, control, limit)
        except lmdb.Error as error:
            self._keeper.say(f"the index cannot be read: {error}")
            return []

    def space(self, space: bytes) -> list[bytes]:
        """Ids of the couplets of a space, for prefetching."""
        try:
            return [] if self._keeper.index is None else self._keeper.index.space(space)
        except lmdb.Error as error:
            self._keeper.say(f"the index cannot be read: {error}")
            return []

    def entry(self, id: bytes) -> Entry | None:
        """What is known of a record beside its payload."""
        try:
            place = None if self._keeper.index is None else self._keeper.index.place(id)
        except lmdb.Error as error:
            self._keeper.say(f"the index cannot be read: {error}")
            return None
        return None if place is None else place.entry

    def scan(self) -> Iterator[Entry]:
        if self._keeper.index is not None:
            for place in self._keeper.index.scan():
                yield place.entry

    def stats(self) -> TierStats:
        entries = 0 if self._keeper.index is None else self._keeper.index.count()
        try:
            size = disk_bytes(self.directory)
        except OSError:
            size = 0
        return TierStats(entries, size, self._keeper.settings.room.limit_bytes)

    @property
    def writable(self) -> bool:
        """Whether this process is the one writer now."""
        return self._keeper.writable

    @property
    def trouble(self) -> str | None:
        """What is wrong now, in words, or None."""
        return self._keeper.trouble

    @property
    def index(self) -> WarmIndex | None:
        """For tools; None while it cannot be opened."""
        return self._keeper.index

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
            stored, error = self._keeper.attempt(lambda w: w.put(list(batch.values())))
            if error is not None:
                self._keeper.resign()
                self._keeper.say(cause_of(error, self.directory))
            return stored

    def delete(self, ids: Iterable[bytes]) -> int:
        """Forget records for good: at once in this server, on disk when the call returns.

        Where another process writes, it makes the deletion durable within moments if it belongs to
        this server; else whoever of this server becomes the writer does.
        """
        wanted = list(dict.fromkeys(ids))
        with self._lock:
            if self.writable:
                return self._keeper.attempt(lambda w: w.delete(wanted))
            return self._keeper.require_index().forget_for_good(wanted)

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
                self._keeper.settle()
                self._note_uses()
                if self._keeper.writer is not None:
                    self._keeper.attempt(WarmWriter.upkeep)
                self._keeper.trouble = None
            except (OSError, TierUnavailable, lmdb.Error) as error:
                self._keeper.say(cause_of(error, self.directory))

    def rebuild(self, progress: Progress | None = None) -> int:
        """Make the index anew from the segments; returns how many records it holds then.

        TierUnavailable where another process of this server maintains the index; `request_rebuild`
        asks that one.
        """
        with self._lock:
            return self._keeper.rebuild(progress)

    def request_rebuild(self) -> None:
        """Have the process that maintains this server's index make it anew within moments."""
        self._keeper.request_rebuild()

    @property
    def rebuild_pending(self) -> bool:
        return self._keeper.rebuild_pending

    def close(self) -> None:
        """Stop, keep use counts, release the lock. The index stays for the server's others."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            try:
                self._note_uses()
            except (TierUnavailable, lmdb.Error) as error:
                log.warning("warm tier: use counts are lost: %s", error)
            self._keeper.close()

    @staticmethod
    def remove_index(index_directory: str | Path) -> None:
        """Give the index's memory back, when the last process of the server has closed it."""
        shutil.rmtree(index_directory, ignore_errors=True)

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

    def _note_uses(self) -> None:
        with self._uses_lock:
            uses, self._uses = self._uses, {}
        if uses and self._keeper.index is not None:
            self._keeper.index.add_uses(uses, self._keeper.clock)

    def _follow(self, interval_s: float) -> None:
        while not self._closed.wait(interval_s):
            self.maintain()
