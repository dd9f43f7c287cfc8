"""What really would have happened: the simulator's outcome of every question of a session.

Simulators replay a test clip from its seed, branch off where a question was asked, and hold its
control. Where they are not installed, the outcomes of the default users (seed 0) come from files
that ship beside the clips.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from worldserve.bench.timeline import PREDICTED, Timeline
from worldserve.bench.workload import HORIZON, Action, Clip, Controls
from worldserve.data.clips import CLIPS, SEED
from worldserve.data.episode import Simulator, open_simulator
from worldserve.data.suites import get_suite

__all__ = ["Truths", "outcomes", "questions"]


def questions(clip: Clip, actions: Sequence[Action]) -> list[tuple[int, Controls]]:
    """For each question: the frame of the clip that was seen last, and the controls (n, 4) from
    there on, of predicted frames first, then the one that is asked about, held."""
    timeline, asked = Timeline(), []
    for action in actions:
        after = action.mode == "advance"
        if not after:
            timeline.follow(clip, action)
        if action.asks:
            dreamt = 0
            while timeline.frames[timeline.present - dreamt] == PREDICTED:
                dreamt += 1
            first = timeline.present - dreamt + 1
            reached = timeline.reached[first : timeline.present + 1]
            held = [np.array(action.control, np.float32)] * HORIZON
            asked.append((timeline.base, np.stack([*reached, *held])))
        if after:
            timeline.follow(clip, action)
    return asked


def outcomes(simulator: Simulator, clip: Clip, actions: Sequence[Action]) -> Controls:
    """(Q, P): the physics of the last frame that each question is about."""
    found = simulator.outcomes(SEED, clip.number, clip.controls, questions(clip, actions))
    return np.stack([physics[-1] for physics in found])


def _key(actions: Sequence[Action]) -> str:
    return hashlib.sha256(repr(list(actions)).encode()).hexdigest()[:24]


class Truths:
    """Outcomes by session: from `shipped` files or `made` ones, else simulated and kept there."""

    def __init__(self, made: Path, shipped: Path = CLIPS) -> None:
        self._made, self._shipped = made, shipped
        self._simulators: dict[tuple[str, str], Simulator | None] = {}
        self._files: dict[str, dict[str, Controls]] = {}

    def of(
        self, clip: Clip, actions: Sequence[Action], whole: Sequence[Action] = ()
    ) -> Controls | None:
        """(Q, P), or None where they are not known and cannot be simulated here. whole: the longer
        session, if any, that `actions` are the beginning of."""
        key = _key(actions)
        shipped = self._known(clip.suite)
        known = shipped.get(key, shipped.get(_key(whole)))
        if known is not None:
            return known[: sum(action.asks for action in actions)]
        path = self._made / f"{key}.npy"
        if path.exists():
            loaded: Controls = np.load(path)
            return loaded
        simulator = self._simulator(clip)
        if simulator is None or clip.number < 0:
            return None
        found = outcomes(simulator, clip, actions)
        self._made.mkdir(parents=True, exist_ok=True)
        np.save(path, found)
        return found

    def _known(self, suite: str) -> dict[str, Controls]:
        if suite not in self._files:
            path = self._shipped / f"{suite}-truth.npz"
            self._files[suite] = {}
            if path.exists():
                with np.load(path) as file:
                    self._files[suite] = {name: file[name] for name in file.files}
        return self._files[suite]

    def _simulator(self, clip: Clip) -> Simulator | None:
        name = (clip.suite, clip.operation)
        if name not in self._simulators:
            suite = get_suite(clip.suite)
            [operation] = [o for o in suite.operations if o.name == clip.operation]
            try:
                self._simulators[name] = open_simulator(suite, operation)
            except ImportError:  # the extra `train` is not installed
                self._simulators[name] = None
        return self._simulators[name]

    def ship(
        self,
        suite: str,
        sessions: Sequence[tuple[Clip, Sequence[Action]]],
        advance: Callable[[], None] = lambda: None,
    ) -> Path:
        """Write the outcomes of these sessions beside the clips; ImportError without simulators."""
        found = {}
        for clip, actions in sessions:
            truth = self.of(clip, actions)
            if truth is None:
                raise ImportError(
                    f"the simulator of suite {suite!r} is not installed (extra train)"
                )
            found[_key(actions)] = truth
            advance()
        path = self._shipped / f"{suite}-truth.npz"
        np.savez_compressed(path, **found)
        return path


def main() -> None:
    """`python -m worldserve.bench.truth`: write the outcomes of the default users' questions."""
    from rich.progress import Progress

    from worldserve.bench.clips import load_clips
    from worldserve.bench.workload import HABITS, act

    truths = Truths(Path(".cache/benchmark/truth"))
    with Progress() as progress:
        for suite, habits in HABITS.items():
            sessions = [
                (clip, act(clip, habits, user))
                for clip in load_clips(suite)
                for user in range(habits.users)
            ]
            bar = progress.add_task(suite, total=len(sessions))
            path = truths.ship(suite, sessions, partial(progress.advance, bar))
            progress.console.print(f"{path}: {path.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
