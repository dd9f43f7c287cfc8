"""The main path over the tiers: what answers, what must not, and what happens behind it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tier_openers import shm_path

from ctrlcache.admission import Trust
from ctrlcache.calibration import TrustModel
from ctrlcache.config import CacheConfig, FlushConfig, PrefetchConfig
from ctrlcache.couplet import Couplet, decode, encode, is_couplet
from ctrlcache.errors import InvalidInput, TierUnavailable
from ctrlcache.key import digest
from ctrlcache.metrics import Admitted, Corrupt, Event, Lookup
from ctrlcache.scores import Scores, probe_controls, scores_from_probes
from ctrlcache.shared import SharedMemory
from ctrlcache.tiered import ADOPTED, TEMPLATE, CoupletCache, Query
from ctrlcache.tiers.base import Record
from ctrlcache.tiers.memory import MemoryTier
from ctrlcache.tiers.warm import WarmTier
from ctrlcache.transfer import Jacobian
from ctrlcache.upkeep import FLUSH_OWNER, entry_of

H, C, S = 4, 3, 6
PROVENANCE = digest(b"provenance")
SPACE = digest(b"space")
SCALE = np.ones(S, np.float32)
# Bound: twice curvature times squared distance, ample for the quadratic world below.
MODEL = TrustModel(
    weights_digest="w", migration="jacobian", delta=0.05, q=2.0, kappa0=0.0, curvature_power=1.0,
    distance_power=2.0, floor=0.0, max_distance=0.4, probe_radius=0.05, horizon=8, rho_max=1.0,
    stability_threshold=0.0, transferability_threshold=0.0, frame_psnr_db=35.0,
    frame_distance=0.1, frame_change=0.01, pairs=1, contexts=1, created="",
)  # fmt: skip

_rng = np.random.default_rng(0)
_A, _B = _rng.normal(size=(H, S, C)), _rng.normal(size=(H, S, C, C)) * 0.3


def world(control: np.ndarray) -> np.ndarray:
    """States (H, S) of a world that is quadratic in the control: the model that is cached."""
    control = np.asarray(control, np.float64)
    curved = np.einsum("hscd,c,d->hs", _B, control, control)
    return (5.0 + _A @ control + curved).astype(np.float32)


def couplet(control: object, space: bytes = SPACE, **more: object) -> Couplet:
    plan = np.tile(np.asarray(control, np.float32), (H, 1))
    base: dict[str, object] = {
        "space": space, "plan": plan, "states": world(plan[0]), "cost_ms": 30.0,
        "tokens": _rng.normal(size=(H, 2, 5)).astype(np.float32),
        "slice": _rng.normal(size=(2, 2, 3, 5)).astype(np.float32),
    }  # fmt: skip
    return Couplet(**{**base, **more})  # type: ignore[arg-type]


def scores_of(made: Couplet) -> Scores:
    probes = probe_controls(made.control, 0.05)
    states = np.stack([world(probe) for probe in probes])
    return scores_from_probes(made.states, made.control, states, probes, SCALE)


def frames(value: int = 0) -> np.ndarray:
    return np.full((H, 4, 5, 3), value, np.uint8)


class Setting:
    """A cache over real shared memory and a tier below it; time moves when told."""

    def __init__(self, place: Path, warm: object = None, **config: object) -> None:
        self.place = place
        self.now_s = 0.0
        self.events: list[Event] = []
        self.warm = MemoryTier(64 << 20) if warm is None else warm
        self.config = CacheConfig(**config)  # type: ignore[arg-type]
        self.memory = SharedMemory(place, 64 << 20)
        self.cache = self.make()

    def make(self, **more: object) -> CoupletCache:
        arguments: dict[str, object] = {
            "memory": self.memory, "warm": self.warm, "provenance": PROVENANCE,
            "policy": Trust(MODEL, 0.1), "migration": Jacobian(), "config": self.config,
            "on_event": self.events.append, "monotonic": lambda: self.now_s, "background": False,
        }  # fmt: skip
        return CoupletCache(**{**arguments, **more})  # type: ignore[arg-type]

    def forget_hot(self) -> None:
        """As if everything had been evicted."""
        hot = self.memory.hot
        hot.unpin(FLUSH_OWNER)
        hot.delete([entry.id for entry in list(hot.scan())])

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(shm_path(tmp_path))
    yield made
    made.memory.close()
    SharedMemory.remove(made.place)


def ask(control: object, max_error: float = 0.0, **more: object) -> Query:
    plan = np.tile(np.asarray(control, np.float32), (H, 1))
    return Query(SPACE, plan, max_error, **more)  # type: ignore[arg-type]


# -- what answers ---------------------------------------------------------------------------------


def test_the_same_plan_is_answered_exactly(setting: Setting) -> None:
    """Bit for bit what was admitted, at once, with bound 0."""
    made = couplet([0.1, 0.2, 0.3])
    assert setting.cache.lookup(ask(made.control)) is None
    setting.cache.admit(made)
    hit = setting.cache.lookup(ask(made.control))
    assert hit is not None
    assert (hit.tier, hit.exact, hit.bound, hit.distance) == ("hot", True, 0.0, 0.0)
    assert hit.states.tobytes() == made.states.tobytes()
    assert hit.has == {"tokens", "slice"}
    assert hit.couplet.tokens is None  # not asked for, not read
    full = setting.cache.fetch(made.id)
    assert full is not None
    assert full.slice is not None
    assert full.slice.tobytes() == made.slice.tobytes()


def test_a_neighbour_answers_within_its_bound(setting: Setting) -> None:
    """Its states are moved to the plan that was asked for, and truly lie within the bound."""
    rng = np.random.default_rng(1)
    centres = rng.uniform(-0.5, 0.5, (20, C))
    for centre in centres:
        setting.cache.admit(couplet(centre), scores_of(couplet(centre)))
    answered = 0
    for centre in centres:
        query = (centre + rng.normal(size=C) * 0.03).astype(np.float32)
        hit = setting.cache.lookup(ask(query, max_error=0.05))
        if hit is None:
            continue
        answered += 1
        truth = world(query)
        error = np.linalg.norm(hit.states - truth, axis=1) / np.linalg.norm(truth, axis=1)
        assert not hit.exact
        assert 0.0 < hit.bound <= 0.05
        assert error.max() <= hit.bound
        assert np.abs(hit.states - hit.couplet.states).max() > 0
    assert answered > 10


def test_the_budget_decides(setting: Setting) -> None:
    """A budget below the bound gets nothing; no budget gets only exact answers."""
    made = couplet([0.0, 0.0, 0.0])
    setting.cache.admit(made, scores_of(made))
    query = np.float32([0.1, 0.0, 0.0])
    hit = setting.cache.lookup(ask(query, max_error=0.1))
    assert hit is not None
    assert setting.cache.lookup(ask(query, max_error=hit.bound)) is not None
    assert setting.cache.lookup(ask(query, max_error=hit.bound * 0.99)) is None
    assert setting.cache.lookup(ask(query, max_error=0.0)) is None


def test_the_smallest_bound_wins(setting: Setting) -> None:
    """Not the nearest couplet but the most trustworthy one answers."""
    near, calm = couplet([0.05, 0.0, 0.0]), couplet([-0.08, 0.0, 0.0])
    scored = scores_of(near)
    setting.cache.admit(near, replace(scored, curvature=scored.curvature * 9))
    setting.cache.admit(calm, replace(scores_of(calm), curvature=scored.curvature))
    hit = setting.cache.lookup(ask([0.0, 0.0, 0.0], max_error=0.1))
    assert hit is not None
    assert hit.couplet.id == calm.id
    assert hit.distance == pytest.approx(0.08, abs=1e-6)


def test_frames_are_preferred_where_they_are_wanted(setting: Setting) -> None:
    """Of several neighbours one with frames; a couplet without any still answers."""
    bare, drawn = couplet([0.02, 0, 0]), couplet([0.04, 0, 0], frames=frames(7))
    setting.cache.admit(bare, scores_of(bare))
    wanting = ask([0.0, 0.0, 0.0], max_error=0.1, want_frames=True)
    hit = setting.cache.lookup(wanting)
    assert hit is not None
    assert (hit.couplet.id, hit.couplet.frames) == (bare.id, None)
    assert hit.couplet.tokens is not None  # what frames can be drawn from
    setting.cache.admit(drawn, scores_of(drawn))
    hit = setting.cache.lookup(wanting)
    assert hit is not None
    assert hit.couplet.id == drawn.id
    assert hit.couplet.frames is not None
    assert (hit.couplet.frames == 7).all()
    without = setting.cache.lookup(ask([0.0, 0.0, 0.0], max_error=0.1))
    assert without is not None
    assert without.couplet.id == bare.id
    assert without.couplet.frames is None


# -- what must not --------------------------------------------------------------------------------


def test_other_spaces_and_horizons_never_answer(setting: Setting) -> None:
    """The same control in another scene is another couplet."""
    made = couplet([0.1, 0.1, 0.1], space=digest(b"elsewhere"))
    setting.cache.admit(made, scores_of(made))
    assert setting.cache.lookup(ask(made.control, max_error=1.0)) is None
    shorter = Query(made.space, made.plan[:2], 1.0)
    hit = setting.cache.lookup(shorter)
    assert hit is None


def test_varied_plans_answer_only_themselves(setting: Setting) -> None:
    """A plan whose control changes is found by its own id, and never by neighbourhood."""
    plan = np.linspace(0, 0.1, H * C, dtype=np.float32).reshape(H, C)
    varied = couplet([0, 0, 0], plan=plan)
    setting.cache.admit(varied, scores_of(couplet(plan[0])))
    hit = setting.cache.lookup(Query(SPACE, plan, 0.1))
    assert hit is not None
    assert hit.exact
    assert setting.cache.lookup(ask(plan[0], max_error=1.0)) is None
    held = couplet([0, 0, 0])
    setting.cache.admit(held, scores_of(held))
    assert setting.cache.lookup(Query(SPACE, plan + np.float32(1e-3), 1.0)) is None


def test_unscored_couplets_answer_no_neighbour(setting: Setting) -> None:
    """Until the probes have spoken, a couplet answers only its own plan."""
    made = couplet([0.0, 0.0, 0.0])
    assert setting.cache.admit(made).reason == "unscored"
    assert setting.cache.lookup(ask([1e-4, 0, 0], max_error=1.0)) is None
    assert setting.cache.lookup(ask([0.0, 0, 0], max_error=1.0)) is not None


def test_without_calibration_nothing_approximate_is_served(setting: Setting) -> None:
    """The policy fails closed; exact answers are not touched by that."""
    closed = setting.make(policy=Trust(None, 0.1))
    made = couplet([0.0, 0.0, 0.0])
    setting.cache.admit(made, scores_of(made))
    assert closed.lookup(ask([1e-4, 0, 0], max_error=1.0)) is None
    assert closed.lookup(ask([0.0, 0, 0], max_error=1.0)) is not None


def test_another_provenance_never_answers(setting: Setting) -> None:
    """Even under the same id, a record of another provenance is damage, not an answer."""
    other = setting.make(provenance=digest(b"other weights"))
    made = couplet([0.0, 0.0, 0.0])
    other.admit(made, scores_of(made))
    assert setting.cache.lookup(ask([0.0, 0.0, 0.0], max_error=1.0)) is None
    assert setting.cache.lookup(ask([0.01, 0.0, 0.0], max_error=1.0)) is None


def test_templates_answer_nothing(setting: Setting) -> None:
    """A couplet from another context never answers here, not even for the very same control, and
    leaves nothing behind in the exact one that takes its place."""
    made = replace(couplet([0.0, 0.0, 0.0]), lineage=f"{TEMPLATE}:door-open")
    admission = setting.cache.admit(made, scores_of(made))
    assert admission.radius > 0
    for control in (made.control, made.control + np.float32(0.01)):
        assert setting.cache.lookup(ask(control, max_error=0.1)) is None
    exact = couplet([0.0, 0.0, 0.0])
    setting.cache.admit(exact)
    replaced = setting.cache.lookup(ask(made.control))
    assert replaced is not None
    assert replaced.couplet.lineage == "session"
    assert replaced.couplet.radius == 0.0


def test_borrowed_trust_is_named(setting: Setting) -> None:
    """Where a template lent the trust that a neighbour's answer rests on, the tier is `cold`; the
    couplet's own plan is answered exactly, and hot."""
    made = replace(couplet([0.0, 0.0, 0.0]), lineage=f"{ADOPTED}:door-open")
    setting.cache.admit(made, scores_of(made))
    exact = setting.cache.lookup(ask(made.control, max_error=0.1))
    near = setting.cache.lookup(ask([0.01, 0.0, 0.0], max_error=0.1))
    assert exact is not None
    assert near is not None
    assert (exact.tier, exact.exact) == ("hot", True)
    assert (near.tier, near.exact) == ("cold", False)
    assert 0 < near.bound <= 0.1


def test_damage_in_the_hot_tier_is_a_counted_miss(setting: Setting) -> None:
    """Flipped bits in shared memory: a miss each, an event each, and the record is removed."""
    made = couplet([0.0, 0.0, 0.0])
    payload = encode(made, PROVENANCE, "raw")
    for position in (0, 5, 40, 200, len(payload) // 8):
        damaged = bytearray(payload)
        damaged[position] ^= 4
        setting.memory.hot.put([Record(entry_of(made), bytes(damaged))])
        setting.events.clear()
        hit = setting.cache.lookup(ask(made.control))
        if hit is not None:  # the damage is in a part that was not read: it is found when it is
            assert hit.states.tobytes() == made.states.tobytes()
            assert setting.cache.fetch(made.id) is None
        assert setting.of(Corrupt) == [Corrupt("hot")]
        setting.cache.upkeep.tick()
        assert setting.memory.hot.contains([made.id]) == [False]


@pytest.mark.parametrize("plan", [np.zeros(3, "f4"), np.zeros((0, 3), "f4")])
def test_impossible_plans_are_refused(setting: Setting, plan: np.ndarray) -> None:
    """A plan that is no (H, C) array, or no number, or of another width, is the caller's error."""
    with pytest.raises(InvalidInput, match="plan"):
        setting.cache.lookup(Query(SPACE, plan, 0.1))
    with pytest.raises(InvalidInput, match="finite"):
        setting.cache.lookup(ask([0.0, np.nan, 0.0]))
    setting.cache.admit(couplet([0, 0, 0]))
    with pytest.raises(InvalidInput, match=r"\(3,\).*\(2,\)"):
        setting.cache.lookup(Query(SPACE, np.zeros((H, 2), np.float32), 0.1))


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
    array = _rng.normal(size=(2, 2, 33, 5)).astype(np.float32)
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
        setting = Setting(shm_path(tmp_path), prefetch=PrefetchConfig(size))
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
        setting.memory.close()
        SharedMemory.remove(setting.place)


def test_flushing_is_due_by_time_or_by_number(tmp_path: Path) -> None:
    """After 30 s, or as soon as 5 wait, whichever comes first; not before."""
    setting = Setting(shm_path(tmp_path), flush=FlushConfig(30.0, 5))
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
    setting.memory.close()
    SharedMemory.remove(setting.place)


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
    setting = Setting(shm_path(tmp_path), flush=FlushConfig(30.0, 10**6, max_share=0.1))
    big = np.ones((2, 50_000), np.float32)
    for n in range(120):
        setting.cache.admit(couplet([n / 1000, 0, 0], slice=big))
    stats = setting.memory.hot.stats()
    waiting = setting.memory.hot.pin_count(FLUSH_OWNER)
    assert 0 < waiting * big.nbytes <= 0.1 * stats.limit_bytes
    assert stats.entries > 3 * waiting
    setting.memory.close()
    SharedMemory.remove(setting.place)


def test_look_ups_are_reported(setting: Setting) -> None:
    """One event per tier that was asked, with what came of it."""
    made = couplet([0.0, 0.0, 0.0])
    setting.cache.lookup(ask(made.control, 0.05))
    setting.cache.admit(made, scores_of(made))
    setting.cache.lookup(ask(made.control, 0.05))
    setting.cache.lookup(ask([0.01, 0, 0], 0.05))
    seen = [(event.tier, event.result) for event in setting.of(Lookup)]
    assert seen == [("hot", "miss"), ("memory", "miss"), ("hot", "exact"), ("hot", "near")]
    assert all(event.seconds > 0 for event in setting.of(Lookup))
    assert [event.decision for event in setting.of(Admitted)] == ["trusted"]


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
