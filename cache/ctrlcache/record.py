"""The binary layout that all stored payloads share: header, section table, checksummed arrays.

    magic  4   layout version  u16   flags u16   sections u16   0 u16   header bytes u32
    total bytes u64   provenance digest 16   meta (fixed length per magic)
    section table, 48 bytes each: field u8, dtype u8, codec u8, dimensions u8, stored bytes u32,
        raw bytes u32, 0 u32, XXH3-64 of the stored bytes with their padding, shape 6 x u32
    XXH3-64 of all of the above
    sections, each padded with zeros to 8 bytes

Every byte is under one checksum or another, and each section has its own, so that a reader who
wants the states need not pay for the tokens. No pickle, nothing is executed, nothing is trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from ctrlcache.errors import CorruptRecord, InvalidInput

__all__ = ["LAYOUT_VERSION", "Section", "compress", "owner_of", "pack", "unpack"]

LAYOUT_VERSION = 1
ZSTD_LEVEL = 3
PLAIN, ZSTD = 0, 1
MAX_DIMENSIONS = 6

_HEAD = struct.Struct("<4sHHHHIQ16s")
_SECTION = struct.Struct("<BBBBIIIQ6I")
_CHECKSUM = struct.Struct("<Q")
_DTYPES = ("<f4", "<f2", "|u1", "|i1", "<i4", "<i8", "<f8")
_CODES = {np.dtype(name): code for code, name in enumerate(_DTYPES)}
_NUMPY = tuple(np.dtype(name) for name in _DTYPES)

Array: TypeAlias = NDArray[Any]
Buffer: TypeAlias = bytes | memoryview


@dataclass(frozen=True)
class Section:
    """One array on its way into a record. `field`: which one, 0 to 255, unique in the record."""

    field: int
    array: Array
    compress: bool = False


def compress(array: Array) -> bytes:
    """The zstd frame that a compressed section of `array` would hold."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(array.tobytes())


def _padding(length: int) -> int:
    return -length % 8


def pack(
    magic: bytes, provenance: bytes, flags: int, meta: bytes, sections: Sequence[Section]
) -> bytes:
    """Lay out a record. InvalidInput for an array whose type or shape the layout cannot hold."""
    header_bytes = _HEAD.size + len(meta) + _SECTION.size * len(sections) + _CHECKSUM.size
    table: list[bytes] = []
    bodies: list[bytes] = []
    for section in sections:
        array = np.asarray(section.array)
        little = array.dtype.newbyteorder("<")
        if little not in _CODES or array.ndim > MAX_DIMENSIONS:
            raise InvalidInput(
                f"cannot store an array of {array.dtype}, {array.ndim} dimensions; "
                f"expected one of {', '.join(_DTYPES)} with at most {MAX_DIMENSIONS}"
            )
        raw = array.astype(little, copy=False).tobytes()
        if len(raw) >= 1 << 32:
            raise InvalidInput(
                f"cannot store an array of {len(raw)} bytes; expected less than 4 GiB"
            )
        body, codec = raw, PLAIN
        if section.compress and raw:
            packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw)
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
                xxhash.xxh3_64_intdigest(padded),
                *shape,
            )
        )
        bodies.append(padded)
    total = header_bytes + _padding(header_bytes) + sum(map(len, bodies))
    head = _HEAD.pack(
        magic, LAYOUT_VERSION, flags, len(sections), 0, header_bytes, total, provenance
    )
    header = b"".join((head, meta, *table))
    checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header))
    return b"".join((header, checksum, bytes(_padding(header_bytes)), *bodies))


def unpack(
    data: Buffer,
    magic: bytes,
    provenance: bytes,
    meta_bytes: int,
    wanted: Collection[int] | None = None,
) -> tuple[int, bytes, dict[int, Array], set[int]]:
    """Read a record: (flags, meta, arrays by field, fields present).

    Only the `wanted` fields are read and verified (None: all of them). Arrays of a record given as
    bytes are read-only views into it; those of a memoryview are copies, since what it shows may
    change once the caller's transaction ends. CorruptRecord, with the reason, for anything amiss.
    """
    size = len(data)
    if size < _HEAD.size:
        raise CorruptRecord(f"record of {size} bytes is shorter than a header")
    found, version, flags, count, _, header_bytes, total, owner = _HEAD.unpack_from(data)
    if found != magic:
        raise CorruptRecord(f"magic is {bytes(found)!r}, expected {magic!r}")
    if version != LAYOUT_VERSION:
        raise CorruptRecord(f"layout version is {version}, expected {LAYOUT_VERSION}")
    table_start = _HEAD.size + meta_bytes
    table_end = table_start + count * _SECTION.size
    if header_bytes != table_end + _CHECKSUM.size or header_bytes > size or total != size:
        raise CorruptRecord(f"lengths do not add up: {size} bytes, {total} by the header")
    view = memoryview(data)
    (checksum,) = _CHECKSUM.unpack_from(data, table_end)
    if checksum != xxhash.xxh3_64_intdigest(view[:table_end]):
        raise CorruptRecord("checksum of the header does not match")
    if owner != provenance:
        raise CorruptRecord("record belongs to another provenance")

    position = header_bytes + _padding(header_bytes)
    if any(view[header_bytes:position]):
        raise CorruptRecord("padding is not zero")
    owned = isinstance(data, bytes)
    arrays: dict[int, Array] = {}
    present: set[int] = set()
    for entry in _SECTION.iter_unpack(view[table_start:table_end]):
        field, dtype, codec, ndim, stored, raw, _, expected = entry[:8]
        end = position + stored + _padding(stored)
        if end > size:
            raise CorruptRecord(f"section {field} ends beyond the record")
        present.add(field)
        if wanted is None or field in wanted:
            body = view[position:end]
            if xxhash.xxh3_64_intdigest(body) != expected:
                raise CorruptRecord(f"checksum of section {field} does not match")
            shape = entry[8 : 8 + ndim]
            arrays[field] = _array(body[:stored], dtype, codec, shape, raw, owned)
        position = end
    if position != size:
        raise CorruptRecord(f"{size - position} bytes follow the last section")
    return flags, bytes(view[_HEAD.size : table_start]), arrays, present


def owner_of(data: Buffer) -> bytes:
    """The provenance digest a record was written for; CorruptRecord where there is no header."""
    if len(data) < _HEAD.size:
        raise CorruptRecord(f"record of {len(data)} bytes is shorter than a header")
    owner: bytes = _HEAD.unpack_from(data)[-1]
    return owner


def _array(
    body: memoryview, dtype: int, codec: int, shape: tuple[int, ...], raw: int, owned: bool
) -> Array:
    if dtype >= len(_NUMPY) or codec > ZSTD:
        raise CorruptRecord(f"unknown dtype {dtype} or codec {codec}")
    content: Buffer = body
    if codec == ZSTD:
        try:
            if zstandard.frame_content_size(body) != raw:
                raise CorruptRecord(f"compressed section does not announce {raw} bytes")
            content = zstandard.ZstdDecompressor().decompress(body, max_output_size=raw)
        except zstandard.ZstdError as error:
            raise CorruptRecord(f"cannot decompress: {error}") from error
    if len(content) != raw:
        raise CorruptRecord(f"section holds {len(content)} bytes, expected {raw}")
    try:
        array = np.frombuffer(content, dtype=_NUMPY[dtype]).reshape(shape)
    except ValueError as error:
        raise CorruptRecord(f"section does not fill its shape {shape}: {error}") from error
    return array if owned or codec == ZSTD else array.copy()
