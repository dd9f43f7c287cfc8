"""Backups taken while a process writes, and going back to one under a running server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_process import identity, open_tier, payload, record
from warm_setting import LIMIT, SEGMENT

from ctrlcache.backup import backup, read_manifest, restore
from ctrlcache.errors import InvalidInput
from ctrlcache.tiers.warm import WarmTier


@pytest.fixture
def tier(tmp_path: Path, index: Path) -> Iterator[WarmTier]:
    tier = open_tier(tmp_path / "warm", index, LIMIT, SEGMENT)
    yield tier
    tier.close()


def fill(tier: WarmTier, name: str, count: int = 100) -> list[bytes]:
    ids = [identity(f"{name} {n}") for n in range(count)]
    assert tier.put([record(id) for id in ids]) == count
    return ids


def held(tier: WarmTier, ids: list[bytes]) -> int:
    found = [tier.get(id) for id in ids]
    assert all(f == payload(id) for f, id in zip(found, ids, strict=True) if f is not None)
    return sum(f is not None for f in found)


def test_back_to_an_earlier_state(tier: WarmTier, tmp_path: Path) -> None:
    """The state at the backup returns, later records are gone and deleted ones are back; the
    server that runs notices by itself, writes on, and the backup can be used again."""
    early = fill(tier, "early")
    made = backup(tier.directory, tmp_path / "backup")
    assert made == read_manifest(tmp_path / "backup")
    assert made.linked > 0
    late = fill(tier, "late")
    tier.delete(early[:50])
    for _ in range(2):
        restore(tmp_path / "backup", tier.directory)
        # Before it looks: right answers or none.
        held(tier, early + late)
        tier.maintain()
        assert (held(tier, early), held(tier, late)) == (100, 0)
        assert tier.stats().entries == 100
        more = fill(tier, "more")
        assert held(tier, more) == 100
    assert len(list(tmp_path.glob("warm.before-*"))) == 2


def test_a_backup_shares_the_disk(tier: WarmTier, tmp_path: Path) -> None:
    """Sealed segments are the same files; compacting the source leaves the backup whole."""
    ids = fill(tier, "some")
    backup(tier.directory, tmp_path / "backup")
    (first, *_) = sorted(tier.directory.glob("seg-*"))
    assert os.path.samefile(first, tmp_path / "backup" / first.name)
    (*_, last) = sorted(tier.directory.glob("seg-*"))
    assert not os.path.samefile(last, tmp_path / "backup" / last.name)
    tier.delete(ids)
    for _ in range(5):
        tier.maintain()
    assert not first.exists()
    restore(tmp_path / "backup", tier.directory)
    tier.maintain()
    assert held(tier, ids) == 100


def test_backups_under_way_hold_all_that_was_stored(tmp_path: Path, index: Path) -> None:
    """Taken one after the other while another process writes, deletes and compacts, each backup
    holds what that one had reported stored before, except what it deleted."""
    directory = tmp_path / "warm"
    script = Path(__file__).with_name("warm_process.py")
    arguments = ["write", str(directory), str(index), "1", str(LIMIT), str(SEGMENT)]
    child = subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.PIPE)
    assert child.stdout is not None
    stored: list[tuple[int, set[bytes]]] = []
    total: set[bytes] = set()
    gone: set[bytes] = set()
    try:
        assert child.stdout.readline().startswith(b"open writer")
        for n in range(5):
            for _ in range(15):
                verb, *words = child.stdout.readline().decode().split()
                (total if verb == "put" else gone).update(map(bytes.fromhex, words))
            backup(directory, tmp_path / f"backup-{n}")
            stored.append((n, set(total)))
        child.kill()
        for line in child.stdout.read().decode().splitlines():
            verb, *words = line.split()
            if verb != "put":
                gone.update(map(bytes.fromhex, words))
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    for n, ids in stored:
        other = index.with_name(f"{index.name}-{n}")
        tier = open_tier(tmp_path / f"backup-{n}", other, LIMIT, SEGMENT, read_only=True)
        try:
            certain = list(ids - gone)
            assert len(certain) > 50 * (n + 1)
            assert held(tier, certain) == len(certain)
        finally:
            tier.close()


def test_restoring_is_a_matter_of_seconds(tier: WarmTier, tmp_path: Path) -> None:
    """It costs links, not copies: bytes written are those of the tail alone."""
    fill(tier, "many", 600)
    made = backup(tier.directory, tmp_path / "backup")
    assert made.copied == 1
    restore(tmp_path / "backup", tmp_path / "elsewhere")
    own = [p for p in (tmp_path / "elsewhere").iterdir() if p.stat().st_nlink == 1]
    assert sum(p.stat().st_size for p in own) < 2 * SEGMENT


def test_wrong_paths_are_refused(tier: WarmTier, tmp_path: Path) -> None:
    """The error says which directory, and nothing is left behind or replaced."""
    fill(tier, "some")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InvalidInput, match="full exists"):
        backup(tier.directory, tmp_path / "full")
    with pytest.raises(InvalidInput, match="nowhere is no directory"):
        backup(tier.directory, tmp_path / "nowhere" / "backup")
    with pytest.raises(InvalidInput, match="nothing is no directory"):
        backup(tmp_path / "nothing", tmp_path / "backup")
    with pytest.raises(InvalidInput, match="full is no backup"):
        restore(tmp_path / "full", tier.directory)
    (tmp_path / "full" / "backup.json").write_text('{"format": 9}')
    with pytest.raises(InvalidInput, match="format 9, expected 1"):
        restore(tmp_path / "full", tier.directory)
    backup(tier.directory, tmp_path / "backup")
    with pytest.raises(InvalidInput, match="restored to itself"):
        restore(tmp_path / "backup", tmp_path / "backup")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup", "full", "warm"]
