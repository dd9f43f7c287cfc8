"""The engine: requests in, replies out. `Engine.step` is the path of every interaction.

Knows no Triton. Whatever is not needed for the reply is handed to `Thinking`, which does it in the
user's thinking time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctrlcache.couplet import Couplet, encode_array
from ctrlcache.errors import CtrlCacheError, InvalidInput
from ctrlcache.key import digest, frame_id
from ctrlcache.metrics import Answered, Saved, Sink, ignore
from ctrlcache.tiered import Hit, Query
from ctrlcache.tiers.base import Entry, Record
from worldserve.drawing import Drawing
from worldserve.elsewhere import carried_over
from worldserve.features import Features
from worldserve.models.protocol import Float, Pixels, RolloutInput, WorldModel
from worldserve.opening import Opener, Turn
from worldserve.recall import Made, Present, Recall
from worldserve.rendering import draw
from worldserve.replying import STAGES, Answer, account_of, is_complete, outputs_of, wants_answer
from worldserve.request import Request
from worldserve.session_store import SessionNotFound, SessionStore

__all__ = ["STAGES", "Abandonment", "Answer", "Couplets", "Engine", "Reply", "Thinker"]


class Abandonment(CtrlCacheError):
    """Nobody waits for the answer any more: the caller cancelled, or his time is up."""


@dataclass(frozen=True, eq=False)
class Reply:
    """Outputs by name, of those that were asked for. account: where they came from, and when."""

    outputs: dict[str, NDArray[Any]]
    account: Answered | None = None


class Couplets(Protocol):
    """What the engine needs of `ctrlcache.tiered.CoupletCache`."""

    def lookup(self, query: Query) -> Hit | None: ...
    def get_blob(self, id: bytes) -> NDArray[Any] | None: ...
    def fetch(self, id: bytes, fields: Iterable[str]) -> Couplet | None: ...


class Thinker(Protocol):
    """What happens after a reply; returns at once."""

    def answered(
        self, turn: Turn, answer: Answer | None, present: Present | None, made: list[Made]
    ) -> None: ...


@dataclass(eq=False)
class _Work:
    """A turn in the making. made: arrays that were computed on the way."""

    turn: Turn
    answer: Answer | None = None
    present: Present | None = None
    made: list[Made] = field(default_factory=list)


#: Takes a request and what becomes of it.
Send = Callable[[Request, Reply | Exception], None]


class Engine:
    """Answers requests. One thread calls `step`; everything else may go on beside it.

    max_error: state error budget of requests that state none.
    """

    def __init__(
        self,
        model: WorldModel,
        couplets: Couplets,
        store: SessionStore,
        opener: Opener,
        recall: Recall,
        thinker: Thinker,
        drawing: Drawing,
        provenance: bytes,
        max_error: float = 0.02,
        on_event: Sink = ignore,
        features: Features | None = None,
    ) -> None:
        self._model = model
        self._features = features or Features(model)
        self._couplets = couplets
        self._store = store
        self._opener = opener
        self._recall = recall
        self._thinker = thinker
        self._drawing = drawing
        self._provenance = provenance
        self._max_error = max_error
        self._on_event = on_event

    # -- the core --------------------------------------------------------------------------------

    def step(
        self, requests: Sequence[Request], send: Send, more: Callable[[], Sequence[Request]] = list
    ) -> None:
        """Answer requests of different sessions. Each is sent as soon as it is ready: what the
        cache knows first, then what has to be computed, as one batch.

        more: asked for further requests once it is clear that something must be computed.
        """
        missed = self._answer_known(requests, send)
        if missed:
            missed += self._answer_known(more(), send)
        self._encode(missed, send)
        self._predict(missed, send)
        self._generate(missed, send)
        for work in self._wanted(missed, send):
            with self._stop_at(work, missed, send):
                self._finish(work, send)

    def _answer_known(self, requests: Sequence[Request], send: Send) -> list[_Work]:
        """Open every request and look it up; answer the hits; return what must be computed."""
        works: list[_Work] = []
        for request in requests:
            try:
                began = time.perf_counter()
                work = _Work(self._opener.open(request))
                work.turn.times_ms["align"] = _ms_since(began)
                works.append(work)
            except Exception as error:
                send(request, error)
        for work in self._wanted(works, send):
            with self._stop_at(work, works, send):
                self._look_up(work)
                if is_complete(work.turn, work.answer):
                    self._finish(work, send)
                    works.remove(work)
        return works

    def _look_up(self, work: _Work) -> None:
        turn = work.turn
        began = time.perf_counter()
        if turn.restore:
            # A seek succeeds only where the present it leads to can really be computed.
            self._remember(work)
        if turn.request.cache == "on" and wants_answer(turn):
            budget = turn.request.max_error
            query = Query(
                space=turn.space,
                plan=turn.plan,
                max_error=self._max_error if budget is None else budget,
                want_frames="PREDICTED_FRAMES" in turn.request.outputs and turn.elsewhere is None,
                session=turn.here.key.hex(),
            )
            hit = self._couplets.lookup(query)
            if hit is not None:
                work.answer = self._answer_from(hit, query)
                if turn.elsewhere is not None and "PREDICTED_FRAMES" in turn.request.outputs:
                    work.answer = self._carriable(work.answer, query)
            if work.answer is not None:
                self._on_event(Saved(work.answer.couplet.cost_ms / 1e3))
        turn.times_ms["lookup"] = _ms_since(began)

    def _answer_from(self, hit: Hit, query: Query) -> Answer | None:
        """An answer, where the frames that are wanted can be shown or drawn."""
        couplet = hit.couplet
        answer = Answer(couplet, hit.states, couplet.frames, None, hit.tier, hit.exact, hit.bound)
        if not query.want_frames:
            return answer
        if hit.exact:
            # Only tokens that are as the model made them give the model's own frames.
            answer.tokens = None if couplet.lossy else couplet.tokens
        elif not self._drawing.shows(couplet, hit.distance):
            answer.frames = None
            answer.tokens = self._drawing.tokens(query.space, query.plan[0])
        drawable = answer.frames is not None or answer.tokens is not None
        return answer if drawable else None

    def _carriable(self, answer: Answer | None, query: Query) -> Answer | None:
        """The answer with tokens to carry over to a further view, where it has any."""
        if answer is not None and answer.exact:
            whole = self._couplets.fetch(answer.couplet.id, ("tokens",))
            answer.tokens = None if whole is None or whole.lossy else whole.tokens
        elif answer is not None:
            answer.tokens = self._drawing.tokens(query.space, query.plan[0])
        return None if answer is None or answer.tokens is None else answer

    def _encode(self, works: list[_Work], send: Send) -> None:
        """New frames -> what the model remembers of them; nothing where it is known already."""
        for work in self._wanted(works, send):
            with self._stop_at(work, works, send):
                if work.answer is None:
                    began = time.perf_counter()
                    self._remember(work)
                    work.turn.times_ms["encode"] = _ms_since(began)

    def _remember(self, work: _Work) -> None:
        turn = work.turn
        if work.present is None:
            alone = turn.new_from if turn.request.cache == "off" else None
            work.present, made = self._recall.present(
                turn.here, turn.conditioning, turn.fresh, alone
            )
            work.made += made

    def _predict(self, works: list[_Work], send: Send) -> None:
        """One rollout for all works of the same horizon."""
        by_horizon: dict[int, list[_Work]] = {}
        for work in self._wanted(works, send):
            with self._stop_at(work, works, send):
                if work.answer is None and wants_answer(work.turn):
                    by_horizon.setdefault(len(work.turn.plan), []).append(work)
        for batch in by_horizon.values():
            try:
                self._roll_out(batch)
            except Exception as error:
                for work in batch:
                    works.remove(work)
                    send(work.turn.request, error)

    def _roll_out(self, batch: list[_Work]) -> None:
        began = time.perf_counter()
        inputs = [
            RolloutInput(
                work.present.memory, work.present.tokens, work.turn.plan, work.turn.conditioning
            )
            for work in batch
            if work.present is not None
        ]
        outputs = self._model.rollout(inputs)
        took_ms = _ms_since(began)
        for work, out in zip(batch, outputs, strict=True):
            work.turn.times_ms["dynamics"] = took_ms
            couplet = Couplet(
                space=work.turn.space,
                plan=work.turn.plan,
                states=out.states,
                tokens=out.tokens,
                slice=out.slice,
                cost_ms=took_ms / len(batch),
                created_s=time.time(),
                stability=np.nan,
                transferability=np.nan,
            )
            work.answer = Answer(couplet, out.states, None, out.tokens, "none", True, 0.0)

    def _generate(self, works: list[_Work], send: Send) -> None:
        """Frames, for those who asked for them and have none yet."""
        for work in self._wanted(works, send):
            with self._stop_at(work, works, send):
                turn, answer = work.turn, work.answer
                if answer is None or "PREDICTED_FRAMES" not in turn.request.outputs:
                    continue
                if answer.tokens is None or (answer.frames is not None and turn.elsewhere is None):
                    continue
                began = time.perf_counter()
                base, there = self._base_frame(turn), turn.elsewhere
                if there is None:
                    answer.frames = self._drawn(turn, base, answer.tokens)
                else:
                    view = turn.request.view or ""
                    tokens = carried_over(
                        self._model,
                        partial(self._embedded, turn),
                        view,
                        base,
                        there,
                        answer.tokens,
                        answer.states,
                    )
                    answer.elsewhere = self._drawn(turn, there, tokens)
                turn.times_ms["decode"] = _ms_since(began)

    def _embedded(self, turn: Turn, frames: Pixels) -> Float:
        """Tokens of frames; those of a frame that was shown before are known."""
        if turn.request.cache != "on":
            return self._model.embed(frames)
        return self._features.embed(frames, turn.request.tenant)

    def _drawn(self, turn: Turn, base: Pixels, tokens: Float) -> Pixels:
        """The frames of a prediction; the same ones are drawn once."""
        request, rendering = turn.request, turn.request.rendering

        def make() -> Pixels:
            return draw(self._model, base, tokens, request.seed, rendering, turn.plan)

        if request.cache != "on":
            return make()
        # Where features are reused between steps, the controls say how many.
        plan = turn.plan.tobytes() if rendering.mark else b""
        how = digest(b"%d" % request.seed, rendering.mark, plan)
        return self._features.frames(base, tokens, how, request.tenant, make)

    def _finish(self, work: _Work, send: Send) -> None:
        """Write the session, reply, and leave the rest to thinking time."""
        turn = work.turn
        made = outputs_of(self._model, turn, work.answer)
        if turn.request.canary:
            # It has no session, and nobody remembers it; it wants to know who is alive.
            if "CACHE_TIER" in made:
                made["CACHE_TIER"] = np.array([b"pid:%d" % os.getpid()], np.object_)
            send(turn.request, Reply(made))
            return
        if turn.changed:
            self._keep_restorable(work)
            turn.after = self._store.commit(turn.old, turn.after, self._pixels(turn), turn.taken)
        elif turn.old is not None:
            self._store.touch(turn.old)
        turn.times_ms["total"] = _ms_since(turn.request.arrived_s)
        if "TIMING_MS" in turn.request.outputs:
            stages = [turn.times_ms.get(stage, 0.0) for stage in STAGES]
            made["TIMING_MS"] = np.array(stages, np.float32)
        send(turn.request, Reply(made, account_of(turn, work.answer)))
        self._thinker.answered(turn, work.answer, work.present, work.made)

    def _keep_restorable(self, work: _Work) -> None:
        """What a session forgets of its history must not be what its present is computed from: an
        answer from the cache may have come before anything of the kind was computed."""
        turn = work.turn
        kept = turn.after.trimmed(self._store.limits.history)
        if kept.first == turn.after.first or self._recall.restorable(kept):
            return
        # Where even the whole history does not suffice any more, nothing more is lost.
        with suppress(InvalidInput, SessionNotFound):
            _, made = self._recall.present(turn.after, turn.conditioning, turn.fresh)
            work.made += made

    # -- parts -----------------------------------------------------------------------------------

    def _base_frame(self, turn: Turn) -> Pixels:
        """The last frame that was really seen: predicted frames are drawn from it."""
        context = turn.here.base
        pixels: Pixels | None = turn.fresh.get(context)
        if pixels is None:
            pixels = self._couplets.get_blob(frame_id(context))
        if pixels is None:
            raise SessionNotFound(
                "the session's last observed frame is not in memory any more: begin a new session"
            )
        return pixels

    def _pixels(self, turn: Turn) -> Iterator[Record]:
        """Records of the new frames' pixels, which nothing could compute again."""
        for context, pixels in turn.fresh.items():
            id = frame_id(context)
            entry = Entry(id, id, None, 0.0, 0.0, 0.0, time.time())
            yield Record(entry, encode_array(pixels, self._provenance))

    def _abandon_if_unwanted(self, request: Request) -> None:
        if request.deadline_s is not None and time.perf_counter() > request.deadline_s:
            raise Abandonment("the request's time is up; nothing of it was kept")
        if request.cancelled():
            raise Abandonment("the request was cancelled; nothing of it was kept")

    def _wanted(self, works: list[_Work], send: Send) -> Iterator[_Work]:
        """Those that somebody still waits for; the others are out, and told so."""
        for work in list(works):
            try:
                self._abandon_if_unwanted(work.turn.request)
            except Exception as error:
                works.remove(work)
                send(work.turn.request, error)
            else:
                yield work

    @contextmanager
    def _stop_at(self, work: _Work, works: list[_Work], send: Send) -> Iterator[None]:
        """What goes wrong with one work is its own affair: it is answered, and the others go on."""
        try:
            yield
        except Exception as error:
            works.remove(work)
            send(work.turn.request, error)


def _ms_since(began_s: float) -> float:
    return (time.perf_counter() - began_s) * 1e3
