"""Notice that a model has stopped answering, and bring it back.

Triton restarts no stub and goes on reporting ready, so the supervisor asks the models themselves:
one open canary sequence per instance. A dead or hung stub is replaced by unload + load; where that
fails the server is started again; each attempt waits twice as long as the one before; after
`max_attempts` without a calm minute in between it gives up, loudly.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ctrlcache.errors import CtrlCacheError
from worldserve.canary import Canary, NoAnswer
from worldserve.runtime import Runtime

__all__ = ["GaveUp", "Lost", "Recovered", "Supervisor", "SupervisorConfig", "SupervisorEvent"]


@dataclass(frozen=True)
class SupervisorConfig:
    """Seconds, but for the counts.

    interval_s: between looks at the processes, which cost nothing. ask_every_s: between canaries. A
    canary that is late (`deadline_s`) `late_limit` times in a row, while the model finishes no
    other request either, means that the model hangs. `calm_s` without a loss forgets past attempts.
    """

    interval_s: float = 1.0
    ask_every_s: float = 5.0
    deadline_s: float = 10.0
    late_limit: int = 2
    first_backoff_s: float = 0.5
    longest_backoff_s: float = 30.0
    max_attempts: int = 6
    calm_s: float = 60.0


@dataclass(frozen=True)
class Lost:
    model: str
    reason: str


@dataclass(frozen=True)
class Recovered:
    """how: "reload" (unload + load of the model) or "restart" (of the server)."""

    model: str
    how: str
    took_s: float
    attempt: int


@dataclass(frozen=True)
class GaveUp:
    model: str
    reason: str
    attempts: int


SupervisorEvent = Lost | Recovered | GaveUp


class Supervisor:
    """Watches all models of a started Runtime from a thread of its own.

    `gave_up` is set when it stopped trying: the caller decides what that means (`up` ends with
    status 1, so that whatever runs it can start it afresh).
    """

    def __init__(
        self,
        runtime: Runtime,
        config: SupervisorConfig | None = None,
        on_event: Callable[[SupervisorEvent], None] | None = None,
    ) -> None:
        self.config = config or SupervisorConfig()
        self.gave_up = threading.Event()
        self._runtime = runtime
        self._on_event = on_event or (lambda _: None)
        self._watches: list[_Watch] = []
        self._attempts = 0
        self._last_loss_s = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self._watches = [
            _Watch(self._runtime, model, self.config) for model in self._runtime.models
        ]
        for watch in self._watches:
            watch.open()
        self._thread.start()

    def stop(self) -> None:
        """Returns at once; a recovery under way ends with the runtime's stop."""
        self._closed.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed.wait(self.config.interval_s):
            for watch in self._watches:
                reason = watch.check()
                if reason is not None and not self._closed.is_set():
                    self._recover(watch, reason)
                if self._closed.is_set() or self.gave_up.is_set():
                    break
            if self.gave_up.is_set():
                break
        for watch in self._watches:
            watch.close()

    def _recover(self, watch: _Watch, reason: str) -> None:
        started = time.monotonic()
        self._on_event(Lost(watch.model, reason))
        if started - self._last_loss_s > self.config.calm_s:
            self._attempts = 0
        reload_failed = False
        while not self._closed.is_set():
            self._attempts += 1
            if self._attempts > self.config.max_attempts:
                self.gave_up.set()
                self._on_event(GaveUp(watch.model, reason, self._attempts - 1))
                return
            if self._attempts > 1:
                pause = self.config.first_backoff_s * 2 ** (self._attempts - 2)
                if self._closed.wait(min(pause, self.config.longest_backoff_s)):
                    return
            how = "restart" if reload_failed or not self._runtime.alive else "reload"
            try:
                if how == "reload":
                    self._runtime.reload_model(watch.model)
                    watch.open()
                else:
                    self._runtime.restart_server()
                    for other in self._watches:
                        other.open()
            except CtrlCacheError as error:
                reason = str(error)
                reload_failed = True
                continue
            self._last_loss_s = time.monotonic()
            self._on_event(Recovered(watch.model, how, self._last_loss_s - started, self._attempts))
            return


class _Watch:
    """One model: as many canaries as instances, which the batcher spreads over them."""

    def __init__(self, runtime: Runtime, model: str, config: SupervisorConfig) -> None:
        self.model = model
        self._runtime = runtime
        self._config = config
        self._canaries: list[Canary] = []
        self._late = 0
        self._finished = 0
        self._instances = 1
        self._asked_s = 0.0

    def open(self) -> None:
        """After each load: new sequences. What is wrong already, the next check finds."""
        self.close()
        self._late = 0
        self._asked_s = time.monotonic()
        self._instances = self._runtime.instances[self.model]
        endpoint = self._runtime.endpoints.grpc
        self._canaries = [Canary(endpoint, self.model) for _ in range(self._instances)]
        for canary in self._canaries:
            with contextlib.suppress(NoAnswer):
                canary.ask(self._config.deadline_s)

    def close(self) -> None:
        for canary in self._canaries:
            canary.close()

    def check(self) -> str | None:
        """None while the model is well, else what is wrong."""
        if not self._runtime.alive:
            return "the server process ended"
        stubs = len(self._runtime.stubs(self.model))
        if stubs < self._instances:
            return f"{self._instances - stubs} of {self._instances} stub processes ended"
        if time.monotonic() - self._asked_s < self._config.ask_every_s and not self._late:
            return None
        self._asked_s = time.monotonic()
        try:
            for canary in self._canaries:
                canary.ask(self._config.deadline_s)
        except NoAnswer as error:
            if not error.late:
                return str(error)
            finished = self._count_finished()
            self._late = (
                1 if finished is not None and finished != self._finished else self._late + 1
            )
            self._finished = finished or 0
            if self._late >= self._config.late_limit:
                return f"no answer within {self._config.deadline_s:g} s, {self._late} times"
            return None
        self._late = 0
        return None

    def _count_finished(self) -> int | None:
        """Requests the model has finished, successful or not: it is not hung while this grows."""
        import tritonclient.grpc as grpcclient

        try:
            with grpcclient.InferenceServerClient(self._runtime.endpoints.grpc) as client:
                statistics: Any = client.get_inference_statistics(self.model, client_timeout=5)
            stats = statistics.model_stats[0].inference_stats
            return int(stats.success.count) + int(stats.fail.count)
        except grpcclient.InferenceServerException:
            return None
