"""Where each warm record lies: an LMDB environment in shared memory, one per server.

It steers reads, so it never touches the disk: it can always be made again from the segments, and no
flipped bit there can mislead it. All processes of a server share it; LMDB lets them read without
ever waiting for a writer, and a process that is killed leaves it as after its last transaction.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import InvalidInput
from ctrlcache.eviction import used
from ctrlcache.tiers.base import Entry
from ctrlcache.tiers.places import (
    TOMB,
    USE,
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
from ctrlcache.tiers.warm_reads import MEMBER, WarmReads

__all__ = ["WarmIndex"]

_LAYOUT = b"1"


class WarmIndex(WarmReads):
    """TierUnavailable, with the cause, where shared memory is full or the map limit is reached."""

    def __init__(self, path: Path, map_bytes: int) -> None:
        super().__init__(path, map_bytes)
        if self.note("layout") not in (None, _LAYOUT):
            self.clear()
        else:
            self.set_note("layout", _LAYOUT)

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
            fresh: dict[bytes, Entry] = {}  # accepted, and not yet filed by control
            newest = int.from_bytes(txn.get(b"sequence", b"", db=self._meta), "big")
            for header in headers:
                newest = max(newest, header.sequence)
                change.oldest[header.segment] = min(
                    header.sequence, change.oldest.get(header.segment, header.sequence)
                )
                id = header.entry.id
                if header.tombstone:
                    self._bury(txn, header, change, fresh)
                elif (header.segment, header.offset, id) not in skip:
                    live += self._accept(txn, header, change, fresh)
            self._file(txn, list(fresh.values()))
            self._apply(txn, change, rows or {})
            txn.put(b"sequence", newest.to_bytes(8, "big"), db=self._meta)
        return live

    def fill(
        self, records: NDArray[Any], rows: NDArray[Any], controls: NDArray[np.float32] | None
    ) -> None:
        """Make very many live records known that are not yet, sorted by id (see `bulk`).

        records: their headers, with the fields of `segments.FIXED_FIELDS`; rows: what `places`
        holds of them; controls (n, C), or None where they have none.
        """
        ids = np.ascontiguousarray(records["id"])
        change = _Change()
        with self._writing() as txn:
            _put_all(txn, self._places, ids, rows)
            keys = np.zeros(len(records), [("segment", ">u8"), ("offset", ">u8")])
            keys["segment"], keys["offset"] = records["segment"], records["offset"]
            order = np.lexsort((records["offset"], records["segment"]))
            _put_all(txn, self._members, keys[order], ids[order])
            if controls is not None:
                sound = np.isfinite(controls).all(axis=1)
                self._controls.fill(
                    txn,
                    np.ascontiguousarray(records["space"][sound]),
                    controls[sound],
                    records["radius"][sound],
                    records["curvature"][sound],
                    ids[sound],
                )
            sizes = records["header_bytes"].astype(np.int64) + records["payload_bytes"]
            numbers, where = np.unique(records["segment"], return_inverse=True)
            for n, segment in enumerate(numbers.tolist()):
                change.add(segment, int(sizes[where == n].sum()), int((where == n).sum()))
            self._apply(txn, change, {})

    def note_sequences(self, oldest: Mapping[int, int], newest: int) -> None:
        """The lowest sequence in each segment, and the highest of all."""
        change = _Change()
        change.oldest.update(oldest)
        newest = max(newest, self.newest_sequence())
        with self._writing() as txn:
            self._apply(txn, change, {})
            txn.put(b"sequence", newest.to_bytes(8, "big"), db=self._meta)

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
            first = MEMBER.pack(segment, from_offset)
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

    def _accept(
        self, txn: lmdb.Transaction, header: Header, change: _Change, fresh: dict[bytes, Entry]
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
            self._remove(txn, old, change, fresh)
        txn.put(id, pack_place(header), db=self._places)
        txn.put(MEMBER.pack(header.segment, header.offset), id, db=self._members)
        change.add(header.segment, header.end - header.offset, 1)
        if header.entry.control is not None:
            fresh[id] = header.entry
        return True

    def _bury(
        self, txn: lmdb.Transaction, header: Header, change: _Change, fresh: dict[bytes, Entry]
    ) -> None:
        id = header.entry.id
        found = txn.get(id, db=self._tombs)
        rank = (header.sequence, header.segment)
        if found is None or TOMB.unpack(found) < rank:
            txn.put(id, TOMB.pack(*rank), db=self._tombs)
        row = txn.get(id, db=self._places)
        if row is not None and (place := unpack_place(id, row)).sequence < header.sequence:
            self._remove(txn, place, change, fresh)
            txn.delete(id, db=self._uses)

    def _remove(
        self,
        txn: lmdb.Transaction,
        place: Place,
        change: _Change,
        fresh: dict[bytes, Entry] | None = None,
    ) -> None:
        txn.delete(place.entry.id, db=self._places)
        txn.delete(MEMBER.pack(place.segment, place.offset), db=self._members)
        filed = fresh is None or fresh.pop(place.entry.id, None) is None
        if filed and place.entry.control is not None:
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


def _put_all(txn: lmdb.Transaction, db: Any, keys: NDArray[Any], values: NDArray[Any]) -> None:
    packed, key_bytes = keys.tobytes(), keys.itemsize
    body, value_bytes = values.tobytes(), values.itemsize
    with txn.cursor(db) as cursor:
        cursor.putmulti(
            (
                packed[n * key_bytes : (n + 1) * key_bytes],
                body[n * value_bytes : (n + 1) * value_bytes],
            )
            for n in range(len(keys))
        )


class _Change:
    """What a transaction changes in the figures of each segment."""

    def __init__(self) -> None:
        self.bytes: defaultdict[int, int] = defaultdict(int)
        self.count: defaultdict[int, int] = defaultdict(int)
        self.oldest: dict[int, int] = {}

    def add(self, segment: int, size: int, count: int) -> None:
        self.bytes[segment] += size
        self.count[segment] += count
