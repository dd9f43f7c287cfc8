"""Who keeps a server's warm index true, and writes the directory if it may.

A process is the writer while it holds the directory's lock, and a follower else. It changes from
one to the other by itself, looking again at every call of `settle`; whatever goes wrong on the way
is put into words once, and over when it no longer goes wrong.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import lmdb

from ctrlcache.errors import TierUnavailable
from ctrlcache.eviction import Policy
from ctrlcache.metrics import Corrupt, Evicted, Sink
from ctrlcache.tiers.places import Place
from ctrlcache.tiers.warm_checks import cause_of
from ctrlcache.tiers.warm_files import Quarantine, WriterLock, store_id
from ctrlcache.tiers.warm_index import WarmIndex
from ctrlcache.tiers.warm_recovery import Progress, Survey, reconcile
from ctrlcache.tiers.warm_writer import Room, WarmWriter

__all__ = ["Keeper", "Settings"]

log = logging.getLogger(__name__)
T = TypeVar("T")

_REBUILD = "rebuild"
_TIER = "warm"


@dataclass(frozen=True)
class Settings:
    """See `warm.WarmTier`."""

    directory: Path
    index_directory: Path
    index_bytes: int
    room: Room
    durable: bool
    policy: Policy
    read_only: bool
    on_event: Sink
    now: Callable[[], float]


class Keeper:
    """One per process and directory. Its owner lets one thread in at a time, except to read
    `index`, `writable` and `trouble`, and to report damage."""

    def __init__(self, settings: Settings, progress: Progress | None) -> None:
        self.settings = settings
        self.directory = settings.directory
        self.index: WarmIndex | None = None
        self.writer: WarmWriter | None = None
        #: What is wrong, until it is over.
        self.trouble: str | None = None
        self._progress = progress
        self._quarantine = Quarantine(settings.directory)
        self._rights = WriterLock(settings.directory, settings.index_directory)
        self._clock = 0.0  # of `gdsf`
        self._existed = False
        self._closed = False
        self._said = ""

    @property
    def writable(self) -> bool:
        return self.writer is not None and self._rights.held()

    @property
    def clock(self) -> float:
        return self._clock if self.writer is None else self.writer.clock

    def settle(self) -> None:
        """Be the writer if the lock is free, else follow."""
        index = self.require_index()
        if self.writer is not None and self._rights.held():
            if index.note(_REBUILD) is not None:
                self.rebuild()
            return
        self.resign()
        if not self.settings.read_only:
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
        self.writer = WarmWriter(
            self.directory,
            index,
            survey,
            self.settings.room,
            durable=self.settings.durable,
            policy=self.settings.policy,
            now=self.settings.now,
            clock=self._clock,
            quarantine=self._quarantine,
            on_corrupt=self.damaged,
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
        if not self.directory.is_dir():
            # Before anything is forgotten: a disk that is not mounted for a while loses nothing.
            raise FileNotFoundError(errno.ENOENT, "no directory", str(self.directory))
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

    def resign(self) -> None:
        """Put the pen down; the lock stays ours, the next writer starts from what is on disk."""
        if self.writer is not None:
            self._clock = self.writer.clock
            self.writer.abandon()
            self.writer = None

    def attempt(self, work: Callable[[WarmWriter], T]) -> T:
        """Run `work` as the writer; whatever fails becomes TierUnavailable with its cause."""
        try:
            self.settle()
            if self.writer is None:
                reason = (
                    "was opened for reading only"
                    if self.settings.read_only
                    else f"is written by {self._rights.holder()}"
                )
                raise TierUnavailable(f"{self.directory} {reason}")
            return work(self.writer)
        except (OSError, TierUnavailable, lmdb.Error) as error:
            self.resign()
            cause = cause_of(error, self.directory)
            self.say(cause)
            raise TierUnavailable(cause) from error

    def require_index(self) -> WarmIndex:
        if self.index is None:
            if self._closed:
                raise TierUnavailable("the warm tier is closed")
            self.index = WarmIndex(self.settings.index_directory, self.settings.index_bytes)
        return self.index

    def rebuild(self, progress: Progress | None = None) -> int:
        """Make the index anew from the segments; returns how many records it holds then.

        TierUnavailable where another process of this server maintains the index; `request_rebuild`
        asks that one.
        """
        index = self.require_index()
        if not self._rights.acquire_local():
            raise TierUnavailable("another process of this server maintains the index")
        self.resign()
        before, self._progress = self._progress, progress or self._progress
        try:
            index.clear()
            self._rights.release_local()
            self.settle()
        finally:
            self._progress = before
        return index.count()

    def request_rebuild(self) -> None:
        self.require_index().set_note(_REBUILD, b"1")

    @property
    def rebuild_pending(self) -> bool:
        return self.require_index().note(_REBUILD) is not None

    def damaged(self, place: Place, reason: str) -> None:
        """Count a damaged record once, and let nobody look at it again."""
        index = self.index
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
        self.settings.on_event(Corrupt(_TIER))
        log.warning(
            "warm tier: segment %d is damaged at %d (%s): record %s is lost",
            segment,
            offset,
            reason,
            id.hex() or "unknown",
        )

    def _evicted(self, count: int) -> None:
        if count:
            self.settings.on_event(Evicted(_TIER, "bytes", count))

    def close(self) -> None:
        """Save use counts, release the lock and the index. Nothing can be opened afterwards."""
        self._closed = True
        try:
            if self.writable and self.writer is not None:
                self.writer.save_uses()
        except (OSError, TierUnavailable, lmdb.Error) as error:
            log.warning("warm tier: use counts are lost: %s", error)
        self.resign()
        self._rights.release()
        if self.index is not None:
            self.index.close()
            self.index = None

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            log.warning("warm tier: %s", text)

    def say(self, cause: str) -> None:
        self.trouble = cause
        self._say_once(cause)
