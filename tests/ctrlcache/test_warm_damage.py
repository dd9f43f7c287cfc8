"""Damage in the files of a warm tier: counted misses, never a wrong answer."""

from __future__ import annotations

import os
import random
from pathlib import Path

from warm_process import open_tier, record
from warm_setting import LIMIT, SEGMENT, Open, ids, right

from ctrlcache.metrics import Corrupt, Event
from ctrlcache.tiers import segments
from ctrlcache.tiers.warm import WarmTier

FLIPS = int(os.environ.get("CTRLCACHE_FLIPS", "200"))


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
