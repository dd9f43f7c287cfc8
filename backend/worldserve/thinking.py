"""What is done in the user's thinking time: exact commits, trust, and where the hand goes next.

Nothing here changes a session: what is computed has a name (its content's digest) and is put under
it. So the order in which work is done, or whether it is done at all, never changes an exact answer.
"""

from __future__ import annotations

import logging
import random
from dataclasses import replace

from ctrlcache.couplet import Couplet
from ctrlcache.errors import CtrlCacheError
from ctrlcache.key import slice_id
from ctrlcache.metrics import HitError, Sink, ignore
from ctrlcache.scores import relative_error
from worldserve.agenda import Agenda
from worldserve.background import Background, Urgency
from worldserve.cold import TaskTemplates
from worldserve.drawing import Drawing
from worldserve.engine import Answer
from worldserve.foresight import Foresight
from worldserve.inheritance import Inheritance
from worldserve.logs import fields
from worldserve.models.protocol import Checkpoint, RolloutInput
from worldserve.opening import Turn
from worldserve.recall import Made, Present
from worldserve.scoring import Bench, Helpers, Place, Scorer, ThinkingConfig
from worldserve.session import tokens_id

__all__ = ["Thinking"]

_log = logging.getLogger(__name__)


class Thinking:
    """Implements `engine.Thinker` on a `Background`."""

    def __init__(
        self,
        bench: Bench,
        background: Background,
        config: ThinkingConfig,
        templates: TaskTemplates,
        inheritance: Inheritance,
        drawing: Drawing,
        on_event: Sink = ignore,
    ) -> None:
        self._bench = bench
        self._background = background
        self._config = config
        self._templates = templates
        self._on_event = on_event
        self._agenda = Agenda(config.probe_radius)
        self._scorer = Scorer(
            bench, background, self._agenda, config, templates, inheritance, drawing, on_event
        )
        self._foresight = Foresight(
            bench, self._scorer, background, self._agenda, templates, drawing
        )
        self._random = random.Random(0)

    def helped_by(self, helpers: Helpers) -> None:
        """Let others probe where they have nothing else to do."""
        self._scorer.helpers = helpers

    def probe_for(self, place: Place, couplet: bytes, lineage: str, checkpoint: Checkpoint) -> None:
        """See `Scorer.probe_for`."""
        self._scorer.probe_for(place, couplet, lineage, checkpoint)

    def answered(
        self, turn: Turn, answer: Answer | None, present: Present | None, made: list[Made]
    ) -> None:
        """Queue what follows from an answer; called by the thread that answers, after the reply."""
        try:
            self._remember(turn, answer, present, list(made))
            if turn.request.cache == "off" or not self._config.think:
                return
            if answer is not None:
                self._ponder(turn, answer)
            elif self._config.prefetch and turn.changed and not turn.request.end:
                self._foresight.shown(turn, turn.after.key)
        except CtrlCacheError:
            _log.exception("nothing can be kept of a request", extra=fields(session=turn.here.id))

    # -- what was computed, and the next present ---------------------------------------------------

    def _remember(
        self, turn: Turn, answer: Answer | None, present: Present | None, made: list[Made]
    ) -> None:
        recall, computed = self._bench.recall, answer is not None and answer.tier == "none"
        if answer is not None and computed and turn.request.mode == "advance":
            made += self._first_step(turn, answer.couplet, present)
        couplet = self._worth_keeping(turn, answer)
        if couplet is not None:
            # At once: the very same question may be the next one.
            self._bench.keeper.admit(couplet)
        if made:
            self._background.submit(Urgency.KEEP, lambda _: self._bench.keep(made))
        if recall.known(turn.after, turn.after.context) is None:
            found = answer.couplet.id if answer is not None and answer.exact else None
            self._background.submit(
                Urgency.COMMIT,
                lambda checkpoint: self._catch_up(turn, found, checkpoint),
                turn.after.key,
            )

    def _worth_keeping(self, turn: Turn, answer: Answer | None) -> Couplet | None:
        """The answer's couplet, where something of it is new."""
        if answer is None or not answer.exact or turn.request.cache == "off":
            return None
        if answer.frames is not None and answer.couplet.frames is None:
            return replace(answer.couplet, frames=answer.frames)
        return answer.couplet if answer.tier == "none" else None

    def _first_step(self, turn: Turn, couplet: Couplet, present: Present | None) -> list[Made]:
        """What an advance commits at the frame it leaves, from an answer that holds it exactly."""
        here, index, recall = turn.here, turn.here.present + 1, self._bench.recall
        if couplet.lossy or couplet.slice is None or couplet.tokens is None:
            return []
        if index < turn.after.first:
            return []  # so many steps at once that the first has left the history
        after, tokens = turn.after.context_at(index), couplet.tokens[0]
        if present is None:
            present = recall.known(here, here.context)
        if present is not None:
            recall.grown(turn.after, present, couplet.slice, tokens, after)
        return [
            Made(slice_id(here.context, turn.plan[0]), couplet.slice, recall.replay_ms),
            Made(tokens_id(after), tokens, couplet.cost_ms / len(turn.plan)),
        ]

    def _catch_up(self, turn: Turn, found: bytes | None, checkpoint: Checkpoint) -> None:
        """Have the session's new present at hand before its next request."""
        if turn.request.mode == "advance" and found is not None:
            couplet = self._bench.keeper.fetch(found, ("slice", "tokens"))
            if couplet is not None:
                self._bench.keep(self._first_step(turn, couplet, None))
        self._bench.present(_after(turn), checkpoint)

    # -- trust, and what may be asked next ---------------------------------------------------------

    def _ponder(self, turn: Turn, answer: Answer) -> None:
        place, key = _after(turn), turn.after.key
        here = replace(place, session=turn.here)
        task = self._task(turn, answer)
        self._agenda.left(key, place.space)
        if answer.tier == "none" and answer.couplet.held:
            couplet = replace(answer.couplet, frames=answer.frames)
            self._scorer.submit(here, couplet, task, key, place.space)
        elif not answer.exact and self._random.random() < self._config.error_samples:
            self._background.submit(
                Urgency.LATER, lambda checkpoint: self._check(here, turn, answer, checkpoint)
            )
        if self._config.prefetch and not turn.request.end:
            self._foresight.follow(place, turn, task, key)

    def _task(self, turn: Turn, answer: Answer) -> str:
        """The operation that is going on, as the caller says or the model is sure of; else ''.

        After a miss, its templates are asked for.
        """
        if answer.tier != "none":
            return turn.request.task
        confidence = self._bench.model.confidence(answer.states)
        task = turn.request.task or self._bench.model.operation(answer.states)
        self._templates.missed(task, 1.0 if turn.request.task else confidence)
        return task if turn.request.task or self._templates.sure(confidence) else ""

    def _check(self, place: Place, turn: Turn, answer: Answer, checkpoint: Checkpoint) -> None:
        """How far an approximate answer was from the truth."""
        present = self._bench.present(place, checkpoint)
        checkpoint()
        plan = RolloutInput(present.memory, present.tokens, turn.plan, place.conditioning)
        [out] = self._bench.model.rollout([plan], checkpoint)
        scale = self._bench.model.spec.state_scale
        error = float(relative_error(answer.states, out.states, scale))
        self._on_event(HitError(error, answer.bound))


def _after(turn: Turn) -> Place:
    """Where the session is after a turn, and what it asks there."""
    return Place(
        session=turn.after,
        conditioning=turn.conditioning,
        horizon=len(turn.plan),
        seed=turn.request.seed,
        rendering=turn.request.rendering,
        with_frames="PREDICTED_FRAMES" in turn.request.outputs,
    )
