"""The control hash index by itself; that it finds every neighbour, the contract suite shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctrlcache import index
from ctrlcache.errors import InvalidInput
from ctrlcache.index import LEVEL_WIDTHS, WIDE, Cell, ControlHashIndex, cell_of, shard_prefix
from ctrlcache.key import digest
from ctrlcache.tiers.base import Entry

SPACE = digest(b"space")


def entry(name: object, control: object, radius: float = 0.1, space: bytes = SPACE) -> Entry:
    array = np.asarray(control, np.float32)
    return Entry(digest(str(name).encode()), space, array, radius, 1.0, 1.0, 0.0)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[lmdb.Environment]:
    env = lmdb.open(str(tmp_path / "env"), map_size=64 << 20, max_dbs=2 * index.DATABASES)
    yield env
    env.close()


@pytest.mark.parametrize(
    ("radius", "level"),
    [(0, 0), (0.025, 0), (0.026, 1), (0.05, 1), (0.1, 2), (0.2, 3), (0.4, 4), (0.41, 5), (9, 5)],
)
def test_cells_are_twice_as_wide_as_the_radius(radius: float, level: int) -> None:
    """A couplet is filed at the finest level whose cells are at least two radii wide."""
    cell = cell_of(np.float32([0.13, -0.13]), radius)
    assert cell.level == level
    if level < WIDE:
        assert LEVEL_WIDTHS[level] >= 2 * radius
        assert cell.bins == tuple(math.floor(v / LEVEL_WIDTHS[level]) for v in (0.13, -0.13))


def test_two_indexes_share_an_environment(env: lmdb.Environment) -> None:
    """Prefixes keep them apart."""
    first, second = ControlHashIndex(env, "first"), ControlHashIndex(env, "second")
    with env.begin(write=True) as txn:
        assert first.add(txn, [entry(1, [0, 0])]) == 1
        assert len(first.query(txn, SPACE, np.zeros(2, np.float32))) == 1
        assert second.query(txn, SPACE, np.zeros(2, np.float32)) == []


def test_spaces_of_different_width_live_side_by_side(env: lmdb.Environment) -> None:
    """Controls of 1 to 100 numbers in one environment, many to a cell, each found again."""
    chi = ControlHashIndex(env, "i")
    widths = (1, 2, 3, 4, 6, 7, 16, 100)
    with env.begin(write=True) as txn:
        for width in widths:
            space = digest(b"%d" % width)
            entries = [
                entry((width, n), np.full(width, n * 1e-3), 0.0505, space) for n in range(40)
            ]
            assert chi.add(txn, entries) == 40
        for width in widths:
            space = digest(b"%d" % width)
            found = chi.query(txn, space, np.full(width, 0.02, np.float32), limit=100)
            expected = [n for n in range(40) if abs(n - 20) * 1e-3 * width**0.5 <= 0.0505]
            assert sorted(c.id for c in found) == sorted(
                digest(str((width, n)).encode()) for n in expected
            )


def test_adding_twice_and_removing(env: lmdb.Environment) -> None:
    """An entry counts once; removed it is gone, and so is the space once it is empty."""
    chi = ControlHashIndex(env, "i")
    one, two = entry(1, [0, 0], 0.1), entry(2, [0, 0], 0.3)
    with env.begin(write=True) as txn:
        assert chi.add(txn, [one, one, two]) == 2
        assert chi.add(txn, [one]) == 0
        assert sorted(chi.members(txn, SPACE)) == sorted([one.id, two.id])
        assert chi.remove(txn, one)
        assert not chi.remove(txn, one)
        assert [c.id for c in chi.query(txn, SPACE, np.zeros(2, np.float32))] == [two.id]
        assert chi.remove(txn, two)
        assert chi.query(txn, SPACE, np.zeros(7, np.float32)) == []  # any width: nothing is known
        assert list(chi.members(txn, SPACE)) == []
        # Free for controls of another width now.
        assert chi.add(txn, [entry(3, [0, 0, 0])]) == 1


def test_occupancy_and_listing_names(env: lmdb.Environment) -> None:
    """Each cell in use once, with what is in it; its name has 16 bits and depends on the space."""
    chi = ControlHashIndex(env, "i")
    other = digest(b"other")
    with env.begin(write=True) as txn:
        chi.add(txn, [entry(n, [0.01, -0.01], 0.02) for n in range(3)])
        chi.add(txn, [entry("a", [0.01, -0.01], 0.05), entry("b", [0.01, 0.01], 0.02, other)])
        seen = sorted(chi.occupancy(txn))
        assert seen == sorted(
            [
                (SPACE, Cell(0, (0, -1)), 3),
                (SPACE, Cell(1, (0, -1)), 1),
                (other, Cell(0, (0, 0)), 1),
            ]
        )
        names = {shard_prefix(space, cell) for space, cell, _ in seen}
        assert all(len(name) == 4 and int(name, 16) < 1 << 16 for name in names)
        assert len(names) == 3
        chi.clear(txn)
        assert list(chi.occupancy(txn)) == []


@pytest.mark.parametrize("control", [[np.nan, 0], [np.inf, 0], [], [[0, 0]], [0] * 101])
def test_impossible_controls_are_refused(env: lmdb.Environment, control: object) -> None:
    """What cannot be filed is an InvalidInput, and leaves the index as it was."""
    chi = ControlHashIndex(env, "i")
    with env.begin(write=True) as txn:
        with pytest.raises(InvalidInput):
            chi.add(txn, [entry(1, control)])
        assert list(chi.occupancy(txn)) == []
        chi.add(txn, [entry(1, [0, 0])])
        with pytest.raises(InvalidInput, match="2 dimensions, got 3"):
            chi.add(txn, [entry(2, [0, 0, 0])])


def test_a_query_touches_few_cells() -> None:
    """At most 2^C cells of a level, fewer where the ball misses the corners; 2^6 for wider ones."""
    rng = np.random.default_rng(0)
    for width in (1, 2, 4, 8, 100):
        counts = []
        for _ in range(200):
            query = rng.uniform(-1, 1, width)[: index.CELL_DIMENSIONS]
            keys = index._touched(SPACE, (0, 3), query)
            assert sorted(keys) == sorted(
                key for level in (0, 3) for key in index._touched_one(SPACE, level, query.tolist())
            )
            counts.append(len(keys) / 2)
        most = 2 ** min(width, index.CELL_DIMENSIONS)
        assert max(counts) <= most
        if width >= 4:
            assert np.mean(counts) < 0.85 * most


values = st.floats(-3, 3, width=32) | st.integers(-60, 60).map(lambda n: np.float32(n * 0.05))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(values, min_size=1, max_size=9),
    st.floats(0, 0.6),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.5, 0.999999, 1.0]),
)
def test_the_cell_of_a_reaching_couplet_is_touched(
    control: list[float], radius: float, seed: int, share: float
) -> None:
    """For any query within (or exactly at) a couplet's radius, its cell is among those looked
    into."""
    centre = np.float32(control)
    direction = np.random.default_rng(seed).normal(size=len(centre))
    query = (centre + share * radius * direction / np.linalg.norm(direction)).astype(np.float32)
    away = np.sqrt(np.sum((centre.astype(np.float64) - query.astype(np.float64)) ** 2))
    cell = cell_of(centre, radius)
    if away <= radius and cell.level < WIDE:
        leading = query.astype(np.float64)[: index.CELL_DIMENSIONS]
        assert index._key(SPACE, cell) in index._touched(SPACE, (cell.level,), leading)
        one = index._touched_one(SPACE, cell.level, leading.tolist())
        assert index._key(SPACE, cell) in one
