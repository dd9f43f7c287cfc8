"""The hot tier and the memory around it: pins, transactions, tables, crashes, full memory."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hot_setting import SIZE, check_accounts, fill, record

from ctrlcache import eviction
from ctrlcache.errors import InvalidInput, TierUnavailable
from ctrlcache.key import digest
from ctrlcache.metrics import Event, Evicted
from ctrlcache.shared import RECORD_SHARE, SharedMemory
from ctrlcache.tiers.base import Entry, Record
from ctrlcache.tiers.ledger import SAMPLE

# -- pins -----------------------------------------------------------------------------------------


def test_pinned_records_are_never_evicted(memory: SharedMemory) -> None:
    """Cheap, small, unused and yet kept, for as long as anybody pins them; then they go."""
    kept = [record(f"kept {n}") for n in range(20)]
    memory.hot.put(kept)
    ids = [item.entry.id for item in kept]
    assert memory.hot.pin(b"a", ids) == 20
    assert memory.hot.pin(b"b", ids[:5]) == 5
    fill(memory)
    assert memory.hot.contains(ids) == [True] * 20
    assert memory.hot.unpin(b"a") == 20
    fill(memory)
    assert memory.hot.contains(ids) == [True] * 5 + [False] * 15
    assert memory.hot.unpin(b"b", ids[:2]) == 2
    fill(memory)
    assert memory.hot.contains(ids[:5]) == [False] * 2 + [True] * 3
    check_accounts(memory)


def test_a_pin_is_on_an_id(memory: SharedMemory) -> None:
    """It may come before the record, and outlasts that being replaced or deleted; pinning twice
    is pinning once."""
    item = record("later")
    id = item.entry.id
    assert memory.hot.pin(b"a", [id]) == 0
    memory.hot.put([item])
    memory.hot.put([record("later", 200)])
    fill(memory)
    assert len(memory.hot.get(id) or b"") == 200
    assert memory.hot.delete([id]) == 1
    assert memory.hot.contains([id]) == [False]
    memory.hot.put([item])
    assert memory.hot.pin(b"a", [id]) == 1
    fill(memory)
    assert memory.hot.contains([id]) == [True]
    assert memory.hot.unpin(b"a", [id]) == 1
    assert memory.hot.unpin(b"a", [id]) == 0
    fill(memory)
    assert memory.hot.contains([id]) == [False]
    check_accounts(memory)


def test_pins_that_fill_the_memory_are_an_error_not_an_eviction(memory: SharedMemory) -> None:
    """When all of it is pinned, a put says so, nothing pinned is lost, and reading goes on."""
    held = []

    def put_and_pin_without_end() -> None:
        for n in range(SIZE // 1000):
            item = record(f"{n}", 50_000)
            memory.hot.put([item])
            memory.hot.pin(b"a", [item.entry.id])
            held.append(item.entry.id)

    with pytest.raises(TierUnavailable, match="pinned"):
        put_and_pin_without_end()
    assert len(held) > RECORD_SHARE * SIZE / 60_000
    assert all(memory.hot.contains(held))
    memory.hot.unpin(b"a", held[:5])
    memory.hot.put([record("room again", 50_000)])
    check_accounts(memory)


def test_unpin_unchanged_spares_what_was_replaced(memory: SharedMemory) -> None:
    """Only ids whose payload is still the one given are let go."""
    same, changed, gone = record("same"), record("changed"), record("gone")
    ids = [item.entry.id for item in (same, changed, gone)]
    memory.hot.put([same, changed, gone])
    memory.hot.pin(b"a", ids)
    payloads = {item.entry.id: item.payload for item in (same, changed)} | {ids[2]: b""}
    memory.hot.put([record("changed", 101)])
    memory.hot.delete([ids[2]])
    assert memory.hot.unpin_unchanged(b"a", payloads) == 2
    assert memory.hot.pinned(b"a") == [ids[1]]
    assert memory.hot.pin_count(b"a") == 1


# -- transactions and tables ----------------------------------------------------------------------


def test_a_transaction_is_all_or_nothing(memory: SharedMemory) -> None:
    """What raises leaves no record, row, pin or count behind; what returns leaves all of them."""
    item = record("session's slice")
    fill(memory, 1)
    before, entries = memory.hot.stats(), {entry.id for entry in memory.hot.scan()}

    def work(tx: object, fail: bool) -> None:
        tx.put([item, record("other", 100_000)])
        tx.pin(b"s", [item.entry.id])
        tx.write("sessions", b"s", b"state")
        assert tx.read("sessions", b"s") == b"state"
        assert tx.get(item.entry.id) == item.payload
        if fail:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        memory.transact(lambda tx: work(tx, True))
    assert memory.hot.stats() == before
    assert {entry.id for entry in memory.hot.scan()} == entries
    assert memory.table("sessions").get(b"s") is None
    assert memory.hot.pinned(b"s") == []
    memory.transact(lambda tx: work(tx, False))
    assert memory.table("sessions").get(b"s") == b"state"
    assert memory.hot.pinned(b"s") == [item.entry.id]
    check_accounts(memory)


def test_tables_are_apart_and_counted(memory: SharedMemory) -> None:
    """Keys of one table are invisible in another; values count against the limit and are never
    evicted; scan follows the order of keys and a prefix."""
    table, other = memory.table("t"), memory.table("t2")
    for n in range(600):
        table.put(b"%03d" % n, b"v" * (n % 50))
    other.put(b"001", b"other")
    table.put(b"001", b"again")
    assert table.get(b"001") == b"again"
    assert other.get(b"001") == b"other"
    assert [key for key, _ in table.scan()] == [b"%03d" % n for n in range(600)]
    assert [key for key, _ in table.scan(b"59")] == [b"59%d" % n for n in range(10)]
    assert table.delete(b"000")
    assert not table.delete(b"000")
    assert other.delete(b"001")
    check_accounts(memory)
    fill(memory)
    assert len(list(table.scan())) == 599
    check_accounts(memory)
    for name, key in (("", b""), ("a\0b", b""), ("n" * 61, b""), ("n", b"k" * 401)):
        with pytest.raises(InvalidInput):
            memory.table(name).put(key, b"")


def test_evictions_are_reported(place: Path) -> None:
    """Each eviction is an event, and is counted across processes."""
    events: list[Event] = []
    memory = SharedMemory(place, SIZE, on_event=events.append)
    fill(memory)
    evicted = [event for event in events if isinstance(event, Evicted)]
    assert {(event.tier, event.reason) for event in evicted} == {("hot", "bytes")}
    assert sum(event.count for event in evicted) == memory.hot.evictions > 100
    memory.close()


def test_eviction_looks_at_few_records(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many records there are, evicting one looks at a sample of them."""
    looks = 0

    def counting(usage: eviction.Usage, now_s: float) -> float:
        nonlocal looks
        looks += 1
        return eviction.lru(usage, now_s)

    monkeypatch.setattr(eviction, "POLICIES", {**eviction.POLICIES, "counting": counting})
    memory = SharedMemory(place, SIZE, "counting")
    memory.hot.put([record(f"{n}", 500) for n in range(6000)])
    assert memory.hot.evictions > 500
    assert memory.hot.stats().entries > 4000
    assert looks <= memory.hot.evictions * SAMPLE
    memory.close()


# -- what can go wrong ----------------------------------------------------------------------------


def test_the_file_keeps_to_its_size(memory: SharedMemory) -> None:
    """Records of mixed sizes, in and out: the file never exceeds what was granted."""
    rng = np.random.default_rng(0)
    for n in range(600):
        memory.hot.put([record(f"{n}", int(rng.choice([50, 3000, 40_000, 400_000])))])
        assert memory.file_bytes <= SIZE
    check_accounts(memory)


@pytest.fixture
def small_shm(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "shm"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system needs privileges")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_full_shared_memory_is_an_error_that_passes(small_shm: Path) -> None:
    """With /dev/shm full before the tier is: put raises, what is there can be read, and it goes
    on by itself when there is room."""
    memory = SharedMemory(small_shm / "hot", 64 << 20)
    first = record("first", 10_000)
    memory.hot.put([first])
    (small_shm / "other").write_bytes(bytes(2 << 20))

    def put_without_end() -> None:
        for n in range(100):
            memory.hot.put([record(f"{n}", 50_000)])

    with pytest.raises(TierUnavailable, match="full: free some space"):
        put_without_end()
    assert memory.hot.get(first.entry.id) == first.payload
    check_accounts(memory)
    (small_shm / "other").unlink()
    memory.hot.put([record("again", 50_000)])
    check_accounts(memory)
    memory.close()


def test_no_room_even_to_begin(small_shm: Path) -> None:
    """Opened in a full /dev/shm, it says so; no signal, no half-made directory in the way."""
    filler = small_shm / "other"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(TierUnavailable, match="cannot"):
        SharedMemory(small_shm / "hot", SIZE)
    filler.unlink()
    memory = SharedMemory(small_shm / "hot", SIZE)
    memory.hot.put([record("fits")])
    memory.close()


def test_another_layout_is_refused(place: Path) -> None:
    """Memory that another version laid out is left alone, with a word on what to do."""
    SharedMemory(place, SIZE).close()
    env = lmdb.open(str(place), map_size=SIZE, max_dbs=20)
    with env.begin(write=True) as txn:
        txn.put(b"format", b"ctrlcache-hot-0", db=env.open_db(b"meta", txn=txn))
    env.close()
    with pytest.raises(TierUnavailable, match="delete the directory"):
        SharedMemory(place, SIZE)


def test_closed_it_misses(place: Path) -> None:
    """After close, reading finds nothing and writing says why; neither crashes."""
    memory = SharedMemory(place, SIZE)
    item = record("x")
    memory.hot.put([item])
    memory.close()
    assert memory.hot.get(item.entry.id) is None
    assert memory.hot.neighbours(item.entry.space, np.zeros(4, np.float32)) == []
    assert list(memory.hot.scan()) == []
    with pytest.raises(TierUnavailable):
        memory.hot.put([item])
    with pytest.raises(TierUnavailable):
        memory.table("t").get(b"k")


def test_impossible_places_and_sizes(tmp_path: Path) -> None:
    """A path that cannot be a directory, and a size that cannot work, are named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TierUnavailable, match="cannot open shared memory"):
        SharedMemory(tmp_path / "file", SIZE)
    with pytest.raises(InvalidInput, match="size_bytes"):
        SharedMemory(tmp_path / "d", 1000)


def test_malformed_ids_are_refused(memory: SharedMemory) -> None:
    """An id or space that is no digest is the caller's mistake."""
    entry = Entry(b"short", digest(b"s"), None, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(InvalidInput, match="16 bytes"):
        memory.hot.put([Record(entry, b"")])
    with pytest.raises(InvalidInput, match="owner"):
        memory.hot.pin(b"", [digest(b"s")])
