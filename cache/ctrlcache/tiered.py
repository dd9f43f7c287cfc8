"""The main path: one cache over all tiers, as whoever answers requests sees it.

A look-up asks, in this order: the very plan in the hot tier, its neighbours there, the very plan in
the warm tier, its neighbours there. It never waits for a network, for a writer, or for anything in
the background, and it never raises because a tier is gone. A neighbour answers only within the
bound that the policy states for it, and its states are moved to the plan that was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctrlcache.admission import Admission, Policy
from ctrlcache.config import CacheConfig
from ctrlcache.couplet import (
    ALL_FIELDS,
    Couplet,
    decode_array,
    decode_parts,
    encode_array,
)
from ctrlcache.errors import CorruptRecord, InvalidInput, TierUnavailable
from ctrlcache.key import plan_key
from ctrlcache.metrics import Admitted, Lookup, Sink, ignore
from ctrlcache.scores import Scores
from ctrlcache.shared import SharedMemory, Transaction
from ctrlcache.tiers.base import Candidate, Entry, Record, Tier, TierStats
from ctrlcache.tiers.hot import HotTier, Rest
from ctrlcache.trace import Recorder
from ctrlcache.transfer import Migration
from ctrlcache.upkeep import Checkpoint, LowerTier, Upkeep, hot_record

__all__ = ["ADOPTED", "TEMPLATE", "CoupletCache", "Hit", "Query"]

#: Kinds of lineage: a couplet of another context, which never answers here; and an exact one of
#: this context that a template of the cold tier has lent its trust (`ctrlcache.templates`).
TEMPLATE, ADOPTED = "template", "adopted"
_NOTHING: frozenset[str] = frozenset()
_LOOK_AT = 16


@dataclass(frozen=True, eq=False, slots=True)
class Query:
    """What would `plan` (H, C) do in `space`? max_error: budget of relative state error, 0 for
    exact answers only. want_frames: of several neighbours, one that has frames is preferred.
    session: who asks, for a trace."""

    space: bytes
    plan: NDArray[np.float32]
    max_error: float = 0.0
    want_frames: bool = False
    session: str = ""


@dataclass(eq=False, slots=True)  # not frozen: that would be half a microsecond of each look-up
class Hit:
    """An answer. states (H, S): for the plan that was asked for. couplet: as stored, with the
    fields that were read (`CoupletCache.fetch` reads more); has: all fields it holds. tier: `hot`,
    `warm`, or `cold` for a neighbour whose trust comes from a template. bound: on the relative
    state error, 0 where exact; distance: of the controls."""

    couplet: Couplet
    states: NDArray[np.float32]
    tier: str
    exact: bool
    bound: float
    distance: float
    has: frozenset[str]


def _go_on() -> None:
    return None


def _kind(couplet: Couplet) -> str:
    return couplet.lineage.partition(":")[0]


class CoupletCache:
    """Couplets, and the exact arrays beside them, in a hot tier and (optionally) a warm one.

    provenance: 16 bytes that mark every record; one of another mark is damage here. trace: takes
    down what is asked and stored. Safe in several threads; one for each process, over the same
    shared memory. Closing it closes neither `memory`, `warm` nor `trace`: who opened them does.
    """

    def __init__(
        self,
        memory: SharedMemory,
        warm: LowerTier | None,
        provenance: bytes,
        policy: Policy,
        migration: Migration,
        config: CacheConfig | None = None,
        on_event: Sink = ignore,
        checkpoint: Checkpoint = _go_on,
        monotonic: Callable[[], float] = time.monotonic,
        background: bool = True,
        trace: Recorder | None = None,
    ) -> None:
        config = config or CacheConfig()
        self._memory = memory
        self._hot = memory.hot
        self._warm = warm
        self._provenance = provenance
        self._policy = policy
        self._migration = migration
        self._on_event = on_event
        self._trace = trace
        self.upkeep = Upkeep(
            memory.hot, warm, config.flush, config.prefetch, on_event, checkpoint, monotonic
        )
        if background:
            self.upkeep.start()

    # -- looking up -----------------------------------------------------------------------------

    def lookup(self, query: Query) -> Hit | None:
        """The best answer at hand, or None. InvalidInput for a plan that no couplet could have."""
        id, held = plan_key(query.space, query.plan)
        near = held and query.max_error > 0
        hit = self._look_in(self._hot, id, query, near)
        if hit is None and self._warm is not None:
            hit = self._look_in(self._warm, id, query, near)
            if hit is not None:
                self.upkeep.promote(hit.couplet.id)
                self.upkeep.prefetch(query.space, query.plan[0])
        if self._trace is not None:
            id = id if hit is None else hit.couplet.id
            self._note(id, "couplet", hit is not None, query.session)
        return hit

    def _note(self, id: bytes, kind: str, hit: bool, session: str = "") -> None:
        if self._trace is not None:
            self._trace.got(id, kind, hit, lambda: self._facts(id), session)

    def _facts(self, id: bytes) -> tuple[int, float]:
        """Size and cost of a record, for a trace."""
        for tier in self._tiers():
            try:
                payload, entry = tier.get(id), tier.entry(id)
            except TierUnavailable:
                continue
            if payload is not None and entry is not None:
                return len(payload), entry.cost_ms
        return 0, 0.0

    def _look_in(self, tier: Tier, id: bytes, query: Query, near: bool) -> Hit | None:
        began = time.perf_counter()
        hit = self._exact(tier, id, query.want_frames)
        if hit is None and near:
            hit = self._near(tier, query)
            id = id if hit is None else hit.couplet.id
        result = "miss" if hit is None else "exact" if hit.exact else "near"
        self._on_event(Lookup(tier.name, result, time.perf_counter() - began))
        if hit is not None:
            tier.touch((id,))
        return hit

    def _exact(self, tier: Tier, id: bytes, want_frames: bool) -> Hit | None:
        found = self._read(tier, id, _NOTHING, want_frames)
        if found is None or _kind(found[0]) == TEMPLATE:
            return None
        couplet, has = found
        return Hit(couplet, couplet.states, tier.name, True, 0.0, 0.0, has)

    def _near(self, tier: Tier, query: Query) -> Hit | None:
        control = query.plan[0]
        accepted: list[tuple[float, Candidate]] = []
        for candidate in tier.neighbours(query.space, control, _LOOK_AT):
            bound = self._policy.accept(candidate, query.max_error)
            if bound is not None:
                accepted.append((bound, candidate))
        accepted.sort(key=lambda pair: pair[0])
        second: Hit | None = None
        for bound, candidate in accepted:
            hit = self._from_neighbour(tier, candidate, bound, query)
            if hit is None:
                continue
            if not query.want_frames or hit.couplet.frames is not None:
                return hit
            second = second or hit
        return second

    def _from_neighbour(
        self, tier: Tier, candidate: Candidate, bound: float, query: Query
    ) -> Hit | None:
        found = self._read(tier, candidate.id, frozenset({"jacobian"}), query.want_frames)
        if found is None:
            return None
        couplet, has = found
        if couplet.plan.shape != query.plan.shape:
            return None
        kind = _kind(couplet)
        if kind == TEMPLATE:
            return None
        control = query.plan[0]
        try:
            states = self._migration.migrate(
                couplet.states, couplet.jacobian, couplet.control, control
            )
        except InvalidInput:  # never scored, so there is nothing to move it by
            return None
        name = "cold" if kind == ADOPTED else tier.name
        return Hit(couplet, states, name, False, bound, candidate.distance, has)

    def _read(
        self, tier: Tier, id: bytes, fields: frozenset[str], want_frames: bool
    ) -> tuple[Couplet, frozenset[str]] | None:
        """A couplet with those fields; with its frames, or else its tokens, where frames are
        wanted. None where it is absent or damaged."""

        def take(
            payload: bytes | memoryview, rest: Rest | None = None
        ) -> tuple[Couplet, frozenset[str]]:
            if not want_frames:
                return decode_parts(payload, self._provenance, fields, rest)
            couplet, has = decode_parts(payload, self._provenance, fields | {"frames"}, rest)
            if couplet.frames is None and "tokens" in has:
                return decode_parts(payload, self._provenance, fields | {"tokens"}, rest)
            return couplet, has

        try:
            if isinstance(tier, HotTier):
                return tier.read(id, take)
            payload = tier.get(id)
            return None if payload is None else take(payload)
        except CorruptRecord as error:
            self.upkeep.damaged(tier, id, error)
        except TierUnavailable:
            pass
        return None

    def fetch(self, id: bytes, fields: Iterable[str] = ALL_FIELDS) -> Couplet | None:
        """The couplet of that id with more of its fields, from the first tier that has it."""
        for tier in self._tiers():
            found = self._read(tier, id, frozenset(fields), False)
            if found is not None:
                return found[0]
        return None

    def trusted_near(
        self,
        space: bytes,
        control: NDArray[np.float32],
        fields: Iterable[str] = (),
        limit: int = _LOOK_AT,
    ) -> list[Couplet]:
        """Couplets in the hot tier whose radius reaches `control`, nearest first, with these
        fields. Not a look-up: nothing is counted, no budget is asked."""
        wanted = frozenset(fields)
        found = []
        for candidate in self._hot.neighbours(space, control, limit):
            read = self._read(self._hot, candidate.id, wanted, False)
            if read is not None and _kind(read[0]) != TEMPLATE:
                found.append(read[0])
        return found

    # -- keeping --------------------------------------------------------------------------------

    def admit(self, couplet: Couplet, scores: Scores | None = None) -> Admission:
        """Keep an exact answer, after the reply: in the hot tier at once, visible to all
        processes; in the warm tier with the next flush, where the policy admits it.

        What a couplet of the same id holds already, and this one lacks, stays. Without scores the
        couplet keeps the radius it has: 0 answers for no neighbour. Where the hot tier cannot
        take it, that is counted, and nothing is raised.
        """
        if scores is None:
            admission = Admission(True, "unscored", couplet.radius)
        else:
            admission = self._policy.decide(scores)
            couplet = replace(
                couplet,
                jacobian=scores.jacobian,
                stability=scores.stability,
                transferability=scores.transferability,
                curvature=scores.curvature,
                radius=admission.radius,
            )
        couplet = self._completed(couplet, scored=scores is not None)
        self._keep(hot_record(couplet, self._provenance), "couplet", flush=admission.admit)
        self._on_event(Admitted(admission.reason))
        return admission

    def _completed(self, couplet: Couplet, scored: bool) -> Couplet:
        found = self._read(self._hot, couplet.id, ALL_FIELDS, False)
        if found is None or _kind(found[0]) == TEMPLATE:
            return couplet
        before = found[0]
        names = ("frames",) if before.lossy and not couplet.lossy else sorted(ALL_FIELDS)
        missing: dict[str, Any] = {
            name: getattr(before, name)
            for name in names
            if getattr(couplet, name) is None and getattr(before, name) is not None
        }
        if not scored and couplet.radius == 0.0 and before.radius > 0.0:
            for name in ("stability", "transferability", "curvature", "radius", "jacobian"):
                missing[name] = getattr(before, name)
        return replace(couplet, **missing) if missing else couplet

    def get_blob(self, id: bytes) -> NDArray[Any] | None:
        """An exact array (read-only) that was kept under `id`, or None."""
        for tier in self._tiers():
            try:
                payload = tier.get(id)
                if payload is None:
                    continue
                array = decode_array(bytes(payload), self._provenance)
            except CorruptRecord as error:
                self.upkeep.damaged(tier, id, error)
                continue
            except TierUnavailable:
                continue
            tier.touch((id,))
            if tier is not self._hot:
                self.upkeep.promote(id)
            self._note(id, "array", hit=True)
            return array
        self._note(id, "array", hit=False)
        return None

    def put_blob(
        self, id: bytes, array: NDArray[Any], cost_ms: float = 0.0, flush: bool = True
    ) -> None:
        """Keep an exact array, as `admit` keeps couplets; without `flush`, in the hot tier only."""
        entry = Entry(id, id, None, 0.0, 0.0, cost_ms, time.time())
        self._keep(Record(entry, encode_array(array, self._provenance)), "array", flush=flush)

    def remember(self, tx: Transaction, id: bytes, size_bytes: int) -> bool:
        """Have a record that `tx` stores flushed to the warm tier with the others."""
        return self.upkeep.remember(tx.pin, id, size_bytes)

    def _keep(self, kept: Record, kind: str, flush: bool) -> None:
        def work(tx: Transaction) -> None:
            tx.put([kept])
            if flush:
                self.remember(tx, kept.entry.id, len(kept.payload))

        try:
            self._memory.transact(work)
        except TierUnavailable as error:
            self.upkeep.failed(error)
            return
        if self._trace is not None:
            entry = kept.entry
            self._trace.put(entry.id, kind, len(kept.payload), entry.cost_ms)

    # -- the rest -------------------------------------------------------------------------------

    def prefetch(self, space: bytes, control: NDArray[np.float32] | None = None) -> None:
        """Bring what the warm tier has of a space into the hot tier, in the background."""
        self.upkeep.prefetch(space, control)

    def load(self, ids: Iterable[bytes], room_bytes: int) -> None:
        """Bring warm records into the hot tier, now, until `room_bytes` of them have come."""
        self.upkeep.fetch(ids, room_bytes)

    def flush(self) -> int:
        """Write what waits to the warm tier now; TierUnavailable where it cannot take it."""
        return self.upkeep.flush()

    def stats(self) -> dict[str, TierStats]:
        """By tier."""
        return {tier.name: tier.stats() for tier in self._tiers()}

    def close(self) -> None:
        """Stop the background, and flush what waits where this process can."""
        self.upkeep.close()

    def _tiers(self) -> tuple[HotTier | LowerTier, ...]:
        return (self._hot,) if self._warm is None else (self._hot, self._warm)
