"""What the demo found: figures for its summary, and the faults that make it fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ctrlcache.scores import relative_error
from worldserve.demo_script import HORIZON, Interaction, Scene
from worldserve.sequence_client import Reply

__all__ = ["Percentiles", "Played", "Step", "Summary", "summarise"]

#: A stated bound holds for 19 uses of 20; an error of more than this many times the bound is wrong.
_FAR_OVER = 3.0


@dataclass(frozen=True, eq=False)
class Step:
    """One interaction, as the cached session and its twin without a cache answered it."""

    interaction: Interaction
    cached: Reply
    plain: Reply


@dataclass(eq=False)
class Played:
    """A scene played through. last: the same question to both sessions in the end, cache off.

    second: the same clip opened once more, by a session of its own.
    """

    scene: Scene
    steps: list[Step] = field(default_factory=list)
    last: tuple[Reply, Reply] | None = None
    second: Reply | None = None


@dataclass(frozen=True)
class Percentiles:
    p50_ms: float
    p99_ms: float
    total_ms: float

    @classmethod
    def of(cls, answers: Sequence[Reply]) -> Percentiles:
        took = [answer.latency_ms for answer in answers]
        return cls(
            float(np.percentile(took, 50)), float(np.percentile(took, 99)), float(np.sum(took))
        )


@dataclass(frozen=True)
class Summary:
    """exact: answers that said so, exact_same: those that equal cache=off to the last bit.

    memory_same: scenes after which both sessions remember the same. errors, bounds: of the
    approximate answers, in order. psnr_db: predicted frames of the next 0.8 s against the clip's.
    """

    interactions: int
    cached: Percentiles
    plain: Percentiles
    tiers: dict[str, int]
    exact: int
    exact_same: int
    memory_same: int
    errors: tuple[float, ...]
    bounds: tuple[float, ...]
    encode_first_ms: tuple[float, ...]
    encode_second_ms: tuple[float, ...]
    psnr_db: float
    psnr_copy_db: float
    faults: tuple[str, ...]

    @property
    def over_bound(self) -> int:
        return sum(e > b for e, b in zip(self.errors, self.bounds, strict=True))


def summarise(played: Sequence[Played], scale: NDArray[np.float32]) -> Summary:
    """scale (S,): the model's `state_scale`, in which state errors are measured."""
    steps = [step for scene in played for step in scene.steps]
    approximate = [step for step in steps if not step.cached.exact]
    replayed = [(p.scene, s) for p in played for s in p.steps if s.interaction.kind == "replay"]
    truths = [scene.frames[s.interaction.truth :][:HORIZON] for scene, s in replayed]
    presents = [scene.frames[scene.present][None] for scene, _ in replayed]
    return Summary(
        interactions=len(steps),
        cached=Percentiles.of([step.cached for step in steps]),
        plain=Percentiles.of([step.plain for step in steps]),
        tiers=dict(Counter(step.cached.tier for step in steps)),
        exact=len(steps) - len(approximate),
        exact_same=sum(step.cached.exact and _same(step.cached, step.plain) for step in steps),
        memory_same=sum(p.last is not None and _same(*p.last) for p in played),
        errors=tuple(
            float(relative_error(step.cached.states, step.plain.states, scale))
            for step in approximate
        ),
        bounds=tuple(step.cached.bound for step in approximate),
        encode_first_ms=tuple(p.steps[0].cached.stage_ms("encode") for p in played if p.steps),
        encode_second_ms=tuple(p.second.stage_ms("encode") for p in played if p.second),
        psnr_db=_mean_psnr([s.cached.frames for _, s in replayed], truths),
        psnr_copy_db=_mean_psnr(presents, truths),
        faults=tuple(fault for scene in played for fault in _faults(scene, scale)),
    )


def _faults(played: Played, scale: NDArray[np.float32]) -> list[str]:
    faults = []
    for number, step in enumerate(played.steps, 1):
        where = f"{played.scene.name}, interaction {number} ({step.interaction.kind})"
        for name, answer in (("cached", step.cached), ("cache=off", step.plain)):
            faults += [f"{where}, {name}: {what}" for what in _incomplete(answer, played.scene)]
        if step.plain.tier != "none" or not step.plain.exact:
            faults.append(f"{where}: cache=off was answered from the cache ({step.plain.tier})")
        if step.cached.exact:
            # Frames and states, as an exact answer promises: to the last bit.
            if not _same(step.cached, step.plain):
                faults.append(f"{where}: said to be exact, yet differs from cache=off")
            continue
        error = float(relative_error(step.cached.states, step.plain.states, scale))
        if not error <= _FAR_OVER * step.cached.bound:
            faults.append(
                f"{where}: error {error:.4f} is far over the bound {step.cached.bound:.4f}"
            )
    if played.last is None or not _same(*played.last):
        faults.append(
            f"{played.scene.name}: the cached session's memory differs from that of cache=off"
        )
    if played.second is None or not _same(played.second, played.steps[0].plain):
        faults.append(f"{played.scene.name}: a second session on the clip sees something else")
    return faults


def _incomplete(answer: Reply, scene: Scene) -> list[str]:
    faults = []
    if answer.frames is None or len(answer.frames) != HORIZON:
        faults.append("predicted frames are missing")
    elif answer.frames.shape[1:] != scene.frames.shape[1:]:
        faults.append(f"predicted frames have shape {answer.frames.shape}")
    elif int(answer.frames.max()) == int(answer.frames.min()):
        faults.append("predicted frames are blank")
    if answer.states is None or len(answer.states) != HORIZON:
        faults.append("predicted states are missing")
    elif not np.isfinite(answer.states).all():
        faults.append("predicted states are not finite")
    return faults


def _same(one: Reply, other: Reply) -> bool:
    return np.array_equal(one.states, other.states) and np.array_equal(one.frames, other.frames)


def _mean_psnr(made: Sequence[NDArray[np.uint8]], truths: Sequence[NDArray[np.uint8]]) -> float:
    """Of the mean squared error over all frames."""
    errors = [np.square(m.astype(np.float64) - t).mean() for m, t in zip(made, truths, strict=True)]
    return float(10 * np.log10(255**2 / max(float(np.mean(errors)), 1e-9))) if errors else np.nan
