"""What is special about the warm tier: what is deleted or evicted, who may write."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from hunting import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from warm_process import SPACE, open_tier, record
from warm_setting import LIMIT, SEGMENT, Open, ids, process, right

from ctrlcache.errors import ConfigError, InvalidInput, TierUnavailable
from ctrlcache.metrics import Event, Evicted
from ctrlcache.tiers import segments
from ctrlcache.tiers.base import Entry, Record
from ctrlcache.tiers.places import SegmentRow
from ctrlcache.tiers.segment_scan import scan
from ctrlcache.tiers.warm import WarmTier
from ctrlcache.tiers.warm_files import disk_bytes
from ctrlcache.tiers.warm_index import WarmIndex


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
    before = None
    while before != segments.list_segments(directory):
        # Opening compacts one segment at a time, after its index has been filled.
        before = segments.list_segments(directory)
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
            headers = list(scan(file.fileno(), number, 0, end, verify_payload=False))
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
