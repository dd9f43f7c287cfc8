"""Making room on the warm disk: segments whose records save the least go first.

A record is not evicted by itself. A whole segment is given up at once: what is worth most of its
live records is copied to the newest segment, the rest is evicted, and the file is removed. A crash
in between leaves both copies, which are the same; an evicted record may then be found again, whole,
and is simply back. A *deleted* record never is: tombstones are copied along for as long as any
older segment might hold what they declare dead.
"""

from __future__ import annotations

import os
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ctrlcache.errors import CorruptRecord
from ctrlcache.eviction import Policy
from ctrlcache.tiers import segments
from ctrlcache.tiers.places import Place, SegmentRow
from ctrlcache.tiers.segment_writer import Pending, SegmentWriter
from ctrlcache.tiers.warm_index import WarmIndex

__all__ = ["Compactor", "Plan"]

#: Priorities are ranked against this many records drawn at random.
_SAMPLE = 512
#: Segments considered for one compaction: those with the most dead bytes, and some at random.
_DEADEST = 8
_OTHERS = 24
#: Live records looked at to estimate what a segment is worth.
_ESTIMATE = 128
#: Records ranked above this share of the sample are worth a copy ...
_KEEP_RANK = 0.5
#: ... as long as the copies take no more than this share of the segment.
_KEEP_SHARE = 0.5
_GROUP_BYTES = 4 << 20


@dataclass(frozen=True)
class Plan:
    """How to give up a segment; `freed` bytes in the end."""

    segment: int
    keep: tuple[Place, ...]
    drop: tuple[Place, ...]
    freed: int


@dataclass(frozen=True)
class _Estimate:
    segment: int
    lost: float  # summed rank of the bytes that would be evicted
    freed: float


class Compactor:
    """Chooses segments and compacts them, for the one writer.

    on_corrupt(place, reason) is told of records that turn out damaged while they are copied.
    """

    def __init__(
        self,
        index: WarmIndex,
        directory: Path,
        policy: Policy,
        on_corrupt: Callable[[Place, str], None],
        now: Callable[[], float] = time.time,
        seed: int | None = None,
    ) -> None:
        self._index = index
        self._directory = directory
        self._policy = policy
        self._on_corrupt = on_corrupt
        self._now = now
        self._rng = random.Random(seed)
        #: The highest priority evicted so far: the clock of `gdsf`.
        self.clock = 0.0

    def choose(self, sizes: Mapping[int, int], active: int | None) -> Plan | None:
        """The segment whose removal frees the most for the least; None where there is none."""
        rows = self._index.segments()
        closed = [number for number in sizes if number != active]
        if not closed:
            return None
        scale = self._scale()
        estimates = [
            self._estimate(number, sizes[number], rows.get(number, SegmentRow()), scale)
            for number in self._candidates(closed, sizes, rows)
        ]
        best = min(
            (e for e in estimates if e.freed > 0),
            key=lambda e: (e.lost / e.freed, -e.freed),
            default=None,
        )
        return None if best is None else self._plan(best.segment, sizes[best.segment], scale)

    def deadest(self, sizes: Mapping[int, int], active: int | None, share: float) -> Plan | None:
        """The segment with the most dead bytes, if they are more than `share` of it."""
        rows = self._index.segments()
        dead = {
            number: 1.0 - rows.get(number, SegmentRow()).live_bytes / max(size, 1)
            for number, size in sizes.items()
            if number != active
        }
        number = max(dead, key=lambda n: dead[n], default=None)
        if number is None or dead[number] <= share:
            return None
        return self._plan(number, sizes[number], self._scale())

    def run(self, plan: Plan, writer: SegmentWriter) -> int:
        """Carry a plan out; returns how many records were evicted.

        OSError as the disk reports it: the segment is then still there, and so are its records.
        """
        self._copy(plan, writer)
        if plan.drop:
            self.clock = max(self.clock, *self._priorities(plan.drop))
        dropped = self._index.forget(
            [place.entry.id for place in plan.drop],
            expect={place.entry.id: place for place in plan.drop},
        )
        row = self._index.segments().get(plan.segment, SegmentRow())
        self._index.set_rows({plan.segment: replace(row, doomed=True)})
        segments.segment_path(self._directory, plan.segment).unlink(missing_ok=True)
        segments.fsync_directory(self._directory)
        self._index.drop_segment(plan.segment)
        return dropped

    def _candidates(
        self, closed: list[int], sizes: Mapping[int, int], rows: Mapping[int, SegmentRow]
    ) -> list[int]:
        def dead(number: int) -> int:
            return sizes[number] - rows.get(number, SegmentRow()).live_bytes

        ranked = sorted(closed, key=dead, reverse=True)
        others = ranked[_DEADEST:]
        return ranked[:_DEADEST] + self._rng.sample(others, min(_OTHERS, len(others)))

    def _scale(self) -> list[float]:
        return sorted(self._priorities(self._index.sample(_SAMPLE, self._rng)))

    def _priorities(self, places: Sequence[Place]) -> list[float]:
        now_s = self._now()
        return [self._policy(usage, now_s) for usage in self._index.usages(places)]

    def _ranks(self, places: Sequence[Place], scale: list[float]) -> list[float]:
        """Share of the sample below each record: comparable whatever the policy's unit."""
        return [bisect_left(scale, p) / max(1, len(scale)) for p in self._priorities(places)]

    def _estimate(self, number: int, size: int, row: SegmentRow, scale: list[float]) -> _Estimate:
        if row.live_bytes <= size * _KEEP_SHARE:
            return _Estimate(number, 0.0, size - row.live_bytes)
        ids = self._index.live(number)
        picked = self._rng.sample(ids, _ESTIMATE) if len(ids) > _ESTIMATE else ids
        places = [p for p in self._index.places(picked).values() if p.segment == number]
        time.sleep(0)
        keep, drop = _split(places, self._ranks(places, scale), size * len(picked) / len(ids))
        share = len(ids) / max(1, len(picked))
        lost = sum(rank * place.size_bytes for rank, place in drop)
        freed = size - share * sum(place.size_bytes for _, place in keep)
        return _Estimate(number, share * lost, freed)

    def _plan(self, number: int, size: int, scale: list[float]) -> Plan:
        ids = self._index.live(number)
        places = [p for p in self._index.places(ids).values() if p.segment == number]
        live = sum(place.size_bytes for place in places)
        if live <= size * _KEEP_SHARE:
            return Plan(number, tuple(places), (), size - live)
        keep, drop = _split(places, self._ranks(places, scale), size)
        freed = size - sum(place.size_bytes for _, place in keep)
        return Plan(number, tuple(p for _, p in keep), tuple(p for _, p in drop), freed)

    def _copy(self, plan: Plan, writer: SegmentWriter) -> None:
        pending: list[Pending] = [
            replace(Pending.tombstone(id), sequence=sequence)
            for id, sequence in self._needed_tombstones(plan.segment).items()
        ]
        path = segments.segment_path(self._directory, plan.segment)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for place in sorted(plan.keep, key=lambda place: place.offset):
                try:
                    header, payload = segments.read_record(
                        fd, plan.segment, place.offset, place.header_bytes, place.payload_bytes
                    )
                except CorruptRecord as error:
                    self._on_corrupt(place, str(error))
                    continue
                pending.append(Pending(header.entry, payload, sequence=place.sequence))
                if sum(item.size_bytes for item in pending) >= _GROUP_BYTES:
                    self._write(pending, writer)
                    pending = []
        finally:
            os.close(fd)
        self._write(pending, writer)

    def _write(self, pending: Sequence[Pending], writer: SegmentWriter) -> None:
        if pending:
            headers = writer.append(pending)
            writer.sync()
            self._index.publish(headers, writer.rows())

    def _needed_tombstones(self, segment: int) -> dict[bytes, int]:
        """Those of the segment that some other one's older records still need; forgets the rest."""
        oldest = min(
            (row.oldest for number, row in self._index.segments().items() if number != segment),
            default=1 << 64,
        )
        found = self._index.tombstones(segment)
        needed = {id: sequence for id, sequence in found.items() if sequence > oldest}
        self._index.drop_tombstones(id for id in found if id not in needed)
        return needed


def _split(
    places: Sequence[Place], ranks: Sequence[float], size: float
) -> tuple[list[tuple[float, Place]], list[tuple[float, Place]]]:
    """Which (rank, record) to keep of a segment of `size` bytes, and which to evict."""
    keep: list[tuple[float, Place]] = []
    drop: list[tuple[float, Place]] = []
    room = size * _KEEP_SHARE
    for rank, place in sorted(zip(ranks, places, strict=True), key=lambda item: -item[0]):
        if rank >= _KEEP_RANK and place.size_bytes <= room:
            room -= place.size_bytes
            keep.append((rank, place))
        else:
            drop.append((rank, place))
    return keep, drop
