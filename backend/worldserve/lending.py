"""What becomes of probes as a session moves on: raw material for `ctrlcache.lending`.

A couplet is probed in a context, and the context moves on: by what was really seen, every other
time, else by what the model predicts while the control drifts. At every age, exact answers around
the hand are compared with what the old slope makes of the exact answer at the hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctrlcache.calibration import TrustModel
from ctrlcache.conformal import BUDGETS, Pairs
from ctrlcache.errors import CalibrationError
from ctrlcache.scores import Scores, probe_controls, relative_error, scores_from_probes
from ctrlcache.transfer import Migration
from worldserve.drawing import token_slope
from worldserve.models.protocol import Float, Pixels, RolloutInput, RolloutOutput, WorldModel
from worldserve.neighbourhood import ClipLike, Present, Sampling, around, presents

__all__ = ["AGEING", "collect_ages", "psnr_db"]

#: Distances of queries from the hand: as for the bound itself, as far as anything is lent.
AGEING = Sampling(queries=4, nearest=0.005, farthest=0.4)
_DRIFT = 0.05  # of the control, from frame to frame
_AWAY = 0.1  # of the hand from where it drifted, at most
_PER_CLIP = 8


def psnr_db(a: Pixels, b: Pixels) -> NDArray[np.float64]:
    """Peak signal-to-noise ratio of frames (..., h, w, 3) in dB; identical frames count as 99."""
    difference = a.astype(np.float64) - b
    mse = np.square(difference).mean(axis=(-3, -2, -1))
    ratio: NDArray[np.float64] = 10 * np.log10(255**2 / np.maximum(mse, 1e-12))
    return np.minimum(ratio, 99.0)


@dataclass(frozen=True, eq=False)
class _Stage:
    """A context at some age of the probes, and where the hand is there."""

    memory: Any
    tokens: Float
    frame: Pixels
    control: Float


def collect_ages(
    model: WorldModel,
    clips: Iterable[ClipLike],
    contexts: int,
    trust: TrustModel,
    migration: Migration,
    *,
    ages: int = 3,
    sampling: Sampling = AGEING,
    drawn: int = 2,
    families: Mapping[str, str] = MappingProxyType({}),
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> list[Pairs]:
    """Pairs by age of their scores in frames, 0 to `ages`, from up to `contexts` contexts.

    trust: what is beyond the radius of a couplet, counted from where it was probed, is left out, as
    nothing is lent there. drawn: in each context and age, frames are drawn for so many queries.
    families: of a clip by its operation.
    """
    rng = np.random.default_rng(seed)
    parts: list[list[Pairs]] = [[] for _ in range(ages + 1)]
    points = presents(model, clips, _PER_CLIP, rng, sampling.horizon)
    for number, present in enumerate(itertools.islice(points, contexts)):
        observed = number % 2 == 0
        control = present.control if observed else rng.uniform(-1, 1, present.control.size)
        control = np.clip(control, -1, 1).astype(np.float32)
        probed = _Probed(model, present, control, trust, sampling, migration)
        for age, stage in enumerate(_stages(model, present, control, ages, observed, rng)):
            queries = probed.within(stage, around(stage.control, rng, sampling))
            if len(queries):
                pairs = probed.pairs(stage, number, queries, drawn)
                family = np.full(len(pairs), families.get(present.operation, ""))
                parts[age].append(replace(pairs, family=family))
        advance()
    if not parts[0]:
        raise CalibrationError("there are no clips to calibrate on")
    return [Pairs.join(made) for made in itertools.takewhile(len, parts)]


def _stages(
    model: WorldModel,
    present: Present,
    control: Float,
    ages: int,
    observed: bool,
    rng: np.random.Generator,
) -> Iterator[_Stage]:
    memory, tokens, frame = present.memory, present.tokens, present.frame
    yield _Stage(memory, tokens, frame, control)
    drift = _direction(control.size, rng) * _DRIFT
    for age in range(min(ages, len(present.controls_after))):
        out = model.absorb(memory, tokens[None], control[None], present.conditioning)
        memory, tokens = out.memory, out.predicted_tokens
        if observed:
            frame = present.frames_after[age]
            [tokens] = model.embed(frame[None])
            control = np.clip(present.controls_after[age], -1, 1).astype(np.float32)
        else:
            control = np.clip(control + drift, -1, 1).astype(np.float32)
        hand = control + rng.uniform(0, _AWAY) * _direction(control.size, rng)
        yield _Stage(memory, tokens, frame, np.clip(hand, -1, 1).astype(np.float32))


def _direction(axes: int, rng: np.random.Generator) -> Float:
    drawn = rng.normal(size=axes)
    unit: Float = (drawn / np.linalg.norm(drawn)).astype(np.float32)
    return unit


class _Probed:
    """What probes around `control` at `present` have shown, and how it fares elsewhere."""

    def __init__(
        self,
        model: WorldModel,
        present: Present,
        control: Float,
        trust: TrustModel,
        sampling: Sampling,
        migration: Migration,
    ) -> None:
        self._model, self._conditioning = model, present.conditioning
        self._horizon, self._migration = sampling.horizon, migration
        self._control = control
        probes = probe_controls(control, trust.probe_radius)
        own, *others = self._ask(_Stage(present.memory, present.tokens, present.frame, control),
                                 np.concatenate([control[None], probes]))  # fmt: skip
        self._scores: Scores = scores_from_probes(
            own.states,
            control,
            np.stack([out.states for out in others]),
            probes,
            model.spec.state_scale,
            migration=migration,
        )
        self._radius = trust.radius(self._scores.curvature, max(BUDGETS))
        self._slope = token_slope(own.tokens, control, probes, [out.tokens for out in others])

    def _ask(self, stage: _Stage, controls: Float) -> list[RolloutOutput]:
        plans = [np.repeat(control[None], self._horizon, axis=0) for control in controls]
        return self._model.rollout(
            [RolloutInput(stage.memory, stage.tokens, plan, self._conditioning) for plan in plans]
        )

    def within(self, stage: _Stage, queries: Float) -> Float:
        """Those of the queries at a stage for which the slope may be used at all."""
        away = float(np.linalg.norm(stage.control - self._control))
        within: Float = queries[
            np.linalg.norm(queries - stage.control, axis=-1) <= self._radius - away
        ]
        return within

    def pairs(self, stage: _Stage, context: int, queries: Float, drawn: int) -> Pairs:
        """An exact answer at the stage, moved to `queries` (m, C) there with what was probed; for
        the first `drawn` of them frames are drawn, too."""
        scores = self._scores
        m = len(queries)
        own, *truths = self._ask(stage, np.concatenate([stage.control[None], queries]))
        states = np.stack([t.states for t in truths])
        moved = self._migration.migrate(own.states, scores.jacobian, stage.control, queries)
        steps = queries - stage.control
        squared = np.square(steps.astype(np.float64))
        psnr = np.full(m, np.nan)
        if drawn:
            tokens = [own.tokens + self._slope.astype(np.float32) @ s for s in steps[:drawn]]
            shown = self._draw(stage, tokens)
            made = self._draw(stage, [t.tokens for t in truths[:drawn]])
            psnr[:drawn] = psnr_db(shown, made).min(axis=-1)
        return Pairs(
            context=np.full(m, context),
            curvature=np.full(m, scores.curvature),
            sensitivity=np.full(m, scores.sensitivity),
            transferability=np.full(m, scores.transferability),
            distance=np.sqrt(squared.sum(axis=-1)),
            main_axis=squared.max(axis=-1) / np.maximum(squared.sum(axis=-1), 1e-30),
            error=relative_error(moved, states, self._model.spec.state_scale),
            psnr_db=psnr,
        )

    def _draw(self, stage: _Stage, tokens: list[Float]) -> Pixels:
        count = len(tokens)
        return np.stack(self._model.generate([stage.frame] * count, tokens, [0] * count))
