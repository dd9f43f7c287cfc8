"""Reading a segment from end to end: its records in order, and the damage between them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from ctrlcache.errors import CorruptRecord
from ctrlcache.tiers.segments import (
    FIXED,
    MAX_CONTROL_DIM,
    RECORD_MAGIC,
    SEGMENT_HEADER_BYTES,
    TRAILER_MAGIC,
    Header,
    header_bytes,
    parse_header,
    read_record,
)

__all__ = ["Damage", "scan"]

_SMALL_WINDOW = 4 << 10
_LARGE_WINDOW = 1 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes [offset, end) of a segment hold no valid record.

    torn: nothing valid follows. cut: the file ends within the record, as an interrupted write
    leaves it.
    """

    segment: int
    offset: int
    end: int
    reason: str
    torn: bool
    cut: bool


class _CutOff(CorruptRecord):
    """The file ends within the record, or within the seal."""


class _Window:
    """Bytes of a file by offset; reads ahead little over large records and much over small ones."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start = 0
        self._data = b""
        self.ahead = _LARGE_WINDOW

    def at(self, offset: int, size: int) -> memoryview:
        """Up to `size` bytes at `offset` (fewer at the end of the file)."""
        if not self._start <= offset <= offset + size <= self._start + len(self._data):
            self._start = offset
            self._data = os.pread(self._fd, max(size, self.ahead), offset)
        begin = offset - self._start
        return memoryview(self._data)[begin : begin + size]


def scan(
    fd: int, segment: int, start: int, end: int, *, verify_payload: bool
) -> Iterator[Header | Damage]:
    """Records in bytes [start, end) of a segment, in order, and the damage between them.

    After damage the scan goes on at the next valid header. The last piece of damage is marked
    `torn` when no valid record follows: the tail of an interrupted write.
    """
    window = _Window(fd)
    at = max(start, SEGMENT_HEADER_BYTES)
    while at < end:
        try:
            header = _header_at(window, segment, at, end)
            if verify_payload and not header.tombstone:
                read_record(fd, segment, at, header.header_bytes, header.payload_bytes)
        except CorruptRecord as error:
            # A payload that fails under a valid header ends where the header says.
            known = _valid_header(window, segment, at, end)
            resume = known.end if known else _resync(fd, segment, at + 1, end)
            torn = resume is None or resume >= end
            stop = end if resume is None else resume
            yield Damage(segment, at, stop, str(error), torn, isinstance(error, _CutOff))
            if resume is None:
                return
            at = resume
            continue
        window.ahead = _LARGE_WINDOW if header.end - at < _LARGE_WINDOW // 64 else _SMALL_WINDOW
        yield header
        at = header.end


def _header_at(window: _Window, segment: int, at: int, end: int) -> Header:
    fixed = window.at(at, FIXED.size)
    if len(fixed) < FIXED.size:
        raise _CutOff("header is cut off")
    fields = FIXED.unpack_from(fixed, 0)
    size, number, offset = int(fields[4]), int(fields[6]), int(fields[7])
    if bytes(fixed[: len(TRAILER_MAGIC)]) == TRAILER_MAGIC:
        raise _CutOff("seal is unfinished")
    if not FIXED.size < size <= header_bytes(MAX_CONTROL_DIM):
        raise CorruptRecord("header length is wrong")
    if at + size > end and bytes(fixed[:4]) == RECORD_MAGIC:
        raise _CutOff("header is cut off")
    if number == segment and offset < at:
        parse_header(window.at(at, size), 0, segment, offset)
        raise _CutOff("seal is unfinished")  # a header of the footer, without a trailer
    header = parse_header(window.at(at, size), 0, segment, at)
    if header.end > end:
        raise _CutOff("payload is cut off")
    return header


def _valid_header(window: _Window, segment: int, at: int, end: int) -> Header | None:
    try:
        return _header_at(window, segment, at, end)
    except CorruptRecord:
        return None


def _resync(fd: int, segment: int, start: int, end: int) -> int | None:
    """Offset of the first valid header at or after `start`."""
    window = _Window(fd)
    at = start
    while at < end:
        data = bytes(window.at(at, _LARGE_WINDOW))
        found = data.find(RECORD_MAGIC)
        if found < 0:
            if len(data) < _LARGE_WINDOW:
                return None
            at += len(data) - len(RECORD_MAGIC) + 1
            continue
        if _valid_header(window, segment, at + found, end) is not None:
            return at + found
        at += found + 1
    return None
