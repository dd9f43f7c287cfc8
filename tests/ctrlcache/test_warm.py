"""What is special about the warm tier: what survives, what is noticed, who may write."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hunting import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tier_openers import shm_path
from warm_process import SPACE, identity, open_tier, payload, record

from ctrlcache.errors import ConfigError, InvalidInput, TierUnavailable
from ctrlcache.metrics import Corrupt, Event, Evicted
from ctrlcache.tiers import segments
from ctrlcache.tiers.base import Entry, Record
from ctrlcache.tiers.places import SegmentRow
from ctrlcache.tiers.warm import WarmTier
from ctrlcache.tiers.warm_files import disk_bytes
from ctrlcache.tiers.warm_index import WarmIndex

KILLS = int(os.environ.get("CTRLCACHE_KILLS", "20"))
FLIPS = int(os.environ.get("CTRLCACHE_FLIPS", "200"))
SCRIPT = Path(__file__).with_name("warm_process.py")
LIMIT, SEGMENT = 64 << 20, 128 << 10
Open = Callable[..., WarmTier]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Path]:
    path = shm_path(tmp_path)
    yield path
    for item in path.parent.glob(f"{path.name}*"):
        shutil.rmtree(item)


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


@contextlib.contextmanager
def process(
    mode: str, tier_at: tuple[Path, Path], seed: int = 0, limit: int = LIMIT
) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        [sys.executable, str(SCRIPT), mode, *map(str, (*tier_at, seed, limit, SEGMENT))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def ids(count: int, name: str = "id") -> list[bytes]:
    return [identity(f"{name} {n}") for n in range(count)]


def right(tier: WarmTier, id: bytes) -> bool | None:
    """None: absent; else whether the payload is the right one."""
    found = tier.get(id)
    return None if found is None else found == payload(id)


# --- killed at any moment ---------------------------------------------------------------------


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


# --- damage -----------------------------------------------------------------------------------


def test_flipped_bits_are_counted_misses(tmp_path: Path, index: Path) -> None:
    """Any bit of any segment flips: the record it hits is a miss and counted once, every other one
    is right; with the index made anew from the damaged files too. (CTRLCACHE_FLIPS flips.)"""
    rng = random.Random(2)
    directory = tmp_path / "warm"
    events: list[Event] = []

    def reopen() -> WarmTier:
        return open_tier(directory, index, LIMIT, SEGMENT, on_event=events.append)

    tier = reopen()
    everything = ids(150)
    tier.put([record(id) for id in everything])
    hits = 0
    for flip in range(FLIPS):
        fresh = flip % 10 == 9
        path = rng.choice(sorted(directory.glob("seg-*.ccs")))
        number = int(path.stem[4:])
        at = rng.randrange(path.stat().st_size)
        assert tier.index is not None
        hit = {
            place.entry.id
            for place in tier.index.scan()
            if place.segment == number and place.offset <= at < place.offset + place.size_bytes
        }
        if fresh:
            tier.close()
            WarmTier.remove_index(index)
        _flip(path, at, 1 << rng.randrange(8))
        if fresh:
            tier = reopen()
        missing = set()
        for id in everything:
            verdict = right(tier, id)
            assert verdict is not False
            if verdict is None:
                missing.add(id)
        assert missing == hit
        corrupt = sum(isinstance(event, Corrupt) for event in events)
        hits += bool(hit)
        if fresh:
            # A new look at everything also counts earlier hits on what was dead by then.
            assert corrupt >= bool(hit)
        else:
            assert corrupt == bool(hit)
        events.clear()
        assert tier.put([record(id) for id in missing]) == len(missing)
    assert hits > FLIPS / 3
    tier.close()


def _flip(path: Path, at: int, mask: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def test_many_flips_at_once_never_give_a_wrong_answer(tmp_path: Path, index: Path) -> None:
    """With bits flipped all over every file of the directory, an index made from that finds right
    records or none, and every look-up that fails is counted."""
    rng = random.Random(3)
    directory = tmp_path / "warm"
    tier = open_tier(directory, index, LIMIT, SEGMENT)
    everything = ids(400)
    tier.put([record(id) for id in everything])
    tier.touch(everything)
    tier.close()
    WarmTier.remove_index(index)
    for _ in range(FLIPS):
        path = rng.choice([p for p in directory.iterdir() if p.stat().st_size])
        _flip(path, rng.randrange(path.stat().st_size), 1 << rng.randrange(8))
    events: list[Event] = []
    tier = open_tier(directory, index, LIMIT, SEGMENT, on_event=events.append)
    verdicts = [right(tier, id) for id in everything]
    missing = verdicts.count(None)
    assert False not in verdicts
    assert 0 < missing < len(everything)
    # Damage that hides several records is one piece of damage.
    assert 0 < len(events) <= FLIPS
    assert tier.stats().entries == len(everything) - missing
    tier.close()


def test_a_damaged_record_stays_out_after_a_rebuild(open_warm: Open) -> None:
    """Once found damaged it is in quarantine: not loaded, not counted again; the same record put
    anew is found."""
    events: list[Event] = []
    tier = open_warm(on_event=events.append)
    (id,) = ids(1)
    tier.put([record(id), *(record(other) for other in ids(20, "other"))])
    assert tier.index is not None
    place = tier.index.place(id)
    assert place is not None
    path = segments.segment_path(tier.directory, place.segment)
    _flip(path, place.offset + place.header_bytes, 1)
    assert tier.get(id) is None
    assert events == [Corrupt("warm")]
    assert tier.rebuild() == 20
    assert tier.get(id) is None
    assert events == [Corrupt("warm")]
    tier.put([record(id)])
    assert tier.rebuild() == 21
    assert right(tier, id)


def test_a_segment_cut_short_by_others_is_a_miss(open_warm: Open) -> None:
    """Records beyond the end of a file that shrank are missed and counted, never guessed."""
    events: list[Event] = []
    tier = open_warm(on_event=events.append)
    everything = ids(60)
    tier.put([record(id) for id in everything])
    path = segments.segment_path(tier.directory, 1)
    os.truncate(path, path.stat().st_size // 2)
    verdicts = [right(tier, id) for id in everything]
    assert False not in verdicts
    assert verdicts.count(None) == len(events) > 0


def everything_in(index: WarmIndex) -> dict[str, list[tuple[bytes, bytes]]]:
    """All rows of an index, by database (the directory's notes apart)."""
    found = {}
    with index._env.begin() as txn:
        for name in ("places", "members", "segments", "tombs", "warm.cells", "warm.spaces"):
            db = index._env.open_db(name.encode(), txn=txn, create=False)
            found[name] = [(bytes(key), bytes(value)) for key, value in txn.cursor(db)]
    return found


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from("pppprdco"), st.integers(0, 60), st.integers(1, 30)),
        min_size=1,
        max_size=12,
    )
)
def test_an_index_filled_at_once_is_the_index_that_grew(
    tmp_path: Path, index: Path, steps: list[tuple[str, int, int]]
) -> None:
    """Whatever was put, replaced, deleted and compacted, with whatever widths and radii: what is
    filled in at once from the segments equals what reading them one by one gives, row by row."""
    directory = tmp_path / "warm"
    shutil.rmtree(directory, ignore_errors=True)
    WarmTier.remove_index(index)
    rng = np.random.default_rng(len(steps))
    tier = open_tier(directory, index, 1 << 20, 16 << 10)
    for verb, start, count in steps:
        chosen = ids(start + count)[start:]
        if verb == "d":
            tier.delete(chosen)
        elif verb == "c":
            tier.maintain()
        else:
            tier.put([_varied(id, verb, rng) for id in chosen])
    tier.close()
    WarmTier.remove_index(index)
    tier = open_tier(directory, index, 1 << 20, 16 << 10)
    assert tier.index is not None
    filled = everything_in(tier.index)
    tier.close()
    WarmTier.remove_index(index)
    grown = WarmIndex(index, 64 << 20)
    for number, size in segments.list_segments(directory).items():
        path = segments.segment_path(directory, number)
        with path.open("rb") as file:
            footer = segments.read_footer(file.fileno(), number, size)
            end = size if footer is None else footer.end
            headers = list(segments.scan(file.fileno(), number, 0, end, verify_payload=False))
        for header in headers:
            assert isinstance(header, segments.Header)
            grown.publish([header])
        grown.set_rows({number: SegmentRow(end, size, sealed=footer is not None)})
    expected = everything_in(grown)
    grown.close()
    for name, rows in expected.items():
        assert filled[name] == rows, name


def _varied(id: bytes, verb: str, rng: np.random.Generator) -> Record:
    width = {"p": 4, "r": 4, "o": 3}[verb]
    control = rng.uniform(-1.5, 1.5, width).astype(np.float32) if rng.random() < 0.8 else None
    radius = float(rng.choice([0.0, 0.025, 0.1, 0.2, 0.41, 3.0]))
    # A space holds controls of one width.
    space = bytes([width, id[0] % 4]) * 8
    entry = Entry(id, space, control, radius, float(rng.random()), float(rng.random()), 1e9)
    return Record(entry, rng.bytes(int(rng.integers(1, 3000))))


# --- deletion, replacement, eviction ------------------------------------------------------------


def test_deleted_records_never_come_back(open_warm: Open) -> None:
    """Not after a rebuild, not after the segment with their tombstone was compacted away while an
    older one still holds them."""
    tier = open_warm()
    old = ids(30, "old")
    tier.put([record(id) for id in old])
    tier.put([record(id) for id in ids(30, "filler")])
    tier.delete(old[:10])
    tier.delete(ids(30, "filler"))  # the segments that hold the tombstones are mostly dead now
    tier.put([record(id) for id in ids(60, "later")])
    tier.delete(ids(60, "later")[:50])
    for _ in range(20):
        tier.maintain()  # compacts one segment at a time
    assert tier.rebuild() == 20 + 10
    assert [right(tier, id) for id in old] == [None] * 10 + [True] * 20


def test_a_replaced_record_does_not_come_back_when_its_successor_goes(open_warm: Open) -> None:
    """After the newer copy was evicted, a rebuild does not find the older one."""
    tier = open_warm(limit=1 << 20)
    (id,) = ids(1)

    def worth(id: bytes, cost_ms: float, content: bytes) -> Record:
        return Record(Entry(id, SPACE, None, 0.0, 0.0, cost_ms, 1e9), content * 1000)

    dear = [worth(other, 1e6, b"dear") for other in ids(40, "dear")]  # two segments and a half
    tier.put([worth(id, 1e6, b"old"), *dear])
    tier.put([worth(other, 0.0, b"cheap") for other in ids(20, "before")])
    tier.put([worth(id, 0.0, b"new, and larger")])
    for n in range(60):
        tier.put([worth(other, 0.0, b"cheap") for other in ids(10, f"after {n}")])
        if tier.get(id) is None:
            break
    assert tier.get(id) is None
    assert tier.get(dear[0].entry.id) is not None  # which lies beside the old copy
    tier.rebuild()
    assert tier.get(id) is None


def test_putting_the_same_again_writes_nothing(open_warm: Open) -> None:
    """Records that are there in the same form count as stored and cost no bytes."""
    tier = open_warm()
    batch = [record(id) for id in ids(20)]
    tier.put(batch)
    before = tier.stats()
    assert tier.put(batch) == 20
    assert tier.stats() == before


def test_the_limit_holds_at_every_moment(open_warm: Open) -> None:
    """While a full tier takes record after record, no look at the directory sees more than the
    limit, evictions are reported, and records put last are there."""
    events: list[Event] = []
    limit = 1 << 20
    tier = open_warm(limit=limit, on_event=events.append)
    for n in range(150):
        batch = [record(id) for id in ids(10, f"batch {n}")]
        tier.put(batch)
        assert disk_bytes(tier.directory) <= limit
        assert all(right(tier, item.entry.id) for item in batch)
    evicted = sum(event.count for event in events if isinstance(event, Evicted))
    assert evicted == 1500 - tier.stats().entries
    assert tier.stats().size_bytes > limit * 0.6


def test_use_counts_survive_a_restart_with_a_lost_index(open_warm: Open, index: Path) -> None:
    """What was used often is still known to have been when the index is made anew."""
    tier = open_warm()
    used, *others = ids(10)
    tier.put([record(id) for id in (used, *others)])
    for _ in range(5):
        tier.touch([used])
    tier.close()
    WarmTier.remove_index(index)
    tier = open_warm()
    assert tier.index is not None
    ((id, hits, _),) = tier.index.all_uses()
    assert (id, round(hits)) == (used, 5)


def test_records_without_control_and_with_another_width(open_warm: Open) -> None:
    """Slices (no control) are found by id; a couplet whose control does not fit its space is
    found by id and is nobody's neighbour."""
    tier = open_warm()
    a, b, c, d = ids(4)
    far = np.full(4, 5, np.float32)
    tier.put(
        [
            Record(Entry(d, SPACE, far, 0.1, 0, 1, 0), b"d"),
            Record(Entry(a, SPACE, np.zeros(4, np.float32), 0.1, 0, 1, 0), b"a"),
            Record(Entry(b, SPACE, None, 0.0, 0, 1, 0), b"b"),
            Record(Entry(c, SPACE, np.zeros(3, np.float32), 0.1, 0, 1, 0), b"c"),
        ]
    )
    assert [tier.get(id) for id in (a, b, c)] == [b"a", b"b", b"c"]
    assert [n.id for n in tier.neighbours(SPACE, np.zeros(4, np.float32))] == [a]
    assert tier.rebuild() == 4
    assert [n.id for n in tier.neighbours(SPACE, np.zeros(4, np.float32))] == [a]


# --- several processes --------------------------------------------------------------------------


def test_a_reader_process_sees_what_the_writer_stored(tmp_path: Path, index: Path) -> None:
    """Two processes of one server share the index: what one reported stored, the other reads,
    while the first goes on flushing."""
    at = (tmp_path / "warm", index)
    with process("write", at) as writer, process("read", at) as reader:
        assert writer.stdout is not None
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert writer.stdout.readline().startswith(b"open writer")
        assert reader.stdout.readline().startswith(b"open reader")
        asked = 0
        deleted: set[str] = set()
        absent: set[str] = set()
        while asked < 1500:
            verb, *words = writer.stdout.readline().decode().split()
            deleted |= set(words) if verb != "put" else set()
            for word in words if verb == "put" else ():
                reader.stdin.write(word.encode() + b"\n")
                reader.stdin.flush()
                verdict = reader.stdout.readline().strip()
                assert verdict in (b"right", b"absent")
                absent |= {word} if verdict == b"absent" else set()
                asked += 1
        writer.kill()
        for line in writer.stdout.read().decode().splitlines():
            verb, *words = line.split()
            deleted |= set(words) if verb != "put" else set()
        assert absent <= deleted
        assert len(absent) < 150


def test_a_second_server_reads_along_and_takes_over(tmp_path: Path, index: Path) -> None:
    """It says who writes, serves what the first one stores and deletes, cannot write itself, and
    becomes the writer once the first one is killed."""
    directory = tmp_path / "warm"
    with process("write", (directory, index)) as first:
        assert first.stdout is not None
        assert first.stdout.readline().startswith(b"open writer")
        tier = open_tier(directory, index.with_name(index.name + "-two"), LIMIT, SEGMENT)
        try:
            assert not tier.writable
            with pytest.raises(TierUnavailable, match=f"written by process {first.pid} on"):
                tier.put([record(ids(1)[0])])
            stored: set[bytes] = set()
            gone: set[bytes] = set()
            for _ in range(40):
                verb, *words = first.stdout.readline().decode().split()
                (stored if verb == "put" else gone).update(map(bytes.fromhex, words))
            tier.maintain()
            assert all(right(tier, id) for id in stored - gone)
            first.send_signal(signal.SIGKILL)
            first.wait()
            for line in first.stdout.read().decode().splitlines():
                verb, *words = line.split()
                (stored if verb == "put" else gone).update(map(bytes.fromhex, words))
            tier.maintain()
            assert tier.writable
            assert all(right(tier, id) for id in stored - gone)
            assert tier.put([record(ids(1)[0])]) == 1
        finally:
            tier.close()


def test_a_follower_forgets_what_the_writer_compacted_away(open_warm: Open) -> None:
    """Its index follows deletions and evictions of the other server's writer."""
    writer = open_warm(limit=1 << 20)
    follower = open_warm(server="-two", limit=1 << 20)
    for n in range(60):
        writer.put([record(id) for id in ids(20, f"{n}")])
        if n % 7 == 0:
            follower.maintain()
    writer.delete(ids(20, "59")[:5])
    follower.maintain()
    assert {e.id for e in follower.scan()} == {e.id for e in writer.scan()}
    assert all(right(follower, entry.id) for entry in writer.scan())


def test_deletion_in_a_process_that_does_not_write(open_warm: Open) -> None:
    """It takes effect there at once, and on disk once that server writes."""
    first = open_warm()
    second = open_warm(server="-two")
    a, b = ids(2)
    first.put([record(a), record(b)])
    second.maintain()
    assert second.delete([a]) == 1
    second.maintain()
    assert right(second, a) is None
    assert second.rebuild() == 1
    first.close()
    second.maintain()
    assert second.writable
    third = open_warm(server="-three", read_only=True)
    assert (right(third, a), right(third, b)) == (None, True)


def test_a_requested_rebuild_is_done_by_the_maintainer(open_warm: Open) -> None:
    """`request_rebuild` has the writer make the index anew."""
    tier = open_warm()
    tier.put([record(id) for id in ids(10)])
    assert tier.index is not None
    tier.index.forget(ids(5))
    tier.request_rebuild()
    assert tier.rebuild_pending
    tier.maintain()
    assert not tier.rebuild_pending
    assert tier.stats().entries == 10


# --- trouble ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", path]).returncode:
        pytest.skip("mounting a file system needs privileges")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def fill(disk: Path, but_pages: int) -> Path:
    """Occupy a disk except for some pages."""
    room = os.statvfs(disk)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes((room.f_bavail - but_pages) * room.f_frsize))
    return ballast


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


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("limit_bytes", 10, "limit_bytes must be .* got 10"),
        ("segment_bytes", 1, "segment_bytes must be .* got 1"),
        ("index_bytes", 5, "index_bytes must be .* got 5"),
        ("policy", "fifo", "choose one of"),
    ],
)
def test_wrong_settings_are_refused(
    tmp_path: Path, index: Path, setting: str, value: object, said: str
) -> None:
    """The error names the setting, the value and what would be right."""
    settings = {"limit_bytes": LIMIT, "follow_s": None, setting: value}
    with pytest.raises(ConfigError, match=said):
        WarmTier(tmp_path / "warm", index, **settings)  # type: ignore[arg-type]


def test_wrong_records_are_refused(open_warm: Open) -> None:
    """Nothing of a batch with an impossible record is written."""
    tier = open_warm()
    before = tier.stats()
    nan = np.full(4, np.nan, np.float32)
    for bad in (Entry(b"short", SPACE, None, 0, 0, 0, 0), Entry(bytes(16), SPACE, nan, 0, 0, 0, 0)):
        with pytest.raises(InvalidInput):
            tier.put([record(ids(1)[0]), Record(bad, b"")])
    assert tier.stats() == before
