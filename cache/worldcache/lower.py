"""What lies below the device: packed features in host memory (L2), and below that on disk (L3).

Similar features are kept as differences to a base (`worldcache.similar`), which stays in memory for
as long as another one there needs it, and goes to disk with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from numpy.typing import NDArray

from ctrlcache.errors import CorruptRecord
from worldcache.disk import Disk
from worldcache.eviction import Usual
from worldcache.merge import Packed, pack_alone, restore
from worldcache.metrics import Corrupt, Sink, StoreEvicted
from worldcache.shelf import Held, Shelf
from worldcache.similar import Similar

__all__ = ["Lower", "Packing"]

Array: TypeAlias = NDArray[Any]
#: Room is made for some more than what is needed now, so that the disk gets larger batches.
_AHEAD = 0.05


@dataclass(frozen=True)
class Packing:
    """provenance: 16 bytes that mark every record. max_error: of merged features, as a share of
    full scale. merge: store similar features as differences."""

    provenance: bytes
    max_error: float
    merge: bool


class Lower:
    """L2 and L3. lock: held for moments, by everyone. moving: held by whoever calls `put`, `take`
    and `write`, for as long as that takes. above: a feature that is on the device, every bit of it.
    clock: now, and what is usual in the store.
    """

    def __init__(
        self,
        shelf: Shelf[bytes],
        disk: Disk | None,
        packing: Packing,
        lock: threading.Lock,
        moving: threading.RLock,
        above: Callable[[bytes], Array | None],
        clock: Callable[[], tuple[float, Usual]],
        on_event: Sink,
    ) -> None:
        self.shelf = shelf
        self.disk = disk
        self._packing = packing
        self._lock = lock
        self._moving = moving
        self._above = above
        self._clock = clock
        self._on_event = on_event
        self._similar = Similar(packing.provenance, packing.max_error)

    def restored(self, payload: bytes, level: str, id: bytes) -> tuple[Array, float] | None:
        """(array, bound on its error) of a record. What is damaged, or a difference to what is
        gone, is deleted: None."""
        try:
            restored = restore(payload, self._packing.provenance, self._base)
        except CorruptRecord:
            self._on_event(Corrupt(level))
            restored = None
        if restored is None:
            self._forget(level, id)
            return None
        restored[0].flags.writeable = False
        return restored

    def _base(self, id: bytes) -> Array | None:
        """What others are differences to: always exact."""
        whole = self._above(id)
        if whole is not None:
            return whole
        with self._lock:
            packed = self.shelf.get(id)
        payload = packed.value if packed is not None else None
        if payload is None and self.disk is not None:
            payload = self.disk.get(id)
        if payload is None:
            return None
        restored = restore(payload, self._packing.provenance, lambda _: None)
        return None if restored is None else restored[0]

    def _forget(self, level: str, id: bytes) -> None:
        if level == "l3" and self.disk is not None:
            self.disk.delete(id)
        elif level == "l2":
            with self._moving:
                self.take(id)

    def put(self, id: bytes, array: Array, held: Held[Any]) -> None:
        """Have a feature in L2, or where that has no room for it, on disk."""
        if id in self.shelf:
            return
        packed = self.packed(array, held)
        size = len(packed.payload)
        standing = replace(held.standing, size_bytes=size, dependents=0)
        below = Held(packed.payload, standing, held.kind, held.group, packed.base)
        if size > self.shelf.limit_bytes or not self._make_room(size, packed.base):
            self.write(id, below)
            return
        with self._lock:
            base = None if packed.base is None else self.shelf.get(packed.base)
            if base is not None:
                base.standing.dependents += 1
            self.shelf.add(id, below)
        self._similar.add(id, packed, array, (held.kind, held.group))

    def packed(self, array: Array, held: Held[Any]) -> Packed:
        """As it would be stored here."""
        if not self._packing.merge:
            return pack_alone(array, self._packing.provenance)

        def base(id: bytes) -> Array | None:
            return self._base(id) if id in self.shelf else None

        return self._similar.pack(array, (held.kind, held.group), base)

    def _make_room(self, size_bytes: int, base: bytes | None) -> bool:
        limit = self.shelf.limit_bytes
        if self.shelf.size_bytes + size_bytes <= limit:
            return True
        goal = max(0, limit - size_bytes - int(_AHEAD * limit))
        while self.shelf.size_bytes > goal:
            with self._lock:
                victim = self.shelf.least(*self._clock(), base)
            held = None if victim is None else self.shelf.get(victim)
            if victim is None or held is None:
                break
            self.write(victim, held)
            self.take(victim)
            self._on_event(StoreEvicted("l2"))
        return self.shelf.size_bytes + size_bytes <= limit

    def take(self, id: bytes) -> None:
        """Remove a feature from L2."""
        with self._lock:
            held = self.shelf.pop(id)
            if held is not None and held.base is not None:
                base = self.shelf.get(held.base)
                if base is not None:
                    base.standing.dependents -= 1
        self._similar.discard(id)

    def write(self, id: bytes, held: Held[bytes]) -> None:
        """Write a feature to disk, with what it is a difference to."""
        if self.disk is None:
            return
        base = None if held.base is None else self.shelf.get(held.base)
        both = (
            [(id, held)] if base is None or held.base is None else [(held.base, base), (id, held)]
        )
        self.disk.put(
            (id, held.value, held.standing.cost_ms * (1 + held.standing.dependents))
            for id, held in both
        )
