"""What is done in the user's thinking time: exact commits, scores, and where the hand goes next.

Nothing here changes a session: what is computed has a name (its content's digest) and is put under
it. So the order in which work is done, or whether it is done at all, never changes an answer.
"""

from __future__ import annotations

import logging
import random
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctrlcache.admission import Admission
from ctrlcache.couplet import Couplet
from ctrlcache.errors import CtrlCacheError
from ctrlcache.key import couplet_id, frame_id, is_held, slice_id, space_id
from ctrlcache.metrics import HitError, Scored, Sink, ignore
from ctrlcache.scores import Scores, probe_controls, relative_error, scores_from_probes
from ctrlcache.templates import lineage
from worldserve.agenda import Agenda
from worldserve.background import Background, Urgency
from worldserve.cold import TaskTemplates
from worldserve.engine import Answer
from worldserve.models.protocol import Checkpoint, Float, Pixels, RolloutInput, WorldModel
from worldserve.opening import Turn
from worldserve.recall import Made, Present, Recall
from worldserve.session import Session, tokens_id

__all__ = ["Keeper", "Thinking", "ThinkingConfig"]

_log = logging.getLogger(__name__)
_HANDS = 1_024
_MOVED = 1e-3
_TYPICAL = 4


class Keeper(Protocol):
    """What thinking time needs of `ctrlcache.tiered.CoupletCache`."""

    def admit(self, couplet: Couplet, scores: Scores | None = None) -> Admission: ...
    def fetch(self, id: bytes, fields: Iterable[str]) -> Couplet | None: ...
    def get_blob(self, id: bytes) -> NDArray[Any] | None: ...
    def put_blob(self, id: bytes, array: NDArray[Any], cost_ms: float = 0.0) -> None: ...


@dataclass(frozen=True)
class ThinkingConfig:
    """probe_radius: of scoring probes. probe_batch: rollouts at once. rho_max: from calibration.

    think: score couplets at all. prefetch: predict along the hand's motion. keep_probes: probes are
    couplets of their own. error_samples: share of approximate answers that are computed afterwards.
    """

    think: bool = True
    probe_radius: float = 0.1
    probe_batch: int = 4
    rho_max: float = 1.0
    prefetch: bool = True
    keep_probes: bool = False
    error_samples: float = 0.02


@dataclass(frozen=True, eq=False)
class _Place:
    """Where something is predicted: a context of a session, with all that a prediction needs."""

    session: Session
    conditioning: Any
    horizon: int
    seed: int
    with_frames: bool

    def space(self) -> bytes:
        return space_id(self.session.context, self.horizon, self.seed)


class Thinking:
    """Implements `engine.Thinker` on a `Background`."""

    def __init__(
        self,
        model: WorldModel,
        keeper: Keeper,
        recall: Recall,
        background: Background,
        config: ThinkingConfig,
        templates: TaskTemplates,
        on_event: Sink = ignore,
    ) -> None:
        self._model = model
        self._keeper = keeper
        self._recall = recall
        self._background = background
        self._config = config
        self._on_event = on_event
        self._templates = templates
        self._agenda = Agenda(config.probe_radius)
        self._hands: OrderedDict[bytes, list[Float]] = OrderedDict()
        self._random = random.Random(0)

    # -- after a reply ----------------------------------------------------------------------------

    def answered(
        self, turn: Turn, answer: Answer | None, present: Present | None, made: list[Made]
    ) -> None:
        """Queue what follows from an answer; called by the thread that answers, after the reply."""
        try:
            self._answered(turn, answer, present, list(made))
        except CtrlCacheError:
            _log.exception("nothing can be kept of session %r's last request", turn.here.id)

    def _answered(
        self, turn: Turn, answer: Answer | None, present: Present | None, made: list[Made]
    ) -> None:
        request, key = turn.request, turn.after.key
        computed = answer is not None and answer.tier == "none"
        if answer is not None and computed and request.mode == "advance":
            made += self._first_step(turn, answer.couplet, present)
        couplet = None
        if answer is not None and request.cache != "off" and answer.exact:
            couplet = answer.couplet
            drawn = answer.frames is not None and couplet.frames is None
            if drawn:
                couplet = replace(couplet, frames=answer.frames)
            if not computed and not drawn:
                couplet = None
        if couplet is not None:
            # At once: the very same question may be the next one.
            self._keeper.admit(couplet)
        if made:
            self._background.submit(Urgency.KEEP, lambda _: self._keep(made))
        place = _Place(
            session=turn.after,
            conditioning=turn.conditioning,
            horizon=len(turn.plan),
            seed=request.seed,
            with_frames="PREDICTED_FRAMES" in request.outputs,
        )
        if self._recall.known(turn.after.context) is None:
            found = answer.couplet.id if answer is not None and answer.exact else None
            self._background.submit(
                Urgency.COMMIT,
                lambda checkpoint: self._catch_up(turn, place, found, checkpoint),
                key,
            )
        if answer is None or request.cache == "off" or not self._config.think:
            return
        here = replace(place, session=turn.here)
        task = self._task(turn, answer)
        self._agenda.left(key, place.space())
        if computed and answer.couplet.held:
            self._submit_score(here, couplet or answer.couplet, task, key, place.space())
        elif not answer.exact and self._random.random() < self._config.error_samples:
            self._background.submit(
                Urgency.LATER, lambda checkpoint: self._check(here, turn, answer, checkpoint)
            )
        if not request.end:
            self._prefetch(place, turn, task, key)

    def _submit_score(
        self, place: _Place, couplet: Couplet, task: str, key: bytes, now_in: bytes
    ) -> None:
        """Have a couplet scored, unless that of a neighbour is on its way: it will answer for this
        one's surroundings too. In a context that its session has left, there is no hurry."""
        if self._agenda.covers(couplet.space, couplet.control):
            return
        urgency = Urgency.SCORE if couplet.space == now_in else Urgency.LATER
        handle = self._background.submit(
            urgency, lambda checkpoint: self._score(place, couplet, task, checkpoint)
        )
        self._agenda.add(key, couplet.space, couplet.control, handle)

    def _task(self, turn: Turn, answer: Answer) -> str:
        """The operation that is going on, as the caller says or the model is sure of; else ''.

        After a miss, its templates are asked for.
        """
        if answer.tier != "none":
            return turn.request.task
        confidence = self._model.confidence(answer.states)
        task = turn.request.task or self._model.operation(answer.states)
        self._templates.missed(task, 1.0 if turn.request.task else confidence)
        return task if turn.request.task or self._templates.sure(confidence) else ""

    def _first_step(self, turn: Turn, couplet: Couplet, present: Present | None) -> list[Made]:
        """What an advance commits at the frame it leaves, from an answer that holds it exactly."""
        here, index = turn.here, turn.here.present + 1
        if couplet.lossy or couplet.slice is None or couplet.tokens is None:
            return []
        if index < turn.after.first:
            return []  # so many steps at once that the first has left the history
        after, tokens = turn.after.context_at(index), couplet.tokens[0]
        if present is None:
            present = self._recall.known(here.context)
        if present is not None:
            self._recall.grown(present, couplet.slice, tokens, after)
        return [
            Made(slice_id(here.context, turn.plan[0]), couplet.slice, self._recall.replay_ms),
            Made(tokens_id(after), tokens, couplet.cost_ms / len(turn.plan)),
        ]

    # -- work -------------------------------------------------------------------------------------

    def _keep(self, made: Sequence[Made]) -> None:
        for item in made:
            self._keeper.put_blob(item.id, item.array, item.cost_ms)

    def _catch_up(
        self, turn: Turn, place: _Place, found: bytes | None, checkpoint: Checkpoint
    ) -> None:
        """Have the session's new present at hand before its next request."""
        if turn.request.mode == "advance" and found is not None:
            couplet = self._keeper.fetch(found, ("slice", "tokens"))
            if couplet is not None:
                self._keep(self._first_step(turn, couplet, None))
        self._commit(place, checkpoint)

    def _commit(self, place: _Place, checkpoint: Checkpoint) -> Present:
        """The present of a place, computed exactly where it is not known."""
        present, made = self._recall.present(
            place.session, place.conditioning, checkpoint=checkpoint
        )
        self._keep(made)
        return present

    def _roll(
        self, present: Present, place: _Place, controls: Float, checkpoint: Checkpoint
    ) -> list[Couplet]:
        """Exact couplets for held `controls` (M, C), in small batches."""
        made: list[Couplet] = []
        space = place.space()
        for first in range(0, len(controls), self._config.probe_batch):
            checkpoint()
            plans = [
                np.repeat(control[None], place.horizon, axis=0)
                for control in controls[first : first + self._config.probe_batch]
            ]
            began = time.perf_counter()
            inputs = [
                RolloutInput(present.memory, present.tokens, plan, place.conditioning)
                for plan in plans
            ]
            outputs = self._model.rollout(inputs, checkpoint)
            cost_ms = (time.perf_counter() - began) * 1e3 / len(plans)
            made += [
                Couplet(
                    space=space,
                    plan=plan,
                    states=out.states,
                    tokens=out.tokens,
                    slice=out.slice,
                    cost_ms=cost_ms,
                    created_s=time.time(),
                    lineage="probe",
                )
                for plan, out in zip(plans, outputs, strict=True)
            ]
        return made

    def _score(self, place: _Place, couplet: Couplet, task: str, checkpoint: Checkpoint) -> None:
        """Probe around a couplet, and let the policy decide with what comes of it."""
        began = time.perf_counter()
        # What one tenant does is never distilled into templates that others see.
        couplet = replace(couplet, lineage=lineage("session", "" if place.session.tenant else task))
        adopted = self._templates.adopted(task, couplet)
        if adopted is not None:
            # Trusted at once, on a template's word; the probes' own word then replaces it.
            self._keeper.admit(adopted)
        present = self._commit(place, checkpoint)
        probes = probe_controls(couplet.control, self._config.probe_radius)
        around = self._roll(present, place, probes, checkpoint)
        self._on_event(Scored("probe", time.perf_counter() - began))
        scores = scores_from_probes(
            couplet.states,
            couplet.control,
            np.stack([probe.states for probe in around]),
            probes,
            self._model.spec.state_scale,
            self._config.rho_max,
        )
        self._keeper.admit(couplet, scores)
        if self._config.keep_probes:
            for probe in around:
                self._keeper.admit(replace(probe, tokens=None, slice=None))

    def _check(self, place: _Place, turn: Turn, answer: Answer, checkpoint: Checkpoint) -> None:
        """How far an approximate answer was from the truth."""
        present = self._commit(place, checkpoint)
        checkpoint()
        plan = RolloutInput(present.memory, present.tokens, turn.plan, place.conditioning)
        [out] = self._model.rollout([plan], checkpoint)
        scale = self._model.spec.state_scale
        self._on_event(HitError(float(relative_error(answer.states, out.states, scale))))

    # -- where the hand goes next ------------------------------------------------------------------

    def _prefetch(self, place: _Place, turn: Turn, task: str, key: bytes) -> None:
        controls = self._expected(turn, key)
        if turn.request.start:
            # Where the hand will go first is anybody's guess: what is typical of the task.
            given = turn.request.templates
            typical = self._templates.controls(task, _TYPICAL) if given is None else list(given)
            controls += [np.clip(c, -1, 1) for c in typical[:_TYPICAL]]
        space = place.space()
        for control in controls if self._config.prefetch else ():
            if not self._agenda.covers(space, control):
                explore = partial(self._explore, place, control, task, key)
                handle = self._background.submit(Urgency.PREFETCH, explore)
                self._agenda.add(key, space, control, handle)

    def _expected(self, turn: Turn, key: bytes) -> list[Float]:
        """Controls that the next request may bring: on in the direction of the last motion, and,
        where the session has moved on, where the hand is now."""
        hand = self._hands.setdefault(key, [])
        self._hands.move_to_end(key)
        while len(self._hands) > _HANDS:
            self._hands.popitem(last=False)
        if not is_held(turn.plan):
            return []
        now = turn.plan[-1]
        expected: list[Float] = []
        if hand and np.linalg.norm(now - hand[-1]) > _MOVED:
            expected.append(np.clip(2 * now - hand[-1], -1, 1).astype(np.float32))
        if turn.after.context != turn.here.context:
            expected.append(now)
        hand.append(now)
        del hand[:-2]
        return expected

    def _explore(
        self, place: _Place, control: Float, task: str, key: bytes, checkpoint: Checkpoint
    ) -> None:
        """Compute what may be asked next, and have it scored."""
        plan = np.repeat(np.asarray(control, np.float32)[None], place.horizon, axis=0)
        if self._keeper.fetch(couplet_id(place.space(), plan), ()) is not None:
            return
        present = self._commit(place, checkpoint)
        [couplet] = self._roll(present, place, plan[:1], checkpoint)
        base = self._base_frame(place) if place.with_frames else None
        if base is not None and couplet.tokens is not None:
            [frames] = self._model.generate([base], [couplet.tokens], [place.seed], checkpoint)
            couplet = replace(couplet, frames=frames)
        self._keeper.admit(couplet)
        self._score(place, couplet, task, checkpoint)

    def _base_frame(self, place: _Place) -> Pixels | None:
        return self._keeper.get_blob(frame_id(place.session.base))
