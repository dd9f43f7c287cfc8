"""Policies of step reuse: frozen dataclasses that do what `worldcache.steps.Policy` says.

`content` is in `worldcache.content`, because it needs a calibration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from worldcache.steps import Decision, Kind, Measured, Observation, Reuses, State

__all__ = [
    "Always",
    "Chunkwise",
    "Controlled",
    "EasyCache",
    "Plain",
    "Schedule",
    "TeaCache",
    "kinds",
    "thresholds",
]

_NOTHING: frozenset[str] = frozenset()
_STILL = 0.02  # control units: less is a hand at rest
_SUDDEN = 0.25  # control units: more is another motion
_TURN = math.cos(math.radians(30))


def kinds(controls: ArrayLike, before: ArrayLike | None = None, chunk: int = 1) -> tuple[Kind, ...]:
    """The class of each chunk of `chunk` steps from controls (H, C) alone.

    `initial`: the first one, where no control `before` (C,) is known. `transition`: the control
    jumps, or sets out or comes to rest. `turning`: it goes on in another direction. Else `steady`.
    """
    rows = np.asarray(controls, np.float64)
    if rows.ndim != 2 or chunk < 1:
        raise ValueError(f"controls must have shape (H, C) and chunk be positive, got {rows.shape}")
    heads = rows[::chunk]
    previous = None if before is None else np.asarray(before, np.float64)
    moves: list[NDArray[np.float64] | None] = []
    for head in heads:
        moves.append(None if previous is None else head - previous)
        previous = head
    found: list[Kind] = []
    for index, move in enumerate(moves):
        last = moves[index - 1] if index else None
        found.append(_kind(move, last))
    return tuple(found)


def _kind(move: NDArray[np.float64] | None, last: NDArray[np.float64] | None) -> Kind:
    if move is None:
        return "initial"
    speed = float(np.linalg.norm(move))
    pace = 0.0 if last is None else float(np.linalg.norm(last))
    if speed > _SUDDEN:
        return "transition"
    if last is None:
        return "steady"
    if (speed > _STILL) != (pace > _STILL):
        return "transition"
    if speed > _STILL and float(move @ last) < _TURN * speed * pace:
        return "turning"
    return "steady"


@dataclass(frozen=True, slots=True)
class Plain:
    """What most policies share: nothing to sum up, the last output is held."""

    may_skip: frozenset[str] = _NOTHING
    needs: frozenset[str] = _NOTHING

    def follow(self, state: State, seen: Observation, measured: Measured | None) -> State:
        return state

    def slope(self, state: State, seen: Observation) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Always(Plain):
    """Computes every step."""

    name: str = "none"
    reuses: Reuses = "step"

    def decide(self, state: State, seen: Observation) -> Decision:
        return "compute"


@dataclass(frozen=True, slots=True)
class Schedule(Plain):
    """Computes the steps it is given, by chunk where `steps` differ: what an oracle is made of."""

    steps: tuple[tuple[int, ...], ...] = ((),)
    name: str = "schedule"
    reuses: Reuses = "step"
    slopes: tuple[tuple[tuple[int, int, int], float], ...] = ()

    def decide(self, state: State, seen: Observation) -> Decision:
        mine = self.steps[min(seen.chunk, len(self.steps) - 1)]
        return "compute" if seen.step in mine else "reuse"

    def slope(self, state: State, seen: Observation) -> float:
        if len(state.computed) < 2:
            return 0.0
        return dict(self.slopes).get((state.computed[-2], state.computed[-1], seen.step), 0.0)


@dataclass(frozen=True, slots=True)
class TeaCache(Plain):
    """Reuses what the blocks added while the first block's modulated input has hardly changed.

    Relative changes are rescaled by a polynomial, highest power first, and summed up to `threshold`
    (Liu et al., "Timestep Embedding Tells", 2024).
    """

    threshold: float = 0.1
    polynomial: tuple[float, ...] = (1.0, 0.0)
    name: str = "teacache"
    needs: frozenset[str] = frozenset({"modulated"})
    reuses: Reuses = "blocks"

    def decide(self, state: State, seen: Observation) -> Decision:
        return "reuse" if self._drift(state, seen) < self.threshold else "compute"

    def follow(self, state: State, seen: Observation, measured: Measured | None) -> State:
        return replace(state, drift=0.0 if measured else self._drift(state, seen))

    def _drift(self, state: State, seen: Observation) -> float:
        if seen.modulated is None:
            return math.inf
        scaled = 0.0
        for coefficient in self.polynomial:
            scaled = scaled * seen.modulated + coefficient
        return state.drift + abs(scaled)


@dataclass(frozen=True, slots=True)
class EasyCache(Plain):
    """Reuses a step's output while the change that its input promises is small.

    The rate at which the output follows the input is measured between computed steps; rate x motion
    of the input / size of the output is summed up to `threshold` (Zhou et al., "Less is Enough",
    2025). There the difference between output and input is held, here the output itself, which on a
    straight flow is the same velocity, and the better of the two.
    """

    threshold: float = 0.1
    name: str = "easycache"
    needs: frozenset[str] = frozenset({"moved", "measured"})
    reuses: Reuses = "step"

    def decide(self, state: State, seen: Observation) -> Decision:
        return "reuse" if self._drift(state, seen) < self.threshold else "compute"

    def follow(self, state: State, seen: Observation, measured: Measured | None) -> State:
        travelled = state.travelled + seen.moved
        if measured is None:
            return replace(state, drift=self._drift(state, seen), travelled=travelled)
        rate = measured.change / travelled if state.computed and travelled > 0 else state.rate
        return replace(state, drift=0.0, travelled=0.0, rate=rate, size=measured.size)

    def _drift(self, state: State, seen: Observation) -> float:
        if state.rate is None or state.size <= 0:
            return math.inf
        return state.drift + state.rate * seen.moved / state.size


@dataclass(frozen=True, slots=True)
class Controlled(Plain):
    """Looks at the controls alone: in a calm chunk every `period`-th step is computed and the
    others reuse what the blocks added; all steps of any other chunk are computed."""

    period: int = 2
    calm: frozenset[Kind] = frozenset({"steady"})
    name: str = "control"
    reuses: Reuses = "blocks"

    def decide(self, state: State, seen: Observation) -> Decision:
        return "reuse" if seen.kind in self.calm and seen.step % self.period else "compute"


@dataclass(frozen=True, slots=True)
class Chunkwise(Plain):
    """Takes over what the blocks added in an earlier chunk at the same step; every `period`-th
    chunk is computed."""

    period: int = 2
    name: str = "chunk"
    reuses: Reuses = "neighbour"

    def decide(self, state: State, seen: Observation) -> Decision:
        return "reuse" if seen.neighbour and seen.chunk % self.period else "compute"


def thresholds(policy: str) -> Sequence[float]:
    """Settings of a policy's one knob that a calibration tries, the most careful first."""
    known: dict[str, Sequence[float]] = {
        "none": (0.0,),
        "teacache": (0.01, 0.02, 0.04, 0.06, 0.09, 0.13, 0.18, 0.25, 0.35, 0.5, 0.8),
        "easycache": (0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.4, 0.8),
        "control": (2, 3, 4, 5, 6, 8),
        "chunk": (2, 3, 4, 8),
    }
    if policy not in known:
        raise ValueError(f"policy {policy!r} has no knob; known: {', '.join(known)}")
    return known[policy]
