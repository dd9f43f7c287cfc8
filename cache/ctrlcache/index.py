"""The control hash index: every couplet whose own radius reaches a control, and no others.

Controls are quantised per dimension, and a couplet is filed under the cell its control falls in. It
is filed at the level whose cells are at least twice as wide as its radius, so a ball of that radius
around a query touches at most two cells per dimension: looking into those, at each level the space
uses, finds every neighbour, also across the edges of cells. A plain bucket look-up would not.

It lives in two databases of an LMDB environment that its owner opens, and works inside the owner's
transactions, so that index and records never disagree. Safe in as many processes as LMDB is.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import InvalidInput
from ctrlcache.key import DIGEST_BYTES
from ctrlcache.tiers.base import Candidate, Entry

__all__ = ["LEVEL_WIDTHS", "Cell", "ControlHashIndex", "cell_of", "shard_prefix"]

#: Width of the cells of each level. Radii above half of the last share one cell at level 5.
LEVEL_WIDTHS = (0.05, 0.1, 0.2, 0.4, 0.8)
WIDE = len(LEVEL_WIDTHS)
#: A cell covers this many dimensions, the first ones; with wider controls the distance check does
#: the rest. More would multiply the cells to look into faster than it empties them.
CELL_DIMENSIONS = 6
DATABASES = 2

_ROW = struct.Struct(f"<H{WIDE + 1}I")  # of a space: control dimensions, couplets per level
_CELL_LIMIT = 32767  # cells beyond are clamped, on filing and on looking alike: nothing is lost
#: Up to so many couplets in a space are all looked at.
_FEW = 96
_SLACK = 1.0 + 1e-9  # of floating-point rounding at the edge of a cell


class Cell(NamedTuple):
    """Where a couplet is filed: its level and the quantised leading dimensions."""

    level: int
    bins: tuple[int, ...]


def cell_of(control: NDArray[np.float32], radius: float) -> Cell:
    """The cell of a couplet with that control (C,) and radius."""
    level = 0
    while level < WIDE and LEVEL_WIDTHS[level] < 2.0 * radius:
        level += 1
    leading: list[float] = control[:CELL_DIMENSIONS].tolist()
    if level == WIDE:
        return Cell(level, (0,) * len(leading))
    width = LEVEL_WIDTHS[level]
    return Cell(level, tuple(_bin(value, width) for value in leading))


def shard_prefix(space: bytes, cell: Cell) -> str:
    """Four hexadecimal digits (16 bits of SHA-256) that name a cell in listings."""
    return hashlib.sha256(_key(space, cell)).hexdigest()[:4]


def _bin(value: float, width: float) -> int:
    return max(-_CELL_LIMIT, min(_CELL_LIMIT, math.floor(value / width)))


def _key(space: bytes, cell: Cell) -> bytes:
    return space + struct.pack(f">B{len(cell.bins)}h", cell.level, *cell.bins)


@lru_cache
def _layout(dimensions: int, keys: bool) -> np.dtype[Any]:
    """One value as stored, or one row of what a cursor returns: the key, then the value."""
    key = f"V{DIGEST_BYTES + 1 + 2 * min(dimensions, CELL_DIMENSIONS)}"
    return np.dtype(
        [
            *([("key", key)] if keys else []),
            ("control", "<f4", (dimensions,)),
            ("radius", "<f8"),
            ("curvature", "<f8"),
            ("id", f"V{DIGEST_BYTES}"),
        ]
    )


def _value(entry: Entry, control: NDArray[np.float32]) -> bytes:
    return control.tobytes() + struct.pack("<dd", entry.radius, entry.curvature) + entry.id


class ControlHashIndex:
    """Look-up by control within a space.

    `env` needs room for DATABASES named databases, which `prefix` keeps apart from the owner's;
    no transaction of this thread may be open while they are created. At most 100 dimensions.
    """

    def __init__(self, env: lmdb.Environment, prefix: str) -> None:
        self._cells = env.open_db(f"{prefix}.cells".encode(), dupsort=True, dupfixed=True)
        self._spaces = env.open_db(f"{prefix}.spaces".encode())

    def add(self, txn: lmdb.Transaction, entries: Iterable[Entry]) -> int:
        """File entries (those without a control are passed over); returns how many were new.

        InvalidInput where a control is not finite or its width differs from its space's.
        """
        items: list[tuple[bytes, bytes]] = []
        for entry in entries:
            if entry.control is None:
                continue
            control = _checked(entry.control)
            cell = cell_of(control, entry.radius)
            items.append((_key(entry.space, cell), _value(entry, control)))
        items.sort()  # neighbours in the tree come one after the other
        added: Counter[tuple[bytes, int, int]] = Counter()
        for key, value in items:
            if txn.put(key, value, dupdata=False, db=self._cells):
                dimensions = (len(value) - 2 * 8 - DIGEST_BYTES) // 4
                added[key[:DIGEST_BYTES], dimensions, key[DIGEST_BYTES]] += 1
        for (space, dimensions, level), count in added.items():
            self._count(txn, space, dimensions, level, count)
        return added.total()

    def fill(
        self,
        txn: lmdb.Transaction,
        spaces: NDArray[Any],
        controls: NDArray[np.float32],
        radii: NDArray[np.float64],
        curvatures: NDArray[np.float64],
        ids: NDArray[Any],
    ) -> None:
        """`add` for very many entries that are not there yet, of one width: spaces and ids (n,) of
        16 bytes (dtype V16), controls (n, C) finite, radii and curvatures (n,)."""
        count, dimensions = controls.shape
        widths = np.array([*LEVEL_WIDTHS, np.inf])
        levels = np.searchsorted(widths[:WIDE], 2.0 * radii, side="left")
        leading = controls[:, :CELL_DIMENSIONS].astype(np.float64) / widths[levels][:, None]
        bins = np.clip(np.floor(leading), -_CELL_LIMIT, _CELL_LIMIT)
        bins[levels == WIDE] = 0
        keys = np.zeros(count, [("space", "V16"), ("level", "u1"), ("bins", ">i2", bins.shape[1:])])
        keys["space"], keys["level"], keys["bins"] = spaces, levels, bins
        values = np.zeros(count, _layout(dimensions, keys=False))
        values["control"], values["radius"] = controls, radii
        values["curvature"], values["id"] = curvatures, ids
        halves = spaces.view(">u8").reshape(count, 2)
        order = np.lexsort((levels, halves[:, 1], halves[:, 0]))
        packed, key_bytes = keys[order].tobytes(), keys.itemsize
        body, value_bytes = values[order].tobytes(), values.itemsize
        with txn.cursor(self._cells) as cursor:
            cursor.putmulti(
                (
                    packed[n * key_bytes : (n + 1) * key_bytes],
                    body[n * value_bytes : (n + 1) * value_bytes],
                )
                for n in range(count)
            )
        runs = np.flatnonzero(
            np.r_[
                True,
                (np.diff(halves[order], axis=0) != 0).any(axis=1) | (np.diff(levels[order]) != 0),
            ]
        )
        sizes = np.diff(np.r_[runs, count])
        for start, size in zip(runs.tolist(), sizes.tolist(), strict=True):
            row = order[start]
            self._count(txn, spaces[row].tobytes(), dimensions, int(levels[row]), size)

    def remove(self, txn: lmdb.Transaction, entry: Entry) -> bool:
        """Take out an entry, given exactly as it was added; whether it was there."""
        if entry.control is None:
            return False
        control = _checked(entry.control)
        cell = cell_of(control, entry.radius)
        if not txn.delete(_key(entry.space, cell), _value(entry, control), db=self._cells):
            return False
        self._count(txn, entry.space, len(control), cell.level, -1)
        return True

    def _count(
        self, txn: lmdb.Transaction, space: bytes, dimensions: int, level: int, change: int
    ) -> None:
        found = txn.get(space, db=self._spaces)
        row = list(_ROW.unpack(found)) if found else [dimensions] + [0] * (WIDE + 1)
        if row[0] != dimensions:
            raise InvalidInput(f"controls of this space have {row[0]} dimensions, got {dimensions}")
        row[1 + level] += change
        if any(row[1:]):
            txn.put(space, _ROW.pack(*row), db=self._spaces)
        else:
            txn.delete(space, db=self._spaces)

    def query(
        self, txn: lmdb.Transaction, space: bytes, control: NDArray[np.float32], limit: int = 16
    ) -> list[Candidate]:
        """Every entry of `space` whose radius reaches `control` (C,), nearest first.

        InvalidInput for a control of another width than the space's.
        """
        found = txn.get(space, db=self._spaces)
        if found is None:
            return []
        row = _ROW.unpack(found)
        query = np.asarray(control, np.float64)
        dimensions = row[0]
        if query.shape != (dimensions,):
            raise InvalidInput(f"control must have shape ({dimensions},), got {query.shape}")
        with txn.cursor(self._cells) as cursor:
            if sum(row[1:]) <= _FEW:
                # All that there are lie side by side; to look at them is less than to choose.
                cursor.set_range(space)
                values = islice(cursor.iternext(keys=False), sum(row[1:]))
                layout = _layout(dimensions, keys=False)
                packed: bytes | memoryview = b"".join(values)
            else:
                levels = tuple(level for level in range(WIDE) if row[1 + level])
                keys = _touched(space, levels, query[:CELL_DIMENSIONS]) if levels else []
                if row[1 + WIDE]:
                    keys.append(_key(space, Cell(WIDE, (0,) * min(dimensions, CELL_DIMENSIONS))))
                layout = _layout(dimensions, keys=True)
                value_bytes = layout.itemsize - layout["key"].itemsize
                packed = cursor.getmulti(
                    keys, dupdata=True, dupfixed_bytes=value_bytes, keyfixed=True
                )
        if not len(packed):
            return []
        rows = np.frombuffer(packed, layout)
        away = rows["control"] - query
        distances = np.sqrt(np.einsum("ij,ij->i", away, away))
        within = np.flatnonzero(distances <= rows["radius"])
        if len(within) > limit:
            within = within[np.argpartition(distances[within], limit)[:limit]]
        within = within[np.argsort(distances[within], kind="stable")]
        found_rows = rows[within]
        ids = found_rows["id"].tobytes()
        return [
            Candidate(ids[at : at + DIGEST_BYTES], near, radius, curvature, distance)
            for at, near, radius, curvature, distance in zip(
                range(0, len(ids), DIGEST_BYTES),
                found_rows["control"],
                found_rows["radius"].tolist(),
                found_rows["curvature"].tolist(),
                distances[within].tolist(),
                strict=True,
            )
        ]

    def members(self, txn: lmdb.Transaction, space: bytes) -> Iterator[bytes]:
        """Ids of all entries of a space."""
        with txn.cursor(self._cells) as cursor:
            found = cursor.set_range(space)
            while found and bytes(cursor.key()[:DIGEST_BYTES]) == space:
                yield bytes(cursor.value()[-DIGEST_BYTES:])
                found = cursor.next()

    def occupancy(self, txn: lmdb.Transaction) -> Iterator[tuple[bytes, Cell, int]]:
        """(space, cell, entries in it) of every cell in use, for statistics."""
        with txn.cursor(self._cells) as cursor:
            for key in cursor.iternext_nodup(keys=True, values=False):
                key = bytes(key)
                bins = (len(key) - DIGEST_BYTES - 1) // 2
                level, *cell = struct.unpack(f">B{bins}h", key[DIGEST_BYTES:])
                yield key[:DIGEST_BYTES], Cell(level, tuple(cell)), cursor.count()

    def clear(self, txn: lmdb.Transaction) -> None:
        """Forget everything, before a rebuild."""
        txn.drop(self._cells, delete=False)
        txn.drop(self._spaces, delete=False)


def _checked(control: NDArray[np.float32]) -> NDArray[np.float32]:
    array = np.ascontiguousarray(control, dtype="<f4")
    if array.ndim != 1 or not 0 < len(array) <= 100 or not np.isfinite(array).all():
        raise InvalidInput(f"control must be 1 to 100 finite numbers, got {control!r}")
    return array


class _Pattern(NamedTuple):
    """What looking around a query needs of a set of L levels in D dimensions, with K = 2 ** D ways
    to step or not to step across the nearer edge in each of them."""

    widths: NDArray[np.float64]  # (L, 1)
    reach: NDArray[np.float64]  # (L, 1), squared
    steps: NDArray[np.float64]  # (K, D) of 0, 1
    ways: NDArray[np.float64]  # (D, K): the same
    levels: NDArray[np.uint8]  # (L, K): the level of each


@lru_cache
def _pattern(levels: tuple[int, ...], dimensions: int) -> _Pattern:
    widths = np.array([[LEVEL_WIDTHS[level]] for level in levels])
    steps = (np.arange(2**dimensions)[:, None] >> np.arange(dimensions) & 1).astype(np.float64)
    tiled = np.repeat(np.array(levels, np.uint8)[:, None], len(steps), axis=1)
    return _Pattern(widths, np.square(widths / 2 * _SLACK), steps, steps.T.copy(), tiled)


def _touched(space: bytes, levels: tuple[int, ...], query: NDArray[np.float64]) -> list[bytes]:
    """Keys of the cells that a ball of its level's largest radius around `query` (D,) can reach.

    In each dimension that is the cell of the query and the one across its nearer edge; of their
    combinations, those whose nearest corner is not too far away.
    """
    widths, reach, steps, ways, tiled = _pattern(levels, len(query))
    scaled = query / widths  # (L, D)
    home = np.floor(scaled)
    within = scaled - home
    nearer = np.minimum(within, 1.0 - within)
    if nearer.max() > 0.5 - 1e-6 or np.abs(scaled).max() > _CELL_LIMIT - 2:
        # As near to one edge as to the other, or beyond the last cell.
        return [key for level in levels for key in _touched_one(space, level, query.tolist())]
    reached = np.square(nearer * widths) @ ways <= reach  # (L, K)
    across = np.where(within < 0.5, -1.0, 1.0)
    cells = (home[:, None] + steps * across[:, None])[reached]  # (n, D)
    keys = np.empty((len(cells), DIGEST_BYTES + 1 + 2 * len(query)), np.uint8)
    keys[:, :DIGEST_BYTES] = np.frombuffer(space, np.uint8)
    keys[:, DIGEST_BYTES] = tiled[reached]
    keys[:, DIGEST_BYTES + 1 :] = cells.astype(">i2").view(np.uint8)
    packed, step = keys.tobytes(), keys.shape[1]
    return [packed[at : at + step] for at in range(0, len(packed), step)]


def _touched_one(space: bytes, level: int, query: list[float]) -> list[bytes]:
    """As `_touched`, for one level and any query."""
    width = LEVEL_WIDTHS[level]
    reach = width / 2 * _SLACK
    reach_squared = reach * reach
    cells = [(space + bytes((level,)), 0.0)]
    for value in query:
        home = math.floor(value / width)
        below, above = value - home * width, (home + 1) * width - value
        bins = [(home, 0.0)]
        if below <= reach:
            bins.append((home - 1, max(below, 0.0) ** 2))
        if above <= reach:
            bins.append((home + 1, max(above, 0.0) ** 2))
        packed = {
            struct.pack(">h", max(-_CELL_LIMIT, min(_CELL_LIMIT, number))): gap
            if abs(number) < _CELL_LIMIT
            else 0.0
            for number, gap in bins
        }
        cells = [
            (key + number, squared + gap)
            for key, squared in cells
            for number, gap in packed.items()
            if squared + gap <= reach_squared
        ]
    return [key for key, _ in cells]
