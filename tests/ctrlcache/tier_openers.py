"""Every tier the contract suite runs against: one opener each, in `OPENERS`.

An opener gets a directory of the test's own, a byte limit, an eviction policy and a clock, and
gives back a tier. Opened twice on one directory (the first closed), a persistent one holds what it
held. Clean-up of what lies outside the directory is the opener's `clean`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import object_store

from ctrlcache.shared import RECORD_SHARE, SharedMemory
from ctrlcache.tiers.base import Tier
from ctrlcache.tiers.cold import ColdTier
from ctrlcache.tiers.memory import MemoryTier
from ctrlcache.tiers.warm import WarmTier

Clock = Callable[[], float]


@dataclass(frozen=True)
class Opener:
    open: Callable[[Path, int, str, Clock], Tier]
    clean: Callable[[Path], None] = lambda directory: None
    persistent: bool = True


def shm_path(directory: Path) -> Path:
    """A place in /dev/shm that belongs to `directory`."""
    return Path("/dev/shm") / f"ctrlcache-test-{hashlib.md5(str(directory).encode()).hexdigest()}"


def _hot(directory: Path, limit_bytes: int, eviction: str, clock: Clock) -> Tier:
    size_bytes = int(limit_bytes / RECORD_SHARE) + 1
    return SharedMemory(shm_path(directory), size_bytes, eviction, clock).hot


def _memory(directory: Path, limit_bytes: int, eviction: str, clock: Clock) -> Tier:
    return MemoryTier(limit_bytes, eviction, clock)


def _warm(directory: Path, limit_bytes: int, eviction: str, clock: Clock) -> Tier:
    return WarmTier(
        directory / "warm",
        shm_path(directory),
        limit_bytes=limit_bytes,
        policy=eviction,
        index_bytes=1 << 28,
        follow_s=None,
        clock=clock,
    )


def _cold(directory: Path, limit_bytes: int, eviction: str, clock: Clock) -> Tier:
    tier = ColdTier(
        object_store.objects(object_store.gateway()),
        f"contract/{shm_path(directory).name}",
        "a task",
        limit_bytes=limit_bytes,
        policy=eviction,
        now=clock,
    )
    tier.refresh()
    tier.trim()
    return tier


OPENERS: dict[str, Opener] = {
    "cold": Opener(_cold),
    "memory": Opener(_memory, persistent=False),
    "hot": Opener(_hot, lambda directory: SharedMemory.remove(shm_path(directory))),
    "warm": Opener(_warm, lambda directory: WarmTier.remove_index(shm_path(directory))),
}


class Closing:
    """Keeps at most one tier open per directory, and cleans up."""

    def __init__(self, name: str, directory: Path) -> None:
        self.opener = OPENERS[name]
        self.name = name
        self._directory = directory
        self._tier: Any = None
        self.now_s = 1_000.0

    def open(self, limit_bytes: int = 8 << 20, eviction: str = "lru") -> Tier:
        """Open the tier, or open it again."""
        self.close()
        self._tier = self.opener.open(self._directory, limit_bytes, eviction, lambda: self.now_s)
        return self._tier

    def close(self) -> None:
        if self._tier is not None:
            self._tier.close()
            self._tier = None

    def clean(self) -> None:
        self.close()
        self.opener.clean(self._directory)
