"""How a couplet comes by its trust: from a neighbour, from the past, or from probes of its own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctrlcache.admission import Admission
from ctrlcache.couplet import Couplet
from ctrlcache.key import space_id
from ctrlcache.metrics import Scored, Sink, ignore
from ctrlcache.scores import Scores, probe_controls, scores_from_probes
from ctrlcache.templates import lineage
from worldserve.agenda import Agenda, Work
from worldserve.background import Background, Urgency
from worldserve.cold import TaskTemplates
from worldserve.drawing import Drawing, slope_id, token_slope
from worldserve.inheritance import Inheritance
from worldserve.models.protocol import Checkpoint, Float, Rendering, RolloutInput, WorldModel
from worldserve.recall import Made, Present, Recall
from worldserve.rendering import marked
from worldserve.session import Session

__all__ = ["Bench", "Helpers", "Keeper", "Place", "Scorer", "ThinkingConfig"]


class Keeper(Protocol):
    """What thinking time needs of `ctrlcache.tiered.CoupletCache`."""

    def admit(self, couplet: Couplet, scores: Scores | None = None) -> Admission: ...
    def fetch(self, id: bytes, fields: Iterable[str]) -> Couplet | None: ...
    def trusted_near(
        self, space: bytes, control: Float, fields: Iterable[str] = ()
    ) -> list[Couplet]: ...
    def get_blob(self, id: bytes) -> NDArray[Any] | None: ...
    def put_blob(
        self, id: bytes, array: NDArray[Any], cost_ms: float = 0.0, flush: bool = True
    ) -> None: ...


class Helpers(Protocol):
    """What scoring needs of `worldserve.siblings.Siblings`."""

    def idle(self) -> bool: ...
    def ask(self, place: Place, couplet: bytes, lineage: str) -> Work: ...


@dataclass(frozen=True)
class ThinkingConfig:
    """probe_radius: of scoring probes. rho_max: from calibration.

    think: score couplets at all. prefetch: predict along the hand's motion. keep_probes: probes are
    couplets of their own. error_samples: share of approximate answers that are computed afterwards.
    """

    think: bool = True
    probe_radius: float = 0.1
    rho_max: float = 1.0
    prefetch: bool = True
    keep_probes: bool = False
    error_samples: float = 0.02


@dataclass(frozen=True, eq=False)
class Place:
    """Where something is predicted: a session's present, and what a prediction needs beside."""

    session: Session
    conditioning: Any
    horizon: int
    seed: int
    with_frames: bool
    rendering: Rendering = field(default_factory=Rendering)

    @property
    def space(self) -> bytes:
        return self._space(self.session.context)

    def space_before(self, frames: int) -> bytes:
        """The space of the same question, asked some frames earlier."""
        context = self.session.context_at(self.session.present - frames)
        return self._space(context)

    def _space(self, context: bytes) -> bytes:
        return marked(space_id(context, self.horizon, self.seed), self.rendering)


class Bench:
    """Exact work at a place: its present, and rollouts from there."""

    def __init__(self, model: WorldModel, keeper: Keeper, recall: Recall, batch: int) -> None:
        self.model = model
        self.keeper = keeper
        self.recall = recall
        self._batch = batch

    def keep(self, made: Sequence[Made]) -> None:
        for item in made:
            self.keeper.put_blob(item.id, item.array, item.cost_ms)

    def present(self, place: Place, checkpoint: Checkpoint) -> Present:
        """The present of a place, computed exactly where it is not known."""
        present, made = self.recall.present(
            place.session, place.conditioning, checkpoint=checkpoint
        )
        self.keep(made)
        return present

    def roll(self, place: Place, controls: Float, checkpoint: Checkpoint) -> list[Couplet]:
        """Exact couplets for held `controls` (M, C), in small batches."""
        present = self.present(place, checkpoint)
        made: list[Couplet] = []
        for first in range(0, len(controls), self._batch):
            checkpoint()
            plans = [
                np.repeat(control[None], place.horizon, axis=0)
                for control in controls[first : first + self._batch]
            ]
            began = time.perf_counter()
            inputs = [
                RolloutInput(present.memory, present.tokens, plan, place.conditioning)
                for plan in plans
            ]
            outputs = self.model.rollout(inputs, checkpoint)
            cost_ms = (time.perf_counter() - began) * 1e3 / len(plans)
            made += [
                Couplet(
                    space=place.space,
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


class Scorer:
    """Gives couplets a radius, at once where another one's trust can be taken over, else when there
    is time for probes."""

    def __init__(
        self,
        bench: Bench,
        background: Background,
        agenda: Agenda,
        config: ThinkingConfig,
        templates: TaskTemplates,
        inheritance: Inheritance,
        drawing: Drawing,
        on_event: Sink = ignore,
    ) -> None:
        #: Other instances, which may have time when this one has none.
        self.helpers: Helpers | None = None
        self._bench = bench
        self._keeper = bench.keeper
        self._background = background
        self._agenda = agenda
        self._config = config
        self._templates = templates
        self._inheritance = inheritance
        self._drawing = drawing
        self._on_event = on_event

    def submit(self, place: Place, couplet: Couplet, task: str, key: bytes, now_in: bytes) -> None:
        """Give an exact couplet of `place` a radius. key: of its session, which is in the space
        `now_in` now."""
        # What one tenant does is never distilled into templates that others see.
        named = lineage("session", "" if place.session.tenant else task)
        couplet = replace(couplet, lineage=named)
        if self._trusted_by_neighbour(couplet):
            return
        if self._agenda.covers(couplet.space, couplet.control):
            return  # a neighbour's probes are on their way: they answer for these surroundings too
        reach = max(self._trusted_by_past(place, couplet), self._trusted_by_task(couplet, task))
        # Nothing hurries in a context that was left, or where what was taken over goes far enough.
        hurry = couplet.space == now_in and reach < self._config.probe_radius
        if hurry and self.helpers is not None and self.helpers.idle():
            errand = self.helpers.ask(place, couplet.id, couplet.lineage)
            self._agenda.add(key, couplet.space, couplet.control, errand)
            return
        handle = self._background.submit(
            Urgency.SCORE if hurry else Urgency.LATER,
            lambda checkpoint: self._probe(place, couplet, checkpoint),
        )
        self._agenda.add(key, couplet.space, couplet.control, handle)

    def probe_for(
        self, place: Place, couplet_id: bytes, lineage: str, checkpoint: Checkpoint
    ) -> None:
        """Probe around a couplet that another instance has computed."""
        fields = ("tokens", "slice", "frames")
        couplet = self._keeper.fetch(couplet_id, fields)
        if couplet is not None and not couplet.lossy:
            self._probe(place, replace(couplet, lineage=lineage), checkpoint)

    def _trusted_by_neighbour(self, couplet: Couplet) -> bool:
        """Admit a couplet with the trust of a scored one in its context; whether there is one."""
        near = self._keeper.trusted_near(couplet.space, couplet.control, ("jacobian",))
        inherited = self._inheritance.from_neighbour(near, couplet)
        if inherited is not None:
            self._keeper.admit(inherited)
        return inherited is not None

    def _trusted_by_past(self, place: Place, couplet: Couplet) -> float:
        """Admit a couplet with what is left of the trust of one some frames before; its radius."""
        session, generations = place.session, self._inheritance.generations
        for frames in range(1, min(generations, session.present - session.first) + 1):
            space = place.space_before(frames)
            scored = self._keeper.trusted_near(space, couplet.control, ("jacobian",))
            inherited = self._inheritance.from_past(scored, couplet, frames)
            if inherited is not None:
                self._drawing.borrow(couplet.id, scored, frames)
                self._keeper.admit(inherited)
                return inherited.radius
        return 0.0

    def _trusted_by_task(self, couplet: Couplet, task: str) -> float:
        """Admit a couplet with the trust of a template that has foretold it; its radius."""
        adopted = self._templates.adopted(task, couplet)
        if adopted is None:
            return 0.0
        self._keeper.admit(adopted)
        return adopted.radius

    def _probe(self, place: Place, couplet: Couplet, checkpoint: Checkpoint) -> None:
        """Probe around a couplet, and let the policy decide with what comes of it."""
        began = time.perf_counter()
        probes = probe_controls(couplet.control, self._config.probe_radius)
        around = self._bench.roll(place, probes, checkpoint)
        self._on_event(Scored("probe", time.perf_counter() - began))
        scores = scores_from_probes(
            couplet.states,
            couplet.control,
            np.stack([probe.states for probe in around]),
            probes,
            self._bench.model.spec.state_scale,
            self._config.rho_max,
        )
        self._keeper.admit(couplet, scores)
        if couplet.tokens is not None and np.isfinite(scores.curvature):
            tokens = [probe.tokens for probe in around if probe.tokens is not None]
            slope = token_slope(couplet.tokens, couplet.control, probes, tokens)
            cost_ms = sum(probe.cost_ms for probe in around)
            # Large, and worth little once its session is over: not for the disk.
            self._keeper.put_blob(slope_id(couplet.id), slope, cost_ms, flush=False)
        if self._config.keep_probes:
            for probe in around:
                self._keeper.admit(replace(probe, tokens=None, slice=None))
