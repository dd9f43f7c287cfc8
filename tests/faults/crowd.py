"""People at work while something breaks: each has a session, and knows every answer beforehand.

The model alone computes what an undisturbed session would see (`tiny_world.Truth`). A person whose
request fails comes back with START and `resume`, and must find the session where it was: as it had
been acknowledged, or one step on where the reply to a step was lost.
"""

from __future__ import annotations

import copy
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from tiny_world import HELD, Truth, clip, equal
from wire import InferenceServerException, Wire, code

from ctrlcache.scores import relative_error
from worldserve.models.tiny import TinyWorldModel

__all__ = ["Crowd", "Person"]

T = TypeVar("T")

SCENES = 16
_FRAMES = [clip(40, seed=900 + scene) for scene in range(SCENES)]
_SCALE = TinyWorldModel().spec.state_scale
#: A server that comes back must be found at once: gRPC's own pauses grow to two minutes.
CHANNEL = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 300)]


@dataclass
class Tally:
    """Answers by kind, refusals by code, and what must not be: wrong answers, lost sessions."""

    answers: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)  # with the refusals, shortened
    over_bound: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class Person(threading.Thread):
    """One session: probes near the hand, steps, observations, at a pace; checks every answer.

    find: where the server is now. max_error: the budget of its probes.
    """

    def __init__(
        self,
        number: int,
        find: Callable[[], Any],
        model: str,
        pace_s: float,
        timeout_s: float,
        parameters: dict[str, str],
        max_error: float = 0.05,
    ) -> None:
        super().__init__(name=f"person-{number}", daemon=True)
        self.id: int | str = number if number % 2 else f"person-{number}"
        self.tally = Tally()
        self.last_answer_s = 0.0  # when the request was sent that was answered last
        self.away_since_s: float | None = None
        self._scene = number % SCENES
        self._find, self._model = find, model
        self._pace_s, self._timeout_s, self._max_error = pace_s, timeout_s, max_error
        self._parameters = parameters
        self._draw = random.Random(number)
        self._hand = HELD.copy()
        self._seen = 2
        self._truth: Truth | None = None
        self._possible: list[Truth] = []  # where the session may be, after a lost reply
        self._over = threading.Event()
        self._wire: Wire | None = None

    # -- working -----------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._begin()
            while not self._over.is_set():
                self._work()
                self._over.wait(self._pace_s * self._draw.uniform(0.5, 1.5))
        except Exception as error:
            self.tally.wrong.append(f"{self.id}: {type(error).__name__}: {error}")

    def finish(self) -> None:
        """Stop working, then see that the session is what it should be, without the cache."""
        self._over.set()
        self.join()
        if self._truth is not None:
            self._over.clear()
            self._resume(self._possible or [self._truth])
        if self._wire is not None:
            self._wire.close()

    def stop_soon(self) -> None:
        self._over.set()

    def _begin(self) -> None:
        frames = _FRAMES[self._scene][: self._seen]
        while not self._over.is_set():
            got = self._ask(HELD, frames=frames, start=True, max_error="0")
            if got is not None:
                self._truth = Truth(frames, [HELD] * (len(frames) - 1))
                self._check(got, self._truth, HELD)
                return
            self._over.wait(0.2)

    def _work(self) -> None:
        assert self._truth is not None
        before = self._truth
        kind = self._draw.choices(["probe", "advance", "observe"], [8, 2, 1])[0]
        step = np.float32([self._draw.gauss(0, 0.05), self._draw.gauss(0, 0.05)])
        self._hand = np.clip(self._hand + step, -1, 1).astype(np.float32)
        hand = self._hand.round(2).astype(np.float32)  # people share what they ask
        if kind == "probe":
            got = self._ask(hand, outputs=["STATE", "EXACT", "ERROR_BOUND"])
            after = before
        elif kind == "advance":
            got = self._ask(hand, mode="advance", outputs=["STATE", "EXACT", "ERROR_BOUND"])
            after = copy.copy(before)
            after.leave(hand)
        else:
            frame = _FRAMES[self._scene][self._seen % 40][None]
            got = self._ask(np.vstack([hand, HELD]), frames=frame)
            after = copy.copy(before)
            after.see(frame, [hand])
        if got is None:
            self._possible = [before, after] if after is not before else [before]
            self._resume(self._possible)
        else:
            self._check(
                got, after if kind == "observe" else before, HELD if kind == "observe" else hand
            )
            self._truth = after
        self._seen += kind == "observe"

    def _resume(self, possible: Sequence[Truth]) -> None:
        """Come back for the session, and find it in one of the states it may be in."""
        while not self._over.is_set():
            got = self._ask(HELD, start=True, resume=self.id, cache="off")
            if got is not None:
                for truth in possible:
                    if equal(got, truth.predict(HELD)):
                        self._truth, self._possible = truth, []
                        self.tally.answers["exact"] += 1
                        return
                self.tally.wrong.append(f"{self.id}: not where it was")
                self._begin_anew()
                return
            if self.tally.lost:
                self._begin_anew()
                return
            self._over.wait(0.2)

    def _begin_anew(self) -> None:
        self._seen, self._possible = 2, []
        self._begin()

    def _ask(self, control: Any, **options: Any) -> dict[str, Any] | None:
        """None where it failed; the tally says how."""
        options.setdefault("outputs", ["STATE", "PREDICTED_FRAMES", "EXACT", "ERROR_BOUND"])
        options.setdefault("max_error", str(self._max_error))
        sent = time.monotonic()
        try:
            if self._wire is None:
                self._wire = Wire(self._find(), "grpc", self._model, channel_args=CHANNEL)
            got = self._wire.ask(
                control, self.id, client_timeout=self._timeout_s, **options, **self._parameters
            )
        except InferenceServerException as error:
            self.tally.refusals[code(error)] += 1
            self.tally.said[error.message()[:90]] += 1
            if "no session" in error.message() and options.get("resume") is not None:
                self.tally.lost.append(f"{self.id}: {error.message()}")
            if self.away_since_s is None:
                self.away_since_s = sent
            return None
        self.last_answer_s, self.away_since_s = sent, None
        return got

    def _check(self, got: dict[str, Any], truth: Truth, control: Any) -> None:
        states, frames = truth.predict(control)
        if got["EXACT"][0]:
            self.tally.answers["exact"] += 1
            if not equal(got, (states, frames)):
                self.tally.wrong.append(f"{self.id}: an exact answer is not the model's")
            return
        self.tally.answers["near"] += 1
        bound = float(got["ERROR_BOUND"][0])
        if bound > self._max_error:
            self.tally.wrong.append(f"{self.id}: bound {bound} over the budget")
        self.tally.over_bound += float(relative_error(got["STATE"], states, _SCALE)) > bound + 1e-6


class Crowd:
    """Many of them. `struck`: the harm is done; `recovered`: all have had an answer since."""

    def __init__(
        self,
        size: int,
        find: Callable[[], Any],
        *,
        model: str = "world_model",
        pace_s: float = 0.3,
        timeout_s: float = 5.0,
        first: int = 1,
        **parameters: str,
    ) -> None:
        self.people = [
            Person(number, find, model, pace_s, timeout_s, parameters)
            for number in range(first, first + size)
        ]
        self.struck_s = 0.0
        self.recovery_s: list[float] = []
        for person in self.people:
            person.start()

    def settle(self, answers: int = 5, within_s: float = 120.0) -> None:
        """Until everybody has had some more answers."""
        wanted = {p: sum(p.tally.answers.values()) + answers for p in self.people}
        self._until(lambda p: sum(p.tally.answers.values()) >= wanted[p], within_s)

    def answered(self) -> int:
        return sum(sum(person.tally.answers.values()) for person in self.people)

    def struck(self) -> None:
        """The harm is done now."""
        self.struck_s = time.monotonic()

    def recovered(self, within_s: float = 120.0) -> None:
        """Until everybody's newest answer is to a request sent after the harm was done."""
        done: dict[Person, float] = {}

        def well(person: Person) -> bool:
            if person not in done and person.last_answer_s > self.struck_s:
                done[person] = time.monotonic() - self.struck_s
            return person in done

        self._until(well, within_s)
        self.recovery_s = sorted(done.values())

    def work(self, seconds: float) -> int:
        """Go on for a while; how many answers came."""
        before = self.answered()
        time.sleep(seconds)
        return self.answered() - before

    def finish(self) -> Tally:
        """Everybody stops, and looks whether the session is where it should be; all tallies."""
        for person in self.people:
            person.stop_soon()
        for person in self.people:
            person.finish()
        total = Tally()
        for person in self.people:
            total.answers += person.tally.answers
            total.refusals += person.tally.refusals
            total.said += person.tally.said
            total.over_bound += person.tally.over_bound
            total.wrong += person.tally.wrong
            total.lost += person.tally.lost
        return total

    def until(self, condition: Callable[[], T], within_s: float = 60.0) -> T:
        """Work goes on until the condition comes true; what it returned."""
        deadline = time.monotonic() + within_s
        while not (found := condition()):
            assert time.monotonic() < deadline, "it did not come to that"
            time.sleep(0.1)
        return found

    def _until(self, condition: Callable[[Person], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while [person for person in self.people if not condition(person)]:
            if time.monotonic() > deadline:
                late = [p for p in self.people if not condition(p)]
                about = [(p.id, p.tally.said, p.tally.wrong, p.tally.lost) for p in late]
                raise AssertionError(f"{len(late)} people have no answer: {about[:5]}")
            time.sleep(0.02)
