"""What a user does: a seeded model of a hand on a scene, as a list of actions.

A session alternates between episodes. Each is drawn by weight from the suite's `Habits`; within
one, the hand moves as its kind says and rests between two actions. `docs/benchmarks.md` has the
table of parameters. The same clip, habits, user and seed give the same actions, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["HABITS", "HORIZON", "Action", "Clip", "Habits", "act", "opening"]

Controls = NDArray[np.float32]
Pixels = NDArray[np.uint8]

HORIZON = 8
#: Controls reach from -1 to 1; the hand stays a little within, as people do.
_REACH = 0.9


@dataclass(frozen=True, eq=False)
class Clip:
    """A test clip. frames (T, h, w, 3); controls (T - 1, 4), each applied between two frames;
    physics (T, P): the simulator's truth. other: the same moments from another camera, if any.
    number: of the episode in its operation, by which a simulator replays it; -1 where none can.
    """

    name: str
    suite: str
    operation: str
    prompt: str
    frames: Pixels = field(repr=False)
    controls: Controls = field(repr=False)
    physics: Controls = field(repr=False)
    view: str = "front"
    other: Pixels | None = field(default=None, repr=False)
    other_view: str = ""
    number: int = -1


@dataclass(frozen=True)
class Action:
    """One thing the user does.

    kind: of the episode it belongs to. mode: `probe`, `advance`, `seek`, or `watch`: frames are
    shown, nothing is asked. control (C,): held over the horizon. watched: [first, last) frames of
    the clip that are shown with this action. seek: frame of the session's history. view: whether it
    asks for the other camera. pause_s: until the next action.
    """

    kind: str
    mode: str
    control: tuple[float, ...]
    pause_s: float
    watched: tuple[int, int] = (0, 0)
    steps: int = 0
    seek: int = -1
    view: bool = False

    @property
    def asks(self) -> bool:
        return self.mode != "watch"


@dataclass(frozen=True)
class Habits:
    """How people use a suite. All lengths are in control units, where an axis spans [-1, 1].

    lead: frames on the screen before the first question. asks: questions of a session. users: that
    open the same clip, one after the other. weights: of the kinds of episode. correction: standard
    deviation of a small correction. drag_step, drag_length: of a drag, in each action, and actions.
    pause_s: median rest between two actions (log-normal, sigma 0.4). play: frames that go by when
    the user lets the video run. presets: controls a scene's users have in common (marks on a dial,
    buttons of a lesson); jumps go there with this chance.
    """

    lead: int = 24
    asks: int = 40
    users: int = 2
    weights: dict[str, float] = field(
        default_factory=lambda: {
            "correct": 0.30,
            "drag": 0.30,
            "repeat": 0.14,
            "jump": 0.06,
            "scrub": 0.08,
            "play": 0.08,
            "advance": 0.04,
        }
    )
    correction: float = 0.015
    corrections: tuple[int, int] = (2, 5)
    drag_step: float = 0.04
    drag_length: tuple[int, int] = (4, 9)
    pause_s: float = 0.35
    play: tuple[int, int] = (4, 12)
    presets: int = 4
    preset_share: float = 0.7


_KITCHEN = Habits()
#: An inspector looks closely: more small corrections and going back, fewer drags, longer looks.
_INSPECTION = Habits(
    weights={
        "correct": 0.34,
        "drag": 0.20,
        "repeat": 0.16,
        "jump": 0.07,
        "scrub": 0.13,
        "play": 0.06,
        "advance": 0.02,
        "view": 0.02,
    },
    correction=0.012,
    drag_step=0.03,
    pause_s=0.5,
)
#: A class tries the same few settings again and again.
_EDUDEMO = Habits(
    weights={
        "correct": 0.24,
        "drag": 0.26,
        "repeat": 0.26,
        "jump": 0.08,
        "scrub": 0.08,
        "play": 0.05,
        "advance": 0.03,
    },
    users=3,
    drag_step=0.05,
    preset_share=0.9,
)
HABITS: dict[str, Habits] = {
    "kitchen": _KITCHEN,
    "inspection": _INSPECTION,
    "edudemo": _EDUDEMO,
}


def act(clip: Clip, habits: Habits, user: int, seed: int = 0) -> list[Action]:
    """The actions of one user on a clip; ValueError where the clip is shorter than the lead."""
    if len(clip.frames) < habits.lead + HORIZON:
        raise ValueError(
            f"clip {clip.name!r} has {len(clip.frames)} frames, need {habits.lead + HORIZON}"
        )
    return _Hand(clip, habits, user, seed).session()


def opening(habits: Habits, control: tuple[float, ...]) -> Action:
    """How a session begins: the frames that are on the screen before anything is asked."""
    return Action("open", "watch", control, habits.pause_s, watched=(0, habits.lead))


class _Hand:
    """One user. `history` mirrors the session's: the clip's frame shown at each index, or -1."""

    def __init__(self, clip: Clip, habits: Habits, user: int, seed: int) -> None:
        self.clip, self.habits = clip, habits
        self.draw = _generator(seed, clip.suite, clip.name, f"user {user}")
        shared = _generator(seed, clip.suite, clip.name, "presets")
        self.presets = shared.uniform(-_REACH, _REACH, (habits.presets, 4)).astype(np.float32)
        self.control = np.clip(clip.controls[habits.lead - 1], -_REACH, _REACH)
        self.history = list(range(habits.lead))
        self.present = habits.lead - 1
        self.visited: list[Controls] = []
        self.places: list[int] = [self.present]

    def session(self) -> list[Action]:
        possible = {
            kind: weight
            for kind, weight in sorted(self.habits.weights.items())
            if kind != "view" or self.clip.other is not None
        }
        kinds, weights = zip(*possible.items(), strict=True)
        chances = np.array(weights) / sum(weights)
        actions = [opening(self.habits, self._tuple()), self._ask("open")]
        asked = 1
        while asked < self.habits.asks:
            kind = str(self.draw.choice(kinds, p=chances))
            episode: Callable[[], Iterator[Action]] = getattr(self, f"_{kind}")
            for action in episode():
                actions.append(action)
                asked += action.asks
                if asked >= self.habits.asks:
                    break
        return actions

    # -- episodes ----------------------------------------------------------------------------------

    def _correct(self) -> Iterator[Action]:
        for _ in range(self._between(self.habits.corrections)):
            offset = self.draw.normal(0, self.habits.correction, 4)
            offset[3] = 0
            yield self._to("correct", self.control + offset)

    def _drag(self) -> Iterator[Action]:
        direction = self.draw.normal(size=4)
        direction[3] = 0
        direction /= np.linalg.norm(direction)
        for _ in range(self._between(self.habits.drag_length)):
            step = self.habits.drag_step * self.draw.lognormal(0, 0.3)
            direction += self.draw.normal(0, 0.15, 4) * (1, 1, 1, 0)
            direction /= np.linalg.norm(direction)
            if np.any(np.abs(self.control[:3] + step * direction[:3]) > _REACH):
                direction = -direction
            yield self._to("drag", self.control + step * direction)

    def _repeat(self) -> Iterator[Action]:
        if self.visited:
            yield self._to("repeat", self.visited[self.draw.integers(len(self.visited))])

    def _jump(self) -> Iterator[Action]:
        if self.draw.random() < self.habits.preset_share:
            yield self._to("jump", self.presets[self.draw.integers(len(self.presets))])
        else:
            yield self._to("jump", self.draw.uniform(-_REACH, _REACH, 4))

    def _scrub(self) -> Iterator[Action]:
        """Back to where a question was asked before, and the same question or one beside it."""
        self.present = self.places[self.draw.integers(len(self.places))]
        if self.visited and self.draw.random() < 0.5:
            self.control = self.visited[self.draw.integers(len(self.visited))]
        yield self._ask("scrub", mode="seek", seek=self.present)

    def _play(self) -> Iterator[Action]:
        """The video runs on for a while from where the user is, then a question."""
        first = self._next_frame()
        last = min(first + self._between(self.habits.play), len(self.clip.frames))
        if first >= last:
            return
        self._moved(range(first, last))
        # The camera's pace: ten frames a second go by while the user watches.
        yield Action("play", "watch", self._tuple(), (last - first) * 0.1, watched=(first, last))
        yield self._ask("play")

    def _advance(self) -> Iterator[Action]:
        """The user does it: one to four frames on, by the model's own prediction."""
        steps = int(self.draw.integers(1, 5))
        action = self._ask("advance", mode="advance", steps=steps)
        self._moved([-1] * steps)
        yield action

    def _view(self) -> Iterator[Action]:
        yield self._ask("view", view=True)

    # -- the hand ----------------------------------------------------------------------------------

    def _to(self, kind: str, control: NDArray[np.floating[Any]]) -> Action:
        self.control = np.clip(control, -_REACH, _REACH).astype(np.float32)
        return self._ask(kind)

    def _ask(
        self,
        kind: str,
        mode: str = "probe",
        steps: int = 0,
        seek: int = -1,
        view: bool = False,
    ) -> Action:
        self.visited.append(self.control)
        if self.present not in self.places:
            self.places.append(self.present)
        pause_s = float(self.habits.pause_s * self.draw.lognormal(0, 0.4))
        return Action(kind, mode, self._tuple(), pause_s, steps=steps, seek=seek, view=view)

    def _next_frame(self) -> int:
        """The clip's frame that follows the present one; predicted frames took their time, too."""
        predicted = 0
        while self.history[self.present - predicted] < 0:
            predicted += 1
        return self.history[self.present - predicted] + predicted + 1

    def _moved(self, frames: range | list[int]) -> None:
        del self.history[self.present + 1 :]
        self.places = [place for place in self.places if place <= self.present]
        self.history += frames
        self.present = len(self.history) - 1

    def _between(self, bounds: tuple[int, int]) -> int:
        return int(self.draw.integers(bounds[0], bounds[1] + 1))

    def _tuple(self) -> tuple[float, ...]:
        return tuple(float(c) for c in self.control)


def _generator(seed: int, *names: str) -> np.random.Generator:
    """Independent of the order in which clips and users are played."""
    text = "\0".join((str(seed), *names)).encode()
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text).digest()[:8], "little"))
