"""Backups by the clock while a server writes, a fresh machine from one, and another model."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_world import HELD, Truth, clip
from wire import Wire, eventually

from ctrlcache.backup import backup, read_manifest, restore
from ctrlcache.errors import ConfigError
from worldserve.backups import BackupConfig, Backups, duration_s, kept_backups
from worldserve.upgrade import keep_before_upgrade, kept_before_upgrade

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"


@pytest.fixture
def warm(tmp_path):
    """A warm directory with something in it."""
    path = tmp_path / "warm"
    path.mkdir()
    (path / "store").write_text("one")
    return path


@pytest.fixture
def begin(warm, tmp_path):
    """Started backups of `warm`: `begin(every_s=..., keep=...)`; closed afterwards."""
    running = []

    def start(**config):
        said: list[str] = []
        made = Backups(warm, BackupConfig(tmp_path / "backups", **config), said.append)
        made.start()
        running.append(made)
        return said

    yield start
    for made in running:
        made.close()


def test_backups_are_made_by_the_clock_and_the_oldest_go(begin, tmp_path):
    """One at once, then one a second; never more than two stay, and those are the newest."""
    said = begin(every_s=1.0, keep=2)
    eventually(lambda: len(said) >= 4, 60)
    kept = kept_backups(tmp_path / "backups")
    assert len(kept) == 2
    assert [read_manifest(path).created_s for path in kept] == sorted(
        (read_manifest(path).created_s for path in kept), reverse=True
    )
    assert str(kept[0]) in said[-1] or len(said) > 4


def test_a_restart_makes_none_before_its_time(begin, warm, tmp_path):
    """The clock is that of the newest backup: a start soon after it waits for the rest."""
    (tmp_path / "backups").mkdir()
    backup(warm, tmp_path / "backups" / "warm-20200101-000000")
    said = begin(every_s=3_600.0)
    time.sleep(0.3)
    assert said == []
    assert len(kept_backups(tmp_path / "backups")) == 1


def test_a_backup_that_fails_is_told_and_tried_again(begin, warm):
    """The warm directory is away for a while: that is said, and the next one succeeds."""
    away = warm.with_name("away")
    warm.rename(away)
    said = begin(every_s=1.0)
    eventually(lambda: any("failed" in line for line in said), 30)
    away.rename(warm)
    eventually(lambda: any(line.startswith("backup /") for line in said), 30)


def test_durations():
    """As a person writes them."""
    assert [duration_s(text) for text in ("90s", "30m", "24h", "1.5d")] == [90, 1800, 86400, 129600]
    for wrong in ("", "1", "day", "-1h"):
        with pytest.raises(ConfigError, match="24h"):
            duration_s(wrong)
    with pytest.raises(ConfigError, match="keep"):
        BackupConfig(Path("x"), keep=0)


def test_another_model_keeps_the_directory_of_the_one_before(warm):
    """The first start of a model keeps nothing, the second neither; another model keeps the
    directory as it was, the one after it replaces that; and back to one is a restore away."""
    assert keep_before_upgrade(warm, "aa", keep=1) is None
    assert keep_before_upgrade(warm, "aa", keep=1) is None
    kept = keep_before_upgrade(warm, "bb", keep=1)
    assert kept_before_upgrade(warm) == [kept]
    assert (kept / "backup.json").exists()
    assert keep_before_upgrade(warm, "bb", keep=1) is None
    restore(kept, warm)
    assert keep_before_upgrade(warm, "cc", keep=0) is None
    assert kept_before_upgrade(warm) == [kept]


def test_a_directory_that_cannot_be_kept_stops_no_start(tmp_path, caplog):
    """What goes wrong is told in the log."""
    warm = tmp_path / "warm"
    warm.mkdir()
    (warm / "store").write_text("one")
    (tmp_path / "warm.served.json").mkdir()
    assert keep_before_upgrade(warm, "aa", keep=1) is None
    assert "cannot be kept" in caplog.text


# -- on the real server ----------------------------------------------------------------------------


@pytest.fixture
def serve_tiny(start_server):
    """Servers over the tiny model and a warm directory."""

    def start(warm):
        return start_server(
            model_repository=REPOSITORY,
            models=("world_model",),
            cold="none",
            warm_dir=warm,
            parameters={
                "world_model_class": "worldserve.models.tiny:TinyWorldModel",
                "hot_size_bytes": "64MiB",
                "history_frames": "64",
                "max_sessions": "8",
                "flush_interval_s": "0.2",
            },
        )

    return start


def ask(runtime, count, **more):
    """Tiers of the answers to `count` questions in one scene."""
    wire = Wire(runtime.endpoints, "grpc")
    try:
        got = [wire.ask(HELD, 1, frames=clip(2), start=True, **more)]
        got += [wire.ask(question(n), 1, **more) for n in range(1, count)]
    finally:
        wire.close()
    return got


def question(n):
    return HELD + np.float32(0.01 * n)


@pytest.mark.server
def test_a_fresh_machine_answers_from_a_backup(serve_tiny, tmp_path):
    """Backups are taken while a server answers and writes. One is carried elsewhere, restored there
    and a new server answers from it what the first one had computed, bit for bit."""
    first = serve_tiny(tmp_path / "warm")
    said: list[str] = []
    backups = Backups(
        tmp_path / "warm", BackupConfig(tmp_path / "backups", every_s=1.0, keep=3), said.append
    )
    backups.start()
    ask(first, 12, drain=True)
    first.stop()  # what is hot only goes to the warm tier now, at the latest
    backups.close()
    newest = backups.make()
    assert not any("failed" in line for line in said)
    fresh = tmp_path / "elsewhere"
    shutil.copytree(newest, fresh / "carried")
    restore(fresh / "carried", fresh / "warm")
    second = serve_tiny(fresh / "warm")
    answers = ask(second, 12)
    tiers = [answer["CACHE_TIER"][0] for answer in answers]
    assert tiers[0] == b"warm"
    assert b"none" not in tiers  # what is near was loaded into memory with the first one
    truth = Truth(clip(2), [HELD])
    for n, answer in enumerate(answers):
        if answer["EXACT"][0]:
            assert np.array_equal(answer["STATE"], truth.predict(question(n))[0])
