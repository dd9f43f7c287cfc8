"""A process of its own that writes to, or reads from, a warm directory; and what it writes.

    python warm_process.py write DIRECTORY INDEX SEED LIMIT SEGMENT    until it is killed
    python warm_process.py read  DIRECTORY INDEX SEED LIMIT SEGMENT    ids on stdin, verdicts out
    python warm_process.py fork        a line "write DIRECTORY ..." on stdin for each child to fork

Payloads follow from their ids, so that any process can tell a right one from a wrong one. A line is
written to stdout after the call it tells of has returned.
"""

from __future__ import annotations

import os
import sys
from hashlib import blake2b
from pathlib import Path

import numpy as np

from ctrlcache.tiers.base import Entry, Record
from ctrlcache.tiers.warm import WarmTier

SPACE = b"s" * 16


def identity(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def payload(id: bytes, largest: int = 6_000) -> bytes:
    rng = np.random.default_rng(int.from_bytes(id, "little"))
    return rng.bytes(int(rng.integers(1, largest)))


def record(id: bytes, largest: int = 6_000) -> Record:
    control = np.frombuffer(id, np.uint8)[:4].astype(np.float32) / 255
    cost_ms = float(id[0])
    return Record(Entry(id, SPACE, control, 0.2, 0.1, cost_ms, 1e9), payload(id, largest))


def open_tier(directory: Path, index: Path, limit: int, segment: int, **more: object) -> WarmTier:
    return WarmTier(
        directory,
        index,
        limit_bytes=limit,
        segment_bytes=segment,
        index_bytes=64 << 20,
        **{"follow_s": None, **more},  # type: ignore[arg-type]
    )


def say(*words: str) -> None:
    os.write(1, (" ".join(words) + "\n").encode())


def write(tier: WarmTier, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kept: list[bytes] = []
    for number in range(1_000_000):
        batch = [record(identity(f"{seed}/{number}/{n}")) for n in range(int(rng.integers(1, 40)))]
        assert tier.put(batch) == len(batch)
        kept += [item.entry.id for item in batch]
        say("put", *(item.entry.id.hex() for item in batch))
        if rng.random() < 0.3:
            gone = [kept.pop(int(rng.integers(len(kept)))) for _ in range(min(3, len(kept)))]
            say("deleting", *(id.hex() for id in gone))
            tier.delete(gone)
            say("deleted", *(id.hex() for id in gone))
        if rng.random() < 0.2:
            tier.touch(kept[-3:])
            tier.maintain()


def read(tier: WarmTier) -> None:
    for line in sys.stdin:
        id = bytes.fromhex(line.strip())
        found = tier.get(id)
        say("absent" if found is None else "right" if found == payload(id) else "wrong")


def fork() -> None:
    """Start processes without importing everything again: "pid N", what it says, "ended"."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            sys.argv[1:] = line.split()
            main()
            os._exit(0)
        say("pid", str(pid))
        os.waitpid(pid, 0)
        say("ended")


def main() -> None:
    if sys.argv[1] == "fork":
        return fork()
    mode, directory, index, seed, limit, segment = sys.argv[1:]
    role = {"read_only": True, "follow_s": 0.02} if mode == "read" else {}
    tier = open_tier(Path(directory), Path(index), int(limit), int(segment), **role)
    say("open", "writer" if tier.writable else "reader", tier.trouble or "")
    return write(tier, int(seed)) if mode == "write" else read(tier)


if __name__ == "__main__":
    main()
