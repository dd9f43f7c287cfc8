"""How long a benchmark still takes, from what it has taken so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Load", "TimeLeft", "in_words"]

#: Before anything was measured.
_GUESSED_START_S, _GUESSED_ANSWER_S = 10.0, 0.5


@dataclass(frozen=True)
class Load:
    """What one rival has to play: actions, and the seconds that users pause in all."""

    actions: int
    pauses_s: float


class TimeLeft:
    """loads: by rival, of those that have something to play. clock: seconds, monotonic."""

    def __init__(
        self, loads: Mapping[str, Load], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._left = dict(loads)
        self._clock = clock
        self._began_s: float | None = None
        self._running = ""
        self._starts_s: list[float] = []
        self._answers: dict[str, tuple[int, float]] = {}

    def starting(self, rival: str) -> None:
        self._running, self._began_s = rival, self._clock()

    def acted(self, pause_s: float) -> None:
        """An action of the running rival is over, its pause included. The first one of a rival
        tells how long its server took to start."""
        now_s, load = self._clock(), self._left[self._running]
        assert self._began_s is not None  # a rival acts after it has started
        took_s = max(0.0, now_s - self._began_s - pause_s)
        self._began_s = now_s
        self._left[self._running] = Load(load.actions - 1, load.pauses_s - pause_s)
        if self._running not in self._answers:
            self._starts_s.append(took_s)
            self._answers[self._running] = (0, 0.0)
            return
        count, total_s = self._answers[self._running]
        self._answers[self._running] = (count + 1, total_s + took_s)

    def done(self) -> None:
        self._left.pop(self._running)

    @property
    def seconds(self) -> float:
        """A rival that has not begun is taken to be as fast as the others together were."""
        start_s = _mean(self._starts_s, _GUESSED_START_S)
        counts, totals = zip(*self._answers.values(), strict=True) if self._answers else ((), ())
        usual_s = sum(totals) / sum(counts) if sum(counts) else _GUESSED_ANSWER_S
        left_s = 0.0
        for rival, load in self._left.items():
            count, total_s = self._answers.get(rival, (0, 0.0))
            each_s = total_s / count if count else usual_s
            left_s += load.pauses_s + load.actions * each_s
            left_s += 0.0 if rival in self._answers else start_s
        return left_s


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def in_words(seconds: float) -> str:
    """As people say it: 40 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6_000 else f"{seconds / 3_600:.1f} h"
