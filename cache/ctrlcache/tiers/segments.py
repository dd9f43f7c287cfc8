"""Segment files: append-only, self-describing, checksummed twice.

    segment  = file header (64 bytes) · record · record ... [· footer · trailer (64 bytes)]
    record   = header (fixed fields · control (C,) f32 · padding · checksum) · payload
    footer   = the headers of all records again, so that a start reads one block per segment

A header has a checksum of its own, apart from the payload's, and says where it stands (segment and
offset), so a scan can trust a header without reading the payload, find the next record after a
damaged one, and never takes bytes inside a payload for a record. A segment with a valid trailer is
*sealed* and never changes again. Everything is little-endian; checksums are XXH3-128: they detect
damage, not malice, and whoever may write to the directory is trusted.
"""

from __future__ import annotations

import os
import re
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from xxhash import xxh3_128_digest as checksum

from ctrlcache.errors import CorruptRecord, InvalidInput
from ctrlcache.tiers.base import Entry

__all__ = [
    "FIXED_FIELDS",
    "MAX_PAYLOAD_BYTES",
    "Footer",
    "Header",
    "checksum",
    "fsync_directory",
    "list_segments",
    "pack_header",
    "pack_trailer",
    "parse_header",
    "read_footer",
    "read_record",
    "record_bytes",
    "segment_header",
    "segment_path",
]

VERSION = 1
RECORD = 0
TOMBSTONE = 1
MAX_PAYLOAD_BYTES = 256 << 20
MAX_CONTROL_DIM = 4096

_SEGMENT_MAGIC = b"CTRLSEG\x01"
TRAILER_MAGIC = b"CTRLEND\x01"
RECORD_MAGIC = b"cSc\xa7"
#: magic, version, kind, control width (0xFFFF: no control), header bytes, payload bytes, segment,
#: offset, sequence, id, space, radius, curvature, created_s, cost_ms, payload checksum
FIXED = struct.Struct("<4sBBHIIQQQ16s16sdddd16s")
#: The same for numpy, for those who read headers by the million.
FIXED_FIELDS = [
    ("magic", "V4"),
    ("version", "u1"),
    ("kind", "u1"),
    ("width", "<u2"),
    ("header_bytes", "<u4"),
    ("payload_bytes", "<u4"),
    ("segment", "<u8"),
    ("offset", "<u8"),
    ("sequence", "<u8"),
    ("id", "V16"),
    ("space", "V16"),
    ("radius", "<f8"),
    ("curvature", "<f8"),
    ("created_s", "<f8"),
    ("cost_ms", "<f8"),
    ("checksum", "V16"),
]
_SEGMENT = struct.Struct("<8sQd24x16s")
#: magic, segment, end of the records, footer bytes, header count, footer checksum, own checksum
_TRAILER = struct.Struct("<8sIIII8x16s16s")
SEGMENT_HEADER_BYTES = _SEGMENT.size
TRAILER_BYTES = _TRAILER.size
NO_CONTROL = 0xFFFF
_CHECKSUM_BYTES = 16
_READ_AHEAD_BYTES = 16 << 10
_NAME = re.compile(r"seg-(\d{10})\.ccs")


@dataclass(frozen=True, slots=True)
class Header:
    """One record's header as found in a segment; `raw` are its bytes."""

    kind: int
    segment: int
    offset: int
    sequence: int
    header_bytes: int
    payload_bytes: int
    payload_checksum: bytes
    entry: Entry = field(compare=False)  # `raw` says it all
    raw: bytes

    @property
    def end(self) -> int:
        return self.offset + self.header_bytes + self.payload_bytes

    @property
    def tombstone(self) -> bool:
        return self.kind == TOMBSTONE


@dataclass(frozen=True, slots=True)
class Footer:
    """What a sealed segment says of itself. raw: the bytes of all headers; None where they were
    not repeated, or (`damaged`) cannot be trusted."""

    segment: int
    end: int
    count: int
    raw: bytes | None
    damaged: bool = False

    def headers(self) -> tuple[Header, ...]:
        """CorruptRecord where another version wrote them."""
        found: list[Header] = []
        at = 0
        raw = self.raw or b""
        while at < len(raw):
            # The checksum over the whole footer stands for each header's own.
            header = parse_header(raw, at, self.segment, _offset_of(raw, at), verify=False)
            found.append(header)
            at += header.header_bytes
        return tuple(found)


# --- names ------------------------------------------------------------------------------------


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"seg-{number:010d}.ccs"


def list_segments(directory: Path) -> dict[int, int]:
    """Number -> size in bytes of every segment in `directory`; OSError where it cannot be read."""
    found: dict[int, int] = {}
    with os.scandir(directory) as entries:
        for item in entries:
            match = _NAME.fullmatch(item.name)
            if match is None:
                continue
            try:
                found[int(match[1])] = item.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue  # compacted away between listing and stat
    return dict(sorted(found.items()))


def fsync_directory(directory: Path) -> None:
    """Make creations, renames and removals in `directory` survive a power loss."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- encoding ---------------------------------------------------------------------------------


def segment_header(number: int) -> bytes:
    head = _SEGMENT.pack(_SEGMENT_MAGIC, number, time.time(), b"")[:-_CHECKSUM_BYTES]
    return head + checksum(head)


def header_bytes(control_dim: int | None) -> int:
    """A multiple of 16, so that payloads lie as aligned as the buffer they are read into."""
    size = FIXED.size + 4 * (control_dim or 0) + _CHECKSUM_BYTES
    return (size + 15) & ~15


def record_bytes(entry: Entry, payload_bytes: int) -> int:
    return header_bytes(None if entry.control is None else len(entry.control)) + payload_bytes


def pack_header(
    entry: Entry,
    payload_bytes: int,
    payload_checksum: bytes,
    *,
    segment: int,
    offset: int,
    sequence: int,
    kind: int = RECORD,
) -> bytes:
    """The header of one record; InvalidInput where the entry cannot be stored as it is."""
    if len(entry.id) != 16 or len(entry.space) != 16:
        raise InvalidInput(
            f"id and space must be 16 bytes each, got {len(entry.id)} and {len(entry.space)}"
        )
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise InvalidInput(f"payload of {payload_bytes} bytes, at most {MAX_PAYLOAD_BYTES} fit")
    if entry.control is None:
        dim, control = NO_CONTROL, b""
    else:
        values = np.ascontiguousarray(entry.control, dtype="<f4")
        if values.ndim != 1 or values.size > MAX_CONTROL_DIM:
            raise InvalidInput(
                f"control must be (C,) with C at most {MAX_CONTROL_DIM}, got {values.shape}"
            )
        dim, control = values.size, values.tobytes()
    size = header_bytes(None if dim == NO_CONTROL else dim)
    head = FIXED.pack(
        RECORD_MAGIC,
        VERSION,
        kind,
        dim,
        size,
        payload_bytes,
        segment,
        offset,
        sequence,
        entry.id,
        entry.space,
        entry.radius,
        entry.curvature,
        entry.created_s,
        entry.cost_ms,
        payload_checksum,
    )
    head = (head + control).ljust(size - _CHECKSUM_BYTES, b"\0")
    return head + checksum(head)


def pack_trailer(number: int, end: int, headers: bytes, count: int) -> bytes:
    """Footer and trailer that seal a segment whose records end at `end`."""
    head = _TRAILER.pack(
        TRAILER_MAGIC, number & 0xFFFFFFFF, end, len(headers), count, checksum(headers), b""
    )[:-_CHECKSUM_BYTES]
    return headers + head + checksum(head)


# --- decoding ---------------------------------------------------------------------------------


def parse_header(
    data: bytes | memoryview, at: int, segment: int, offset: int, *, verify: bool = True
) -> Header:
    """The header at data[at:], which must stand at `offset` of `segment`; CorruptRecord if not."""
    if len(data) - at < FIXED.size:
        raise CorruptRecord("header is cut off")
    fields = FIXED.unpack_from(data, at)
    magic, version, kind, dim, size, payload = fields[:6]
    if magic != RECORD_MAGIC:
        raise CorruptRecord("no record magic")
    expected = header_bytes(None if dim == NO_CONTROL else dim)
    if size != expected or len(data) - at < size:
        raise CorruptRecord("header length is wrong")
    raw = bytes(data[at : at + size])
    if verify and checksum(raw[:-_CHECKSUM_BYTES]) != raw[-_CHECKSUM_BYTES:]:
        raise CorruptRecord("header checksum is wrong")
    if version != VERSION:
        raise CorruptRecord(f"record version {version}, this program reads {VERSION}")
    if (fields[6], fields[7]) != (segment, offset):
        raise CorruptRecord(f"record of segment {fields[6]} offset {fields[7]} in another place")
    if kind not in (RECORD, TOMBSTONE) or payload > MAX_PAYLOAD_BYTES:
        raise CorruptRecord("impossible kind or length")
    control = None
    if dim != NO_CONTROL:
        control = np.frombuffer(raw, dtype="<f4", count=dim, offset=FIXED.size)
    entry = Entry(
        id=fields[9],
        space=fields[10],
        control=control,
        radius=fields[11],
        curvature=fields[12],
        cost_ms=fields[14],
        created_s=fields[13],
    )
    return Header(kind, segment, offset, fields[8], size, payload, fields[15], entry, raw)


def read_record(
    fd: int, segment: int, offset: int, head_bytes: int, payload_bytes: int
) -> tuple[Header, bytes]:
    """The record at `offset`, both checksums verified.

    CorruptRecord for anything else than a record of these lengths; OSError as the device reports
    it. Plain reads rather than a memory map: a bad sector is then an error here, not a SIGBUS in
    the server, and the payload is a buffer of the caller's own.
    """
    if payload_bytes > _READ_AHEAD_BYTES:
        # Else the disk is asked twice where nothing is in the page cache: for the header with some
        # pages around it, then for the rest. Asked for all at once it takes half the time.
        os.posix_fadvise(fd, offset, head_bytes + payload_bytes, os.POSIX_FADV_WILLNEED)
    head = os.pread(fd, head_bytes, offset)
    header = parse_header(head, 0, segment, offset)
    if header.payload_bytes != payload_bytes:
        raise CorruptRecord(f"payload of {header.payload_bytes} bytes, expected {payload_bytes}")
    payload = os.pread(fd, payload_bytes, offset + head_bytes)
    if len(payload) != payload_bytes:
        raise CorruptRecord(f"payload is cut off: {len(payload)} of {payload_bytes} bytes")
    if checksum(payload) != header.payload_checksum:
        raise CorruptRecord("payload checksum is wrong")
    return header, payload


def read_footer(fd: int, segment: int, size: int) -> Footer | None:
    """What the trailer of a sealed segment says, or None where there is no valid one."""
    if size < SEGMENT_HEADER_BYTES + TRAILER_BYTES:
        return None
    raw = os.pread(fd, TRAILER_BYTES, size - TRAILER_BYTES)
    if len(raw) != TRAILER_BYTES or checksum(raw[:-_CHECKSUM_BYTES]) != raw[-_CHECKSUM_BYTES:]:
        return None
    magic, number, end, footer_bytes, count, digest, _ = _TRAILER.unpack(raw)
    if magic != TRAILER_MAGIC or number != segment & 0xFFFFFFFF:
        return None
    if end + footer_bytes + TRAILER_BYTES != size:
        return None
    if not footer_bytes and count:
        return Footer(segment, end, count, None)
    data = os.pread(fd, footer_bytes, end)
    if len(data) != footer_bytes or checksum(data) != digest:
        return Footer(segment, end, count, None, damaged=True)
    return Footer(segment, end, count, data)


def _offset_of(data: bytes, at: int) -> int:
    if len(data) - at < FIXED.size:
        raise CorruptRecord("footer is cut off")
    return int(FIXED.unpack_from(data, at)[7])
