"""Rows of the warm index: where a record lies, what a segment holds, how a record was used."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ctrlcache.eviction import Usage
from ctrlcache.tiers.base import Entry
from ctrlcache.tiers.segments import Header

__all__ = [
    "PLACE_FIELDS",
    "TOMB",
    "USE",
    "Place",
    "SegmentRow",
    "pack_place",
    "pack_row",
    "same_place",
    "unpack_place",
    "unpack_row",
    "unpack_usage",
]

Buffer: TypeAlias = bytes | memoryview
#: segment, sequence, offset, header bytes, payload bytes, radius, curvature, created_s, cost_ms,
#: head of the payload checksum, space; the control follows
_PLACE = struct.Struct("<QQIIIdddd8s16s")
#: The same for numpy, by the names that headers use.
PLACE_FIELDS = [
    ("segment", "<u8"),
    ("sequence", "<u8"),
    ("offset", "<u4"),
    ("header_bytes", "<u4"),
    ("payload_bytes", "<u4"),
    ("radius", "<f8"),
    ("curvature", "<f8"),
    ("created_s", "<f8"),
    ("cost_ms", "<f8"),
    ("digest", "V8"),
    ("space", "V16"),
]
_ROW = struct.Struct("<QQQQQQ")
TOMB = struct.Struct("<QQ")  # sequence, segment of the newest tombstone (0: none on disk)
USE = struct.Struct("<fdd")  # hits, last_used_s, clock


@dataclass(frozen=True, slots=True)
class Place:
    """Where a live record lies; `digest` is the head of its payload's checksum."""

    segment: int
    sequence: int
    offset: int
    header_bytes: int
    payload_bytes: int
    digest: bytes
    entry: Entry

    @property
    def size_bytes(self) -> int:
        return self.header_bytes + self.payload_bytes


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """What the index knows of a segment.

    indexed: records before this offset are indexed. seen: size of the file then. doomed: all that
    is worth keeping lies elsewhere, the file is about to be removed.
    """

    indexed: int = 0
    seen: int = 0
    live_bytes: int = 0
    live_count: int = 0
    oldest: int = (1 << 64) - 1  # lowest sequence of a record in the file, dead or alive
    sealed: bool = False
    doomed: bool = False


def same_place(a: Place, b: Place) -> bool:
    return (a.segment, a.offset) == (b.segment, b.offset)


def pack_place(header: Header) -> bytes:
    entry = header.entry
    fixed = _PLACE.pack(
        header.segment,
        header.sequence,
        header.offset,
        header.header_bytes,
        header.payload_bytes,
        entry.radius,
        entry.curvature,
        entry.created_s,
        entry.cost_ms,
        header.payload_checksum[:8],
        entry.space,
    )
    return fixed if entry.control is None else fixed + entry.control.tobytes()


def unpack_place(id: Buffer, row: Buffer) -> Place:
    (
        segment,
        sequence,
        offset,
        header_bytes,
        payload_bytes,
        radius,
        curvature,
        created_s,
        cost_ms,
        digest,
        space,
    ) = _PLACE.unpack_from(row)
    control: Any = None
    if len(row) > _PLACE.size:
        control = np.frombuffer(row, "<f4", offset=_PLACE.size)
    entry = Entry(bytes(id), space, control, radius, curvature, cost_ms, created_s)
    return Place(segment, sequence, offset, header_bytes, payload_bytes, digest, entry)


def unpack_usage(place: Place, row: Buffer | None) -> Usage:
    entry = place.entry
    if row is None:
        return Usage(place.size_bytes, entry.cost_ms, entry.created_s, entry.created_s)
    hits, last_s, clock = USE.unpack(row)
    return Usage(place.size_bytes, entry.cost_ms, entry.created_s, last_s, hits, clock)


def pack_row(row: SegmentRow) -> bytes:
    flags = int(row.sealed) | int(row.doomed) << 1
    return _ROW.pack(row.indexed, row.seen, row.live_bytes, row.live_count, row.oldest, flags)


def unpack_row(value: Buffer) -> SegmentRow:
    indexed, seen, live_bytes, live_count, oldest, flags = _ROW.unpack(value)
    return SegmentRow(
        indexed, seen, live_bytes, live_count, oldest, bool(flags & 1), bool(flags & 2)
    )
