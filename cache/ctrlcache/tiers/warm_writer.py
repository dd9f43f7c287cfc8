"""What the one writer of a warm directory does: append, make room, delete, tidy up.

Order is everything here: write, sync, publish in the index. What the index shows is on the disk.
Methods raise OSError, lmdb.Error or TierUnavailable; the writer is then given up, and the next one
starts from what is on the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ctrlcache.errors import TierUnavailable
from ctrlcache.eviction import Policy
from ctrlcache.tiers import segments
from ctrlcache.tiers.base import Entry, Record
from ctrlcache.tiers.compaction import Compactor
from ctrlcache.tiers.places import Place
from ctrlcache.tiers.segment_writer import Pending, SegmentWriter
from ctrlcache.tiers.warm_files import Quarantine, disk_bytes, load_uses, save_uses
from ctrlcache.tiers.warm_index import WarmIndex
from ctrlcache.tiers.warm_recovery import Survey

__all__ = ["Room", "WarmWriter"]

log = logging.getLogger(__name__)

_GROUP_BYTES = 4 << 20
_USES_SHARE = 64  # use counts kept over a restart take at most 1/64 of the limit
_SAVE_USES_S = 300.0
_UNUSED_SHARE = 0.5  # a segment with more dead bytes than this is compacted without need


@dataclass(frozen=True)
class Room:
    """How the bytes of the limit are divided."""

    limit_bytes: int
    segment_bytes: int

    @property
    def budget_bytes(self) -> int:
        """What files may take before a write; the rest is room for copies of half a segment, for
        its footer, and for the small files."""
        small = self.limit_bytes // _USES_SHARE + 8 * 4096
        return self.limit_bytes - self.segment_bytes - small

    @property
    def largest_record(self) -> int:
        return self.budget_bytes // 4


class WarmWriter:
    """Writes `directory` and `index` while its owner holds the writer's lock.

    on_corrupt(place, reason) and on_evicted(count) are told of what happens on the way.
    """

    def __init__(
        self,
        directory: Path,
        index: WarmIndex,
        survey: Survey,
        room: Room,
        *,
        durable: bool,
        policy: Policy,
        now: Callable[[], float],
        clock: float,
        quarantine: Quarantine,
        on_corrupt: Callable[[Place, str], None],
        on_evicted: Callable[[int], None],
    ) -> None:
        self._directory = directory
        self._index = index
        self._room = room
        self._quarantine = quarantine
        self._on_evicted = on_evicted
        self._segments = SegmentWriter(
            directory,
            room.segment_bytes,
            durable,
            max(survey.segments, default=0) + 1,
            index.newest_sequence(),
        )
        if survey.unsealed is not None:
            self._segments.adopt(*survey.unsealed)
        self._compactor = Compactor(index, directory, policy, on_corrupt, now)
        self._compactor.clock = clock
        self._uses_saved = time.monotonic()
        self._used = disk_bytes(directory)
        index.set_uses(load_uses(directory))
        self._make_room(0)  # the limit may be lower than it was

    @property
    def clock(self) -> float:
        return self._compactor.clock

    def put(self, batch: Sequence[Record]) -> tuple[int, Exception | None]:
        """How many records are stored, and what stopped the rest, if anything did on the way."""
        known = self._index.places(record.entry.id for record in batch)
        self._used = disk_bytes(self._directory)
        stored = 0
        for group, count in self._groups(batch, known):
            try:
                self._append(group)
            except Exception as error:
                if not stored:
                    raise
                return stored, error
            stored += count
        if not stored:
            raise TierUnavailable(
                f"no record of at most {self._room.largest_record} bytes among {len(batch)}"
            )
        return stored, None

    def delete(self, ids: Sequence[bytes]) -> int:
        present = list(self._index.places(ids))
        self._append([Pending.tombstone(id) for id in present])
        return len(present)

    def upkeep(self) -> None:
        """What there is to do between puts."""
        self._index.reap()
        if pending := self._index.pending():
            self._append([Pending.tombstone(id) for id in pending])
            self._index.settle_pending(pending)
        sizes = segments.list_segments(self._directory)
        plan = self._compactor.deadest(sizes, self._segments.active, _UNUSED_SHARE)
        if plan is not None:
            self._on_evicted(self._compactor.run(plan, self._segments))
            self._quarantine.prune(segments.list_segments(self._directory))
        if time.monotonic() - self._uses_saved > _SAVE_USES_S:
            self.save_uses()

    def save_uses(self) -> None:
        self._uses_saved = time.monotonic()
        uses = list(self._index.all_uses())
        share = self._room.limit_bytes // _USES_SHARE // 2  # the old file and the new one
        if uses:
            save_uses(self._directory, uses, share)

    def abandon(self) -> None:
        self._segments.abandon()

    def _groups(
        self, batch: Sequence[Record], known: dict[bytes, Place]
    ) -> list[tuple[list[Pending], int]]:
        """The batch in pieces that are written whole, and how many of its records each settles."""
        largest = min(_GROUP_BYTES, self._room.segment_bytes)
        groups: list[tuple[list[Pending], int]] = []
        group: list[Pending] = []
        count = size = 0
        for record in batch:
            pending = _pending(record, known.get(record.entry.id))
            need = sum(item.size_bytes for item in pending)
            if need > self._room.largest_record:
                log.warning("warm tier: a record of %d bytes is too large to keep", need)
                continue
            if group and size + need > largest:
                groups.append((group, count))
                group, count, size = [], 0, 0
            group += pending
            count += 1
            size += need
        return [*groups, (group, count)]

    def _append(self, group: Sequence[Pending]) -> None:
        if not group:
            return
        size = sum(item.size_bytes for item in group) + self._segments.overhead_bytes(group)
        self._make_room(size)
        headers = self._segments.append(group)
        self._segments.sync()
        self._used += size
        self._index.publish(headers, self._segments.rows())

    def _make_room(self, need: int) -> None:
        if self._used + need > self._room.budget_bytes:
            self._used = disk_bytes(self._directory)  # estimated on the high side until now
        while self._used + need > self._room.budget_bytes:
            sizes = segments.list_segments(self._directory)
            plan = self._compactor.choose(sizes, self._segments.active)
            if plan is not None:
                self._on_evicted(self._compactor.run(plan, self._segments))
            elif self._segments.active is not None:
                self._segments.seal()
            else:
                raise TierUnavailable(
                    f"the limit of {self._room.limit_bytes} bytes leaves no room for {need} more"
                )
            self._used = disk_bytes(self._directory)


def _pending(record: Record, known: Place | None) -> list[Pending]:
    pending = Pending(record.entry, record.payload)
    if known is None:
        return [pending]
    digest = segments.checksum(record.payload)[: len(known.digest)]
    if known.digest == digest and _same_entry(known.entry, record.entry):
        return []
    # The old copy must not come back when this one is evicted some day.
    return [Pending.tombstone(record.entry.id), pending]


def _same_entry(a: Entry, b: Entry) -> bool:
    if (a.space, a.radius, a.curvature) != (b.space, b.radius, b.curvature):
        return False
    if a.control is None or b.control is None:
        return a.control is b.control
    return np.array_equal(a.control, np.asarray(b.control, np.float32))
