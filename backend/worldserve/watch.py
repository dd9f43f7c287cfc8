"""Watch one model: its processes all the time, and the model itself by canaries, one per instance.

Triton spreads sequences over the instances of a model as it likes, and one that lives answers for
one that is dead. So the canaries of a world model are told which process answered them, and as many
are opened as it takes to reach each one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from worldserve.canary import Canary, NoAnswer
from worldserve.runtime import Runtime
from worldserve.shutdown import finished_by

__all__ = ["ModelStatus", "Watch", "WatchConfig"]

#: Canaries opened at a time in search of an instance that none has reached.
_SEARCH = 8


@dataclass(frozen=True)
class WatchConfig:
    """As in `SupervisorConfig`. stuck_limit: canaries late in a row after which a model hangs whose
    other instances may be the ones that finish requests, since it does not tell which one does."""

    ask_every_s: float = 5.0
    deadline_s: float = 10.0
    late_limit: int = 2
    stuck_limit: int = 6


@dataclass(frozen=True)
class ModelStatus:
    """up: every instance answered lately. reason: why not. answered_ago_s: since all of them did,
    None where that never was. reached: instances that a canary is known to have reached."""

    model: str
    up: bool
    reason: str
    instances: int
    alive: int
    reached: int
    answered_ago_s: float | None


class _Asked:
    """One canary and how it went. late: times in a row while nothing was finished. unanswered:
    times in a row. finished: by its instance, when it was late last."""

    def __init__(self, canary: Canary) -> None:
        self.canary = canary
        self.late = 0
        self.unanswered = 0
        self.finished: int | None = None


class Watch:
    """`open` after each load, then `check` about every second; both by one thread. `status` by any.

    took_s: of the slowest canary in the last check, None where none was asked or not all answered.
    newly_lost: the last check found a fault, and the one before it did not.
    """

    def __init__(self, runtime: Runtime, model: str, config: WatchConfig) -> None:
        self.model = model
        self.took_s: float | None = None
        self.newly_lost = False
        self._runtime = runtime
        self._config = config
        self._asked: list[_Asked] = []
        self._stopped: set[int] = set()
        self._instances = 1
        self._asked_s = 0.0
        self._answered_s: float | None = None
        self._reason: str | None = None

    def open(self) -> None:
        """After each load: new sequences. What is wrong already, the next check finds."""
        self._reason = None
        self._stopped = set()
        self._instances = self._runtime.instances[self.model]
        self._asked = []
        for _ in range(self._instances):
            self._ask_one_more()
        self._search()
        self._asked_s = time.monotonic()
        self._answered_s = self._asked_s if self._well() else None

    def close(self) -> None:
        """The sequences are left to the batcher: the server is going to stop."""
        self._asked = []

    def check(self) -> str | None:
        """None while the model is well, else what is wrong."""
        self.took_s = None
        before, self._reason = self._reason, self._look()
        self.newly_lost = self._reason is not None and before is None
        return self._reason

    def status(self) -> ModelStatus:
        config, now = self._config, time.monotonic()
        alive = [stub for stub in self._runtime.stubs(self.model) if stub.state not in "Tt"]
        answered_s = self._answered_s
        ago_s = None if answered_s is None else now - answered_s
        reason = self._reason or ""
        if not reason and len(alive) < self._instances:
            reason = f"{len(alive)} of {self._instances} stub processes run"
        if not reason and (ago_s is None or ago_s > config.ask_every_s + config.deadline_s):
            never = "no canary was answered yet"
            reason = never if ago_s is None else f"no canary was answered for {ago_s:.0f} s"
        return ModelStatus(
            self.model,
            not reason,
            f"{self.model}: {reason}" if reason else "",
            self._instances,
            len(alive),
            len(self._reached()),
            ago_s,
        )

    # -- one look ----------------------------------------------------------------------------

    def _look(self) -> str | None:
        if not self._runtime.alive:
            return "the server process ended"
        stubs = self._runtime.stubs(self.model)
        if len(stubs) < self._instances:
            return f"{self._instances - len(stubs)} of {self._instances} stub processes ended"
        # Twice, since a debugger may stop one for a moment.
        stopped = {stub.pid for stub in stubs if stub.state in "Tt"}
        both, self._stopped = stopped & self._stopped, stopped
        if both:
            return f"{len(both)} of {self._instances} stub processes are stopped"
        late = any(asked.late for asked in self._asked)
        if time.monotonic() - self._asked_s < self._config.ask_every_s and not late:
            return None
        return self._ask_all()

    def _ask_all(self) -> str | None:
        slowest_s = 0.0
        self._asked_s = time.monotonic()
        for asked in self._asked:
            began = time.monotonic()
            try:
                asked.canary.ask(self._config.deadline_s)
            except NoAnswer as error:
                if not error.late:
                    return str(error)
                if self._hangs(asked):
                    return (
                        f"no answer within {self._config.deadline_s:g} s, {asked.unanswered} times"
                        f"{_of(asked.canary.pid)}"
                    )
            else:
                asked.late = asked.unanswered = 0
                slowest_s = max(slowest_s, time.monotonic() - began)
        self._search()
        if self._well():
            self._answered_s = time.monotonic()
            self.took_s = slowest_s
        return None

    def _hangs(self, asked: _Asked) -> bool:
        """After an answer that was late: whether that was once too often."""
        pid = asked.canary.pid
        own = finished_by(self._runtime.run_dir, pid) if pid is not None else None
        finished = self._runtime.api.finished(self.model) if own is None else own
        busy = finished is not None and finished != asked.finished
        asked.late = 1 if busy else asked.late + 1
        asked.unanswered += 1
        asked.finished = finished
        if own is None and self._instances > 1 and asked.unanswered >= self._config.stuck_limit:
            return True
        return asked.late >= self._config.late_limit

    def _well(self) -> bool:
        return bool(self._asked) and not any(asked.late for asked in self._asked)

    # -- reaching each instance --------------------------------------------------------------

    def _reached(self) -> set[int]:
        return {asked.canary.pid for asked in self._asked if asked.canary.pid is not None}

    def _search(self) -> None:
        """Open more canaries until each instance has one, then give back those that are too many.

        Where a model does not tell which process answers, one canary per instance must do.
        """
        if self._instances == 1 or not self._reached():
            return
        for _ in range(_SEARCH):
            if not (missing := self._missing()):
                break
            asked = self._ask_one_more()
            if asked.late:
                # Where the others are all reached, it can only be stuck at the last one.
                asked.canary.pid = missing.pop() if len(missing) == 1 else None
                break
        kept: dict[int, _Asked] = {}
        for asked in self._asked:
            pid = asked.canary.pid
            if pid is not None and pid in kept and not asked.late:
                asked.canary.end()
            else:
                kept[pid if pid is not None else -id(asked)] = asked
        self._asked = list(kept.values())

    def _missing(self) -> set[int]:
        return {stub.pid for stub in self._runtime.stubs(self.model)} - self._reached()

    def _ask_one_more(self) -> _Asked:
        asked = _Asked(self._runtime.canary(self.model))
        self._asked.append(asked)
        try:
            asked.canary.ask(self._config.deadline_s)
        except NoAnswer:
            asked.late = 1
        return asked


def _of(pid: int | None) -> str:
    return "" if pid is None else f" (process {pid})"
