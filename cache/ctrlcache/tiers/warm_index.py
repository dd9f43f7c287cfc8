"""Where each warm record lies: an LMDB environment in shared memory, one per server.

It steers reads, so it never touches the disk: it can always be made again from the segments, and no
flipped bit there can mislead it. All processes of a server share it; LMDB lets them read without
ever waiting for a writer, and a process that is killed leaves it as after its last transaction.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import InvalidInput, TierUnavailable
from ctrlcache.eviction import Usage, used
from ctrlcache.index import DATABASES, ControlHashIndex
from ctrlcache.tiers.base import Candidate, Entry
from ctrlcache.tiers.places import (
    TOMB,
    USE,
    Buffer,
    Place,
    SegmentRow,
    pack_place,
    pack_row,
    same_place,
    unpack_place,
    unpack_row,
    unpack_usage,
)
from ctrlcache.tiers.segments import Header

__all__ = ["WarmIndex"]

_LAYOUT = b"1"
_MEMBER = struct.Struct(">QQ")  # segment, offset: in the order of the file
_FREE_BYTES = 1 << 20
_READERS = 1024


class WarmIndex:
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
        if self.note("layout") not in (None, _LAYOUT):
            self.clear()
        else:
            self.set_note("layout", _LAYOUT)

    def close(self) -> None:
        self._env.close()

    # --- reading ------------------------------------------------------------------------------

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
        first = _MEMBER.pack(segment, 0)
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

    # --- writing ------------------------------------------------------------------------------

    def set_note(self, name: str, value: bytes) -> None:
        with self._writing() as txn:
            txn.put(name.encode(), value, db=self._meta)

    def publish(
        self,
        headers: Sequence[Header],
        rows: Mapping[int, SegmentRow] | None = None,
        skip: Collection[tuple[int, int, bytes]] = (),
    ) -> int:
        """Make records known (tombstones take theirs out); returns how many are live now.

        Of several copies of a record the one with the highest sequence, then segment, counts.
        `rows` replaces `indexed`, `seen`, `sealed` of segments, live figures stay. `skip` holds
        (segment, offset, id) of records in quarantine.
        """
        change = _Change()
        live = 0
        with self._writing() as txn:
            fresh: list[Entry] = []
            newest = int.from_bytes(txn.get(b"sequence", b"", db=self._meta), "big")
            for header in headers:
                newest = max(newest, header.sequence)
                change.oldest[header.segment] = min(
                    header.sequence, change.oldest.get(header.segment, header.sequence)
                )
                id = header.entry.id
                if header.tombstone:
                    self._bury(txn, header, change)
                elif (header.segment, header.offset, id) not in skip:
                    live += self._accept(txn, header, change, fresh)
            self._file(txn, fresh)
            self._apply(txn, change, rows or {})
            txn.put(b"sequence", newest.to_bytes(8, "big"), db=self._meta)
        return live

    def forget(self, ids: Iterable[bytes], expect: Mapping[bytes, Place] | None = None) -> int:
        """Take records out; with `expect`, only those that still lie there."""
        change = _Change()
        count = 0
        with self._writing() as txn:
            for id in ids:
                row = txn.get(id, db=self._places)
                if row is None:
                    continue
                place = unpack_place(id, row)
                if expect is not None and not same_place(place, expect[id]):
                    continue
                self._remove(txn, place, change)
                txn.delete(id, db=self._uses)
                count += 1
            self._apply(txn, change, {})
        return count

    def forget_for_good(self, ids: Iterable[bytes]) -> int:
        """Take records out and remember to have their tombstones written by whoever may."""
        change = _Change()
        count = 0
        with self._writing() as txn:
            for id in ids:
                row = txn.get(id, db=self._places)
                if row is None:
                    continue
                place = unpack_place(id, row)
                self._remove(txn, place, change)
                txn.put(id, TOMB.pack(place.sequence + 1, 0), db=self._tombs)
                txn.put(id, b"", db=self._pending)
                count += 1
            self._apply(txn, change, {})
        return count

    def set_rows(self, rows: Mapping[int, SegmentRow]) -> None:
        with self._writing() as txn:
            self._apply(txn, _Change(), rows)

    def drop_segment(self, segment: int, from_offset: int = 0) -> int:
        """A segment is gone (or from an offset on): so are the records that lie there."""
        change = _Change()
        count = 0
        with self._writing() as txn:
            first = _MEMBER.pack(segment, from_offset)
            ids: list[bytes] = []
            with txn.cursor(self._members) as cursor:
                found = cursor.set_range(first)
                while found and cursor.key()[:8] == first[:8]:
                    ids.append(bytes(cursor.value()))
                    found = cursor.next()
            for id in ids:
                row = txn.get(id, db=self._places)
                if row is not None:
                    self._remove(txn, unpack_place(id, row), change)
                    count += 1
            self._apply(txn, change, {})
            if from_offset == 0:
                txn.delete(segment.to_bytes(8, "big"), db=self._segments)
        return count

    def drop_tombstones(self, ids: Iterable[bytes]) -> None:
        with self._writing() as txn:
            for id in ids:
                txn.delete(id, db=self._tombs)

    def settle_pending(self, ids: Iterable[bytes]) -> None:
        """The tombstones of `ids` are on disk."""
        with self._writing() as txn:
            for id in ids:
                txn.delete(id, db=self._pending)

    def add_uses(self, counts: Mapping[bytes, tuple[int, float]], clock: float) -> None:
        """counts: id -> (new uses, time of the last one in seconds)."""
        with self._writing() as txn:
            for id, (count, last_s) in counts.items():
                row = txn.get(id, db=self._places)
                if row is None:
                    continue
                usage = used(
                    unpack_usage(unpack_place(id, row), txn.get(id, db=self._uses)), last_s
                )
                hits = usage.hits + count - 1
                value = USE.pack(hits, usage.last_used_s, max(usage.clock, clock))
                txn.put(id, value, db=self._uses)

    def set_uses(self, uses: Iterable[tuple[bytes, float, float]]) -> None:
        """(id, hits, last_used_s) as saved; for records that are known and have none yet."""
        with self._writing() as txn:
            for id, hits, last_s in uses:
                if txn.get(id, db=self._places) is not None:
                    txn.put(id, USE.pack(hits, last_s, 0.0), db=self._uses, overwrite=False)

    def clear(self) -> None:
        """Forget everything, before a rebuild."""
        with self._writing() as txn:
            # Pending deletions stay: the segments do not know of them yet.
            for db in (self._places, self._members, self._segments, self._uses, self._meta):
                txn.drop(db, delete=False)
            for id, tomb in list(txn.cursor(self._tombs)):
                if txn.get(id, db=self._pending) is None:
                    txn.delete(id, db=self._tombs)
                else:
                    txn.put(id, TOMB.pack(TOMB.unpack(tomb)[0], 0), db=self._tombs)
            txn.put(b"layout", _LAYOUT, db=self._meta)
            self._controls.clear(txn)

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

    def _accept(
        self, txn: lmdb.Transaction, header: Header, change: _Change, fresh: list[Entry]
    ) -> bool:
        id = header.entry.id
        buried = txn.get(id, db=self._tombs)
        if buried is not None and TOMB.unpack(buried)[0] > header.sequence:
            return False
        row = txn.get(id, db=self._places)
        if row is not None:
            old = unpack_place(id, row)
            rank, new = (old.sequence, old.segment), (header.sequence, header.segment)
            if rank == new and old.offset == header.offset:
                return True
            if rank >= new:
                return False
            self._remove(txn, old, change)
        txn.put(id, pack_place(header), db=self._places)
        txn.put(_MEMBER.pack(header.segment, header.offset), id, db=self._members)
        change.add(header.segment, header.end - header.offset, 1)
        if header.entry.control is not None:
            fresh.append(header.entry)
        return True

    def _bury(self, txn: lmdb.Transaction, header: Header, change: _Change) -> None:
        id = header.entry.id
        found = txn.get(id, db=self._tombs)
        rank = (header.sequence, header.segment)
        if found is None or TOMB.unpack(found) < rank:
            txn.put(id, TOMB.pack(*rank), db=self._tombs)
        row = txn.get(id, db=self._places)
        if row is not None and (place := unpack_place(id, row)).sequence < header.sequence:
            self._remove(txn, place, change)
            txn.delete(id, db=self._uses)

    def _remove(self, txn: lmdb.Transaction, place: Place, change: _Change) -> None:
        txn.delete(place.entry.id, db=self._places)
        txn.delete(_MEMBER.pack(place.segment, place.offset), db=self._members)
        if place.entry.control is not None:
            self._controls.remove(txn, place.entry)
        change.add(place.segment, -place.size_bytes, -1)

    def _file(self, txn: lmdb.Transaction, entries: list[Entry]) -> None:
        try:
            with self._env.begin(write=True, parent=txn) as inner:
                self._controls.add(inner, entries)
        except InvalidInput:
            for entry in entries:  # one of another width than its space: found by id alone
                with (
                    contextlib.suppress(InvalidInput),
                    self._env.begin(write=True, parent=txn) as inner,
                ):
                    self._controls.add(inner, [entry])

    def _apply(
        self, txn: lmdb.Transaction, change: _Change, rows: Mapping[int, SegmentRow]
    ) -> None:
        for segment in {*change.bytes, *change.oldest, *rows}:
            key = segment.to_bytes(8, "big")
            value = txn.get(key, db=self._segments)
            row = SegmentRow() if value is None else unpack_row(value)
            live_bytes = row.live_bytes + change.bytes.get(segment, 0)
            live_count = row.live_count + change.count.get(segment, 0)
            oldest = min(row.oldest, change.oldest.get(segment, row.oldest))
            row = rows.get(segment, row)
            row = replace(row, live_bytes=live_bytes, live_count=live_count, oldest=oldest)
            txn.put(key, pack_row(row), db=self._segments)


class _Change:
    """What a transaction changes in the figures of each segment."""

    def __init__(self) -> None:
        self.bytes: defaultdict[int, int] = defaultdict(int)
        self.count: defaultdict[int, int] = defaultdict(int)
        self.oldest: dict[int, int] = {}

    def add(self, segment: int, size: int, count: int) -> None:
        self.bytes[segment] += size
        self.count[segment] += count


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
