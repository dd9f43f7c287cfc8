"""What the model remembers at a session's present, from slices where they are known, else computed.

Everything here is exact: a slice is read (it was made by this model from the same input) or made
now, and a model makes the same bits however a stream of frames is cut into calls. So it does not
matter who computed a slice first, and an interrupted session loses nothing but time.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import InvalidInput
from ctrlcache.key import frame_id
from worldserve.features import Features
from worldserve.models.protocol import Checkpoint, Float, Pixels, WorldModel
from worldserve.session import Session, tokens_id
from worldserve.session_store import SessionNotFound

__all__ = ["Blobs", "Made", "Present", "Recall"]


class Blobs(Protocol):
    """Exact arrays by id: what `CoupletCache` keeps beside couplets."""

    def get_blob(self, id: bytes) -> NDArray[Any] | None: ...


@dataclass(frozen=True, eq=False)
class Present:
    """Of one context: memory of the frames before the present one, and its tokens (N, D)."""

    memory: Any
    tokens: Float


@dataclass(frozen=True, eq=False)
class Made:
    """An array that was computed and should be kept: its id, and what computing it took."""

    id: bytes
    array: NDArray[Any] = field(repr=False)
    cost_ms: float


#: Frames absorbed between two chances to give way.
_AT_ONCE = 16


def _go_on() -> None:
    return None


def _stretch(session: Session, first: int) -> int:
    """How many frames from `first` on can be absorbed in one call: up to the next predicted one,
    whose tokens only come out of it."""
    frames = 1
    while (
        frames < _AT_ONCE
        and first + frames < session.present
        and session.observed_at(first + frames)
    ):
        frames += 1
    return frames


class Recall:
    """Presents of one model by context digest; the most recently used `most` stay assembled.

    resume: whether what is stored may be used, and what another session assembled. Without, only
    predicted frames' tokens are read, where their past is not at hand any more.

    Safe in several threads. Two threads may compute the same present at the same time; the result
    is the same.
    """

    def __init__(
        self,
        model: WorldModel,
        blobs: Blobs,
        most: int = 16,
        features: Features | None = None,
        resume: bool = True,
    ) -> None:
        self._model = model
        self.resume = resume
        self.alone = Features(model)
        self.features = features if features is not None and resume else self.alone
        self._blobs = blobs
        self._most = most
        self._ready: OrderedDict[bytes, Present] = OrderedDict()
        self._lock = threading.Lock()
        # A memory may write the next frame behind its own end: one thread at a time.
        self._growing = threading.Lock()
        self._step_ms = 1.0

    def known(self, session: Session, context: bytes) -> Present | None:
        """The assembled present of `context`, where it is at hand for this session."""
        name = self._name(session, context)
        with self._lock:
            found = self._ready.get(name)
            if found is not None:
                self._ready.move_to_end(name)
            return found

    def keep(self, session: Session, context: bytes, present: Present) -> None:
        name = self._name(session, context)
        with self._lock:
            self._ready[name] = present
            self._ready.move_to_end(name)
            while len(self._ready) > self._most:
                self._ready.popitem(last=False)

    def _name(self, session: Session, context: bytes) -> bytes:
        return context if self.resume else session.key + context

    def present(
        self,
        session: Session,
        conditioning: Any,
        fresh: Mapping[bytes, Pixels] | None = None,
        alone_from: int | None = None,
        checkpoint: Checkpoint = _go_on,
    ) -> tuple[Present, list[Made]]:
        """The session's present, and the arrays that had to be computed for it.

        fresh: pixels, by context digest, of frames that are not stored yet. alone_from: from this
        frame on, nothing that others computed is used. InvalidInput where the history does not
        reach back far enough to compute it exactly.
        """
        found = self.known(session, session.context) if alone_from is None else None
        if found is not None:
            return found, []
        walk = _Walk(self, session, fresh or {}, alone_from)
        index, present = walk.nearest()
        made: list[tuple[Made, int]] = []
        walk.embed(index + 1)
        while index < session.present:
            checkpoint()
            frames = _stretch(session, index)
            present = self._absorb(session, index, frames, present, conditioning, walk, made)
            index += frames
        self.keep(session, session.context, present)
        return present, [item for item, at in made if at >= walk.exact_from] + walk.made

    def restorable(self, session: Session) -> bool:
        """Whether the session's present can be computed from what is stored, without looking: where
        its history is complete, or with its slices of the window before a frame from which the
        present can be reached."""
        if session.first == 0:
            return True
        oldest = session.first + self._model.spec.window - 1
        within = range(session.present, oldest - 1, -1)
        if any(self.known(session, session.context_at(at)) is not None for at in within):
            return True  # its slices were stored when it was computed
        walk = _Walk(self, session, {}, None)
        return any(walk.reaches_from(index) for index in within)

    def grown(
        self, session: Session, present: Present, made: Float, tokens: Float, context: bytes
    ) -> None:
        """Keep the session's present of `context`, one predicted frame on: `made` is the slice of
        the frame that was left, `tokens` the prediction."""
        with self._growing:
            memory = self._model.extend(present.memory, made)
        self.keep(session, context, Present(memory, tokens))

    def _absorb(
        self,
        session: Session,
        first: int,
        frames: int,
        present: Present,
        conditioning: Any,
        walk: _Walk,
        made: list[tuple[Made, int]],
    ) -> Present:
        """From the present at frame `first` over `frames` frames of the history, in one call; what
        is made at which frame is added to `made`."""
        began = time.perf_counter()
        after = range(first + 1, first + frames)
        tokens = np.stack([present.tokens, *(walk.observed_tokens(at) for at in after)])
        controls = np.stack([session.control_at(at) for at in range(first, first + frames)])
        with self._growing:
            out = self._model.absorb(present.memory, tokens, controls, conditioning)
        self._step_ms = (time.perf_counter() - began) * 1e3 / frames
        made += [
            (Made(session.slice_at(first + i), part, self.replay_ms), first + i)
            for i, part in enumerate(out.slices)
        ]
        last = first + frames
        if session.observed_at(last):
            return Present(out.memory, walk.observed_tokens(last))
        predicted = tokens_id(session.context_at(last))
        made.append((Made(predicted, out.predicted_tokens, self._step_ms), last - 1))
        return Present(out.memory, walk.predicted_tokens(last, out.predicted_tokens))

    @property
    def replay_ms(self) -> float:
        """What losing one slice costs: all that it depends on has to be computed again."""
        return self._step_ms * self._model.spec.window

    # What a walk needs of us.
    @property
    def model(self) -> WorldModel:
        return self._model

    @property
    def blobs(self) -> Blobs:
        return self._blobs


class _Walk:
    """Finds the frame from which the present can be reached with the least computing."""

    def __init__(
        self,
        recall: Recall,
        session: Session,
        fresh: Mapping[bytes, Pixels],
        alone_from: int | None,
    ) -> None:
        self._recall = recall
        self._session = session
        self._fresh = fresh
        self._alone_from = session.end + 1 if alone_from is None else alone_from
        self._slices: dict[int, Float | None] = {}
        self._tokens: dict[int, Float] = {}
        self.made: list[Made] = []
        #: What is made at earlier frames lacks some of their past, and must not be kept.
        self.exact_from = 0

    def nearest(self) -> tuple[int, Present]:
        """The newest frame whose present is at hand or can be put together, and that present."""
        session, spec = self._session, self._recall.model.spec
        # Older frames cannot influence the slices that the present attends to.
        oldest = session.present - (spec.window - 1) - (spec.receptive_field - 1)
        for index in range(session.present, max(oldest, session.first) - 1, -1):
            if index < self._alone_from:
                known = self._recall.known(session, session.context_at(index))
                if known is not None:
                    return index, known
            present = self._assembled(index)
            if present is not None:
                return index, present
        return self._replayed(oldest)

    def _replayed(self, oldest: int) -> tuple[int, Present]:
        """Where nothing is at hand: an early frame, without memory, from where to compute again."""
        session, spec = self._session, self._recall.model.spec
        start = max(oldest, 0)
        # The few frames before it may as well be computed too: all slices can then be kept.
        if start <= spec.window and session.first == 0:
            start = 0
        if start < session.first:
            raise InvalidInput(
                f"frame {session.present} cannot be restored exactly any more: its history begins "
                f"at frame {session.first}; seek to a later one"
            )
        if start > 0:
            self.exact_from = start + spec.receptive_field - 1
            if not self._predictions_stored(start):
                if session.first > 0:
                    raise SessionNotFound(
                        "predicted frames of the session are not in memory any more, and their "
                        "past is not either: begin a new session"
                    )
                start = self.exact_from = 0
        tokens = self._tokens_at(start)
        return start, Present(self._recall.model.assemble((), start), tokens)

    def _predictions_stored(self, start: int) -> bool:
        """Whether predicted frames among those that are replayed without their past have tokens,
        made when they had it. Loads them."""
        session = self._session
        for index in range(start, min(self.exact_from, session.present) + 1):
            if not session.observed_at(index):
                tokens = self._stored(tokens_id(session.context_at(index)), index)
                if tokens is None:
                    return False
                self._tokens[index] = tokens
        return True

    def predicted_tokens(self, index: int, computed: Float) -> Float:
        """Of a predicted frame: as they were made with all of the past, where that matters."""
        return self._tokens.get(index, computed)

    def _assembled(self, index: int) -> Present | None:
        """The present of frame `index` from stored slices and tokens; None where one is missing."""
        window = self._recall.model.spec.window
        first = index - (window - 1)
        if max(first, 0) < self._session.first:
            return None
        slices: list[Float] = []
        for before in range(index - 1, max(first, 0) - 1, -1):
            part = self._slice(before)
            if part is None:
                return None
            slices.append(part)
        if not slices:
            # The first frame of all.
            return Present(self._recall.model.assemble((), index), self._tokens_at(index))
        if not self._session.observed_at(index):
            tokens = self._stored(tokens_id(self._session.context_at(index)), index)
            if tokens is None:
                return None
            self._tokens[index] = tokens
        tokens = self._tokens_at(index)
        return Present(self._recall.model.assemble(slices[::-1], index), tokens)

    def reaches_from(self, index: int) -> bool:
        """Whether the slices of the window before frame `index` are stored, and its tokens where
        nobody has seen it."""
        first = max(index - (self._recall.model.spec.window - 1), 0)
        if any(self._slice(before) is None for before in range(index - 1, first - 1, -1)):
            return False
        if self._session.observed_at(index):
            return True
        return self._stored(tokens_id(self._session.context_at(index)), index) is not None

    def _slice(self, index: int) -> Float | None:
        if index not in self._slices:
            # A slice belongs to what follows it: it was made when its frame was left.
            id = self._session.slice_at(index)
            self._slices[index] = self._stored(id, index + 1) if self._recall.resume else None
        return self._slices[index]

    def _stored(self, id: bytes, index: int) -> Float | None:
        return None if index >= self._alone_from else self._recall.blobs.get_blob(id)

    def observed_tokens(self, index: int) -> Float:
        return self._tokens[index]

    def _tokens_at(self, index: int) -> Float:
        if index not in self._tokens:
            self._embed([index])
        return self._tokens[index]

    def embed(self, first: int) -> None:
        """Have the tokens of all observed frames from `first` to the present."""
        wanted = range(first, self._session.present + 1)
        self._embed([i for i in wanted if self._session.observed_at(i) and i not in self._tokens])

    def _embed(self, indices: list[int]) -> None:
        missing = []
        for index in indices:
            id = tokens_id(self._session.context_at(index))
            tokens = self._stored(id, index) if self._recall.resume else None
            if tokens is None:
                missing.append(index)
            else:
                self._tokens[index] = tokens
        if not missing:
            return
        frames = np.stack([self._pixels(index) for index in missing])
        began = time.perf_counter()
        # Where nothing that others computed may be used, this is not either.
        shared = max(missing) < self._alone_from
        features = self._recall.features if shared else self._recall.alone
        embedded = features.embed(frames, self._session.tenant)
        cost_ms = (time.perf_counter() - began) * 1e3 / len(missing)
        for index, tokens in zip(missing, embedded, strict=True):
            self._tokens[index] = tokens
            self.made.append(Made(tokens_id(self._session.context_at(index)), tokens, cost_ms))

    def _pixels(self, index: int) -> Pixels:
        context = self._session.context_at(index)
        pixels = self._fresh.get(context)
        if pixels is None:
            pixels = self._recall.blobs.get_blob(frame_id(context))
        if pixels is None:
            raise SessionNotFound(
                f"frame {index} of the session is not in memory any more: begin a new session"
            )
        return pixels
