"""The warm tier, killed at any moment: what was reported durable survives."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from warm_process import open_tier, record
from warm_setting import LIMIT, SCRIPT, SEGMENT, Open, ids, right

from ctrlcache.metrics import Event
from ctrlcache.tiers import segments
from ctrlcache.tiers.warm import WarmTier
from ctrlcache.tiers.warm_files import disk_bytes

KILLS = int(os.environ.get("CTRLCACHE_KILLS", "20"))


class Killer:
    """Starts writers by fork and kills them; says what they had reported by then."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, str(SCRIPT), "fork"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def round(self, *arguments: object, after: Callable[[], float]) -> dict[str, set[bytes]]:
        """Run a writer, kill it `after` so many seconds from its first report on."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(" ".join(map(str, ("write", *arguments))) + "\n")
        self._parent.stdin.flush()
        lines: list[list[str]] = []
        pid = 0
        while not (pid and any(line[0] == "put" for line in lines)):
            line = self._parent.stdout.readline().split()
            assert line[0] != "ended"
            if line[0] == "open":
                assert line[1] == "writer"
            elif line[0] == "pid":
                pid = int(line[1])
            else:
                lines.append(line)
        time.sleep(after())
        os.kill(pid, signal.SIGKILL)
        while (line := self._parent.stdout.readline().split())[0] != "ended":
            lines.append(line)
        said: dict[str, set[bytes]] = {"put": set(), "deleting": set(), "deleted": set()}
        for verb, *words in lines:
            said[verb] |= {bytes.fromhex(word) for word in words}
        return said

    def close(self) -> None:
        self._parent.kill()
        self._parent.wait()
        for pipe in (self._parent.stdin, self._parent.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def killer() -> Iterator[Killer]:
    killer = Killer()
    yield killer
    killer.close()


def test_what_was_reported_durable_survives_kill_9(
    tmp_path: Path, index: Path, killer: Killer
) -> None:
    """Killed at random moments of flushing, deleting and compacting, again and again, with the
    index kept or lost: every record reported stored is there and intact, none deleted comes back,
    sizes are true. (CTRLCACHE_KILLS rounds.)"""
    rng = random.Random(0)
    directory = tmp_path / "warm"
    stored: set[bytes] = set()
    doubtful: set[bytes] = set()
    deleted: set[bytes] = set()
    for round in range(KILLS):
        said = killer.round(
            directory, index, round, LIMIT, SEGMENT, after=lambda: rng.expovariate(1 / 0.05)
        )
        stored |= said["put"]
        doubtful |= said["deleting"]
        deleted |= said["deleted"]
        if rng.random() < 0.5:
            WarmTier.remove_index(index)  # as after a power loss
        corrupt: list[Event] = []
        tier = open_tier(directory, index, LIMIT, SEGMENT, on_event=corrupt.append)
        try:
            assert tier.writable
            assert not corrupt
            wrong = [id for id in stored - doubtful if right(tier, id) is not True]
            assert not wrong, f"round {round}: {len(wrong)} of {len(stored)} are not there"
            assert not any(right(tier, id) is False for id in doubtful)
            assert not [id for id in deleted if tier.get(id) is not None]
            # What is there and was never reported was in flight when the process was killed.
            known = {entry.id for entry in tier.scan()}
            assert all(right(tier, id) for id in known)
            assert tier.stats().entries == len(known)
            assert tier.stats().size_bytes == disk_bytes(directory) <= LIMIT
        finally:
            tier.close()
        if len(stored) > 2_000:
            shutil.rmtree(directory)
            WarmTier.remove_index(index)
            stored, doubtful, deleted = set(), set(), set()


def test_a_killed_compaction_loses_no_limit_and_no_tombstone(
    tmp_path: Path, index: Path, killer: Killer
) -> None:
    """Killed while a full tier evicts: the limit holds, what is read is right, deleted records
    stay deleted although the records around them move."""
    rng = random.Random(1)
    directory, limit = tmp_path / "warm", 1 << 20
    deleted: set[bytes] = set()
    for round in range(max(4, KILLS // 5)):
        said = killer.round(
            directory, index, round, limit, SEGMENT, after=lambda: 0.1 + rng.expovariate(1 / 0.1)
        )
        deleted |= said["deleted"]
        assert disk_bytes(directory) <= limit
        if rng.random() < 0.5:
            WarmTier.remove_index(index)
        tier = open_tier(directory, index, limit, SEGMENT)
        try:
            known = [entry.id for entry in tier.scan()]
            assert known
            assert all(right(tier, id) for id in known)
            assert not deleted & set(known)
            assert tier.stats().size_bytes <= limit
        finally:
            tier.close()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 100])
def test_a_segment_that_was_only_begun(open_warm: Open, size: int) -> None:
    """Its writer was killed before the first record was whole: the next one loses nothing by it."""
    tier = open_warm()
    first, second = ids(5, "first"), ids(5, "second")
    tier.put([record(id) for id in first])
    tier.close()
    begun = segments.segment_header(2) + bytes(36)
    segments.segment_path(tier.directory, 2).write_bytes(begun[:size])
    events: list[Event] = []
    tier = open_warm(on_event=events.append)
    tier.put([record(id) for id in second])
    assert tier.rebuild() == 10
    assert all(right(tier, id) for id in first + second)
    assert len(events) <= int(size > 64)  # 36 zero bytes are no interrupted write of ours
