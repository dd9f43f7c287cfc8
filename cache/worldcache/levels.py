"""Features in three levels: on the device as they are, in host memory packed, on disk packed.

    L1  device memory (15 % of it), or a budget in this process: arrays as they are computed
    L2  host memory: compressed, similar ones merged (`worldcache.merge`)
    L3  disk: the engine of CtrlCache's warm tier; shared by the processes of a server, kept over
        restarts

What has to leave a level goes to the next one; what is asked for comes back up, if it is worth more
there than what would have to leave. All budgets hold before, during and after every call. Features
are content-addressed and immutable, so a copy in any level is as good as another, with one
exception: with `max_error` above 0, packing may have cost precision, and `Found.bound` says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from numpy.typing import NDArray

from ctrlcache.errors import ConfigError
from worldcache.devices import Device, HostDevice, device_share
from worldcache.disk import Disk, DiskConfig
from worldcache.eviction import Standing, Weights, score
from worldcache.experience import Experience
from worldcache.lower import Lower, Packing
from worldcache.metrics import Sink, StoreEvicted, StoreLookup, StoreSize, ignore
from worldcache.shelf import Held, Shelf

__all__ = ["Found", "LevelStats", "Levels", "LevelsConfig"]

Array: TypeAlias = NDArray[Any]
MIB = 1 << 20


@dataclass(frozen=True)
class LevelsConfig:
    """l1_bytes: None for 15 % of the device's memory where there is one, else 64 MiB. max_error:
    of merged features, as a share of full scale; 0 keeps every bit. merge: store similar features
    as differences. disk: None goes without L3."""

    l1_bytes: int | None = None
    l2_bytes: int = 256 * MIB
    disk: DiskConfig | None = None
    max_error: float = 0.0
    merge: bool = True
    weights: Weights = field(default_factory=Weights)

    def __post_init__(self) -> None:
        for name in ("l1_bytes", "l2_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"levels {name} must be at least 0, got {value}")
        if not 0 <= self.max_error < 0.5:
            raise ConfigError(f"levels max_error must be 0 to 0.5, got {self.max_error}")


@dataclass(frozen=True, eq=False, slots=True)
class Found:
    """array: read-only. level: `l1`, `l2` or `l3`. bound: on the absolute error of every value; 0
    where it is bit for bit what was put."""

    array: Array
    level: str
    bound: float


@dataclass(frozen=True)
class LevelStats:
    entries: int
    size_bytes: int
    limit_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class _Raw:
    """On the device. bound: above 0 where it came back from a level that is not exact."""

    value: Any
    bound: float


class Levels:
    """A store of features by id (16 bytes). Safe in several threads; the disk also in several
    processes, of which one writes and all read.

    provenance: 16 bytes that mark every packed record. now: seconds, monotonic.
    """

    def __init__(
        self,
        config: LevelsConfig | None = None,
        provenance: bytes = bytes(16),
        on_event: Sink = ignore,
        device: Device | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or LevelsConfig()
        l1_bytes = self.config.l1_bytes
        if l1_bytes is None:
            l1_bytes = device_share() or 64 * MIB
        self._on_event = on_event
        self._device = device or HostDevice()
        self._now = now
        self._l1: Shelf[_Raw] = Shelf(l1_bytes, self.config.weights)
        self._l2: Shelf[bytes] = Shelf(self.config.l2_bytes, self.config.weights)
        self._disk = None if self.config.disk is None else Disk(self.config.disk, on_event)
        self._experience = Experience()
        #: Held for moments, by everyone; and by whoever moves something, for as long as it takes.
        self._lock = threading.Lock()
        self._moving = threading.RLock()
        self._below = Lower(
            self._l2,
            self._disk,
            Packing(provenance, self.config.max_error, self.config.merge),
            self._lock,
            self._moving,
            self._whole,
            lambda: (self._now(), self._experience.usual),
            on_event,
        )

    # -- reading --------------------------------------------------------------------------------

    def get(self, id: bytes) -> Found | None:
        """The feature, from the highest level that has it."""
        found = self._find(id)
        self._on_event(StoreLookup(*(("none", "miss") if found is None else (found.level, "hit"))))
        return found

    def exact(self, id: bytes) -> Array | None:
        """The feature, where it is here with every bit that it was put with."""
        found = self.get(id)
        return found.array if found is not None and found.bound == 0 else None

    def __contains__(self, id: bytes) -> bool:
        """Whether it is here, without looking at it or counting this as a use."""
        with self._lock:
            if id in self._l1 or id in self._l2:
                return True
        return self._disk is not None and self._disk.holds(id)

    def _find(self, id: bytes) -> Found | None:
        with self._lock:
            raw = self._l1.get(id)
            if raw is not None:
                self._used(raw)
        if raw is not None:
            return Found(self._device.download(raw.value.value), "l1", raw.value.bound)
        with self._lock:
            packed = self._l2.get(id)
            if packed is not None:
                self._used(packed)
        if packed is not None:
            restored = self._below.restored(packed.value, "l2", id)
            if restored is not None:
                self._promote(id, *restored, replace(packed.standing), packed.kind, packed.group)
                return Found(restored[0], "l2", restored[1])
        return self._find_on_disk(id)

    def _find_on_disk(self, id: bytes) -> Found | None:
        if self._disk is None:
            return None
        payload = self._disk.get(id)
        restored = None if payload is None else self._below.restored(payload, "l3", id)
        if restored is None:
            return None
        self._disk.touch(id)
        array, bound = restored
        cost_ms = self._disk.cost_ms(id)
        with self._lock:
            standing = self._experience.returned(id, array.nbytes, cost_ms, self._now())
        self._promote(id, array, bound, standing, "", bytes(16))
        return Found(array, "l3", bound)

    def _used(self, held: Held[Any]) -> None:
        self._experience.used(held, self._now())

    def _whole(self, id: bytes) -> Array | None:
        """What is in L1 with every bit."""
        with self._lock:
            raw = self._l1.get(id)
        if raw is None or raw.value.bound > 0:
            return None
        return self._device.download(raw.value.value)

    # -- writing --------------------------------------------------------------------------------

    def put(
        self,
        id: bytes,
        array: Array,
        *,
        kind: str = "",
        group: bytes = bytes(16),
        importance: float | None = None,
        cost_ms: float = 0.0,
    ) -> None:
        """Keep a feature; the array must not be changed afterwards. What is there already stays.

        kind: what sort of feature, for telling how often such are asked for again. group: features
        of one group may be alike (one camera, one scene). importance: of the content, 0 to 1, where
        it is known. cost_ms: of computing it again. InvalidInput for a type that cannot be packed.
        """
        with self._moving:
            with self._lock:
                there = self._l1.get(id) or self._l2.get(id)
                if there is not None:
                    there.standing.last_used_s = self._now()
                    return
                standing = self._experience.arrived(
                    id, kind, array.nbytes, cost_ms, self._now(), importance
                )
                known = importance is not None
            fits = array.nbytes <= self._l1.limit_bytes and self._deserves(standing)
            if not fits or not self._room_in_l1(array.nbytes):
                self._below.put(id, array, Held(None, standing, kind, group, known=known))
            else:
                raw = _Raw(self._device.upload(array), 0.0)
                with self._lock:
                    self._l1.add(id, Held(raw, standing, kind, group, known=known))
            self._report()

    def _promote(
        self, id: bytes, array: Array, bound: float, standing: Standing, kind: str, group: bytes
    ) -> None:
        """Bring a feature up to L1, unless somebody is moving things, or better ones are there."""
        if array.nbytes > self._l1.limit_bytes or not self._moving.acquire(blocking=False):
            return
        try:
            standing = replace(standing, size_bytes=array.nbytes, dependents=0)
            if id in self._l1 or not self._deserves(standing):
                return
            if not self._room_in_l1(array.nbytes):
                return
            raw = _Raw(self._device.upload(array), bound)
            with self._lock:
                self._l1.add(id, Held(raw, standing, kind, group))
                self._experience.remember(id, standing)
            packed = self._l2.get(id)
            if packed is not None and not packed.standing.dependents and bound == 0:
                self._below.take(id)
            self._report()
        finally:
            self._moving.release()

    def _deserves(self, standing: Standing) -> bool:
        """Whether it is worth more in L1 than what would have to leave."""
        with self._lock:
            if self._l1.size_bytes + standing.size_bytes <= self._l1.limit_bytes:
                return True
            now, usual = self._now(), self._experience.usual
            least = self._l1.least(now, usual)
            held = None if least is None else self._l1.get(least)
            weights = self.config.weights
            return held is not None and score(standing, now, usual, weights) > score(
                held.standing, now, usual, weights
            )

    def _room_in_l1(self, size_bytes: int) -> bool:
        while self._l1.size_bytes + size_bytes > self._l1.limit_bytes:
            with self._lock:
                victim = self._l1.least(self._now(), self._experience.usual)
                held = None if victim is None else self._l1.get(victim)
            if victim is None or held is None:
                return False
            # It can be found all the while: it leaves only when it has arrived below.
            if held.value.bound == 0:
                self._below.put(victim, self._device.download(held.value.value), held)
            with self._lock:
                self._l1.pop(victim)
            self._on_event(StoreEvicted("l1"))
        return True

    # -- the rest -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Have everything on disk that fits there; it stays in memory, too."""
        if self._disk is None:
            return
        with self._moving:
            for id in self._l2:
                below = self._l2.get(id)
                if below is not None:
                    self._below.write(id, below)
            for id in self._l1:
                held = self._l1.get(id)
                if held is None or id in self._l2 or held.value.bound > 0 or self._disk.holds(id):
                    continue
                array = self._device.download(held.value.value)
                made = self._below.packed(array, held)
                self._below.write(
                    id, Held(made.payload, held.standing, held.kind, held.group, made.base)
                )
            self._report()

    def stats(self) -> dict[str, LevelStats]:
        """By level."""
        with self._lock:
            stats = {
                name: LevelStats(len(shelf), shelf.size_bytes, shelf.limit_bytes)
                for name, shelf in (("l1", self._l1), ("l2", self._l2))
            }
        if self._disk is not None:
            stats["l3"] = LevelStats(*self._disk.stats())
        return stats

    def close(self) -> None:
        """Write what is worth keeping to disk, and forget the rest."""
        self.flush()
        if self._disk is not None:
            self._disk.close()

    def _report(self) -> None:
        self._on_event(StoreSize("l1", self._l1.size_bytes))
        self._on_event(StoreSize("l2", self._l2.size_bytes))
        if self._disk is not None and self._disk.changed():
            self._on_event(StoreSize("l3", self._disk.stats()[1]))
