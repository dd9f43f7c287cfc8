"""Bringing the warm index and the segments on disk together.

Done whole at a start with an empty index, and in small by everyone who follows another writer: what
was appended is read, what was compacted away is forgotten. Only headers are read, except where a
writer takes over: what the last one may have left half-written is verified whole, and cut off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from ctrlcache.errors import CorruptRecord
from ctrlcache.tiers import segments
from ctrlcache.tiers.bulk import Bulk
from ctrlcache.tiers.places import SegmentRow
from ctrlcache.tiers.segment_scan import Damage, scan
from ctrlcache.tiers.segments import Header
from ctrlcache.tiers.warm_index import WarmIndex

__all__ = ["Progress", "Survey", "reconcile"]

#: (bytes of segments looked at, of all)
Progress = Callable[[int, int], None]
_BATCH = 4096


@dataclass
class Survey:
    """What a reconciliation found.

    segments: number -> size of the files. lost: records forgotten because their file is gone or
    shorter. damage: what is neither a record nor an interrupted write, nor known from quarantine.
    unsealed: the newest segment, its records and where they end, where the caller may go on
    appending to it.
    """

    segments: dict[int, int] = field(default_factory=dict)
    loaded: int = 0
    lost: int = 0
    damage: list[Damage] = field(default_factory=list)
    unsealed: tuple[int, list[Header], int] | None = None


def reconcile(
    index: WarmIndex,
    directory: Path,
    *,
    exclusive: bool,
    quarantined: Collection[tuple[int, int, bytes]] = (),
    progress: Progress | None = None,
) -> Survey:
    """Make the index true to the segments in `directory`.

    exclusive: the caller holds the writer's lock; the tail of the newest segment is then verified
    and can be cut; segments that a compaction had done with, or that were never begun, are removed.
    OSError where the directory cannot be read, TierUnavailable where the index cannot grow.
    """
    survey = Survey(segments.list_segments(directory))
    known = index.segments()
    # Pending deletions name records that must not be filled in with all the others.
    fresh = not known and not index.count() and not index.pending()
    bulk = Bulk(index, quarantined) if fresh else None
    newest = max(survey.segments, default=0)
    total = sum(survey.segments.values())
    done = 0
    for number, size in list(survey.segments.items()):
        row = known.get(number, SegmentRow())
        tail = exclusive and number == newest and not row.sealed
        try:
            stub = size < segments.SEGMENT_HEADER_BYTES  # its maker was killed at once
            if exclusive and (row.doomed or stub):
                segments.segment_path(directory, number).unlink()
                del survey.segments[number]
            elif size != row.seen or tail:
                load = _Load(index, number, survey, quarantined, bulk)
                load.run(segments.segment_path(directory, number), row, tail, exclusive)
        except FileNotFoundError:
            del survey.segments[number]  # compacted away meanwhile
        done += size
        if progress is not None:
            progress(done, total)
    if bulk is not None:
        survey.loaded = bulk.finish()
    for number in known:
        if number not in survey.segments:
            survey.lost += index.drop_segment(number)
    return survey


class _Load:
    """One segment on its way into the index."""

    def __init__(
        self,
        index: WarmIndex,
        number: int,
        survey: Survey,
        quarantined: Collection[tuple[int, int, bytes]],
        bulk: Bulk | None,
    ) -> None:
        self._bulk = bulk
        self._index = index
        self._number = number
        self._survey = survey
        self._quarantined = quarantined
        self._known = {offset for segment, offset, _ in quarantined if segment == number}

    def run(self, path: Path, row: SegmentRow, tail: bool, exclusive: bool) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            stat = os.fstat(fd)
            start = row.indexed
            if stat.st_size < start:
                # A group that the writer took back after an error, or damage from outside.
                self._survey.lost += self._index.drop_segment(self._number, stat.st_size)
                start = 0
            footer = segments.read_footer(fd, self._number, stat.st_size)
            if footer is not None:
                self._sealed(fd, footer, start, row, stat.st_size)
            else:
                begin = 0 if tail else start
                headers, end = self._scan(fd, begin, stat.st_size, exclusive)
                self._survey.lost += self._index.drop_segment(self._number, end) if tail else 0
                self._publish(headers, replace(row, indexed=end, seen=stat.st_size))
                if tail and stat.st_nlink == 1:  # else a backup shares the file
                    self._survey.unsealed = (self._number, headers, end)
        finally:
            os.close(fd)

    def _sealed(
        self, fd: int, footer: segments.Footer, start: int, row: SegmentRow, size: int
    ) -> None:
        row = replace(row, indexed=footer.end, seen=size, sealed=True)
        if footer.damaged and footer.end not in self._known:
            self._survey.damage.append(
                Damage(self._number, footer.end, size, "footer checksum is wrong", True, False)
            )
        headers: list[Header] = []
        if start < footer.end:
            try:
                if footer.raw is not None and self._bulk is not None and start == 0:
                    self._bulk.footer(footer)
                elif footer.raw is not None:
                    headers = [h for h in footer.headers() if h.offset >= start]
                else:
                    headers, _ = self._scan(fd, start, footer.end, False)
            except CorruptRecord:  # of another version: what can be read will be
                headers, _ = self._scan(fd, start, footer.end, False)
        self._publish(headers, row)

    def _scan(self, fd: int, start: int, end: int, verify: bool) -> tuple[list[Header], int]:
        headers: list[Header] = []
        stop = max(start, min(end, segments.SEGMENT_HEADER_BYTES))
        for item in scan(fd, self._number, start, end, verify_payload=verify):
            if isinstance(item, Header):
                headers.append(item)
                stop = item.end
                continue
            if not item.cut and item.offset not in self._known:
                self._survey.damage.append(item)
            if item.torn:
                break
            stop = item.end
        return headers, stop

    def _publish(self, headers: list[Header], row: SegmentRow) -> None:
        if self._bulk is not None:
            self._bulk.headers(headers)
            self._bulk.segment(self._number, row)
            return
        for at in range(0, len(headers), _BATCH):
            self._survey.loaded += self._index.publish(
                headers[at : at + _BATCH], skip=self._quarantined
            )
        self._index.set_rows({self._number: row})
