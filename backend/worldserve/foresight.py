"""Where the hand goes next: answers that are computed before the question."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from ctrlcache.key import couplet_id, frame_id, is_held
from worldserve.agenda import Agenda
from worldserve.background import Background, Urgency
from worldserve.cold import TaskTemplates
from worldserve.drawing import Drawing
from worldserve.models.protocol import Checkpoint, Float, Pixels
from worldserve.opening import Turn
from worldserve.rendering import draw
from worldserve.scoring import Bench, Place, Scorer

__all__ = ["Foresight"]

_HANDS = 1_024
_TENANTS = 256
_MOVED = 1e-3
_APART = 0.02
_AHEAD = 2  # steps of the hand
_TYPICAL = 4  # controls of a task


class Foresight:
    """Follows the hand of each session, and has answers computed along its way."""

    def __init__(
        self,
        bench: Bench,
        scorer: Scorer,
        background: Background,
        agenda: Agenda,
        templates: TaskTemplates,
        drawing: Drawing,
    ) -> None:
        self._bench = bench
        self._scorer = scorer
        self._background = background
        self._agenda = agenda
        self._templates = templates
        self._drawing = drawing
        self._hands: OrderedDict[bytes, Float] = OrderedDict()
        # Where it asked last, and so in what way: each session, and each tenant.
        self._asked: OrderedDict[bytes, Place] = OrderedDict()
        self._tenants: OrderedDict[str, Place] = OrderedDict()

    def follow(self, place: Place, turn: Turn, task: str, key: bytes) -> None:
        """After a turn of the session `key`, which is at `place` now: queue what may be next."""
        _remember(self._asked, key, place, _HANDS)
        _remember(self._tenants, turn.after.tenant, place, _TENANTS)
        self._queue(place, self._expected(turn, task, key), task, key)

    def shown(self, turn: Turn, key: bytes) -> None:
        """After frames that were shown, and nothing was asked: the next question is likely to be
        about where the hand is now, and of the kind that the session (or, if it is new, its tenant)
        asked before."""
        asked = self._asked.get(key) or self._tenants.get(turn.after.tenant)
        if asked is None or not is_held(turn.plan):
            return
        place = replace(asked, session=turn.after, conditioning=turn.conditioning)
        _remember(self._hands, key, turn.plan[-1], _HANDS)
        self._agenda.left(key, place.space)
        self._queue(place, [turn.plan[-1]], "", key)

    def _queue(self, place: Place, expected: list[Float], task: str, key: bytes) -> None:
        """Have the answers about these controls computed, the likeliest first."""
        wanted: list[Float] = []
        for control in expected:
            near = [np.linalg.norm(control - other) <= _APART for other in wanted]
            if not any(near) and not self._agenda.covers(place.space, control):
                wanted.append(control)
        # The newest work is done first: the likeliest comes last.
        for control in reversed(wanted):
            explore = partial(self._explore, place, control, task, key)
            handle = self._background.submit(Urgency.PREFETCH, explore)
            self._agenda.add(key, place.space, control, handle)

    def _expected(self, turn: Turn, task: str, key: bytes) -> list[Float]:
        """Controls that the next requests may bring, the likeliest first: on in the direction of
        the last motion; where the session has moved on, where the hand is now; and, as long as
        nothing is known of the hand, what is typical of the task."""
        expected: list[Float] = []
        if is_held(turn.plan):
            now = turn.plan[-1]
            before = self._hands.get(key)
            if before is not None and np.linalg.norm(now - before) > _MOVED:
                ahead = [now + steps * (now - before) for steps in range(1, _AHEAD + 1)]
                expected += [np.clip(c, -1, 1).astype(np.float32) for c in ahead]
            if turn.after.context != turn.here.context:
                expected.append(now)
            _remember(self._hands, key, now, _HANDS)
        if turn.request.start:
            given = turn.request.templates
            typical = self._templates.controls(task, _TYPICAL) if given is None else list(given)
            expected += [np.clip(c, -1, 1) for c in typical[:_TYPICAL]]
        return expected

    def _explore(
        self, place: Place, control: Float, task: str, key: bytes, checkpoint: Checkpoint
    ) -> None:
        """Compute what may be asked next, unless it could be answered already, and have it given a
        radius."""
        plan = np.repeat(np.asarray(control, np.float32)[None], place.horizon, axis=0)
        if self._known(place, plan):
            return
        [couplet] = self._bench.roll(place, plan[:1], checkpoint)
        base = self._base_frame(place) if place.with_frames else None
        if base is not None and couplet.tokens is not None:
            model, how = self._bench.model, place.rendering
            frames = draw(model, base, couplet.tokens, place.seed, how, plan, checkpoint)
            couplet = replace(couplet, frames=frames)
        self._bench.keeper.admit(couplet)
        self._scorer.submit(place, couplet, task, key, place.space)

    def _known(self, place: Place, plan: Float) -> bool:
        """Whether a question of this kind about `plan` would find its answer."""
        keeper, control = self._bench.keeper, plan[0]
        found = keeper.fetch(couplet_id(place.space, plan), ("frames",))
        if found is not None and (found.frames is not None or not place.with_frames):
            return True
        near = keeper.trusted_near(place.space, control, ("frames",))
        if not place.with_frames:
            return bool(near)
        return any(
            self._drawing.shows(couplet, float(np.linalg.norm(couplet.control - control)))
            for couplet in near
        )

    def _base_frame(self, place: Place) -> Pixels | None:
        return self._bench.keeper.get_blob(frame_id(place.session.base))


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def _remember(known: OrderedDict[_Key, _Value], key: _Key, value: _Value, most: int) -> None:
    """As the newest of at most so many."""
    known[key] = value
    known.move_to_end(key)
    while len(known) > most:
        known.popitem(last=False)
