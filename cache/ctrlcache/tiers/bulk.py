"""Filling an empty warm index with everything there is: headers by the million, as one table.

Does what `WarmIndex.publish` does for one header after the other, with the same result, in array
operations and in the order of the trees. What does not fit into the table (tombstones, records of
another width than most) is left to `publish`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctrlcache.tiers import segments
from ctrlcache.tiers.places import PLACE_FIELDS, SegmentRow
from ctrlcache.tiers.segments import Header
from ctrlcache.tiers.warm_index import WarmIndex

__all__ = ["Bulk"]

Table = NDArray[Any]
_CHUNK = 50_000
_BATCH = 4096


class Bulk:
    """Takes headers and what is known of segments; `finish` writes them into the empty `index`."""

    def __init__(self, index: WarmIndex, quarantined: Collection[tuple[int, int, bytes]]) -> None:
        self._index = index
        self._quarantined = quarantined
        self._raw: defaultdict[int, list[bytes]] = defaultdict(list)
        self._rows: dict[int, SegmentRow] = {}

    def segment(self, number: int, row: SegmentRow) -> None:
        self._rows[number] = row

    def headers(self, headers: Iterable[Header]) -> None:
        for header in headers:
            self._raw[header.header_bytes].append(header.raw)

    def footer(self, footer: segments.Footer) -> None:
        """All headers of a sealed segment; CorruptRecord where another version wrote them."""
        raw = footer.raw or b""
        first = np.frombuffer(raw, np.dtype(segments.FIXED_FIELDS), count=1)
        size = int(first["header_bytes"][0])
        if len(raw) == size * footer.count:
            table = _table(raw, size)
            if (table["header_bytes"] == size).all() and _sound(table, footer.segment).all():
                self._raw[size].append(raw)
                return
        self.headers(footer.headers())

    def finish(self) -> int:
        """Write; returns how many records are live."""
        rest: list[Header] = []
        tables = {size: _table(b"".join(raw), size) for size, raw in self._raw.items()}
        most = max(tables, key=lambda size: len(tables[size]), default=None)
        for size, table in tables.items():
            dead = table[table["kind"] != segments.RECORD]
            rest += _parsed(dead)
            if size != most:
                rest += _parsed(table[table["kind"] == segments.RECORD])
        if most is not None:
            self._fill(tables[most], rest)
        for at in range(0, len(rest), _BATCH):
            self._index.publish(rest[at : at + _BATCH], skip=self._quarantined)
        self._index.set_rows(self._rows)
        return self._index.count()

    def _fill(self, table: Table, rest: list[Header]) -> None:
        records = table[table["kind"] == segments.RECORD]
        if not len(records):
            return
        widths, counts = np.unique(records["width"], return_counts=True)
        uniform = records["width"] == widths[counts.argmax()]
        rest += _parsed(records[~uniform])
        records = records[uniform]
        self._index.note_sequences(_oldest(records), int(records["sequence"].max()))
        live = _newest(records[~_listed(records, self._quarantined)])
        live = live[~_buried(live, rest)]
        for at in range(0, len(live), _CHUNK):
            chunk = live[at : at + _CHUNK]
            self._index.fill(chunk, place_rows(chunk), _controls(chunk))


def _table(raw: bytes, size: int) -> Table:
    """Headers of `size` bytes each, as rows."""
    fixed = np.dtype(segments.FIXED_FIELDS).itemsize
    fields = [*segments.FIXED_FIELDS, ("tail", "u1", (size - fixed,))]
    return np.frombuffer(raw, np.dtype(fields))


def _sound(table: Table, segment: int) -> NDArray[np.bool_]:
    known = (table["kind"] == segments.RECORD) | (table["kind"] == segments.TOMBSTONE)
    sound: NDArray[np.bool_] = (
        known
        & (table["magic"].view("<u4") == int.from_bytes(segments.RECORD_MAGIC, "little"))
        & (table["version"] == segments.VERSION)
        & (table["segment"] == segment)
    )
    return sound


def _parsed(table: Table) -> list[Header]:
    return [
        segments.parse_header(row.tobytes(), 0, int(row["segment"]), int(row["offset"]))
        for row in table
    ]


def _halves(column: Table) -> NDArray[np.uint64]:
    """16 bytes each, as two numbers that sort as the bytes do: (n, 2)."""
    return np.ascontiguousarray(column).view(">u8").reshape(-1, 2).astype(np.uint64)


def _oldest(records: Table) -> dict[int, int]:
    """Segment -> lowest sequence."""
    order = np.lexsort((records["sequence"], records["segment"]))
    numbers, first = np.unique(records["segment"][order], return_index=True)
    lowest = records["sequence"][order[first]]
    return dict(zip(numbers.tolist(), lowest.tolist(), strict=True))


def _newest(records: Table) -> Table:
    """Of each id the copy with the highest sequence, then segment; sorted by id."""
    id = _halves(records["id"])
    order = np.lexsort((records["segment"], records["sequence"], id[:, 1], id[:, 0]))
    id = id[order]
    last = np.r_[(id[1:] != id[:-1]).any(axis=1), True] if len(id) else np.zeros(0, bool)
    newest: Table = records[order[last]]
    return newest


def _listed(records: Table, listed: Collection[tuple[int, int, bytes]]) -> NDArray[np.bool_]:
    """Which records are in quarantine, by segment, offset and id."""
    found = np.zeros(len(records), bool)
    if not listed:
        return found
    # Segments are numbered from one, and far shorter than 4 GiB: one number says both.
    places = records["segment"] << np.uint64(32) | records["offset"]
    known = set(listed)
    wanted = {s << 32 | o for s, o, _ in listed if 0 <= s < 1 << 31 and 0 <= o < 1 << 32}
    for n in np.flatnonzero(np.isin(places, np.fromiter(wanted, np.uint64))).tolist():
        row = records[n]
        found[n] = (int(row["segment"]), int(row["offset"]), row["id"].tobytes()) in known
    return found


def _buried(records: Table, rest: Iterable[Header]) -> NDArray[np.bool_]:
    """Which records a tombstone declares dead."""
    tombs: dict[bytes, int] = {}
    for header in rest:
        if header.tombstone:
            id = header.entry.id
            tombs[id] = max(tombs.get(id, 0), header.sequence)
    found = np.zeros(len(records), bool)
    if not tombs:
        return found
    dead = _halves(np.frombuffer(b"".join(tombs), "V16"))
    own = _halves(records["id"])
    for n in np.flatnonzero(np.isin(own[:, 0], dead[:, 0])).tolist():
        found[n] = tombs.get(records["id"][n].tobytes(), 0) > records["sequence"][n]
    return found


def _width(records: Table) -> int:
    width = int(records["width"][0])
    return 0 if width == segments.NO_CONTROL else width


def _controls(records: Table) -> NDArray[np.float32] | None:
    """(n, C); None for records that are found by id alone."""
    width = _width(records)
    if width == 0:
        return None
    return np.ascontiguousarray(records["tail"][:, : 4 * width]).view("<f4")


def place_rows(records: Table) -> Table:
    """The rows of the index's `places`, for records of one width."""
    width = _width(records)
    rows = np.zeros(len(records), [*PLACE_FIELDS, ("control", "u1", (4 * width,))])
    for name in rows.dtype.names or ():
        if name == "digest":
            rows[name] = np.ascontiguousarray(records["checksum"]).view("V8")[::2]
        elif name == "control":
            rows[name] = records["tail"][:, : 4 * width]
        else:
            rows[name] = records[name]
    return rows
