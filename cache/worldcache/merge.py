"""Similar arrays stored once: a base, and what others differ from it by.

Frames of a camera that stands still, and the features made from them, differ from one another in
few places. The first of a group is kept whole, the next ones as differences to it, exact or within
a stated bound. A difference that does not pay becomes a base of its own.

Error: with `max_error` e, no value of a restored array is further than e x full scale from the true
one, full scale being 255 for pixels and the largest magnitude in the base for floats. e = 0 gives
every bit back. The bound is checked on what will be restored, before it is stored.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ctrlcache import record
from ctrlcache.errors import CorruptRecord, InvalidInput
from worldcache.pictures import from_blocks, is_picture, nearly, to_blocks

__all__ = [
    "PAYS",
    "Packed",
    "base_of",
    "pack_alone",
    "pack_difference",
    "restore",
    "signature",
    "unlike",
]

Array: TypeAlias = NDArray[Any]

_MAGIC = b"WCft"
_BODY = 0
#: base, step, bound, layout, dtype, dimensions, shape
_META = struct.Struct("<16sddBBB5x6I")
_NO_BASE = bytes(16)
#: How a body is laid out: as it is; floats by byte planes; pixels by blocks; differences to a base.
_PLAIN, _PLANES, _PIXELS, _DIFFERENCE, _STEPS = range(5)
_DTYPES = ("|u1", "<f4", "<f2", "<f8")
#: A difference is kept where it takes at most this share of the whole.
PAYS = 0.5
_SIGNATURE = 256


@dataclass(frozen=True)
class Packed:
    """payload: a checksummed record. base: id of what it differs from, None where it stands alone.
    bound: on the absolute error of every restored value, 0 where all bits come back."""

    payload: bytes
    base: bytes | None = None
    bound: float = 0.0


def signature(array: Array) -> NDArray[np.float32]:
    """A few evenly spaced values of an array: what `unlike` compares."""
    flat = array.reshape(-1)
    # An odd stride meets all columns of a picture, and all channels.
    every = max(1, len(flat) // _SIGNATURE) | 1
    taken: NDArray[np.float32] = flat[::every][:_SIGNATURE].astype(np.float32)
    return taken


def unlike(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """How different two arrays are, by their signatures: mean distance over mean magnitude."""
    if one.shape != other.shape:
        return math.inf
    scale = float(np.abs(one).mean() + np.abs(other).mean())
    return float(np.abs(one - other).mean()) / scale if scale > 0 else 0.0


def pack_alone(array: Array, provenance: bytes) -> Packed:
    """The whole array, every bit of it. InvalidInput for a type that records cannot hold."""
    if is_picture(array):
        return _packed(_PIXELS, array, to_blocks(array, None), provenance)
    if _is_float(array):
        return _packed(_PLANES, array, _planes(array), provenance)
    return _packed(_PLAIN, array, array, provenance)


def pack_difference(
    array: Array,
    base: Array,
    base_id: bytes,
    provenance: bytes,
    max_error: float = 0.0,
    alone_bytes: int | None = None,
) -> Packed | None:
    """The array as its difference to `base`; None where that is hardly smaller than the whole
    (`alone_bytes`, measured here where it is not given)."""
    if not 0 <= max_error < 1:
        raise InvalidInput(f"max_error must be at least 0 and below 1, got {max_error}")
    if array.shape != base.shape or array.dtype != base.dtype:
        return None
    if is_picture(array):
        bound = math.floor(max_error * 255)
        shown = nearly(array, base, bound) if bound else array
        body = to_blocks(shown, base)
        packed = _packed(_DIFFERENCE, array, body, provenance, base_id, bound=float(bound))
    elif _is_float(array):
        near = _in_steps(array, base, base_id, provenance, max_error) if max_error else None
        # Bits that agree are zero; what agrees lies in the high bytes, next to each other.
        packed = near or _packed(
            _DIFFERENCE, array, _planes(array) ^ _planes(base), provenance, base_id
        )
    else:
        return None
    if alone_bytes is None:
        alone_bytes = len(pack_alone(array, provenance).payload)
    return packed if len(packed.payload) <= PAYS * alone_bytes else None


def base_of(payload: bytes, provenance: bytes) -> bytes | None:
    """The base that a record needs, None for one that stands alone; CorruptRecord for damage."""
    base = _meta(record.unpack(payload, _MAGIC, provenance, frozenset())[1])[0]
    return None if base == _NO_BASE else base


def restore(
    payload: bytes, provenance: bytes, base: Callable[[bytes], Array | None]
) -> tuple[Array, float] | None:
    """(the array, the bound on its absolute error); None where the base that it needs is gone.
    CorruptRecord for damage, another version or another provenance. It may be read-only."""
    _, meta, arrays = record.unpack(payload, _MAGIC, provenance)
    base_id, step, bound, layout, dtype, shape = _meta(meta)
    try:
        body = arrays[_BODY]
        origin = base(base_id) if base_id != _NO_BASE else None
        if layout == _PLAIN:
            return body, 0.0
        if layout == _PLANES:
            return _from_planes(body, dtype, shape), 0.0
        if layout == _PIXELS:
            return from_blocks(body, shape, None), 0.0
        if origin is None:
            return None
        if origin.shape != shape or origin.dtype != dtype:
            raise CorruptRecord("the base is of another shape than what differs from it")
        if layout == _STEPS:
            return _apply_steps(body, origin, step), bound
        if dtype == np.uint8:
            return from_blocks(body, shape, origin), bound
        return _from_planes(body ^ _planes(origin), dtype, shape), 0.0
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise CorruptRecord(f"record does not hold a feature: {error}") from error


# -- layouts -----------------------------------------------------------------------------------


def _packed(
    layout: int,
    array: Array,
    body: Array,
    provenance: bytes,
    base: bytes | None = None,
    step: float = 0.0,
    bound: float = 0.0,
) -> Packed:
    if array.ndim > record.MAX_DIMENSIONS:
        raise InvalidInput(
            f"cannot store an array of {array.ndim} dimensions, at most {record.MAX_DIMENSIONS}"
        )
    names = [np.dtype(name) for name in _DTYPES]
    little = array.dtype.newbyteorder("<")
    code = names.index(little) if little in names else 0
    shape = (*array.shape, *(0,) * (record.MAX_DIMENSIONS - array.ndim))
    meta = _META.pack(base or _NO_BASE, step, bound, layout, code, array.ndim, *shape)
    payload = record.pack(_MAGIC, provenance, 0, meta, [record.Section(_BODY, body, True)])
    return Packed(payload, base, bound)


def _meta(meta: bytes) -> tuple[bytes, float, float, int, np.dtype[Any], tuple[int, ...]]:
    try:
        base, step, bound, layout, code, dimensions, *shape = _META.unpack_from(meta)
        return base, step, bound, layout, np.dtype(_DTYPES[code]), tuple(shape[:dimensions])
    except (struct.error, IndexError) as error:
        raise CorruptRecord(f"record does not hold a feature: {error}") from error


def _is_float(array: Array) -> bool:
    return array.dtype.newbyteorder("<") in [np.dtype(name) for name in _DTYPES[1:]] and (
        array.size > 0
    )


def _planes(array: Array) -> NDArray[np.uint8]:
    """Bytes of equal rank together: exponents next to exponents compress, mantissas do not."""
    raw = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
    return np.ascontiguousarray(raw.reshape(-1, array.dtype.itemsize).T)


def _from_planes(body: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    return np.ascontiguousarray(body.T).reshape(-1).view(dtype).reshape(shape)


def _in_steps(
    array: Array, base: Array, base_id: bytes, provenance: bytes, max_error: float
) -> Packed | None:
    """The difference in steps of twice the bound; None where that cannot be kept."""
    if not (np.isfinite(array).all() and np.isfinite(base).all()):
        return None
    bound = max_error * float(np.abs(base).max())
    # A little less than twice, so that rounding to the array's type stays within the bound.
    step = 2 * bound * 0.98
    if step == 0:
        return None
    steps = np.rint((array.astype(np.float64) - base) / step)
    largest = float(np.abs(steps).max())
    if largest >= 2**31:
        return None
    body = steps.astype(np.int8 if largest <= 127 else np.int32)
    restored = _apply_steps(body, base, step)
    if np.abs(restored.astype(np.float64) - array.astype(np.float64)).max() > bound:
        return None
    return _packed(_STEPS, array, body, provenance, base_id, step, bound)


def _apply_steps(body: Array, base: Array, step: float) -> Array:
    restored: Array = (base + body * step).astype(base.dtype)
    return restored
