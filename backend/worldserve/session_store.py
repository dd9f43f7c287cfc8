"""Where sessions live: shared memory, common to all instances, outliving every one of them.

A session is one row, changed in one transaction together with the pixels of its new frames and the
pins that keep what it needs from eviction. Two writers of one session cannot both win: a change is
accepted only on top of the version that it was made from.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from ctrlcache.errors import ConfigError, CorruptRecord, CtrlCacheError, TierUnavailable
from ctrlcache.key import digest, frame_id, slice_id
from ctrlcache.metrics import Corrupt, SessionCount, Sink, ignore
from ctrlcache.shared import SharedMemory, Transaction
from ctrlcache.tiers.base import Record
from worldserve.request import CorrelationId
from worldserve.session import Session, decode_session, encode_session, session_key, tokens_id

__all__ = [
    "SessionConflict",
    "SessionLimits",
    "SessionNotFound",
    "SessionStore",
    "SessionsFull",
    "capacity",
]

_ROWS, _INDEX = "sessions", "session-index"
_SEEN = struct.Struct("<d?")  # touched, ended
_DECODED = 64


class SessionNotFound(CtrlCacheError):
    """There is no such session, or no longer."""


class SessionConflict(CtrlCacheError):
    """Another request changed the session meanwhile; nothing of this one was kept."""


class SessionsFull(CtrlCacheError):
    """As many sessions as the memory is meant for are alive."""


@dataclass(frozen=True)
class SessionLimits:
    """ttl_s: seconds without a request after which a session is forgotten. most: live sessions.

    displace_s: seconds without a request after which a session may be displaced by a new one, where
    all places are taken. history: frames kept of each. window: of the model, as many slices less
    one are kept. touch_s: how late the store may learn of a request that changed nothing.
    """

    ttl_s: float = 3_600.0
    displace_s: float = 600.0
    most: int = 200
    history: int = 256
    window: int = 32
    touch_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("ttl_s", "displace_s", "most", "history", "window"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of sessions must be positive: {getattr(self, name)}")
        if self.history < self.window:
            raise ConfigError(
                f"history_frames must be at least the model's window of {self.window} frames, "
                f"got {self.history}"
            )


def capacity(memory_bytes: int, frame_bytes: int, slice_bytes: int, limits: SessionLimits) -> int:
    """How many full sessions two thirds of `memory_bytes` hold; frame_bytes: pixels or tokens."""
    # Large values occupy whole pages, and a row of bookkeeping each.
    one = limits.history * (frame_bytes + 4_500) + limits.window * (slice_bytes + 4_500) + 32_768
    return memory_bytes * 2 // 3 // one


class SessionStore:
    """Sessions of one model in `memory`; safe in several threads and processes.

    provenance (16 bytes): of the model; sessions of other weights are not found. now: seconds of a
    clock that all processes of the machine share and that nobody sets: a time of day that jumps
    would end sessions, or keep them for ever. They live in memory, and no longer than it runs.
    """

    def __init__(
        self,
        memory: SharedMemory,
        provenance: bytes,
        limits: SessionLimits,
        on_event: Sink = ignore,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self._memory = memory
        self._provenance = provenance
        # Models of different weights in one memory do not see each other's sessions.
        self._prefix = digest(b"sessions", provenance)
        self._rows, self._index = memory.table(_ROWS), memory.table(_INDEX)
        self._on_event = on_event
        self._now = now
        self._decoded: dict[bytes, tuple[bytes, Session]] = {}

    # -- reading ---------------------------------------------------------------------------------

    def load(self, tenant: str, id: CorrelationId) -> Session:
        """SessionNotFound where it never was, has expired, or is damaged."""
        session = self.find(session_key(tenant, id))
        if session is None:
            kind = "text" if isinstance(id, str) else "number"
            raise SessionNotFound(
                f"no session {id!r} (a {kind}) is known here"
                + (f" for tenant {tenant!r}" if tenant else "")
                + f"; sessions are forgotten {self.limits.ttl_s:g} s after their last request: "
                "begin a new one with the START flag and FRAMES"
            )
        return session

    def find(self, key: bytes) -> Session | None:
        """The session with this key (`session_key`), or None."""
        data = self._rows.get(self._prefix + key)
        if data is None:
            return None
        known = self._decoded.get(key)
        if known is not None and known[0] == data:
            session = known[1]
        else:
            try:
                session = decode_session(data, self._provenance)
            except CorruptRecord:
                self._on_event(Corrupt("session"))
                return None
            self._decoded[key] = (data, session)
            while len(self._decoded) > _DECODED:
                self._decoded.pop(next(iter(self._decoded)), None)
        if self._expired(session.touched_s):
            return None
        return session

    def count(self) -> int:
        """Sessions in memory, expired ones that were not collected yet included."""
        return sum(1 for _ in self._index.scan(self._prefix))

    # -- writing ---------------------------------------------------------------------------------

    def commit(
        self,
        old: Session | None,
        new: Session,
        records: Iterable[Record] = (),
        taken: Session | None = None,
    ) -> Session:
        """Make `new` the truth; returns it as stored.

        old: what it was made from (SessionConflict where that is no longer the truth), or None for
        a new session, which replaces any that has the same id. records: pixels of new frames.
        taken: the session that `new` continues under another id, which then is no more.
        SessionsFull, TierUnavailable: nothing was changed.
        """
        new = new.trimmed(self.limits.history)
        incarnation = int.from_bytes(os.urandom(7), "little") if old is None else old.incarnation
        new = replace(
            new,
            version=0 if old is None else old.version + 1,
            incarnation=incarnation,
            touched_s=self._now(),
            created_s=new.created_s or self._now(),
        )
        held = list(records)
        data = encode_session(new, self._provenance)

        def work(tx: Transaction) -> None:
            if old is not None:
                self._check_current(tx, old)
            if taken is not None:
                self._check_current(tx, taken)
                self._drop(tx, taken.key)
            current = self._read(tx, new.key)
            if old is None:
                self._drop(tx, new.key)
                current = None
            tx.write(_ROWS, self._prefix + new.key, data)
            tx.write(_INDEX, self._prefix + new.key, _SEEN.pack(new.touched_s, new.ended))
            tx.put(held)
            self._pin(tx, current, new)

        if old is None and taken is None and self.find(new.key) is None:
            self._ensure_room()
        self._memory.transact(work)
        if old is None:
            self._on_event(SessionCount(self.count()))
        return new

    def touch(self, session: Session) -> None:
        """Note a request that changed nothing, unless one was noted a moment ago. Never raises: an
        answer is not lost because of it."""
        if self._now() - session.touched_s >= self.limits.touch_s:
            with contextlib.suppress(SessionConflict, TierUnavailable):
                self.commit(session, session)

    def collect(self) -> int:
        """Forget expired sessions; returns how many."""
        doomed = [key for key, touched_s, _ in self._seen() if self._expired(touched_s)]
        for key in doomed:
            self._forget(key, lambda touched_s, _: self._expired(touched_s))
        if doomed:
            self._on_event(SessionCount(self.count()))
        return len(doomed)

    def _ensure_room(self) -> None:
        alive = list(self._seen())
        if len(alive) < self.limits.most:
            return
        if self.collect():
            return
        # The ended ones first, then those that nobody has asked for a long time.
        spare = sorted(
            (not ended, touched_s, key)
            for key, touched_s, ended in alive
            if self._spare(touched_s, ended)
        )
        if not spare:
            raise SessionsFull(
                f"all {self.limits.most} sessions are taken; end one with the END flag, or wait: "
                f"one that is idle for {self.limits.displace_s:g} s makes room"
            )
        self._forget(spare[0][2], self._spare)

    def _spare(self, touched_s: float, ended: bool) -> bool:
        return ended or self._now() - touched_s > self.limits.displace_s

    def _forget(self, key: bytes, condition: Callable[[float, bool], bool]) -> None:
        """Remove a session where, at that moment, the condition (touched, ended) holds."""

        def work(tx: Transaction) -> None:
            seen = tx.read(_INDEX, self._prefix + key)
            if seen is not None and condition(*_SEEN.unpack(seen)):
                self._drop(tx, key)

        self._memory.transact(work)

    def _drop(self, tx: Transaction, key: bytes) -> None:
        tx.erase(_ROWS, self._prefix + key)
        tx.erase(_INDEX, self._prefix + key)
        tx.unpin(self._prefix + key)

    def _check_current(self, tx: Transaction, expected: Session) -> None:
        current = self._read(tx, expected.key)
        if current is None or (current.incarnation, current.version) != (
            expected.incarnation,
            expected.version,
        ):
            raise SessionConflict(
                f"session {expected.id!r} was changed by another request meanwhile; "
                "nothing of this one was kept: send it again"
            )

    def _read(self, tx: Transaction, key: bytes) -> Session | None:
        data = tx.read(_ROWS, self._prefix + key)
        if data is None:
            return None
        try:
            return decode_session(data, self._provenance)
        except CorruptRecord:
            return None

    def _pin(self, tx: Transaction, old: Session | None, new: Session) -> None:
        """Let the pins follow. Slices that do not exist yet are pinned too: they will."""
        before = self._needed(old) if old is not None else set()
        after = self._needed(new)
        owner = self._prefix + new.key
        tx.unpin(owner, _ids(before - after))
        tx.pin(owner, _ids(after - before))

    def _needed(self, session: Session) -> set[tuple[bytes, bytes | bool]]:
        return {*session.slices_kept(self.limits.window), *session.frames_kept()}

    def _seen(self) -> Iterable[tuple[bytes, float, bool]]:
        for key, value in self._index.scan(self._prefix):
            touched_s, ended = _SEEN.unpack(value)
            yield key[len(self._prefix) :], touched_s, ended

    def _expired(self, touched_s: float) -> bool:
        return self._now() - touched_s > self.limits.ttl_s


def _ids(needed: Iterable[tuple[bytes, bytes | bool]]) -> list[bytes]:
    """Ids of slices (context, control) and of frames (context, whether observed)."""
    return [
        slice_id(context, np.frombuffer(what, "<f4"))
        if isinstance(what, bytes)
        else (frame_id(context) if what else tokens_id(context))
        for context, what in needed
    ]
