"""What the tests of the levels put and look for, in threads and in processes of their own.

python level_worker.py DIRECTORY INDEX_DIRECTORY SEED ROUNDS
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from ctrlcache.key import digest
from worldcache.disk import DiskConfig
from worldcache.levels import Levels, LevelsConfig

KIB = 1 << 10
_GRAIN = np.random.default_rng(0).integers(0, 40, (32, 32, 3), np.uint8)


def name(number):
    return digest(b"%d" % number)


def feature(number, side=32):
    """Something that nothing is like."""
    return np.random.default_rng(number).standard_normal((side, side)).astype(np.float32)


def frame(number):
    """Frame `number` of a camera that stands still."""
    picture = _GRAIN.copy()
    picture[number % 24 : number % 24 + 6, 4:9] += np.uint8(7 * number % 251)
    return picture


def disk_at(directory, index_directory):
    return DiskConfig(Path(directory), Path(index_directory), 2 << 20, 4 << 20)


def open_levels(disk=None, l1=16 * KIB, l2=24 * KIB, **options):
    events = []
    on_event = options.pop("on_event", events.append)
    device, now = options.pop("device", None), options.pop("now", time.monotonic)
    config = LevelsConfig(l1, l2, disk, **options)
    levels = Levels(config, b"p" * 16, on_event, device, now=now)
    levels.events = events
    return levels


def work(levels, seed, rounds):
    """Put and get at random, and look whether what is found is right and budgets hold."""
    draw = np.random.default_rng(seed)
    for _ in range(rounds):
        number = int(draw.integers(0, 80))
        make = frame if number % 2 else feature
        kept = {"kind": "frame", "group": b"g" * 16} if number % 2 else {"kind": "feature"}
        if draw.random() < 0.4:
            levels.put(name(number), make(number), cost_ms=float(number), **kept)
        else:
            found = levels.get(name(number))
            assert found is None or np.array_equal(found.array, make(number))
        for level, stats in levels.stats().items():
            assert stats.size_bytes <= stats.limit_bytes, level


if __name__ == "__main__":
    directory, index_directory, seed, rounds = sys.argv[1:]
    levels = open_levels(disk_at(directory, index_directory))
    work(levels, int(seed), int(rounds))
    levels.close()
