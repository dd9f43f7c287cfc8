"""The third level: packed features on disk, in the engine of CtrlCache's warm tier.

One process of a server writes, the others read what it has written and take over when it is gone;
what they would have written is left out, since a feature can always be computed again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ctrlcache.errors import ConfigError, TierUnavailable
from ctrlcache.events import Event, Evicted
from ctrlcache.tiers.base import Entry, Record
from ctrlcache.tiers.warm import WarmTier
from worldcache.metrics import Corrupt, Sink, StoreEvicted, ignore

__all__ = ["Disk", "DiskConfig"]

MIB = 1 << 20


@dataclass(frozen=True)
class DiskConfig:
    """directory: its own. index_directory: in shared memory, the same for all processes of one
    server and for no other. size_bytes: of all files together."""

    directory: Path
    index_directory: Path
    size_bytes: int = 4 << 30
    index_bytes: int = 256 * MIB

    def __post_init__(self) -> None:
        for name, least in (("size_bytes", MIB), ("index_bytes", MIB)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"disk {name} must be at least {least}, got {getattr(self, name)}"
                )


class Disk:
    """Safe in several threads and processes; open it anew after a fork."""

    def __init__(self, config: DiskConfig, on_event: Sink = ignore) -> None:
        self._on_event = on_event
        self._changed = True
        self._tier = WarmTier(
            config.directory,
            config.index_directory,
            limit_bytes=config.size_bytes,
            segment_bytes=16 * MIB,
            # Losing the last features with the power costs time, never an answer.
            durable=False,
            policy="weighted",
            index_bytes=config.index_bytes,
            on_event=self._pass_on,
        )

    def _pass_on(self, event: Event) -> None:
        """The tier's own events, under this level's name."""
        match event:
            case Evicted(_, _, count):
                self._on_event(StoreEvicted("l3", count))
            case Corrupt(_, count):
                self._on_event(Corrupt("l3", count))

    def get(self, id: bytes) -> bytes | None:
        return self._tier.get(id)

    def holds(self, id: bytes) -> bool:
        return self._tier.entry(id) is not None

    def cost_ms(self, id: bytes) -> float:
        entry = self._tier.entry(id)
        return 0.0 if entry is None else entry.cost_ms

    def touch(self, id: bytes) -> None:
        self._tier.touch((id,))

    def delete(self, id: bytes) -> None:
        try:
            self._tier.delete((id,))
        except TierUnavailable:
            return

    def put(self, features: Iterable[tuple[bytes, bytes, float]]) -> int:
        """(id, payload, cost_ms) of each; returns how many are there now. What is there stays."""
        now = time.time()
        records = [
            Record(Entry(id, id, None, 0.0, 0.0, cost_ms, now), payload)
            for id, payload, cost_ms in features
            if not self.holds(id)
        ]
        if not records or not self._tier.writable:
            return 0
        self._changed = True
        try:
            return self._tier.put(records)
        except TierUnavailable:
            return 0

    def changed(self) -> bool:
        """Whether something was written since this was asked the last time."""
        changed, self._changed = self._changed, False
        return changed

    def stats(self) -> tuple[int, int, int]:
        """(entries, bytes, limit)."""
        stats = self._tier.stats()
        return stats.entries, stats.size_bytes, stats.limit_bytes

    def close(self) -> None:
        self._tier.close()
