"""What the cache keeps, and what happens behind it: flushing down, fetching up, going without."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cache_setting import (
    MODEL,
    PROVENANCE,
    C,
    Setting,
    ask,
    couplet,
    frames,
    opened,
    scores_of,
    world,
)
from tier_openers import shm_path

from ctrlcache.admission import Trust
from ctrlcache.config import FlushConfig, PrefetchConfig
from ctrlcache.couplet import decode, is_couplet
from ctrlcache.errors import TierUnavailable
from ctrlcache.key import digest
from ctrlcache.metrics import Admitted
from ctrlcache.scores import Scores
from ctrlcache.shared import SharedMemory
from ctrlcache.tiers.memory import MemoryTier
from ctrlcache.tiers.warm import WarmTier
from ctrlcache.upkeep import FLUSH_OWNER

# -- what is kept ---------------------------------------------------------------------------------


def test_admitting_again_adds_and_takes_nothing_away(setting: Setting) -> None:
    """Frames that come later join tokens and slice; scores stay when an unscored copy comes."""
    made = couplet([0.0, 0.0, 0.0])
    setting.cache.admit(made)
    setting.cache.admit(made, scores_of(made))
    setting.cache.admit(replace(made, tokens=None, slice=None, frames=frames(3)))
    full = setting.cache.fetch(made.id)
    assert full is not None
    assert full.fields == {"tokens", "slice", "frames", "jacobian"}
    assert full.radius > 0
    assert full.transferability == scores_of(made).transferability
    assert setting.cache.lookup(ask([0.01, 0, 0], max_error=0.1)) is not None


def test_what_the_policy_refuses_is_not_flushed(setting: Setting) -> None:
    """It serves from the hot tier, and the warm one never sees it."""

    class Never(Trust):
        def decide(self, scores: Scores) -> object:
            return replace(super().decide(scores), admit=False, reason="unstable", radius=0.0)

    cache = setting.make(policy=Never(MODEL, 0.1))
    made = couplet([0.0, 0.0, 0.0])
    assert not cache.admit(made, scores_of(made)).admit
    assert cache.flush() == 0
    assert cache.lookup(ask(made.control)) is not None
    assert [event.decision for event in setting.of(Admitted)] == ["unstable"]


def test_blobs_are_exact_in_every_tier(setting: Setting) -> None:
    """Arrays come back bit for bit from hot, from warm, and from hot again after promotion."""
    array = np.random.default_rng(1).normal(size=(2, 2, 33, 5)).astype(np.float32)
    id = digest(b"slice")
    setting.cache.put_blob(id, array, cost_ms=9.0)
    assert setting.cache.get_blob(digest(b"another")) is None
    for _ in range(2):
        found = setting.cache.get_blob(id)
        assert found is not None
        assert found.tobytes() == array.tobytes()
        setting.cache.flush()
        setting.forget_hot()
    found = setting.cache.get_blob(id)
    assert found is not None
    assert found.tobytes() == array.tobytes()
    assert setting.memory.hot.contains([id]) == [False]
    setting.cache.upkeep.tick()
    assert setting.memory.hot.contains([id]) == [True]
    entry = setting.memory.hot.entry(id)
    assert entry is not None
    assert entry.cost_ms == 9.0


# -- below and behind -----------------------------------------------------------------------------


def test_flushed_couplets_answer_from_the_warm_tier(setting: Setting) -> None:
    """Exactly or as neighbours, like before; then they are in the hot tier again, and so is
    everything else of their space."""
    controls = [[n / 20, 0.0, 0.0] for n in range(5)]
    for control in controls:
        made = couplet(control, frames=frames(9))
        setting.cache.admit(made, scores_of(made))
    before = {n: setting.cache.lookup(ask(c, 0.05)) for n, c in enumerate(controls)}
    assert setting.cache.flush() == 5
    setting.forget_hot()
    for n, control in enumerate(controls):
        hit = setting.cache.lookup(ask(control, 0.05, want_frames=True))
        assert hit is not None
        assert (hit.tier, hit.exact) == ("memory", True)
        assert hit.states.tobytes() == before[n].states.tobytes()
        assert hit.couplet.frames is not None
        assert (hit.couplet.frames == 9).all()
        assert hit.couplet.lossy
    near = setting.cache.lookup(ask([0.01, 0.01, 0.0], 0.05))
    assert near is not None
    assert (near.tier, near.exact) == ("memory", False)
    setting.cache.upkeep.tick()
    assert setting.memory.hot.stats().entries == 5
    hit = setting.cache.lookup(ask(controls[2], 0.05))
    assert hit is not None
    assert hit.tier == "hot"


def test_prefetching_keeps_to_its_buffer(tmp_path: Path) -> None:
    """A hit in the warm tier brings no more of its neighbourhood up than the buffer holds,
    nearest first; 0 brings only the hit itself."""
    for size, least, most in ((20_000, 2, 4), (0, 1, 1)):
        with opened(tmp_path, prefetch=PrefetchConfig(size)) as setting:
            for n in range(12):
                made = couplet([n / 100, 0, 0], slice=np.ones((2, 1000), np.float32))
                setting.cache.admit(made, scores_of(made))
            setting.cache.flush()
            setting.forget_hot()
            assert setting.cache.lookup(ask([0.0, 0.0, 0.0])) is not None
            setting.cache.upkeep.tick()
            here = [entry.control[0] for entry in setting.memory.hot.scan()]
            assert least <= len(here) <= most
            assert max(here) <= 0.04


def test_flushing_is_due_by_time_or_by_number(tmp_path: Path) -> None:
    """After 30 s, or as soon as 5 wait, whichever comes first; not before."""
    with opened(tmp_path, flush=FlushConfig(30.0, 5)) as setting:
        cache, warm = setting.cache, setting.warm
        cache.admit(couplet([0.0, 0, 0]))
        cache.upkeep.tick()
        setting.now_s = 29.0
        cache.upkeep.tick()
        assert warm.stats().entries == 0
        setting.now_s = 30.5
        cache.upkeep.tick()
        assert warm.stats().entries == 1
        for n in range(1, 5):
            cache.admit(couplet([n / 10, 0, 0]))
            cache.upkeep.tick()
        assert warm.stats().entries == 1
        cache.admit(couplet([0.9, 0, 0]))
        cache.upkeep.tick()
        assert warm.stats().entries == 6


def test_a_lost_warm_tier_is_counted_and_remembered(setting: Setting) -> None:
    """While it cannot take anything, nothing is raised at whoever asks or admits, nothing that
    waits is lost, and all of it is written once the tier is back."""

    class Moody(MemoryTier):
        down = True

        def put(self, records: object) -> int:
            if self.down:
                raise TierUnavailable("the disk is full")
            return super().put(records)  # type: ignore[arg-type]

        def get(self, id: bytes) -> bytes | None:
            if self.down:
                raise TierUnavailable("the disk is gone")
            return super().get(id)

    warm = Moody(64 << 20)
    cache = setting.make(warm=warm)
    for n in range(4):
        made = couplet([n / 10, 0, 0])
        assert cache.lookup(ask(made.control, 0.1)) is None
        cache.admit(made)
        assert cache.lookup(ask(made.control)) is not None
    assert cache.get_blob(digest(b"nothing")) is None
    setting.now_s = 31.0
    cache.upkeep.tick()
    assert cache.upkeep.failures == 1
    assert cache.upkeep.trouble == "the disk is full"
    with pytest.raises(TierUnavailable, match="full"):
        cache.flush()
    assert setting.memory.hot.pin_count(FLUSH_OWNER) == 4
    warm.down = False
    setting.now_s = 62.0
    cache.upkeep.tick()
    assert warm.stats().entries == 4
    assert setting.memory.hot.pin_count(FLUSH_OWNER) == 0
    assert cache.upkeep.trouble is None


def test_a_lost_hot_tier_raises_nothing(setting: Setting) -> None:
    """With shared memory gone, look-ups are served from below and admissions are let go."""
    made = couplet([0.0, 0.0, 0.0])
    setting.cache.admit(made)
    setting.cache.flush()
    setting.memory.close()
    hit = setting.cache.lookup(ask(made.control))
    assert hit is not None
    assert hit.tier == "memory"
    setting.cache.admit(couplet([0.5, 0.0, 0.0]))
    assert setting.cache.upkeep.failures >= 1
    setting.cache.upkeep.tick()


def test_what_waits_survives_its_process(setting: Setting) -> None:
    """The list of what is to be flushed is in shared memory: another process writes it."""
    setting.cache.admit(couplet([0.0, 0.0, 0.0]))
    setting.memory.close()  # and the cache is never closed, as if killed
    setting.memory = SharedMemory(setting.place, 64 << 20)
    other = setting.make(provenance=digest(b"of another model"))
    assert other.flush() == 1
    [entry] = setting.warm.scan()
    payload = setting.warm.get(entry.id)
    assert payload is not None
    assert is_couplet(payload)
    assert decode(payload, PROVENANCE).states.tobytes() == world(np.zeros(C)).tobytes()


def test_the_warm_tier_learns_what_is_used(setting: Setting) -> None:
    """Answers from the hot tier count as uses of the warm copy, from the next tick on."""

    class Counting(MemoryTier):
        def touch(self, ids: Iterable[bytes]) -> None:
            uses.update(ids)

    uses: Counter[bytes] = Counter()
    cache = setting.make(warm=Counting(64 << 20))
    made = couplet([0.0, 0.0, 0.0])
    cache.admit(made)
    cache.flush()
    for _ in range(3):
        cache.lookup(ask(made.control))
    assert not uses  # no look-up pays for it
    cache.upkeep.tick()
    assert uses == {made.id: 3}
    cache.lookup(ask(made.control))
    cache.close()
    assert uses == {made.id: 4}


def test_only_the_writer_flushes(setting: Setting) -> None:
    """A process that may not write the warm tier leaves what waits to the one that may."""
    follower = MemoryTier(64 << 20)
    follower.writable = False
    cache = setting.make(warm=follower)
    cache.admit(couplet([0.0, 0.0, 0.0]))
    assert cache.flush() == 0
    assert follower.stats().entries == 0
    assert setting.cache.flush() == 1


def test_a_backlog_never_crowds_out_the_living(tmp_path: Path) -> None:
    """What waits for a warm tier that takes nothing pins at most its share of the hot tier."""
    with opened(tmp_path, flush=FlushConfig(30.0, 10**6, max_share=0.1)) as setting:
        big = np.ones((2, 50_000), np.float32)
        for n in range(120):
            setting.cache.admit(couplet([n / 1000, 0, 0], slice=big))
        stats = setting.memory.hot.stats()
        waiting = setting.memory.hot.pin_count(FLUSH_OWNER)
        assert 0 < waiting * big.nbytes <= 0.1 * stats.limit_bytes
        assert stats.entries > 3 * waiting


def test_the_thread_flushes_into_a_real_warm_tier(tmp_path: Path) -> None:
    """Left alone, the background writes what was admitted to disk; after everything is closed and
    opened again, with empty shared memory, it answers."""
    place, index = shm_path(tmp_path), shm_path(tmp_path / "index")
    made = couplet([0.1, 0.2, 0.3])
    try:
        for round in range(2):
            warm = WarmTier(tmp_path / "warm", index, limit_bytes=64 << 20, follow_s=None)
            setting = Setting(place, warm, flush=FlushConfig(0.05, 128))
            cache = setting.make(background=True, monotonic=time.monotonic)
            if round == 0:
                cache.admit(made, scores_of(made))
                until = time.monotonic() + 30
                while not warm.stats().entries and time.monotonic() < until:
                    time.sleep(0.02)
            hit = cache.lookup(ask([0.1, 0.2, 0.3001], 0.05))
            assert hit is not None
            assert hit.tier == ("hot" if round == 0 else "warm")
            cache.close()
            warm.close()
            setting.memory.close()
            SharedMemory.remove(place)
        assert hit.couplet.cost_ms == 30.0
    finally:
        SharedMemory.remove(place)
        WarmTier.remove_index(index)
