"""What keeps the tiers in step, after replies and between them: flushing down, fetching up.

One thread per process does it, in small steps, calling a checkpoint between them that may wait for
whoever answers requests. Nothing here is ever waited for by a look-up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ctrlcache import record
from ctrlcache.config import FlushConfig, PrefetchConfig
from ctrlcache.couplet import (
    Couplet,
    decode,
    decode_array,
    encode,
    encode_array,
    head_bytes,
    is_couplet,
)
from ctrlcache.errors import CorruptRecord, TierUnavailable
from ctrlcache.metrics import Corrupt, Sink, TierFailed, TierSize, ignore
from ctrlcache.tiers.base import Entry, Record, Tier
from ctrlcache.tiers.hot import HotTier

__all__ = ["FLUSH_OWNER", "LowerTier", "Upkeep", "entry_of", "hot_record"]

log = logging.getLogger(__name__)

#: Pins what is to be flushed. The pins are the list: shared by all processes, and kept by a crash.
FLUSH_OWNER = b"\0flush"
Checkpoint = Callable[[], None]
_TICK_S = 1.0
_RECENT_SPACES = 256
_PREFETCH_AGAIN_S = 30.0
_NEAREST = 64
_TRIES = 3


class LowerTier(Tier, Protocol):
    """A tier that records are flushed to."""

    @property
    def writable(self) -> bool:
        """Whether this process may write it now; another one may be the writer."""
        ...

    def entry(self, id: bytes) -> Entry | None:
        """What is known of a record beside its payload."""
        ...

    def space(self, space: bytes) -> list[bytes]:
        """Ids of the records of a space that have a control."""
        ...


def entry_of(couplet: Couplet) -> Entry:
    """The entry under which a couplet is stored. Only held plans have neighbours."""
    return Entry(
        couplet.id,
        couplet.space,
        couplet.control if couplet.held else None,
        couplet.radius,
        couplet.curvature,
        couplet.cost_ms,
        couplet.created_s,
    )


def hot_record(couplet: Couplet, provenance: bytes, entry: Entry | None = None) -> Record:
    """A couplet as the hot tier keeps it."""
    payload = encode(couplet, provenance, "raw")
    return Record(entry or entry_of(couplet), payload, head_bytes(payload))


def _go_on() -> None:
    return None


class Upkeep:
    """Flushes hot records to the warm tier and brings warm ones up. Safe in several threads.

    `tick` is what the thread does every second; `monotonic` its clock, in seconds. The checkpoint
    is called between steps of a few milliseconds.
    """

    def __init__(
        self,
        hot: HotTier,
        warm: LowerTier | None,
        flush: FlushConfig | None = None,
        prefetch: PrefetchConfig | None = None,
        on_event: Sink = ignore,
        checkpoint: Checkpoint = _go_on,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hot = hot
        self._warm = warm
        self._flush = flush or FlushConfig()
        self._prefetch = prefetch or PrefetchConfig()
        self._on_event = on_event
        self._checkpoint = checkpoint
        self._now = monotonic
        self._flushed_s = monotonic()
        self._flushing = threading.Lock()
        self._tries: dict[bytes, int] = {}
        self._jobs: deque[Callable[[], None]] = deque(maxlen=1024)
        self._spaces: OrderedDict[bytes, float] = OrderedDict()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self.failures = 0
        self.trouble: str | None = None

    # -- the thread -----------------------------------------------------------------------------

    def start(self) -> None:
        """Have a thread do all this from now on."""
        self._thread = threading.Thread(target=self._run, name="ctrlcache-upkeep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and flush what waits where this process can."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._try_flush(_go_on)
        self._pass_on_uses()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(_TICK_S)
            self._wake.clear()
            try:
                self.tick()
            except Exception:  # the thread must outlive whatever goes wrong in one step
                log.exception("upkeep of the cache failed; it will go on")

    def tick(self) -> None:
        """Do the jobs that wait, and flush if it is due."""
        while self._jobs and not self._closed:
            self._checkpoint()
            self._jobs.popleft()()
        self._pass_on_uses()
        if self._due():
            self._try_flush(self._checkpoint)
            self._sizes()

    def _pass_on_uses(self) -> None:
        """What answers from the hot tier is of use in the warm one: eviction, `ctrlcache stats`
        and the templates go by what people come back to, wherever it was found."""
        try:
            uses = self._hot.flush_touches()
        except TierUnavailable as error:
            self.failed(error)
            return
        if self._warm is not None and uses:
            self._warm.touch(id for id, count in uses.items() for _ in range(count))

    def later(self, job: Callable[[], None]) -> None:
        """Have the thread do something soon. The oldest of very many jobs are dropped."""
        self._jobs.append(job)
        self._wake.set()

    # -- flushing -------------------------------------------------------------------------------

    def remember(self, pin: Callable[[bytes, list[bytes]], int], id: bytes, size: int) -> bool:
        """Note that a record is to be flushed, with the `pin` of whatever transaction stores it;
        False where so much waits already that it is let go."""
        if self._warm is None:
            return False
        share = self._hot.stats().limit_bytes * self._flush.max_share
        waiting = self._hot.pin_count(FLUSH_OWNER)
        if (waiting + 1) * size > share:
            return False
        pin(FLUSH_OWNER, [id])
        if waiting + 1 >= self._flush.couplets:
            self._wake.set()
        return True

    def _due(self) -> bool:
        if self._warm is None:
            return False
        waited = self._now() - self._flushed_s >= self._flush.interval_s
        return waited or self._hot.pin_count(FLUSH_OWNER) >= self._flush.couplets

    def _try_flush(self, checkpoint: Checkpoint) -> None:
        self._flushed_s = self._now()
        try:
            self.flush(checkpoint)
        except TierUnavailable as error:
            self.failed(error)

    def failed(self, error: TierUnavailable) -> None:
        """Count that a tier could not do something; said once, while it lasts."""
        self.failures += 1
        self._on_event(TierFailed())
        if self.trouble != str(error):
            log.warning("the cache goes on without: %s", error)
        self.trouble = str(error)

    def flush(self, checkpoint: Checkpoint = _go_on) -> int:
        """Write what waits to the warm tier; returns how many records that were.

        Nothing where another process is the writer: it flushes for all. TierUnavailable where the
        tier cannot take them; they wait on.
        """
        warm = self._warm
        if warm is None or not warm.writable:
            return 0
        written = 0
        with self._flushing:
            while True:
                ids = self._hot.pinned(FLUSH_OWNER, self._flush.couplets)
                if not ids:
                    break
                done = self._flush_some(warm, ids, checkpoint)
                freed = self._hot.unpin_unchanged(FLUSH_OWNER, done)
                written += freed
                if freed < len(ids):
                    break  # the rest, not written or changed meanwhile, has its turn another time
        self.trouble = None
        return written

    def _flush_some(
        self, warm: LowerTier, ids: list[bytes], checkpoint: Checkpoint
    ) -> dict[bytes, bytes]:
        """Returns those that need not be tried again, each with the payload that was written."""
        records: list[Record] = []
        done: dict[bytes, bytes] = {}
        for id in ids:
            checkpoint()
            entry, payload = self._hot.entry(id), self._hot.get(id)
            done[id] = payload or b""
            if entry is None or payload is None:
                continue
            try:
                records.append(Record(entry, _stored(payload)))
            except CorruptRecord as error:
                self.damaged(self._hot, id, error)
        if not records or warm.put(records) == len(records):
            return done
        for id in [r.entry.id for r in records if warm.get(r.entry.id) is None]:
            self._tries[id] = self._tries.get(id, 0) + 1
            if self._tries[id] < _TRIES:
                del done[id]
            else:
                del self._tries[id]
        return done

    # -- fetching -------------------------------------------------------------------------------

    def promote(self, id: bytes) -> None:
        """Bring a warm record into the hot tier, soon."""
        self.later(lambda: self.fetch([id], self._prefetch.buffer_size or 1 << 62))

    def prefetch(self, space: bytes, control: NDArray[np.float32] | None = None) -> None:
        """Bring what the warm tier has of a space into the hot tier, soon, nearest first."""
        if self._warm is None or not self._prefetch.buffer_size:
            return
        now = self._now()
        if now - self._spaces.get(space, -1e9) < _PREFETCH_AGAIN_S:
            return
        self._spaces[space] = now
        self._spaces.move_to_end(space)
        while len(self._spaces) > _RECENT_SPACES:
            self._spaces.popitem(last=False)
        self.later(lambda: self._fetch_space(space, control))

    def _fetch_space(self, space: bytes, control: NDArray[np.float32] | None) -> None:
        assert self._warm is not None
        ids: list[bytes] = []
        if control is not None:
            near = self._warm.neighbours(space, control, _NEAREST)
            ids = [candidate.id for candidate in near]
        ids = list(dict.fromkeys(ids + self._warm.space(space)))
        # At most a quarter of the tier, so that what is fetched does not evict itself.
        room = min(self._prefetch.buffer_size, self._hot.stats().limit_bytes // 4)
        self.fetch(ids, room)

    def fetch(self, ids: Iterable[bytes], room_bytes: int) -> None:
        """Bring warm records into the hot tier, now, until `room_bytes` of them have come."""
        wanted = list(ids)
        for id, here in zip(wanted, self._hot.contains(wanted), strict=True):
            if here or self._warm is None:
                continue
            if self._closed or room_bytes <= 0:
                return
            self._checkpoint()
            entry, payload = self._warm.entry(id), self._warm.get(id)
            if entry is None or payload is None:
                continue
            try:
                fetched = _raw(entry, bytes(payload))
            except CorruptRecord as error:
                self.damaged(self._warm, id, error)
                continue
            room_bytes -= len(fetched.payload)
            self._pass_on_uses()  # before they could count for what goes in this record's stead
            try:
                self._hot.put([fetched])
            except TierUnavailable as error:
                self.failed(error)
                return

    def damaged(self, tier: Tier, id: bytes, error: CorruptRecord) -> None:
        """Count a damaged record, and have it removed."""
        log.warning("damaged record %s in the %s tier: %s", id.hex(), tier.name, error)
        self._on_event(Corrupt(tier.name))
        self.later(lambda: self._remove(tier, id))

    def _remove(self, tier: Tier, id: bytes) -> None:
        try:
            tier.delete([id])
        except TierUnavailable as error:
            self.failed(error)

    def _sizes(self) -> None:
        for tier in (self._hot, self._warm):
            if tier is not None:
                stats = tier.stats()
                self._on_event(
                    TierSize(tier.name, stats.entries, stats.size_bytes, stats.limit_bytes)
                )


def _stored(payload: bytes) -> bytes:
    """A hot payload as the warm tier keeps it."""
    owner = record.owner_of(payload)
    if is_couplet(payload):
        return encode(decode(payload, owner), owner, "stored")
    return encode_array(decode_array(payload, owner), owner, compress=True)


def _raw(entry: Entry, payload: bytes) -> Record:
    """A warm record as the hot tier keeps it."""
    owner = record.owner_of(payload)
    if is_couplet(payload):
        return hot_record(decode(payload, owner), owner, entry)
    return Record(entry, encode_array(decode_array(payload, owner), owner))
