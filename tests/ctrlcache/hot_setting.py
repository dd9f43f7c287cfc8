"""Shared memory of a size that is soon full, and what to put into it."""

from __future__ import annotations

import os
from pathlib import Path

from ctrlcache.key import digest
from ctrlcache.shared import SharedMemory
from ctrlcache.tiers.base import Entry, Record
from ctrlcache.tiers.ledger import occupied_bytes

__all__ = ["SIZE", "WRITER", "check_accounts", "fill", "record"]

SIZE = 8 << 20
WRITER = Path(__file__).with_name("shared_writer.py")


def record(name: str, size: int = 100, cost_ms: float = 1.0) -> Record:
    id = digest(name.encode())
    return Record(Entry(id, id, None, 0.0, 0.0, cost_ms, 0.0), name.encode()[:1] * size)


def fill(memory: SharedMemory, rounds: int = 3) -> None:
    """Put several times what fits, all dearer than anything else."""
    for n in range(rounds * SIZE // 50_000):
        memory.hot.put([record(f"filling {os.urandom(8).hex()} {n}", 50_000, cost_ms=1e6)])


def check_accounts(memory: SharedMemory) -> None:
    """What is counted is what is there."""
    entries = list(memory.hot.scan())
    payloads = [memory.hot.get(entry.id) for entry in entries]
    assert None not in payloads
    rows = [value for table in ("sessions", "t") for _, value in memory.table(table).scan()]
    size = sum(occupied_bytes(len(value)) for value in [*payloads, *rows] if value is not None)
    stats = memory.hot.stats()
    assert (stats.entries, stats.size_bytes) == (len(entries), size)
    assert stats.size_bytes <= stats.limit_bytes
