"""A warm tier whose disk, directory or shared memory fails: clear words, and it mends itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_process import open_tier, payload, record
from warm_setting import LIMIT, SEGMENT, Open, fill, ids, right

from ctrlcache.errors import TierUnavailable
from ctrlcache.tiers.warm import WarmTier


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", path]).returncode:
        pytest.skip("mounting a file system needs privileges")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def test_a_full_disk(small_disk: Path, open_warm: Open) -> None:
    """Put says that the disk is full, what was there is served, and when there is room again the
    same tier stores again."""
    tier = open_warm(directory=small_disk / "warm")
    first, second = ids(60, "first"), ids(60, "second")
    tier.put([record(id) for id in first])
    ballast = fill(small_disk, 3)
    with pytest.raises(TierUnavailable, match="is full: free some space"):
        tier.put([record(id) for id in second])
    assert tier.trouble is not None
    assert all(right(tier, id) for id in first)
    assert all(right(tier, id) is None for id in second)
    with pytest.raises(TierUnavailable):
        tier.put([record(id) for id in second])
    ballast.unlink()
    assert tier.put([record(id) for id in second]) == 60
    tier.maintain()
    assert tier.trouble is None
    assert tier.rebuild() == 120
    assert all(right(tier, id) for id in first + second)


def test_a_disk_that_fills_up_on_the_way(small_disk: Path, open_warm: Open) -> None:
    """Of a large batch, as much as fits is stored, and exactly that is reported and served."""
    tier = open_warm(directory=small_disk / "warm")
    everything = ids(2000)
    stored = tier.put([record(id) for id in everything])
    assert 500 < stored < 2000
    assert "is full" in (tier.trouble or "")
    assert [right(tier, id) for id in everything] == [True] * stored + [None] * (2000 - stored)


def test_a_read_only_disk(small_disk: Path, open_warm: Open) -> None:
    """It is served; put says what is wrong; remounted writable, the same tier stores again."""
    tier = open_warm(directory=small_disk / "warm")
    a, b, c = ids(3)
    tier.put([record(a)])
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=False)
    if not os.statvfs(small_disk).f_flag & os.ST_RDONLY:
        tier.close()  # a writer's open file forbids it
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        tier = open_warm(directory=small_disk / "warm")
    with pytest.raises(TierUnavailable, match="check its mount and permissions"):
        tier.put([record(b)])
    assert right(tier, a)
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert tier.put([record(b), record(c)]) == 2
    assert all(right(tier, id) for id in (a, b, c))


def test_a_directory_that_vanishes_and_returns(open_warm: Open) -> None:
    """Gone: misses and a clear message, nothing made in its place. Back: everything is there."""
    tier = open_warm()
    a, b = ids(2)
    tier.put([record(a)])
    away = tier.directory.with_name("away")
    tier.directory.rename(away)
    assert tier.get(a) is None
    with pytest.raises(TierUnavailable, match="is gone"):
        tier.put([record(b)])
    tier.maintain()
    assert "is gone" in (tier.trouble or "")
    assert not tier.directory.exists()
    away.rename(tier.directory)
    tier.maintain()
    assert tier.trouble is None
    assert right(tier, a)
    assert tier.put([record(b)]) == 1


def test_an_empty_directory_in_its_place(open_warm: Open) -> None:
    """Another store at the same path: nothing of the old one is served, and it is written to."""
    tier = open_warm()
    a, b = ids(2)
    tier.put([record(a)])
    shutil.rmtree(tier.directory)
    tier.directory.mkdir()
    assert tier.put([record(b)]) == 1
    assert tier.stats().entries == 1
    assert (right(tier, a), right(tier, b)) == (None, True)


def test_shared_memory_full(small_disk: Path, tmp_path: Path) -> None:
    """No room for the index to grow: put says so; what it had on disk by then is found once there
    is room, and nothing is lost or doubled."""
    tier = open_tier(tmp_path / "warm", small_disk / "index", LIMIT, SEGMENT)
    try:
        first, second = ids(100, "first"), ids(2000, "second")
        tier.put([record(id, 60) for id in first])
        ballast = fill(small_disk, 2)
        with pytest.raises(TierUnavailable, match=r"cannot write the index.* is full"):
            tier.put([record(id, 60) for id in second])
        assert all(tier.get(id) == payload(id, 60) for id in first)
        ballast.unlink()
        tier.maintain()
        assert tier.put([record(id, 60) for id in second]) == 2000
        assert tier.stats().entries == 2100
        assert all(tier.get(id) == payload(id, 60) for id in first + second)
    finally:
        tier.close()


def test_no_room_for_an_index_at_all(small_disk: Path, tmp_path: Path) -> None:
    """The tier opens all the same, misses, says why, and works once there is room."""
    ballast = fill(small_disk, 100)
    tier = open_tier(tmp_path / "warm", small_disk / "index", LIMIT, SEGMENT)
    try:
        (id,) = ids(1)
        assert tier.get(id) is None
        assert "is full" in (tier.trouble or "")
        with pytest.raises(TierUnavailable, match="is full"):
            tier.put([record(id)])
        ballast.unlink()
        assert tier.put([record(id)]) == 1
        assert right(tier, id)
    finally:
        tier.close()


def test_an_index_at_its_limit(tmp_path: Path, index: Path) -> None:
    """The message names the setting to raise."""
    tier = WarmTier(tmp_path / "warm", index, limit_bytes=LIMIT, index_bytes=1 << 20, follow_s=None)
    try:
        batch = [record(id, 20) for id in ids(10_000)]
        with pytest.raises(TierUnavailable, match="raise index_bytes"):
            tier.put(batch)
    finally:
        tier.close()
