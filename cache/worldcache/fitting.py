"""Fitting a calibration of step reuse to a generator, whatever it is.

A `Subject` generates; everything else is done here, on cases that nobody was trained on.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worldcache.content import Content, Rung, ladder_of
from worldcache.policies import Schedule, thresholds
from worldcache.reuse_calibration import Knob, StepTable, make, peak_quantile
from worldcache.steps import Policy, Reuses

__all__ = ["Run", "Subject", "fit_table", "rmse_levels"]

#: Activity, in grey levels, that every chunk is taken to have at least.
LEAST_ACTIVITY = 0.5
_BEAM, _CHOSEN_ON = 2, 6
_CONTENT_BOUNDS = tuple(float(bound) for bound in range(10, 71, 2))


class Run(Protocol):
    """One generation: frames (M, ...) scaled to 8-bit levels, what was skipped, activities (M,)."""

    @property
    def frames(self) -> NDArray[Any]: ...
    @property
    def skipped(self) -> float: ...
    @property
    def activity(self) -> NDArray[np.float64]: ...


class Subject(Protocol):
    """A generator under test, for a fixed number of steps."""

    @property
    def steps(self) -> int: ...

    def outputs(self, case: int, reuses: Reuses) -> Sequence[Tensor]:
        """What would be reused, from each step of an undisturbed generation (M, ...)."""
        ...

    def run(self, case: int, policy: Policy) -> Run: ...


def rmse_levels(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """Root mean square error of each chunk (M,) in the unit of the frames."""
    error = (a.astype(np.float64) - b).reshape(len(a), -1)
    rmse: NDArray[np.float64] = np.sqrt(np.square(error).mean(1))
    return rmse


def fit_table(
    subject: Subject,
    cases: int,
    policies: Sequence[str] = ("teacache", "easycache", "control", "chunk"),
    reuses: Sequence[Reuses] = ("step",),
    delta: float = 0.05,
    advance: Callable[[], None] = lambda: None,
) -> StepTable:
    """Everything that is calibrated for the subject's number of steps. reuses: what `content` may
    reuse; the one that errs least is taken."""
    truths = [subject.run(case, make("none", 0)) for case in range(cases)]
    few = truths[: min(cases, _CHOSEN_ON)]
    tried = [_Family(subject, what, fit_slopes(subject, cases, what)) for what in reuses]
    best = tried[0]
    if len(tried) > 1:
        middle = (*range(0, subject.steps - 1, 2), subject.steps - 1)
        best = min(tried, key=lambda family: family.error(middle, few))
    advance()
    rungs: list[Rung] = []
    errors: dict[tuple[int, ...], NDArray[np.float64]] = {}
    activity = np.concatenate([run.activity for run in truths])
    reference = float(np.median(activity))
    for steps in _schedules(best, few):
        errors[steps] = best.errors(steps, truths)
        # One rank further than the plain quantile: split-conformal, valid for finite samples.
        flat = np.sort(errors[steps] / (activity + LEAST_ACTIVITY))
        rank = min(int(np.ceil((1 - delta) * (len(flat) + 1))), len(flat)) - 1
        rungs.append(Rung(steps, float(flat[rank]), float(flat[rank]) * LEAST_ACTIVITY))
        advance()
    knobs = {}
    for name in policies:
        knobs[name] = tuple(
            _knob(subject, truths, name, value, delta) for value in thresholds(name)
        )
        advance()
    ladder = ladder_of(rungs, subject.steps, reference)
    knobs["content"] = _content_knobs(ladder, errors, activity, subject.steps, delta)
    return StepTable(knobs, ladder, best.slopes, best.reuses)


def fit_slopes(
    subject: Subject, cases: int, reuses: Reuses = "step"
) -> dict[tuple[int, int, int], float]:
    """By least squares: how far outputs go on from two earlier ones, along their difference."""
    above: dict[tuple[int, int, int], float] = defaultdict(float)
    below: dict[tuple[int, int, int], float] = defaultdict(float)
    for case in range(cases):
        outputs = subject.outputs(case, reuses)
        for a, b in itertools.combinations(range(len(outputs) - 1), 2):
            apart = outputs[b] - outputs[a]
            size = float(apart.square().sum())
            for step in range(b + 1, len(outputs)):
                above[a, b, step] += float((apart * (outputs[step] - outputs[b])).sum())
                below[a, b, step] += size
    return {key: float(np.clip(above[key] / max(below[key], 1e-12), 0, 2)) for key in above}


@dataclass(frozen=True, eq=False)
class _Family:
    """Schedules that reuse one kind of thing."""

    subject: Subject
    reuses: Reuses
    slopes: dict[tuple[int, int, int], float]

    def policy(self, steps: tuple[int, ...]) -> Schedule:
        return Schedule(steps=(steps,), slopes=tuple(self.slopes.items()), reuses=self.reuses)

    def error(self, steps: tuple[int, ...], truths: Sequence[Run]) -> float:
        """Mean logarithm of the errors that a schedule makes."""
        return float(np.log(self.errors(steps, truths) + 1e-2).mean())

    def errors(self, steps: tuple[int, ...], truths: Sequence[Run]) -> NDArray[np.float64]:
        """Of every chunk of every case, root mean square in 8-bit levels."""
        made = [
            rmse_levels(self.subject.run(case, self.policy(steps)).frames, truth.frames)
            for case, truth in enumerate(truths)
        ]
        return np.concatenate(made)


def _schedules(family: _Family, truths: Sequence[Run]) -> list[tuple[int, ...]]:
    """The best schedules of each length, grown step by step from first and last."""
    subject = family.subject
    last = subject.steps - 1
    beam: list[tuple[int, ...]] = [(0, last)]
    found = list(beam)
    while len(beam[0]) < subject.steps - 1 and len(beam[0]) < 10:
        grown = {
            tuple(sorted((*steps, extra)))
            for steps in beam
            for extra in range(1, last)
            if extra not in steps
        }
        scored = [(family.error(steps, truths), steps) for steps in grown]
        beam = [steps for _, steps in sorted(scored)[:_BEAM]]
        found += beam
    return found


def _content_knobs(
    ladder: Sequence[Rung],
    errors: Mapping[tuple[int, ...], NDArray[np.float64]],
    activity: NDArray[np.float64],
    steps: int,
    delta: float,
) -> tuple[Knob, ...]:
    """What bounds on single chunks give over all chunks; every chunk's error on every rung is
    known, so nothing has to be generated for it."""
    knobs = []
    for bound in _CONTENT_BOUNDS:
        policy = Content(ladder=tuple(ladder), quality_db=bound)
        chosen = [policy.rung(float(each)) for each in activity]
        levels = np.array(
            [0.0 if rung is None else errors[rung.steps][at] for at, rung in enumerate(chosen)]
        )
        skipped = [0.0 if rung is None else 1 - len(rung.steps) / steps for rung in chosen]
        kept, mean = peak_quantile(levels, delta)
        knobs.append(Knob(bound, kept, mean, float(np.mean(skipped))))
    return tuple(knobs)


def _knob(subject: Subject, truths: Sequence[Run], name: str, value: float, delta: float) -> Knob:
    levels, skipped = [], []
    for case, truth in enumerate(truths):
        run = subject.run(case, make(name, value))
        levels.append(rmse_levels(run.frames, truth.frames))
        skipped.append(run.skipped)
    kept, mean = peak_quantile(np.concatenate(levels), delta)
    return Knob(value, kept, mean, float(np.mean(skipped)))
