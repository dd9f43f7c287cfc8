"""Names of everything the cache holds: digests that no two different things share.

Whatever could make an answer differ (model, weights, context, horizon, seed, control, tenant) is
hashed into the name, so that a look-up can only ever find what was computed from the same input.
A context is a chain: each digest covers the one before it, the control committed at that frame and
the frame that followed.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctrlcache.errors import InvalidInput

__all__ = [
    "DIGEST_BYTES",
    "Provenance",
    "canonical_control",
    "context_next",
    "context_root",
    "couplet_id",
    "digest",
    "frame_id",
    "is_held",
    "plan_key",
    "slice_id",
    "space_id",
]

DIGEST_BYTES = 16
_ZERO = np.float32(0.0)
_MINUS = b"\0\0\0\x80"  # a negative zero, little-endian
_FLOAT = np.dtype("<f4")
_COUPLET = b"couplet"
_LENGTHS = struct.Struct("<QQ").pack
_LENGTH = struct.Struct("<Q").pack


def digest(*parts: bytes) -> bytes:
    """BLAKE2b of the parts, 16 bytes. Each part is preceded by its length, so that no two
    sequences of parts run together into the same input."""
    joined = b"".join([piece for part in parts for piece in (_LENGTH(len(part)), part)])
    return blake2b(joined, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class Provenance:
    """Where an answer comes from; two answers of different provenance never meet.

    frame_px is (height, width). calibration_epoch names the control units in force.
    """

    model: str
    version: str
    weights_digest: str
    dtype: str
    frame_px: tuple[int, int]
    calibration_epoch: str
    tenant: str

    @cached_property
    def digest(self) -> bytes:
        """16 bytes."""
        height, width = self.frame_px
        return digest(
            b"provenance",
            *(
                text.encode()
                for text in (
                    self.model,
                    self.version,
                    self.weights_digest,
                    self.dtype,
                    f"{height}x{width}",
                    self.calibration_epoch,
                    self.tenant,
                )
            ),
        )


def canonical_control(control: ArrayLike) -> NDArray[np.float32]:
    """Contiguous little-endian float32, without negative zeros: equal controls give equal bytes.

    InvalidInput for NaN and infinity.
    """
    array: NDArray[np.float32] = np.asarray(control, "<f4", "C") + _ZERO
    flat = array.ravel()
    # One product tells, in a fraction of the time; it overflows for huge numbers: look closer.
    if not math.isfinite(flat.dot(flat)) and not np.isfinite(flat).all():
        raise InvalidInput(f"control must be finite, got {array.tolist()}")
    return array


def context_root(provenance: Provenance, conditioning: bytes, frame: bytes) -> bytes:
    """The context of a session that has seen one frame, given by its pixels or their digest."""
    return digest(b"context", provenance.digest, conditioning, frame)


def context_next(context: bytes, control: ArrayLike, frame: bytes | None) -> bytes:
    """The context after `control` (C,) was committed and `frame` followed; None: as predicted."""
    applied = canonical_control(control).tobytes()
    if frame is None:
        return digest(b"predicted", context, applied)
    return digest(b"observed", context, applied, frame)


def slice_id(context: bytes, control: ArrayLike) -> bytes:
    """The slice of the present frame of `context` under `control` (C,)."""
    return digest(b"slice", context, canonical_control(control).tobytes())


def frame_id(context: bytes) -> bytes:
    """The present frame of `context`."""
    return digest(b"frame", context)


def space_id(context: bytes, horizon: int, seed: int) -> bytes:
    """The space of answers to "what if" in one context; only within it are couplets neighbours."""
    return digest(b"space", context, b"%d" % horizon, b"%d" % seed)


def couplet_id(space: bytes, plan: ArrayLike) -> bytes:
    """The couplet for `plan` (H, C) in `space`."""
    return plan_key(space, plan)[0]


def plan_key(space: bytes, plan: ArrayLike) -> tuple[bytes, bool]:
    """(id of the couplet for `plan` (H, C) in `space`, whether the plan is held)."""
    # Here, where every look-up begins, without `digest`: the parts before the last have one length.
    array = np.asarray(plan, _FLOAT, "C")
    if array.ndim != 2 or not array.size:
        raise InvalidInput(f"plan must have shape (H, C), got {array.shape}")
    steps = len(array)
    content = array.tobytes()
    step = content[: len(content) // steps]
    held = content == step * steps
    # One control, held, finite and without anything like a negative zero, is canonical as it is.
    if not held or _MINUS in step or not math.isfinite(sum(memoryview(step).cast("f"))):
        content = canonical_control(array).tobytes()
        held = content == content[: len(step)] * steps
    joined = _COUPLET + space + _LENGTHS(steps, len(content)) + content
    return blake2b(joined, digest_size=DIGEST_BYTES).digest(), held


def is_held(plan: NDArray[np.float32]) -> bool:
    """Whether `plan` (H, C) is one control held for all H steps."""
    return bool((plan == plan[0]).all())
