"""The control-state couplet, what the cache stores, and its two encodings.

"raw" keeps every array as it came: what the hot tier holds, good for exact work. "stored" is for
disk and network: states and frames exact, the rest at reduced precision (`docs/couplet.md` says
what that costs); a couplet read back from it is marked `lossy`, and stays so.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ctrlcache import record
from ctrlcache.errors import CorruptRecord, InvalidInput
from ctrlcache.key import DIGEST_BYTES, couplet_id, is_held
from ctrlcache.record import Section

__all__ = [
    "ALL_FIELDS",
    "Couplet",
    "Precision",
    "decode",
    "decode_array",
    "decode_parts",
    "encode",
    "encode_array",
    "head_bytes",
    "is_couplet",
]

Precision = Literal["raw", "stored"]
#: The arrays a couplet may hold besides plan and states; `decode` reads those it is asked for.
ALL_FIELDS = frozenset({"jacobian", "tokens", "slice", "frames"})

_COUPLET, _ARRAY = b"CCsc", b"CCar"
_META = struct.Struct(f"<{DIGEST_BYTES}s6d")  # then the lineage
# Fields of a couplet record. The numbers are on disk: never reuse one.
_PLAN, _STATES, _JACOBIAN = 1, 2, 3
_TOKENS, _TOKENS_SCALE, _SLICE, _SLICE_SCALE = 5, 6, 7, 8
_FRAMES, _FRAMES_BY_PREVIOUS, _FRAMES_BY_FIRST = 9, 10, 11
_BULK = range(_TOKENS, _FRAMES_BY_FIRST + 1)
_FIELDS = {
    "jacobian": (_JACOBIAN,),
    "tokens": (_TOKENS, _TOKENS_SCALE),
    "slice": (_SLICE, _SLICE_SCALE),
    "frames": (_FRAMES, _FRAMES_BY_PREVIOUS, _FRAMES_BY_FIRST),
}
# Flags of a couplet record: which fields it has, and whether they lost precision.
_HAS = {"jacobian": 1, "tokens": 2, "slice": 4, "frames": 8}
_LOSSY = 16


@lru_cache
def _wanted(fields: frozenset[str]) -> frozenset[int]:
    return frozenset((_PLAN, _STATES, *(code for name in fields for code in _FIELDS[name])))


@lru_cache
def _held(flags: int) -> frozenset[str]:
    return frozenset(name for name, bit in _HAS.items() if flags & bit)


@dataclass(frozen=True, eq=False)
class Couplet:
    """An exact answer of the model to one control plan in one context.

    space: 16 bytes (`key.space_id`). plan (H, C), states (H, S), tokens (H, N, D): float32.
    slice: the present frame's slice under plan[0], any shape, float32. frames (H, h, w, 3): uint8.
    jacobian (H, S, C): d(states)/d(control), float16. stability, transferability, curvature and
    radius come from the scoring probes; radius is the control distance up to which this may answer
    for a neighbour (0: exact use only). cost_ms: what computing it took. created_s: Unix time.
    lineage: how it came to be ("session", "probe", "template"), at most 255 bytes of UTF-8.
    lossy: tokens, slice and jacobian have been through the "stored" encoding.
    """

    space: bytes
    plan: NDArray[np.float32]
    states: NDArray[np.float32]
    tokens: NDArray[np.float32] | None = None
    slice: NDArray[np.float32] | None = None
    frames: NDArray[np.uint8] | None = None
    jacobian: NDArray[np.float16] | None = None
    stability: float = 0.0
    transferability: float = 0.0
    curvature: float = 0.0
    radius: float = 0.0
    cost_ms: float = 0.0
    created_s: float = 0.0
    lineage: str = "session"
    lossy: bool = False

    @property
    def control(self) -> NDArray[np.float32]:
        """(C,): the first step of the plan; the whole of it where the plan is held."""
        control: NDArray[np.float32] = self.plan[0]
        return control

    @cached_property
    def held(self) -> bool:
        return is_held(self.plan)

    @cached_property
    def id(self) -> bytes:
        return couplet_id(self.space, self.plan)

    @property
    def fields(self) -> frozenset[str]:
        """Which of ALL_FIELDS this holds."""
        return frozenset(name for name in ALL_FIELDS if getattr(self, name) is not None)

    def check(self) -> None:
        """InvalidInput where the arrays do not fit together; names the field and both shapes."""
        if len(self.space) != DIGEST_BYTES:
            raise InvalidInput(f"space must be {DIGEST_BYTES} bytes, got {len(self.space)}")
        if self.plan.ndim != 2 or 0 in self.plan.shape:
            raise InvalidInput(f"plan must have shape (H, C), got {self.plan.shape}")
        horizon, controls = self.plan.shape
        if self.states.ndim != 2 or len(self.states) != horizon:
            raise InvalidInput(f"states must have shape ({horizon}, S), got {self.states.shape}")
        jacobian = (horizon, self.states.shape[1], controls)
        if self.jacobian is not None and self.jacobian.shape != jacobian:
            raise InvalidInput(f"jacobian must be {jacobian}, got {self.jacobian.shape}")
        for name, array, ndim in (("tokens", self.tokens, 3), ("frames", self.frames, 4)):
            if array is not None and (array.ndim != ndim or len(array) != horizon):
                raise InvalidInput(
                    f"{name} must have {ndim} dimensions, {horizon} of the first, got {array.shape}"
                )
        if self.slice is not None and self.slice.ndim > record.MAX_DIMENSIONS:
            raise InvalidInput(f"slice may have 6 dimensions at most, got {self.slice.ndim}")
        for name, number in (("radius", self.radius), ("cost_ms", self.cost_ms)):
            if not number >= 0.0:
                raise InvalidInput(f"{name} must be 0 or more, got {number}")
        if len(self.lineage.encode()) > 255:
            raise InvalidInput("lineage must be at most 255 bytes of UTF-8")


def encode(couplet: Couplet, provenance: bytes, precision: Precision) -> bytes:
    """Bytes of a couplet for its provenance digest (16 bytes); InvalidInput if malformed."""
    couplet.check()
    stored = precision == "stored"
    sections = [
        # What every look-up reads comes first.
        Section(_PLAN, np.asarray(couplet.plan, np.float32)),
        Section(_STATES, np.asarray(couplet.states, np.float32), stored),
    ]
    if couplet.jacobian is not None:
        sections.append(Section(_JACOBIAN, np.asarray(couplet.jacobian, np.float16), stored))
    if couplet.tokens is not None:
        sections += _floats(couplet.tokens, _TOKENS, _TOKENS_SCALE, stored)
    if couplet.slice is not None:
        # The last layer alone is what a neighbour's answer could use; exact work needs all of them
        # and does not use a stored slice.
        kept = couplet.slice[-1:] if stored and couplet.slice.ndim >= 3 else couplet.slice
        sections += _floats(kept, _SLICE, _SLICE_SCALE, stored)
    if couplet.frames is not None:
        sections.append(_frames_section(np.asarray(couplet.frames, np.uint8), stored))
    flags = sum(_HAS[name] for name in couplet.fields)
    if couplet.lossy or (stored and couplet.fields & {"tokens", "slice"}):
        flags |= _LOSSY
    meta = _META.pack(
        couplet.space,
        couplet.stability,
        couplet.transferability,
        couplet.curvature,
        couplet.radius,
        couplet.cost_ms,
        couplet.created_s,
    )
    meta += couplet.lineage.encode()
    return record.pack(_COUPLET, provenance, flags, meta, sections)


def decode(
    data: bytes | memoryview, provenance: bytes, fields: Collection[str] = ALL_FIELDS
) -> Couplet:
    """The couplet in `data`, with those of `fields` that it holds; unread fields are None.

    `decode_parts` says too which fields there are. CorruptRecord for damage of what is read,
    another version or another provenance. Arrays of a memoryview are copies; those of bytes are
    read-only views where nothing had to be undone.
    """
    return decode_parts(data, provenance, fields)[0]


def decode_parts(
    data: bytes | memoryview,
    provenance: bytes,
    fields: Collection[str],
    rest: Callable[[], bytes | memoryview] | None = None,
) -> tuple[Couplet, frozenset[str]]:
    """As `decode`, and which of ALL_FIELDS the record holds, read or not. rest: gives what was
    cut off at `head_bytes`, where that is needed."""
    wanted = _wanted(frozenset(fields))
    flags, meta, arrays = record.unpack(data, _COUPLET, provenance, wanted, rest)
    try:
        space, stability, transferability, curvature, radius, cost_ms, created_s = (
            _META.unpack_from(meta)
        )
        # Assigned at once: the constructor of a frozen class sets field by field through a call
        # each, a tenth of the time of a look-up.
        couplet = object.__new__(Couplet)
        values = {
            "space": space,
            "plan": arrays[_PLAN],
            "states": arrays[_STATES],
            "tokens": _restore_floats(arrays, _TOKENS, _TOKENS_SCALE)
            if _TOKENS in arrays
            else None,
            "slice": _restore_floats(arrays, _SLICE, _SLICE_SCALE) if _SLICE in arrays else None,
            "frames": _restore_frames(arrays) if flags & _HAS["frames"] else None,
            "jacobian": arrays.get(_JACOBIAN),
            "stability": stability,
            "transferability": transferability,
            "curvature": curvature,
            "radius": radius,
            "cost_ms": cost_ms,
            "created_s": created_s,
            "lineage": meta[_META.size :].decode(),
            "lossy": flags & _LOSSY != 0,
        }
        object.__setattr__(couplet, "__dict__", values)
    except (KeyError, ValueError, struct.error) as error:
        raise CorruptRecord(f"record does not hold a couplet: {error}") from error
    return couplet, _held(flags)


def head_bytes(data: bytes) -> int:
    """The length of a couplet's record up to its bulk: all that answers about states need."""
    return record.split_before(data, _BULK)


def is_couplet(data: bytes | memoryview) -> bool:
    """Whether a record is a couplet's rather than an array's, by its first bytes."""
    return bytes(data[:4]) == _COUPLET


def encode_array(array: NDArray[Any], provenance: bytes, compress: bool = False) -> bytes:
    """Bytes of one array (a slice, a frame), lossless: what the cache stores beside couplets."""
    return record.pack(_ARRAY, provenance, 0, b"", [Section(0, array, compress)])


def decode_array(data: bytes | memoryview, provenance: bytes) -> NDArray[Any]:
    """The array in `data`; CorruptRecord as for `decode`. Read-only where `data` is bytes."""
    _, _, arrays = record.unpack(data, _ARRAY, provenance)
    if 0 not in arrays:
        raise CorruptRecord("record does not hold an array")
    return arrays[0]


def _floats(array: NDArray[np.float32], code: int, scale_code: int, stored: bool) -> list[Section]:
    array = np.asarray(array, np.float32)
    if not stored or array.ndim == 0 or not np.isfinite(array).all():
        return [Section(code, array)]
    # One scale per vector along the last axis: int8 keeps each within 0.4 % of its largest value.
    scale = np.abs(array).max(axis=-1, keepdims=True, initial=0.0) / np.float32(127)
    steps = np.divide(array, scale, out=np.zeros_like(array), where=scale > 0)
    return [
        Section(code, np.clip(np.rint(steps), -127, 127).astype(np.int8), True),
        Section(scale_code, scale.astype(np.float32), True),
    ]


def _restore_floats(
    arrays: dict[int, NDArray[Any]], code: int, scale_code: int
) -> NDArray[np.float32] | None:
    values = arrays.get(code)
    if values is None:
        return None
    if values.dtype == np.int8:
        floats = values.astype(np.float32)
        floats *= arrays[scale_code]
        return floats
    if values.dtype != np.float32:
        raise CorruptRecord(f"field {code} holds {values.dtype}")
    return values


def _frames_section(frames: NDArray[np.uint8], stored: bool) -> Section:
    """Frames as they are, or as differences: to the frame before, or to the first, whichever
    compresses better on this clip (a generator that redraws from one base frame favours the
    latter)."""
    if not stored or frames.size == 0 or frames.shape[-1] != 3:
        return Section(_FRAMES, frames, stored)
    options = []
    for code in (_FRAMES_BY_PREVIOUS, _FRAMES_BY_FIRST):
        residual = frames.copy()
        reference = frames[:-1] if code == _FRAMES_BY_PREVIOUS else frames[:1]
        residual[1:] -= reference  # modulo 256, undone the same way
        residual[0, :, 1:] -= frames[0, :, :-1]
        residual[..., 0] -= residual[..., 1]
        residual[..., 2] -= residual[..., 1]
        planes = np.ascontiguousarray(np.moveaxis(residual, -1, 1))  # (H, 3, h, w)
        packed = len(record.compress(planes))
        options.append((packed, code, planes))
    _, code, planes = min(options, key=lambda option: option[:2])
    return Section(code, planes, True)


def _restore_frames(arrays: dict[int, NDArray[Any]]) -> NDArray[np.uint8] | None:
    if _FRAMES in arrays:
        return arrays[_FRAMES]
    code = _FRAMES_BY_PREVIOUS if _FRAMES_BY_PREVIOUS in arrays else _FRAMES_BY_FIRST
    planes = arrays.get(code)
    if planes is None:
        return None
    planes = planes.copy()  # (H, 3, h, w)
    planes[:, 0] += planes[:, 1]
    planes[:, 2] += planes[:, 1]
    np.add.accumulate(planes[0], axis=-1, out=planes[0], dtype=np.uint8)
    for step in range(1, len(planes)):  # faster than accumulating along the first axis
        planes[step] += planes[step - 1 if code == _FRAMES_BY_PREVIOUS else 0]
    frames = np.empty((*planes.shape[:1], *planes.shape[2:], 3), np.uint8)
    for channel in range(3):
        frames[..., channel] = planes[:, channel]
    return frames
