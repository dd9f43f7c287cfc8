"""What every tier does: bytes in, bytes out, neighbours by control, nothing about models.

A tier stores *records*: an immutable payload under a 16-byte id, with the little that look-up and
eviction need beside it. Payloads are opaque here; `ctrlcache.couplet` gives them meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import InvalidInput

__all__ = ["Candidate", "Entry", "Record", "Tier", "TierStats", "reaching"]


@dataclass(frozen=True)
class Entry:
    """What is known of a record without reading its payload.

    space: 16 bytes; only records of one space ever answer for one another (provenance, context,
    horizon and conditioning are hashed into it). id: 16 bytes, unique. control (C,) float32, or
    None for records that are found by id alone (context slices). radius: the largest control
    distance at which the record may be a neighbour's answer, 0 for exact use only. curvature:
    second-order residual per squared control distance. cost_ms: what recomputing costs.
    """

    id: bytes
    space: bytes
    control: NDArray[np.float32] | None
    radius: float
    curvature: float
    cost_ms: float
    created_s: float


@dataclass(frozen=True)
class Record:
    """split: payload[:split] is all that most readers need; a tier may keep the parts apart."""

    entry: Entry
    payload: bytes = field(repr=False)
    split: int = 0


@dataclass(frozen=True)
class Candidate:
    """A neighbour found by control: its entry's look-up fields and the Euclidean distance."""

    id: bytes
    control: NDArray[np.float32]
    radius: float
    curvature: float
    distance: float


@dataclass(frozen=True)
class TierStats:
    entries: int
    size_bytes: int
    limit_bytes: int


class Tier(Protocol):
    """One store. Safe to use from several processes at once where its docstring says so."""

    @property
    def name(self) -> str: ...

    def get(self, id: bytes) -> memoryview | bytes | None:
        """The payload, or None. Never raises for a record that is absent or damaged."""
        ...

    def neighbours(
        self, space: bytes, control: NDArray[np.float32], limit: int = 16
    ) -> list[Candidate]:
        """Records of `space` whose radius reaches `control`: the nearest `limit`, in that order."""
        ...

    def put(self, records: Iterable[Record]) -> int:
        """Store; returns how many were stored. Durable (where the tier promises it) on return.

        Raises TierUnavailable, with the cause, when nothing can be stored now.
        """
        ...

    def delete(self, ids: Iterable[bytes]) -> int: ...

    def touch(self, ids: Iterable[bytes]) -> None:
        """Note a use, for eviction."""
        ...

    def scan(self) -> Iterator[Entry]: ...

    def stats(self) -> TierStats: ...

    def close(self) -> None: ...


def reaching(
    entries: Iterable[Entry], space: bytes, control: NDArray[np.float32], limit: int
) -> list[Candidate]:
    """`Tier.neighbours` by looking at each of a few entries; InvalidInput for another width."""
    query = np.asarray(control, np.float64)
    found: list[Candidate] = []
    for entry in entries:
        if entry.space != space or entry.control is None:
            continue
        if entry.control.shape != query.shape:
            raise InvalidInput(f"control must have shape {entry.control.shape}, got {query.shape}")
        distance = float(np.sqrt(np.sum((entry.control - query) ** 2)))
        if distance <= entry.radius:
            found.append(
                Candidate(entry.id, entry.control, entry.radius, entry.curvature, distance)
            )
    return sorted(found, key=lambda candidate: candidate.distance)[:limit]
