"""What a model predicts around a control: the raw material of calibration and of the adapter.

Clips are walked through once: their frames are absorbed into the model's memory as a session would
do it, and at some positions the model is asked what it predicts under a control, under the scoring
probes around it, and under other controls nearby.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctrlcache.scores import Scores, probe_controls, scores_from_probes
from ctrlcache.transfer import Migration
from worldserve.models.protocol import Float, Pixels, RolloutInput, RolloutOutput, WorldModel

__all__ = [
    "ClipLike",
    "Neighbourhood",
    "Present",
    "Sampling",
    "around",
    "neighbourhood",
    "presents",
]


class ClipLike(Protocol):
    """One recorded episode: frames (T, h, w, 3) uint8, controls (T - 1, C) in [-1, 1]."""

    @property
    def frames(self) -> Pixels: ...
    @property
    def controls(self) -> Float: ...
    @property
    def prompt(self) -> str: ...
    @property
    def view(self) -> str: ...
    @property
    def operation(self) -> str: ...


@dataclass(frozen=True)
class Present:
    """A point of a clip at which the model can be asked; `memory` is of what came before.

    position: frame number in the clip. tokens (N, D) and frame (h, w, 3) of the present frame.
    control (C,): what was done next. frames_after, controls_after: what came of it, and what was
    done there, for as many frames as the horizon has.
    """

    position: int
    memory: Any
    tokens: Float
    frame: Pixels
    control: Float
    conditioning: Any
    operation: str
    frames_after: Pixels = field(default_factory=lambda: np.zeros((0, 1, 1, 3), np.uint8))
    controls_after: Float = field(default_factory=lambda: np.zeros((0, 1), np.float32))


@dataclass(frozen=True)
class Sampling:
    """How neighbours are drawn: distances log-uniform between `nearest` and `farthest`.

    `distances`, where given, takes the place of `queries` drawn ones. Without probe radii,
    predictions are made but couplets cannot be scored.
    """

    horizon: int = 8
    queries: int = 8
    probe_radii: tuple[float, ...] = (0.05,)
    nearest: float = 0.005
    farthest: float = 0.5
    distances: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.horizon < 1 or self.queries < 1:
            raise ValueError("horizon >= 1 and queries >= 1 are needed")
        if not 0 < self.nearest < self.farthest <= 1:
            raise ValueError(
                f"0 < nearest < farthest <= 1 is needed, got {self.nearest}, {self.farthest}"
            )


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """Predictions at one present: H steps, S state dimensions, C control axes, m queries.

    own: at `control` (C,). probes: per probe radius, controls (2 C, C) and states (2 C, H, S).
    query_controls (m, C); answers: the model's own outputs for them.
    """

    present: Present
    control: Float
    own: RolloutOutput
    probes: dict[float, tuple[Float, Float]]
    query_controls: Float
    answers: list[RolloutOutput]

    @property
    def distances(self) -> NDArray[np.float64]:
        """(m,) Euclidean."""
        away = self.query_controls.astype(np.float64) - self.control
        distances: NDArray[np.float64] = np.linalg.norm(away, axis=-1)
        return distances

    @property
    def truths(self) -> Float:
        """(m, H, S)."""
        return np.stack([a.states for a in self.answers])

    def scores(self, radius: float, scale: Float, migration: Migration | None = None) -> Scores:
        """What the couplet at `control` is scored with, by the probes at `radius`."""
        controls, states = self.probes[radius]
        return scores_from_probes(
            self.own.states, self.control, states, controls, scale, migration=migration
        )


def presents(
    model: WorldModel,
    clips: Iterable[ClipLike],
    per_clip: int,
    rng: np.random.Generator,
    horizon: int,
) -> Iterator[Present]:
    """`per_clip` points of each clip, in order, one at random in each of as many equal stretches.

    Prompts are given for every other clip: sessions come with and without.
    """
    for number, clip in enumerate(clips):
        prompt = clip.prompt if number % 2 == 0 else ""
        conditioning, _ = model.condition(prompt, clip.view)
        last = max(len(clip.frames) - horizon, 1)
        edges = np.linspace(0, last, min(per_clip, last) + 1)
        chosen = [int(rng.integers(int(a), max(int(b), int(a) + 1))) for a, b in _pairs(edges)]
        tokens = model.embed(clip.frames[: chosen[-1] + 1])
        memory, position = model.assemble([], 0), 0
        for at in chosen:
            if at > position:
                steps = slice(position, at)
                memory = model.absorb(
                    memory, tokens[steps], clip.controls[steps], conditioning
                ).memory
                position = at
            yield Present(
                at,
                memory,
                tokens[at],
                clip.frames[at],
                clip.controls[at],
                conditioning,
                clip.operation,
                clip.frames[at + 1 : at + 1 + horizon],
                clip.controls[at + 1 : at + 1 + horizon],
            )


def neighbourhood(
    model: WorldModel,
    present: Present,
    rng: np.random.Generator,
    sampling: Sampling,
    control: Float | None = None,
) -> Neighbourhood:
    """Ask the model around `control`; without one, every other time around the one that was really
    applied, else anywhere."""
    axes = model.spec.control_dim
    if control is None:
        real = rng.random() < 0.5
        control = present.control if real else rng.uniform(-1, 1, axes).astype(np.float32)
    control = np.clip(control, -1, 1).astype(np.float32)
    queries = around(control, rng, sampling)
    probes = {r: probe_controls(control, r) for r in sampling.probe_radii}
    asked = np.concatenate([control[None], queries, *probes.values()])  # (1 + m + 2 C n, C)
    made = model.rollout(
        [
            RolloutInput(
                present.memory,
                present.tokens,
                np.repeat(c[None], sampling.horizon, axis=0),
                present.conditioning,
            )
            for c in asked
        ]
    )
    states = np.stack([out.states for out in made])
    first = 1 + len(queries)
    probed = {
        r: (controls, states[first + i * 2 * axes : first + (i + 1) * 2 * axes])
        for i, (r, controls) in enumerate(probes.items())
    }
    return Neighbourhood(present, control, made[0], probed, queries, made[1:first])


def around(control: Float, rng: np.random.Generator, sampling: Sampling) -> Float:
    """Query controls (m, C) at drawn distances; half of them differ along some axes only."""
    axes = control.size
    drawn = rng.uniform(np.log(sampling.nearest), np.log(sampling.farthest), sampling.queries)
    distance = np.array(sampling.distances) if sampling.distances else np.exp(drawn)
    m = distance.size
    direction = rng.normal(size=(m, axes))
    sparse = rng.random((m, axes)) < 0.5
    sparse[np.arange(m), rng.integers(axes, size=m)] = False  # one axis moves at least
    direction[(rng.random(m) < 0.5)[:, None] & sparse] = 0
    step = distance[:, None] * direction / np.linalg.norm(direction, axis=1, keepdims=True)
    outside = np.abs(control + step) > 1
    queries: Float = (control + np.where(outside, -step, step)).astype(np.float32)
    return np.clip(queries, -1, 1)


def _pairs(edges: NDArray[np.float64]) -> Iterator[tuple[float, float]]:
    yield from zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
