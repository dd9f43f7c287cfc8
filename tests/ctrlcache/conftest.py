"""Caches and warm tiers for the tests of what is special about them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_setting import Setting, opened
from hot_setting import SIZE
from tier_openers import shm_path
from warm_process import open_tier
from warm_setting import LIMIT, SEGMENT, Open

from ctrlcache.shared import SharedMemory
from ctrlcache.tiers.warm import WarmTier


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Path]:
    path = shm_path(tmp_path)
    yield path
    for item in path.parent.glob(f"{path.name}*"):
        shutil.rmtree(item)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    path = shm_path(tmp_path)
    yield path
    SharedMemory.remove(path)


@pytest.fixture
def memory(place: Path) -> Iterator[SharedMemory]:
    memory = SharedMemory(place, SIZE)
    yield memory
    memory.close()


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    with opened(tmp_path) as made:
        yield made


@pytest.fixture
def open_warm(tmp_path: Path, index: Path) -> Iterator[Open]:
    """Opens tiers on one directory; `server` picks the index of another server."""
    opened: list[WarmTier] = []

    def factory(server: str = "", **more: Any) -> WarmTier:
        directory = more.pop("directory", tmp_path / "warm")
        limit, segment = more.pop("limit", LIMIT), more.pop("segment", SEGMENT)
        tier = open_tier(directory, index.with_name(index.name + server), limit, segment, **more)
        opened.append(tier)
        return tier

    yield factory
    for tier in opened:
        tier.close()
