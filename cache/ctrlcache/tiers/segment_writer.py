"""The one who appends to segments; its callers make sure there is only one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ctrlcache.tiers import segments
from ctrlcache.tiers.base import Entry
from ctrlcache.tiers.places import SegmentRow
from ctrlcache.tiers.segments import Header, checksum

__all__ = ["Pending", "SegmentWriter"]

#: A footer larger than this share of its segment is left out: small records are scanned as fast.
_FOOTER_SHARE = 1 / 16
_BLOCK = 4096
_TURN_S = 0.0005
_IOV = 512  # buffers per system call, below every system's IOV_MAX


@dataclass(frozen=True, slots=True)
class Pending:
    """A record on its way to disk; `sequence` is given where a copy keeps its own."""

    entry: Entry
    payload: bytes
    kind: int = segments.RECORD
    sequence: int | None = None

    @property
    def size_bytes(self) -> int:
        return segments.record_bytes(self.entry, len(self.payload))

    @staticmethod
    def tombstone(id: bytes) -> Pending:
        """Declares every earlier copy of `id` dead."""
        entry = Entry(id, bytes(16), None, 0.0, 0.0, 0.0, time.time())
        return Pending(entry, b"", segments.TOMBSTONE)


class SegmentWriter:
    """Appends groups of records to the newest segment, seals full ones and starts new ones.

    Methods raise OSError and then leave what was there before intact: a group is in the segment as
    a whole or not at all. After a failed sync nothing is known of the segment's pages any more; it
    is given up, and the next group goes to a new one.
    """

    def __init__(
        self, directory: Path, segment_bytes: int, durable: bool, next_number: int, sequence: int
    ) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._durable = durable
        self._next_number = next_number
        self._sequence = sequence
        self._fd: int | None = None
        self._number = 0
        self._end = 0
        self._synced = True
        self._footer = bytearray()
        self._count = 0

    @property
    def active(self) -> int | None:
        """Number of the segment that is being appended to."""
        return self._number if self._fd is not None else None

    @property
    def end(self) -> int:
        """Where the records of the active segment end."""
        return self._end

    def rows(self) -> dict[int, SegmentRow]:
        """What the index should note of the active segment."""
        return {self._number: SegmentRow(self._end, self._end)} if self._fd is not None else {}

    def overhead_bytes(self, group: Sequence[Pending]) -> int:
        """At most this many bytes beyond the records themselves does a group add to the disk."""
        headers = sum(item.size_bytes - len(item.payload) for item in group)
        fixed = segments.TRAILER_BYTES + segments.SEGMENT_HEADER_BYTES
        return len(self._footer) + headers + 2 * fixed + 2 * _BLOCK

    def adopt(self, number: int, headers: Sequence[Header], end: int) -> None:
        """Go on appending to a segment that an earlier writer left unsealed."""
        path = segments.segment_path(self._directory, number)
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != end:
                os.ftruncate(fd, end)
                os.fsync(fd)
            os.lseek(fd, end, os.SEEK_SET)
        except OSError:
            os.close(fd)
            raise
        self._fd, self._number, self._end = fd, number, end
        self._footer = bytearray(b"".join(header.raw for header in headers))
        self._count = len(headers)

    def append(self, group: Sequence[Pending]) -> list[Header]:
        """Write a group into one segment; not durable before `sync`."""
        size = sum(item.size_bytes for item in group)
        if self._fd is not None and self._end + size > self._segment_bytes and self._count:
            self.seal()
        if self._fd is None:
            self._start()
        assert self._fd is not None
        offset = self._end
        buffers: list[bytes] = []
        headers: list[Header] = []
        since = time.perf_counter()
        for item in group:
            self._sequence = max(self._sequence + 1, time.time_ns())
            raw = segments.pack_header(
                item.entry,
                len(item.payload),
                checksum(item.payload),
                segment=self._number,
                offset=offset,
                sequence=self._sequence if item.sequence is None else item.sequence,
                kind=item.kind,
            )
            # Parsed back, so that what is published is exactly what a rebuild would read.
            header = segments.parse_header(raw, 0, self._number, offset, verify=False)
            buffers += (raw, item.payload) if item.payload else (raw,)
            headers.append(header)
            offset = header.end
            if time.perf_counter() - since > _TURN_S:
                time.sleep(0)  # lets a reader in this process have the interpreter
                since = time.perf_counter()
        self._synced = False
        try:
            _write_all(self._fd, buffers)
        except OSError:
            self._roll_back()
            raise
        self._end = offset
        self._footer += b"".join(header.raw for header in headers)
        self._count += len(headers)
        return headers

    def sync(self) -> None:
        """Make everything appended survive a power loss (where the setting says so)."""
        if self._fd is None or self._synced:
            return
        try:
            if self._durable:
                os.fdatasync(self._fd)
            if os.fstat(self._fd).st_nlink == 0:
                raise FileNotFoundError(f"segment {self._number} was removed while in use")
        except OSError:
            self.abandon()
            raise
        self._synced = True

    def seal(self) -> None:
        """Finish the active segment: footer and trailer, synced; it never changes again."""
        if self._fd is None:
            return
        footer = bytes(self._footer) if len(self._footer) <= self._end * _FOOTER_SHARE else b""
        tail = segments.pack_trailer(self._number, self._end, footer, self._count)
        self._synced = False
        try:
            _write_all(self._fd, [tail])
        except OSError:
            self._roll_back()
            raise
        self.sync()
        self.abandon()

    def abandon(self) -> None:
        """Close the active segment as it is."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = None
        self._end = 0
        self._synced = True
        self._footer = bytearray()
        self._count = 0

    def _start(self) -> None:
        number = self._next_number
        path = segments.segment_path(self._directory, number)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._next_number = number + 1
        try:
            _write_all(fd, [segments.segment_header(number)])
            if self._durable:
                os.fsync(fd)
                segments.fsync_directory(self._directory)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        self._fd, self._number, self._end = fd, number, segments.SEGMENT_HEADER_BYTES

    def _roll_back(self) -> None:
        assert self._fd is not None
        try:
            os.ftruncate(self._fd, self._end)
            os.lseek(self._fd, self._end, os.SEEK_SET)
        except OSError:
            self.abandon()


def _write_all(fd: int, buffers: Sequence[bytes]) -> None:
    for start in range(0, len(buffers), _IOV):
        views = [memoryview(item) for item in buffers[start : start + _IOV]]
        while views:
            written = os.writev(fd, views)
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if views:
                views[0] = views[0][written:]
