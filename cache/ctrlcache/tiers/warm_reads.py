"""The warm index as readers see it; `warm_index.WarmIndex` adds what changes it."""

from __future__ import annotations

import contextlib
import os
import random
import struct
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import TierUnavailable
from ctrlcache.eviction import Usage
from ctrlcache.index import DATABASES, ControlHashIndex
from ctrlcache.tiers.base import Candidate
from ctrlcache.tiers.places import (
    TOMB,
    USE,
    Buffer,
    Place,
    SegmentRow,
    unpack_place,
    unpack_row,
    unpack_usage,
)

__all__ = ["MEMBER", "WarmReads"]

MEMBER = struct.Struct(">QQ")  # segment, offset: in the order of the file
_FREE_BYTES = 1 << 20
_READERS = 1024


class WarmReads:
    """TierUnavailable, with the cause, where shared memory is full or the map limit is reached."""

    def __init__(self, path: Path, map_bytes: int) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            room = os.statvfs(path)
            # LMDB maps its lock file; a page that cannot be had would kill the process.
            if room.f_bavail * room.f_frsize < _FREE_BYTES:
                raise TierUnavailable(f"no room for the index: {path.parent} is full")
            _allocate(path / "lock.mdb")
            self._env = lmdb.open(
                str(path),
                map_size=map_bytes,
                max_dbs=7 + DATABASES,
                max_readers=_READERS,
                sync=False,
                metasync=False,
                readahead=False,
                max_spare_txns=16,
            )
        except (OSError, lmdb.Error) as error:
            raise TierUnavailable(f"cannot open the index in {path}: {error}") from error
        with self._writing():
            pass  # waits for whoever is creating it
        self._places = self._env.open_db(b"places")
        self._members = self._env.open_db(b"members")
        self._segments = self._env.open_db(b"segments")
        self._tombs = self._env.open_db(b"tombs")
        self._uses = self._env.open_db(b"uses")
        self._pending = self._env.open_db(b"pending")
        self._meta = self._env.open_db(b"meta")
        self._controls = ControlHashIndex(self._env, "warm")
        self._env.reader_check()

    def close(self) -> None:
        self._env.close()

    # --- what there is -------------------------------------------------------------------------

    def place(self, id: bytes) -> Place | None:
        with self._env.begin(self._places) as txn:
            row = txn.get(id)
        return None if row is None else unpack_place(id, row)

    def places(self, ids: Iterable[bytes]) -> dict[bytes, Place]:
        found: dict[bytes, Place] = {}
        with self._env.begin(self._places) as txn:
            for id in ids:
                row = txn.get(id)
                if row is not None:
                    found[id] = unpack_place(id, row)
        return found

    def neighbours(self, space: bytes, control: NDArray[np.float32], limit: int) -> list[Candidate]:
        with self._env.begin() as txn:
            return self._controls.query(txn, space, control, limit)

    def scan(self, batch: int = 1000) -> Iterator[Place]:
        """Every live record; short transactions, so that a slow caller holds no pages back."""
        after = b""
        while True:
            rows: list[tuple[Buffer, Buffer]] = []
            with self._env.begin(self._places) as txn, txn.cursor() as cursor:
                found = cursor.set_range(after) if after else cursor.first()
                while found and len(rows) < batch:
                    rows.append(cursor.item())
                    found = cursor.next()
            for id, row in rows:
                yield unpack_place(id, row)
            if len(rows) < batch:
                return
            after = bytes(rows[-1][0]) + b"\0"

    def space(self, space: bytes) -> list[bytes]:
        """Ids of the couplets of a space."""
        with self._env.begin() as txn:
            return list(self._controls.members(txn, space))

    def occupancy(self) -> list[int]:
        """Couplets in each cell that is in use."""
        with self._env.begin() as txn:
            return [count for _, _, count in self._controls.occupancy(txn)]

    def count(self) -> int:
        with self._env.begin() as txn:
            return int(txn.stat(self._places)["entries"])

    def segments(self) -> dict[int, SegmentRow]:
        with self._env.begin(self._segments) as txn:
            return {int.from_bytes(key, "big"): unpack_row(value) for key, value in txn.cursor()}

    def live(self, segment: int) -> list[bytes]:
        """Ids of the live records of a segment, in the order of the file."""
        first = MEMBER.pack(segment, 0)
        ids: list[bytes] = []
        with self._env.begin(self._members) as txn, txn.cursor() as cursor:
            found = cursor.set_range(first)
            while found and cursor.key()[:8] == first[:8]:
                ids.append(bytes(cursor.value()))
                found = cursor.next()
        return ids

    def tombstones(self, segment: int) -> dict[bytes, int]:
        """Id -> sequence of the deletions whose (newest) tombstone lies in `segment`."""
        with self._env.begin(self._tombs) as txn:
            rows = [(bytes(key), *TOMB.unpack(value)) for key, value in txn.cursor()]
        return {id: sequence for id, sequence, where in rows if where == segment}

    def pending(self) -> list[bytes]:
        """Ids that were deleted here and have no tombstone on disk yet."""
        with self._env.begin(self._pending) as txn:
            return [bytes(key) for key, _ in txn.cursor()]

    def usages(self, places: Collection[Place]) -> list[Usage]:
        with self._env.begin(self._uses) as txn:
            return [unpack_usage(place, txn.get(place.entry.id)) for place in places]

    def all_uses(self) -> Iterator[tuple[bytes, float, float]]:
        """(id, hits, last_used_s) of every record that was ever used."""
        with self._env.begin(self._uses) as txn:
            rows = [(key, *USE.unpack(value)[:2]) for key, value in txn.cursor()]
        yield from rows

    def sample(self, count: int, rng: random.Random) -> list[Place]:
        """Up to `count` live records at random (ids are digests, so they are spread evenly)."""
        picked: dict[bytes, Place] = {}
        with self._env.begin(self._places) as txn, txn.cursor() as cursor:
            for _ in range(count):
                if not cursor.set_range(rng.randbytes(16)) and not cursor.first():
                    break
                id, row = cursor.item()
                picked[id] = unpack_place(id, row)
        return list(picked.values())

    def note(self, name: str) -> bytes | None:
        """A small fact kept with the index."""
        with self._env.begin(self._meta) as txn:
            value = txn.get(name.encode())
        return None if value is None else bytes(value)

    def newest_sequence(self) -> int:
        """The highest sequence of any record or tombstone that was published."""
        return int.from_bytes(self.note("sequence") or b"", "big")

    # --- shared with the writing half ----------------------------------------------------------

    def set_note(self, name: str, value: bytes) -> None:
        with self._writing() as txn:
            txn.put(name.encode(), value, db=self._meta)

    def reap(self) -> None:
        """Free the reader slots of processes that were killed."""
        self._env.reader_check()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction]:
        try:
            with self._env.begin(write=True) as txn:
                yield txn
        except lmdb.MapFullError as error:
            raise TierUnavailable(
                f"the index in {self.path} has reached its limit of "
                f"{self._env.info()['map_size']} bytes: raise index_bytes"
            ) from error
        except (OSError, lmdb.Error) as error:
            room = os.statvfs(self.path)
            full = room.f_bavail * room.f_frsize < _FREE_BYTES
            cause = f"{self.path.parent} is full" if full else str(error)
            raise TierUnavailable(f"cannot write the index in {self.path}: {cause}") from error


def _allocate(path: Path) -> None:
    """Make the lock file with all its pages: a reader that takes a slot in a full /dev/shm later
    on would be killed by SIGBUS. Only a new file may be touched: closing a descriptor of one that
    LMDB has open would drop this process's locks on it."""
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, 64 * (_READERS + 4))
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)
