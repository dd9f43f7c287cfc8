"""The binary layout that all stored payloads share: header, section table, checksummed arrays.

    magic  4   layout version  u16   flags u16   sections u16   meta bytes u16   header bytes u32
    total bytes u64   provenance digest 16   meta, padded so that the header fills 8s
    section table, by ascending field, 48 bytes each: field u8, dtype u8, codec u8, dimensions u8,
        stored bytes u32, raw bytes u32, 0 u32, XXH3-64 of the stored bytes with their padding,
        shape 6 x u32
    XXH3-64 of all of the above
    sections, each padded with zeros to 8 bytes

Every byte is under one checksum or another, and each section has its own, so that a reader who
wants the states need not pay for the tokens. No pickle, nothing is executed, nothing is trusted.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest as _xxh3

from ctrlcache.errors import CorruptRecord, InvalidInput

__all__ = ["LAYOUT_VERSION", "Section", "compress", "owner_of", "pack", "split_before", "unpack"]

LAYOUT_VERSION = 1
# What is stored is nearly noise: the short matches that level 3 looks for cost more than they gain.
# Long ones alone make differences of frames smaller (by up to 9 %), and a third faster to undo.
_PACKING = zstandard.ZstdCompressionParameters.from_level(
    3, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=13
)
PLAIN, ZSTD = 0, 1
MAX_DIMENSIONS = 6
#: Of one array; none of a couplet is larger. A few kilobytes of zstd may announce gigabytes.
MAX_SECTION_BYTES = 1 << 28

_HEAD = struct.Struct("<4sHHHHIQ16s")
_SECTION = struct.Struct("<BBBBIIIQ6I")
_CHECKSUM = struct.Struct("<Q")
_DTYPES = ("<f4", "<f2", "|u1", "|i1", "<i4", "<i8", "<f8")
_CODES = {np.dtype(name): code for code, name in enumerate(_DTYPES)}
_NUMPY = tuple(np.dtype(name) for name in _DTYPES)

Array: TypeAlias = NDArray[Any]
Buffer: TypeAlias = bytes | memoryview
Body: TypeAlias = memoryview | bytearray


@dataclass(frozen=True)
class Section:
    """One array on its way into a record. `field`: which one, 0 to 255, unique in the record."""

    field: int
    array: Array
    compress: bool = False


class _Zstd(threading.local):
    """Of each thread, since they may not be shared; to make one takes as long as to use it."""

    def __init__(self) -> None:
        self.packer = zstandard.ZstdCompressor(compression_params=_PACKING)
        self.unpacker = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def compress(array: Array) -> bytes:
    """The zstd frame that a compressed section of `array` would hold."""
    return _zstd.packer.compress(array.tobytes())


def _padding(length: int) -> int:
    return -length % 8


def pack(
    magic: bytes, provenance: bytes, flags: int, meta: bytes, sections: Sequence[Section]
) -> bytes:
    """Lay out a record, sections by ascending field. flags: 16 bits and meta: bytes, the caller's.
    InvalidInput for an array whose type or shape the layout cannot hold."""
    header_bytes = _HEAD.size + len(meta) + _SECTION.size * len(sections) + _CHECKSUM.size
    gap = bytes(_padding(header_bytes))
    table: list[bytes] = []
    bodies: list[bytes] = []
    for section in sorted(sections, key=lambda section: section.field):
        array = np.asarray(section.array)
        little = array.dtype.newbyteorder("<")
        if little not in _CODES or array.ndim > MAX_DIMENSIONS:
            raise InvalidInput(
                f"cannot store an array of {array.dtype}, {array.ndim} dimensions; "
                f"expected one of {', '.join(_DTYPES)} with at most {MAX_DIMENSIONS}"
            )
        raw = array.astype(little, copy=False).tobytes()
        if len(raw) > MAX_SECTION_BYTES:
            raise InvalidInput(
                f"cannot store an array of {len(raw)} bytes; one holds at most {MAX_SECTION_BYTES}"
            )
        body, codec = raw, PLAIN
        if section.compress and raw:
            packed = _zstd.packer.compress(raw)
            if len(packed) < len(raw):
                body, codec = packed, ZSTD
        padded = body + bytes(_padding(len(body)))
        shape = (*array.shape, *(0,) * (MAX_DIMENSIONS - array.ndim))
        table.append(
            _SECTION.pack(
                section.field,
                _CODES[little],
                codec,
                array.ndim,
                len(body),
                len(raw),
                0,
                _xxh3(padded),
                *shape,
            )
        )
        bodies.append(padded)
    header_bytes += len(gap)
    total = header_bytes + sum(map(len, bodies))
    head = _HEAD.pack(
        magic, LAYOUT_VERSION, flags, len(sections), len(meta), header_bytes, total, provenance
    )
    header = b"".join((head, meta, gap, *table))
    checksum = _CHECKSUM.pack(_xxh3(header))
    return b"".join((header, checksum, *bodies))


@lru_cache
def _last(fields: frozenset[int]) -> int:
    return max(fields, default=-1)


def unpack(
    data: Buffer,
    magic: bytes,
    provenance: bytes,
    wanted: frozenset[int] | None = None,
    rest: Callable[[], Buffer] | None = None,
) -> tuple[int, bytes, dict[int, Array]]:
    """Read a record: (flags, meta, arrays by field).

    Only the `wanted` fields are read and verified (None: all of them). rest: gives what follows
    `data`, cut between two sections; it is called where a wanted field lies there. Arrays of bytes
    are read-only views into them; those of a memoryview are copies, since what it shows may change
    once the caller's transaction ends. CorruptRecord, with the reason, for anything amiss.
    """
    size = len(data)
    if size < _HEAD.size:
        raise CorruptRecord(f"record of {size} bytes is shorter than a header")
    found, version, flags, count, meta_bytes, header_bytes, total, owner = _HEAD.unpack_from(data)
    if found != magic:
        raise CorruptRecord(f"magic is {bytes(found)!r}, expected {magic!r}")
    if version != LAYOUT_VERSION:
        raise CorruptRecord(f"layout version is {version}, expected {LAYOUT_VERSION}")
    table_end = header_bytes - _CHECKSUM.size
    table_start = table_end - count * _SECTION.size
    if not 0 <= table_start - _HEAD.size - meta_bytes < 8 or header_bytes > size:
        raise CorruptRecord(f"a header of {header_bytes} bytes, {count} sections: does not add up")
    if size > total or (rest is None and size != total):
        raise CorruptRecord(f"record has {size} bytes, {total} by its header")
    header = bytes(data[:header_bytes])
    if _CHECKSUM.unpack_from(header, table_end)[0] != _xxh3(header[:table_end]):
        raise CorruptRecord("checksum of the header does not match")
    if owner != provenance:
        raise CorruptRecord("record belongs to another provenance")

    meta = header[_HEAD.size : _HEAD.size + meta_bytes]
    last = 255 if wanted is None else _last(wanted)
    view = memoryview(data)
    owned = type(data) is bytes
    arrays: dict[int, Array] = {}
    position = header_bytes
    start = 0  # of the part in view
    for entry in _SECTION.iter_unpack(header[table_start:table_end]):
        field, dtype, codec, dimensions, stored, raw = entry[:6]
        if field > last:
            return flags, meta, arrays
        begin, position = position, position + stored + -stored % 8
        if wanted is not None and field not in wanted:
            continue
        if begin >= size and not start:
            start, view = size, memoryview(rest() if rest else b"")
            owned = type(view.obj) is bytes
            if start + len(view) != total:
                raise CorruptRecord(f"record has {start + len(view)} bytes, {total} by its header")
        body: Body = view[begin - start : position - start]
        if not owned and codec == PLAIN:
            body = bytearray(body)  # what the view shows may change later
        if len(body) < position - begin:
            raise CorruptRecord(f"section {field} ends beyond the record")
        if _xxh3(body) != entry[7]:
            raise CorruptRecord(f"checksum of section {field} does not match")
        content = body if codec == PLAIN else _decompressed(body[:stored], codec, raw)
        try:
            array: Array = np.ndarray(entry[8 : 8 + dimensions], _NUMPY[dtype], content)
        except (IndexError, TypeError, ValueError) as error:
            raise CorruptRecord(f"section {field} is no array: {error}") from error
        if array.nbytes != raw or (codec == PLAIN and raw != stored):
            raise CorruptRecord(f"section {field} holds {raw} bytes, its shape says others")
        arrays[field] = array
    if position != total:
        raise CorruptRecord(f"sections end at {position} of {total} bytes")
    return flags, meta, arrays


def split_before(data: bytes, fields: Collection[int]) -> int:
    """Where the first section of `fields` begins: the length of what comes before; 0 where there
    is none, or where others follow them."""
    _, _, _, count, _, header_bytes, _, _ = _HEAD.unpack_from(data)
    position = header_bytes
    table_end = header_bytes - _CHECKSUM.size
    split = 0
    table = memoryview(data)[table_end - count * _SECTION.size : table_end]
    for entry in _SECTION.iter_unpack(table):
        if entry[0] in fields:
            split = split or position
        elif split:
            return 0
        position += entry[4] + _padding(entry[4])
    return split


def owner_of(data: Buffer) -> bytes:
    """The provenance digest a record was written for; CorruptRecord where there is no header."""
    if len(data) < _HEAD.size:
        raise CorruptRecord(f"record of {len(data)} bytes is shorter than a header")
    owner: bytes = _HEAD.unpack_from(data)[-1]
    return owner


def _decompressed(body: Body, codec: int, raw: int) -> bytes:
    if codec != ZSTD:
        raise CorruptRecord(f"unknown codec {codec}")
    if raw > MAX_SECTION_BYTES:
        raise CorruptRecord(f"a section of {raw} bytes; one holds at most {MAX_SECTION_BYTES}")
    try:
        if zstandard.frame_content_size(body) != raw:
            raise CorruptRecord(f"compressed section does not announce {raw} bytes")
        return _zstd.unpacker.decompress(body, max_output_size=raw)
    except zstandard.ZstdError as error:
        raise CorruptRecord(f"cannot decompress: {error}") from error
