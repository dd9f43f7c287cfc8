"""Memory, disks and stored bytes that fail while people work."""

from __future__ import annotations

import os
import random
import resource
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from stand import can_mount, stopped
from wire import metric

from ctrlcache.couplet import decode, decode_array, is_couplet
from ctrlcache.errors import CorruptRecord

pytestmark = pytest.mark.server
mounts = pytest.mark.skipif(not can_mount(), reason="no mounts of one's own here (unshare --mount)")
SHM = Path("/dev/shm")
#: Of a record's header.
_LENGTH_AND_OWNER = struct.Struct("<16xQ16s")


def fill(directory: Path) -> Path:
    """A file that leaves no room in its file system."""
    ballast = directory / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 16, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return ballast


def flip(path: Path, count: int, draw: random.Random, start: int = 0) -> int:
    """One bit at each of `count` places; how many."""
    size = path.stat().st_size
    with open(path, "r+b", buffering=0) as file:
        for _ in range(count):
            at = draw.randrange(start, size)
            old = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([old[0] ^ 1 << draw.randrange(8)]), at)
    return count


def warm_entries(server) -> float:
    return metric(server.endpoints, "ctrlcache_entries", tier="warm") or 0


@pytest.mark.slow
@mounts
def test_the_disk_is_full(stand, crowd, verdict, tmp_path):
    """No byte can be written to the warm tier: answers go on, and so does writing afterwards."""
    warm = tmp_path / "here" / "warm"
    warm.mkdir(parents=True)
    server = stand(directory=warm.parent, private={warm: 48 << 20})
    people = crowd(server)
    people.settle()
    people.until(lambda: warm_entries(server) > 0)
    ballast = fill(server.seen(warm))
    people.struck()
    people.recovered()
    assert people.work(10) > 0
    before = warm_entries(server)
    ballast.unlink()
    people.until(lambda: warm_entries(server) > before)
    row = verdict("disk of the warm tier full", people, server)
    assert row.refused == 0
    assert not server.events()


@pytest.mark.slow
def test_the_warm_directory_becomes_read_only(stand, crowd, verdict, tmp_path):
    """Nothing in it can be written, made or removed: it is counted and told, answers go on, and so
    does writing as soon as it may."""
    if not refuse_writes(tmp_path, True):
        pytest.skip("files cannot be made immutable here (chattr, as root, on ext4 or xfs)")
    refuse_writes(tmp_path, False)
    server = stand()
    people = crowd(server)
    people.settle()
    people.until(lambda: warm_entries(server) > 0)
    try:
        assert refuse_writes(server.warm_dir, True)
        people.struck()
        people.recovered()
        people.until(lambda: (metric(server.endpoints, "ctrlcache_tier_failures_total") or 0) > 0)
        assert people.work(10) > 0
        before = warm_entries(server)
    finally:
        refuse_writes(server.warm_dir, False)
    people.until(lambda: warm_entries(server) > before)
    row = verdict("warm directory read-only", people, server)
    assert row.refused == 0
    assert not server.events()
    assert "goes on without" in (server.run_dir / "logs" / "tritonserver.log").read_text()


def refuse_writes(directory: Path, refuse: bool) -> bool:
    """Make all of it immutable, also for whoever has it open, or undo that; whether it works."""
    command = ["chattr", "-R", "+i" if refuse else "-i", str(directory)]
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_no_file_may_grow(stand, crowd, verdict):
    """A limit on the size of files (as of a quota): the hot tier and the warm one are refused what
    they want to write; requests are answered, or refused as unavailable."""
    server = stand("--hot-bytes", "96MiB")
    people = crowd(server)
    people.settle()
    people.until(lambda: warm_entries(server) > 0)
    stub = server.stubs()[0]
    before = resource.prlimit(stub, resource.RLIMIT_FSIZE)
    largest = max(path.stat().st_size for path in server.warm_dir.glob("seg-*"))
    resource.prlimit(stub, resource.RLIMIT_FSIZE, (largest + 8192, before[1]))
    people.struck()
    people.work(6)
    resource.prlimit(stub, resource.RLIMIT_FSIZE, before)
    people.struck()
    people.recovered()
    people.settle()
    verdict("no file may grow for 6 s (RLIMIT_FSIZE)", people, server)
    assert stub in server.stubs()


@pytest.mark.slow
@mounts
def test_shared_memory_is_full(stand, crowd, verdict):
    """/dev/shm has no byte left: requests are answered, or refused as unavailable, and nobody
    loses a session. As soon as there is room, everything goes on."""
    server = stand("--hot-bytes", "128MiB", private={SHM: 220 << 20})
    people = crowd(server)
    people.settle()
    ballast = fill(server.seen(SHM))
    people.struck()
    people.work(6)
    ballast.unlink()
    people.struck()
    people.recovered()
    people.settle()
    verdict("/dev/shm full for 6 s", people, server)


def test_bits_flip_in_the_warm_tier(stand, crowd, verdict):
    """While the server runs, and before it starts: counted misses, never a wrong answer."""
    draw = random.Random(7)
    server = stand()
    people = crowd(server)
    people.settle(20)
    people.until(lambda: warm_entries(server) > 100)
    for path in sorted(server.warm_dir.glob("seg-*")):
        flip(path, 50, draw)
    people.struck()
    people.recovered()
    verdict("bits flipped in the warm tier, while serving", people, server)
    server.close()
    for path in sorted(server.warm_dir.glob("seg-*")):
        flip(path, 400, draw)
    again = stand(directory=server.directory)
    people = crowd(again)  # they ask the same again: the hot tier is new, so the warm one answers
    people.struck()
    people.recovered()
    people.settle(20)
    found = metric(again.endpoints, "ctrlcache_lookups_total", tier="warm", result="exact") or 0
    bad = metric(again.endpoints, "ctrlcache_corrupt_total", tier="warm") or 0
    quarantined = again.warm_dir / "quarantine.log"
    verdict("bits flipped in the warm tier, before the start", people, again)
    assert found > 0
    assert bad > 0 or quarantined.exists()


@pytest.mark.slow
def test_bits_flip_in_the_hot_tier(stand, crowd, verdict):
    """In what was computed and is kept in shared memory: counted misses, computed again."""
    server = stand()
    people = crowd(server)
    people.settle(20)
    with stopped(server.stubs()[0]):  # else what is damaged may be something new by then
        flipped = flip_records(server.shm_dir / "hot" / "data.mdb", random.Random(7), 2000)
    assert flipped > 100
    people.struck()
    people.recovered()
    people.settle(40)
    bad = metric(server.endpoints, "ctrlcache_corrupt_total") or 0
    verdict(f"{flipped} records of the hot tier with a flipped bit", people, server)
    assert bad > 0
    assert not server.events()


def flip_records(path: Path, draw: random.Random, most: int) -> int:
    """One bit in the body of each couplet and array record in a file; how many.

    But for what people have shown (arrays of bytes): there is nothing that it could be computed
    from again. And only in whole records: where an old one was half overwritten, a session may be.
    """
    data = path.read_bytes()
    starts = []
    for at in (*_places(data, b"CCsc"), *_places(data, b"CCar")):
        try:
            length, provenance = _LENGTH_AND_OWNER.unpack_from(data, at)
            record = data[at : at + length]
            computed = is_couplet(record) or decode_array(record, provenance).dtype != np.uint8
            if is_couplet(record):
                decode(record, provenance)
        except (CorruptRecord, struct.error):
            continue
        if computed:
            starts.append((at, min(160, length)))
    draw.shuffle(starts)
    with open(path, "r+b", buffering=0) as file:
        for at, length in starts[:most]:
            where = at + draw.randrange(8, length)  # beyond the header's first fields
            os.pwrite(file.fileno(), bytes([data[where] ^ 1 << draw.randrange(8)]), where)
    return len(starts[:most])


def _places(data: bytes, magic: bytes) -> list[int]:
    found, at = [], data.find(magic)
    while at >= 0:
        found.append(at)
        at = data.find(magic, at + 1)
    return found


@pytest.mark.slow
def test_two_servers_on_one_warm_directory(stand, crowd, verdict):
    """Both serve, one writes; its server is killed with everything, the other one takes over."""
    first = stand()
    second = stand(directory=first.directory / "second", warm=first.warm_dir)
    mine, theirs = crowd(first, size=32), crowd(second, size=32, first=101)
    mine.settle()
    theirs.settle()
    theirs.until(lambda: warm_entries(first) > 0)
    writing, other = (first, second) if first.writer() in first.stubs() else (second, first)
    theirs.until(lambda: other.writer() in writing.stubs())
    verdict("two servers on one warm directory", mine if other is second else theirs, first)
    writing.close()
    left = theirs if other is second else mine
    left.struck()
    left.recovered()
    before = warm_entries(other)
    left.until(lambda: other.writer() in other.stubs() and warm_entries(other) > before)
    verdict("two servers on one warm directory, the writing one ends", left, other)
