"""Three levels: what is put is found, budgets hold, the disk outlives the rest."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from level_worker import KIB, disk_at, feature, frame, name, open_levels, work

from ctrlcache.errors import ConfigError
from worldcache.devices import HostDevice, TorchDevice
from worldcache.levels import LevelsConfig
from worldcache.metrics import Corrupt, StoreEvicted, StoreLookup, StoreSize

_numbers = itertools.count()
_WORKER = Path(__file__).with_name("level_worker.py")


@pytest.fixture
def disk(tmp_path):
    """Where a server's third level lies."""
    index = Path("/dev/shm") / f"ctrlcache-levels-{threading.get_native_id()}-{next(_numbers)}"
    yield disk_at(tmp_path / "features", index)
    shutil.rmtree(index, ignore_errors=True)


@pytest.mark.parametrize("device", [HostDevice, lambda: TorchDevice("cpu")])
def test_a_feature_goes_down_and_comes_back_up_with_every_bit(disk, device):
    """Pushed out of L1 and L2, it is found on disk."""
    levels = open_levels(disk, device=device(), now=lambda: 0.0)  # only the cost tells them apart
    levels.put(name(0), feature(0), cost_ms=50)
    assert levels.get(name(0)).level == "l1"
    for number in range(1, 40):
        levels.put(name(number), feature(number), cost_ms=500)
    found = levels.get(name(0))
    assert found.level == "l3"
    assert found.bound == 0
    assert np.array_equal(found.array, feature(0))
    for number in range(40):
        assert np.array_equal(levels.exact(name(number)), feature(number))
    levels.close()


def test_what_is_worth_more_comes_back_up(disk):
    """Of what is asked for on disk, the costly goes to L1 at once, the cheap stays where it is."""
    levels = open_levels(disk)
    levels.put(name(0), feature(0), cost_ms=90_000)
    levels.put(name(1), feature(1), cost_ms=0.1)
    levels.flush()
    levels.close()
    levels = open_levels(disk, now=lambda: 0.0)  # nothing but the cost tells them apart
    for number in range(2, 12):
        levels.put(name(number), feature(number), cost_ms=500)
    assert [levels.get(name(0)).level for _ in range(2)] == ["l3", "l1"]
    assert [levels.get(name(1)).level for _ in range(2)] == ["l3", "l3"]
    levels.close()


def test_what_was_never_put_is_a_miss():
    """None, counted as a miss; a look at what is there is not counted."""
    levels = open_levels()
    assert levels.get(name(1)) is None
    assert name(1) not in levels
    levels.put(name(1), feature(1))
    assert name(1) in levels
    assert [e for e in levels.events if isinstance(e, StoreLookup)] == [StoreLookup("none", "miss")]


def test_what_was_given_away_cannot_be_changed(disk):
    """Everything found is read-only, whatever level it comes from."""
    levels = open_levels(disk)
    for number in range(30):
        levels.put(name(number), feature(number))
    seen = set()
    for number in range(30):
        found = levels.get(name(number))
        seen.add(found.level)
        with pytest.raises(ValueError, match="read-only"):
            found.array[0] = 1
    assert seen == {"l1", "l2", "l3"}
    levels.close()


def test_a_view_does_not_keep_the_whole_alive():
    """Of a slice of something large, only the slice is kept: what is counted is what is used."""
    levels = open_levels()
    large = feature(1, 256)
    levels.put(name(1), large[:8, :8])
    assert levels.get(name(1)).array.base is None
    assert levels.stats()["l1"].size_bytes == 256


def test_the_third_level_survives_a_restart(disk):
    """What was in any level when it was closed is found by the next process, from the disk."""
    levels = open_levels(disk)
    for number in range(12):
        levels.put(name(number), frame(number), kind="frame", group=b"g" * 16, cost_ms=3)
    levels.close()
    shutil.rmtree(disk.index_directory)  # a reboot empties shared memory
    again = open_levels(disk)
    for number in range(12):
        found = again.get(name(number))
        assert np.array_equal(found.array, frame(number))
    assert again.stats()["l3"].entries == 12
    again.close()


def test_damage_on_disk_is_a_miss_and_is_counted(disk):
    """A flipped bit on disk never becomes a wrong feature."""
    levels = open_levels(disk, l1=0, l2=0)
    levels.put(name(1), feature(1))
    [segment] = [path for path in disk.directory.rglob("*") if path.stat().st_size > 4096]
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 4
    segment.write_bytes(bytes(data))
    assert levels.get(name(1)) is None
    assert Corrupt("l3") in levels.events
    levels.put(name(1), feature(1))
    assert np.array_equal(levels.get(name(1)).array, feature(1))
    levels.close()


def stored_bytes(merge, max_error=0.0):
    levels = open_levels(l1=0, l2=1 << 20, merge=merge, max_error=max_error)
    for number in range(24):
        levels.put(name(number), frame(number), kind="frame", group=b"g" * 16)
    for number in range(24):
        found = levels.get(name(number))
        wrong = np.abs(found.array.astype(int) - frame(number)).max()
        assert wrong <= found.bound <= max_error * 255
    return levels.stats()["l2"].size_bytes


def test_frames_of_one_camera_share_what_does_not_move():
    """Merged frames take less than half of the bytes, exact or within the bound."""
    apart = stored_bytes(merge=False)
    assert stored_bytes(merge=True) < 0.5 * apart
    assert stored_bytes(merge=True, max_error=0.01) < 0.5 * apart


def test_an_inexact_feature_is_never_taken_for_an_exact_one():
    """With an error allowed, `exact` finds only what kept every bit, also after promotion."""
    levels = open_levels(l1=4 * KIB, l2=1 << 20, max_error=0.02)
    for number in range(24):
        noisy = frame(number) + np.random.default_rng(number).integers(0, 4, (32, 32, 3), np.uint8)
        levels.put(name(number), noisy, kind="frame", group=b"g" * 16)
    near = [number for number in range(24) if levels.get(name(number)).bound > 0]
    assert near
    for number in near * 3:
        assert levels.exact(name(number)) is None


def test_a_base_stays_as_long_as_others_need_it(disk):
    """However tight it gets, a difference never loses its base before it leaves itself."""
    levels = open_levels(disk, l1=0, l2=6 * KIB)
    for number in range(60):
        levels.put(name(number), frame(number), kind="frame", group=b"g" * 16, cost_ms=1)
        levels.put(name(1000 + number), feature(number, 8), cost_ms=50)
    for number in range(60):
        assert np.array_equal(levels.exact(name(number)), frame(number))
    levels.close()


class Watch:
    """Notes when a reported size is over its limit."""

    def __init__(self, limits):
        self.limits, self.over, self.sizes = limits, [], set()

    def __call__(self, event):
        if isinstance(event, StoreSize):
            self.sizes.add(event.level)
            if event.size_bytes > self.limits[event.level]:
                self.over.append(event)


def test_budgets_hold_in_many_threads(disk):
    """Eight threads at once: no level is ever over its limit, nothing wrong is ever found."""
    watch = Watch({"l1": 16 * KIB, "l2": 24 * KIB, "l3": disk.size_bytes})
    levels = open_levels(disk, on_event=watch)
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, levels, seed, 60) for seed in range(8)]:
            done.result()
    assert not watch.over
    assert watch.sizes == {"l1", "l2", "l3"}
    # Nothing is counted twice or forgotten: what is held is what the counters say.
    for shelf in (levels._l1, levels._l2):
        assert shelf.size_bytes == sum(shelf.get(id).standing.size_bytes for id in shelf)
    levels.close()


def test_the_disk_is_shared_by_processes(disk):
    """Three processes on one directory: its limit holds, what one wrote another finds."""
    where = [str(disk.directory), str(disk.index_directory)]
    processes = [
        subprocess.Popen([sys.executable, str(_WORKER), *where, str(seed), "80"])
        for seed in range(3)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0, 0]
    levels = open_levels(disk)
    stats = levels.stats()["l3"]
    assert 0 < stats.entries <= 80
    assert stats.size_bytes <= disk.size_bytes
    assert any(levels.get(name(number)) is not None for number in range(80))
    work(levels, 9, 40)
    levels.close()


def test_the_disk_keeps_within_its_budget(disk):
    """More than fits is written: the rest is evicted, counted, and never found half."""
    levels = open_levels(disk, l1=0, l2=0)
    for number in range(40):
        levels.put(name(number), feature(number, 160), cost_ms=1.0)
        assert levels.stats()["l3"].size_bytes <= disk.size_bytes
    evicted = sum(e.count for e in levels.events if e == StoreEvicted("l3", getattr(e, "count", 0)))
    assert evicted > 0
    assert 0 < sum(levels.get(name(number)) is not None for number in range(40)) < 40
    levels.close()


def test_evictions_are_counted_by_level():
    """Leaving L1 for L2 is one, and leaving L2 for nowhere another."""
    levels = open_levels(l1=4 * KIB, l2=4 * KIB)
    for number in range(4):
        levels.put(name(number), feature(number), importance=0.5)
    events = [e.level for e in levels.events if isinstance(e, StoreEvicted)]
    assert events.count("l1") == 3
    assert events.count("l2") == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [({"l1_bytes": -1}, "l1_bytes"), ({"l2_bytes": -5}, "l2_bytes"), ({"max_error": 0.7}, "0.5")],
)
def test_settings_are_checked(options, said):
    """A setting that cannot be is refused by name."""
    with pytest.raises(ConfigError, match=said):
        LevelsConfig(**options)
