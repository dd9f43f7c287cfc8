"""A session: the history of one correlation id, as a value.

Every change makes a new `Session`; whether it becomes the truth is decided by one transaction of
`SessionStore`. A session holds digests, controls and times, and nothing that can be computed: what
belongs to a frame (pixels, tokens, slice) is found by the frame's context digest. So a session can
be written before its slices exist, and nothing approximate can ever enter it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ctrlcache import record
from ctrlcache.errors import CorruptRecord, InvalidInput
from ctrlcache.key import DIGEST_BYTES, canonical_control, context_next, digest, slice_id
from ctrlcache.record import Section
from worldserve.models.protocol import Float, Pixels
from worldserve.request import CorrelationId

__all__ = ["Session", "decode_session", "encode_session", "session_key", "tokens_id"]

_MAGIC = b"WSse"
_META = struct.Struct("<QQddqq?")
# Sections of a session record. The numbers are in shared memory: never reuse one.
_DIGESTS, _CONTROLS, _OBSERVED, _TIMES, _TEXT = 1, 2, 3, 4, 5


@dataclass(frozen=True, eq=False)
class Session:
    """Frames are counted from the first one ever seen; `first` is the oldest still in the history.

    digests: context digest of each frame, oldest first. controls (n, C): committed at each frame,
    NaN where none was. observed (n,): whether the frame was seen or predicted. times (n,): seconds,
    NaN where unknown. present: index of the frame that the session is at; what lies beyond it is
    there to seek to until something else follows. anchor: context digest of the last observed frame
    that has left the history, empty where none has. version counts the changes. device, online: the
    device that controls come from, and (JSON) the running statistics of an uncalibrated one.
    taken_from: key of the session that this one resumed, empty where it did not.
    """

    tenant: str
    id: CorrelationId
    prompt: str
    view: str
    device: str
    created_s: float
    touched_s: float
    first: int
    present: int
    digests: tuple[bytes, ...]
    controls: Float
    observed: NDArray[np.bool_]
    times: NDArray[np.float64]
    anchor: bytes = b""
    version: int = 0
    incarnation: int = 0
    ended: bool = False
    online: str = ""
    taken_from: bytes = b""

    # -- reading --------------------------------------------------------------------------------

    @property
    def key(self) -> bytes:
        return session_key(self.tenant, self.id)

    @property
    def context(self) -> bytes:
        """Digest of all that led to the present frame."""
        return self.digests[self.present - self.first]

    @property
    def end(self) -> int:
        """One past the newest frame."""
        return self.first + len(self.digests)

    @property
    def present_time(self) -> float | None:
        time = float(self.times[self.present - self.first])
        return None if np.isnan(time) else time

    def context_at(self, index: int) -> bytes:
        return self.digests[index - self.first]

    def control_at(self, index: int) -> Float:
        control: Float = self.controls[index - self.first]
        return control

    def observed_at(self, index: int) -> bool:
        return bool(self.observed[index - self.first])

    def slice_at(self, index: int) -> bytes:
        """Id of the slice of frame `index`, which must have been left."""
        return slice_id(self.context_at(index), self.control_at(index))

    @property
    def base(self) -> bytes:
        """Context digest of the last frame that was observed, at or before the present."""
        seen = np.flatnonzero(self.observed[: self.present - self.first + 1])
        return self.digests[int(seen[-1])] if seen.size else self.anchor

    def last_controls(self, count: int) -> Float:
        """The newest committed controls before the present, oldest first, at most `count`."""
        stop = self.present - self.first
        return self.controls[max(0, stop - count) : stop]

    # -- changing -------------------------------------------------------------------------------

    def observe(
        self, transitions: Float, frames: Pixels, times: NDArray[np.float64] | None
    ) -> Session:
        """After `frames` (T, h, w, 3) were seen, each reached under its row of transitions."""
        contexts = []
        context = self.context
        for control, frame in zip(transitions, frames, strict=True):
            context = context_next(context, control, frame.tobytes())
            contexts.append(context)
        seconds = np.full(len(frames), np.nan) if times is None else times
        return self._moved(transitions, contexts, True, seconds)

    def advance(self, controls: Float, interval_s: float) -> Session:
        """After `controls` (m, C) were committed and the predicted frames accepted as they are."""
        contexts = []
        context = self.context
        for control in controls:
            context = context_next(context, control, None)
            contexts.append(context)
        now = float(self.times[self.present - self.first])
        return self._moved(
            controls, contexts, False, now + interval_s * np.arange(1, len(controls) + 1)
        )

    def _moved(
        self,
        controls: Float,
        contexts: Sequence[bytes],
        observed: bool,
        times: NDArray[np.float64],
    ) -> Session:
        """The present frame and those that follow get `controls`; what lay beyond is dropped."""
        here = self.present - self.first
        left = np.stack([canonical_control(c) for c in controls])
        open_end = np.full((1, left.shape[1]), np.nan, np.float32)
        return replace(
            self,
            present=self.present + len(contexts),
            digests=(*self.digests[: here + 1], *contexts),
            controls=np.concatenate([self.controls[:here], left, open_end]),
            observed=np.concatenate(
                [self.observed[: here + 1], np.full(len(contexts), observed, bool)]
            ),
            times=np.concatenate([self.times[: here + 1], times]),
        )

    def seek(self, index: int) -> Session:
        """With frame `index` as the present; InvalidInput where it is not in the history."""
        if not self.first <= index < self.end:
            raise InvalidInput(
                f"parameter 'frame' must be in the session's history, {self.first} to "
                f"{self.end - 1}, got {index}"
            )
        return replace(self, present=index)

    def trimmed(self, most: int) -> Session:
        """At most `most` frames, by forgetting the oldest; the present frame is never forgotten."""
        drop = min(len(self.digests) - most, self.present - self.first)
        if drop <= 0:
            return self
        gone = np.flatnonzero(self.observed[:drop])
        return replace(
            self,
            first=self.first + drop,
            anchor=self.digests[int(gone[-1])] if gone.size else self.anchor,
            digests=self.digests[drop:],
            controls=self.controls[drop:],
            observed=self.observed[drop:],
            times=self.times[drop:],
        )

    # -- what must stay in memory for it -----------------------------------------------------------

    def slices_kept(self, window: int) -> set[tuple[bytes, bytes]]:
        """(context, control) of the slices that predictions at the present or the end attend to."""
        kept: set[tuple[bytes, bytes]] = set()
        for stop in {self.present, self.end - 1}:
            for index in range(max(self.first, stop - window + 1), stop):
                kept.add((self.context_at(index), self.control_at(index).tobytes()))
        return kept

    def frames_kept(self) -> set[tuple[bytes, bool]]:
        """(context, observed) of the frames whose pixels (observed) or tokens are needed."""
        kept = set(zip(self.digests, map(bool, self.observed), strict=True))
        return kept | {(self.anchor, True)} if self.anchor else kept


def session_key(tenant: str, id: CorrelationId) -> bytes:
    """16 bytes; a number and a text that looks like it are two sessions."""
    kind = b"text" if isinstance(id, str) else b"number"
    return digest(b"session", tenant.encode(), kind, str(id).encode())


def tokens_id(context: bytes) -> bytes:
    """Name of the tokens of the present frame of `context`; `key.frame_id` names its pixels."""
    return digest(b"tokens", context)


def encode_session(session: Session, provenance: bytes) -> bytes:
    text = {
        "tenant": session.tenant,
        "id": session.id,
        "prompt": session.prompt,
        "view": session.view,
        "device": session.device,
        "online": session.online,
        "anchor": session.anchor.hex(),
        "taken_from": session.taken_from.hex(),
    }
    digests = np.frombuffer(b"".join(session.digests), np.uint8).reshape(-1, DIGEST_BYTES)
    meta = _META.pack(
        session.version,
        session.incarnation,
        session.created_s,
        session.touched_s,
        session.first,
        session.present,
        session.ended,
    )
    sections = [
        Section(_DIGESTS, digests),
        Section(_CONTROLS, session.controls),
        Section(_OBSERVED, session.observed.astype(np.uint8)),
        Section(_TIMES, session.times),
        Section(_TEXT, np.frombuffer(json.dumps(text).encode(), np.uint8)),
    ]
    return record.pack(_MAGIC, provenance, 0, meta, sections)


def decode_session(data: bytes, provenance: bytes) -> Session:
    """CorruptRecord for damage, another version, or a session of other weights."""
    _, meta, arrays = record.unpack(data, _MAGIC, provenance)
    try:
        version, incarnation, created_s, touched_s, first, present, ended = _META.unpack(meta)
        text = json.loads(arrays[_TEXT].tobytes())
        return Session(
            tenant=text["tenant"],
            id=text["id"],
            prompt=text["prompt"],
            view=text["view"],
            device=text["device"],
            created_s=created_s,
            touched_s=touched_s,
            first=first,
            present=present,
            digests=tuple(row.tobytes() for row in arrays[_DIGESTS]),
            controls=arrays[_CONTROLS],
            observed=arrays[_OBSERVED].astype(bool),
            times=arrays[_TIMES],
            anchor=bytes.fromhex(text["anchor"]),
            version=version,
            incarnation=incarnation,
            ended=ended,
            online=text["online"],
            taken_from=bytes.fromhex(text["taken_from"]),
        )
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise CorruptRecord(f"record does not hold a session: {error}") from error
