"""What the tests of the warm tier share: sizes, identities, a process to do harm to."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from warm_process import identity, payload

from ctrlcache.tiers.warm import WarmTier

SCRIPT = Path(__file__).with_name("warm_process.py")
LIMIT, SEGMENT = 64 << 20, 128 << 10
#: Opens tiers on one directory; `server` picks the index of another server.
Open = Callable[..., WarmTier]


@contextlib.contextmanager
def process(
    mode: str, tier_at: tuple[Path, Path], seed: int = 0, limit: int = LIMIT
) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        [sys.executable, str(SCRIPT), mode, *map(str, (*tier_at, seed, limit, SEGMENT))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def ids(count: int, name: str = "id") -> list[bytes]:
    return [identity(f"{name} {n}") for n in range(count)]


def right(tier: WarmTier, id: bytes) -> bool | None:
    """None: absent; else whether the payload is the right one."""
    found = tier.get(id)
    return None if found is None else found == payload(id)


def fill(disk: Path, but_pages: int) -> Path:
    """Occupy a disk except for some pages."""
    room = os.statvfs(disk)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes((room.f_bavail - but_pages) * room.f_frsize))
    return ballast
