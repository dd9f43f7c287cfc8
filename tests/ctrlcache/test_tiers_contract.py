"""What every tier does, whatever it is made of. Tiers are listed in `tier_openers.OPENERS`."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hunting import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tier_openers import OPENERS, Closing

from ctrlcache.errors import InvalidInput, TierUnavailable
from ctrlcache.key import digest
from ctrlcache.tiers.base import Entry, Record, Tier

SPACE = digest(b"space")
counter = itertools.count()


@pytest.fixture(params=sorted(OPENERS))
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Closing]:
    closing = Closing(request.param, tmp_path)
    yield closing
    closing.clean()


def record(
    payload: bytes = b"payload",
    control: object = None,
    radius: float = 0.1,
    space: bytes = SPACE,
    cost_ms: float = 10.0,
    id: bytes | None = None,
) -> Record:
    id = id or digest(b"record %d" % next(counter))
    array = None if control is None else np.asarray(control, np.float32)
    return Record(Entry(id, space, array, radius, 0.5, cost_ms, 999.0), payload)


def held(tier: Tier, *records: Record) -> list[bool]:
    return [tier.get(item.entry.id) is not None for item in records]


def same_entry(left: Entry, right: Entry) -> bool:
    controls = [None if e.control is None else e.control.tolist() for e in (left, right)]
    plain = [(e.id, e.space, e.radius, e.curvature, e.cost_ms, e.created_s) for e in (left, right)]
    return controls[0] == controls[1] and plain[0] == plain[1]


def test_what_is_put_can_be_got(tiers: Closing) -> None:
    """Payloads of any length, empty and large ones included, come back as they were."""
    tier = tiers.open()
    records = [record(bytes([n % 251]) * n) for n in (0, 1, 100, 2000, 4097, 300_000)]
    assert tier.put(records) == len(records)
    for item in records:
        found = tier.get(item.entry.id)
        assert found is not None
        assert bytes(found) == item.payload
    assert tier.stats().entries == len(records)


def test_a_miss_is_none(tiers: Closing) -> None:
    """An id nobody stored gives None, also when its neighbours in order exist."""
    tier = tiers.open()
    tier.put([record(id=bytes(15) + b"\1"), record(id=bytes(15) + b"\3")])
    assert tier.get(bytes(15) + b"\2") is None
    assert tier.neighbours(digest(b"elsewhere"), np.zeros(4, np.float32)) == []


def test_put_replaces(tiers: Closing) -> None:
    """A record stored again takes the place of the old one, in look-up and in the count."""
    tier = tiers.open()
    old = record(b"old" * 900, [0, 0, 0, 0], 0.3)
    new = record(b"new", [0.5, 0, 0, 0], 0.1, id=old.entry.id)
    tier.put([old])
    size = tier.stats().size_bytes
    tier.put([new])
    assert bytes(tier.get(old.entry.id) or b"") == b"new"
    assert tier.neighbours(SPACE, np.zeros(4, np.float32)) == []
    found = tier.neighbours(SPACE, np.float32([0.5, 0, 0, 0]))
    assert [(c.id, c.radius) for c in found] == [(old.entry.id, 0.1)]
    assert tier.stats().entries == 1
    assert tier.stats().size_bytes <= size or tiers.name == "warm"  # appends before it reclaims


def test_delete(tiers: Closing) -> None:
    """A deleted record is gone from look-up, neighbours, scan and count; others stay."""
    tier = tiers.open()
    gone, stays = record(control=[0, 0, 0, 0]), record(control=[0.01, 0, 0, 0])
    tier.put([gone, stays])
    assert tier.delete([gone.entry.id, digest(b"absent")]) == 1
    assert held(tier, gone, stays) == [False, True]
    found = tier.neighbours(SPACE, np.zeros(4, np.float32))
    assert [candidate.id for candidate in found] == [stays.entry.id]
    assert [entry.id for entry in tier.scan()] == [stays.entry.id]
    assert tier.stats().entries == 1


def test_scan_gives_every_entry(tiers: Closing) -> None:
    """Scan returns the entries as they were put, with and without a control."""
    tier = tiers.open()
    records = [record(control=None if n % 3 else [n / 900] * 4, cost_ms=n) for n in range(700)]
    tier.put(records)
    found = {entry.id: entry for entry in tier.scan()}
    assert len(found) == len(records)
    assert all(same_entry(found[item.entry.id], item.entry) for item in records)


def test_neighbours_stay_in_their_space(tiers: Closing) -> None:
    """The same control in another space is no neighbour; nor is a record without a control."""
    tier = tiers.open()
    other = digest(b"other space")
    here, there = record(control=[0, 0]), record(control=[0, 0, 0], space=other)
    tier.put([here, there, record(control=None)])
    assert [c.id for c in tier.neighbours(SPACE, np.zeros(2, np.float32))] == [here.entry.id]
    assert [c.id for c in tier.neighbours(other, np.zeros(3, np.float32))] == [there.entry.id]


def test_a_control_of_another_width_is_refused(tiers: Closing) -> None:
    """Asking a space of four-wide controls with three numbers names both widths."""
    tier = tiers.open()
    tier.put([record(control=[0, 0, 0, 0])])
    with pytest.raises(InvalidInput, match=r"\(4,\).*\(3,\)"):
        tier.neighbours(SPACE, np.zeros(3, np.float32))


def test_nearest_first_and_no_more_than_asked(tiers: Closing) -> None:
    """Of many neighbours the nearest `limit` come, in order of distance."""
    tier = tiers.open()
    rng = np.random.default_rng(0)
    records = [record(control=rng.uniform(-0.1, 0.1, 4), radius=0.4) for _ in range(60)]
    tier.put(records)
    query = np.float32([0.01, 0, 0, 0])
    expected = sorted(
        (float(np.linalg.norm(r.entry.control - query.astype(float))), r.entry.id) for r in records
    )[:10]
    found = tier.neighbours(SPACE, query, limit=10)
    assert [candidate.id for candidate in found] == [id for _, id in expected]
    assert [candidate.distance for candidate in found] == pytest.approx([d for d, _ in expected])
    by_id = {r.entry.id: r.entry for r in records}
    for candidate in found:
        entry = by_id[candidate.id]
        assert candidate.control.tolist() == entry.control.tolist()
        assert (candidate.radius, candidate.curvature) == (entry.radius, entry.curvature)


# Values that lie on edges of cells as often as not, and some beyond [-1, 1].
edge = st.integers(-30, 30).map(lambda n: n * 0.05)
value = edge | st.floats(-1.5, 1.5, width=32) | st.sampled_from([-2000.0, 2000.0])
radii = st.sampled_from([0.0, 0.025, 0.05, 0.1, 0.2, 0.4, 0.41, 3.0]) | st.floats(0, 0.5)


@settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data(), st.integers(1, 8), st.sampled_from([0, 150]))
def test_every_neighbour_is_found_and_no_other(
    tiers: Closing, data: st.DataObject, dimensions: int, others: int
) -> None:
    """Neighbours equal those of a brute-force search, whatever the radii and wherever the points
    lie: on edges of cells, beyond [-1, 1], at the query itself, exactly at the radius."""
    control = st.lists(value, min_size=dimensions, max_size=dimensions).map(np.float32)
    space = digest(b"space %d" % next(counter))
    tier = tiers._tier or tiers.open()
    points = data.draw(st.lists(st.tuples(control, radii), min_size=1, max_size=25))
    # In company: a tier may search a crowded space in another way than one of a few.
    rng = np.random.default_rng(others)
    points += [(rng.uniform(-2, 2, dimensions), rng.uniform(0, 0.4)) for _ in range(others)]
    records = [record(control=point, radius=radius, space=space) for point, radius in points]
    tier.put(records)
    query = data.draw(control | st.sampled_from([point for point, _ in points]))
    nudge = data.draw(st.lists(radii, min_size=dimensions, max_size=dimensions))
    for asked in (query, (query + nudge).astype(np.float32)):
        expected = set()
        for item in records:
            away = item.entry.control.astype(np.float64) - asked.astype(np.float64)
            if np.sqrt(np.sum(away**2)) <= item.entry.radius:
                expected.add(item.entry.id)
        found = tier.neighbours(space, asked, limit=1000)
        assert {candidate.id for candidate in found} == expected
        distances = [candidate.distance for candidate in found]
        assert distances == sorted(distances)


def test_the_limit_holds(tiers: Closing) -> None:
    """However much is put, in small and large pieces, no more than the limit is kept, and a good
    part of what would fit is."""
    limit = 4 << 20
    tier = tiers.open(limit)
    rng = np.random.default_rng(0)
    for _ in range(30):
        batch = [record(rng.bytes(int(rng.integers(10, 60_000)))) for _ in range(20)]
        tier.put(batch)
        stats = tier.stats()
        assert stats.size_bytes <= stats.limit_bytes <= limit
    assert tier.stats().size_bytes > limit / 4
    assert held(tier, batch[-1]) == [True]


def test_what_is_used_stays(tiers: Closing) -> None:
    """Under `lru`, a record in use outlives many that are not."""
    tier = tiers.open(2 << 20, "lru")
    rng = np.random.default_rng(0)
    keep = record(rng.bytes(20_000))
    tier.put([keep])
    for _ in range(300):
        tiers.now_s += 1.0
        tier.touch([keep.entry.id])
        tier.put([record(rng.bytes(20_000))])
    assert held(tier, keep) == [True]


def test_what_is_dear_stays(tiers: Closing) -> None:
    """Under `cost`, records that take long to recompute outlive as many that do not."""
    tier = tiers.open(2 << 20, "cost")
    rng = np.random.default_rng(0)
    dear, cheap = [], []
    for _ in range(30):
        tiers.now_s += 1.0
        dear.append(record(rng.bytes(20_000), cost_ms=1000.0))
        cheap += [record(rng.bytes(20_000), cost_ms=0.1) for _ in range(9)]
        tier.put([dear[-1], *cheap[-9:]])
    kept_dear, kept_cheap = np.mean(held(tier, *dear)), np.mean(held(tier, *cheap))
    assert kept_dear > 2 * kept_cheap


def test_a_record_larger_than_the_tier_is_refused(tiers: Closing) -> None:
    """It cannot be stored, says so, and evicts nothing; in company only the others are stored."""
    tier = tiers.open(2 << 20)
    small, large = record(b"small"), record(np.random.default_rng(0).bytes(3 << 20))
    tier.put([small])
    with pytest.raises(TierUnavailable):
        tier.put([large])
    other = record(b"other")
    assert tier.put([large, other]) == 1
    assert held(tier, small, large, other) == [True, False, True]


def test_reopened_it_holds_what_it_held(tiers: Closing) -> None:
    """A persistent tier, closed and opened again, has the same records, neighbours and sizes."""
    if not tiers.opener.persistent:
        pytest.skip("lost with the process, by design")
    tier = tiers.open()
    records = [record(b"%d" % n * n, [n / 100, 0]) for n in range(100)]
    tier.put(records)
    tier.delete([records[0].entry.id])
    before, query = tier.stats(), np.float32([0.5, 0])
    neighbours = {c.id for c in tier.neighbours(SPACE, query, limit=50)}
    tier = tiers.open()
    assert tier.stats() == before
    assert held(tier, *records) == [False] + [True] * 99
    assert all(bytes(tier.get(r.entry.id) or b"") == r.payload for r in records[1:])
    assert {c.id for c in tier.neighbours(SPACE, query, limit=50)} == neighbours


def test_a_lower_limit_holds_after_reopening(tiers: Closing) -> None:
    """Opened with a lower limit, a tier gives up what no longer fits at once."""
    if not tiers.opener.persistent:
        pytest.skip("lost with the process, by design")
    tier = tiers.open(8 << 20)
    rng = np.random.default_rng(0)
    tier.put([record(rng.bytes(40_000)) for _ in range(120)])
    tier = tiers.open(2 << 20)
    assert 0 < tier.stats().size_bytes <= tier.stats().limit_bytes <= 2 << 20


def test_readers_beside_a_writer_see_whole_records(tiers: Closing) -> None:
    """While records are put, replaced and evicted, what is read is one of the payloads put under
    that id, whole."""
    tier = tiers.open(2 << 20)
    ids = [digest(b"shared %d" % n) for n in range(8)]
    done = threading.Event()
    seen: list[bytes] = []
    wrong: list[bytes] = []

    def read() -> None:
        for id in itertools.cycle(ids):
            if done.is_set():
                return
            payload = tier.get(id)
            if payload is not None:
                payload = bytes(payload)
                seen.append(payload[:1])
                if payload != payload[:1] * len(payload) or len(payload) < 50_000:
                    wrong.append(payload[:8])
            tier.neighbours(SPACE, np.zeros(4, np.float32))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for round in range(250):
            time.sleep(0.001)  # let the readers have their turn
            if len(set(seen)) > 5:
                break
            for n, id in enumerate(ids):
                size = 50_000 + 1000 * ((n + round) % 9)
                tier.put([record(bytes([round]) * size, [n / 100] * 4, 0.3, id=id)])
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert not wrong
    assert len(set(seen)) > 5
