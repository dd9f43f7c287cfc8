"""Notice that a model has stopped answering, and bring it back.

Triton restarts no stub and goes on reporting ready, so the supervisor asks the models themselves:
one open canary sequence per instance. A dead or hung stub is replaced by unload + load; where that
fails the server is started again; each attempt waits twice as long as the one before; after
`max_attempts` without a calm minute in between it gives up, loudly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ctrlcache.errors import CtrlCacheError
from worldserve.runtime import Runtime
from worldserve.watch import ModelStatus, Watch, WatchConfig

__all__ = [
    "Answered",
    "Failed",
    "GaveUp",
    "Lost",
    "Recovered",
    "Status",
    "Supervisor",
    "SupervisorConfig",
    "SupervisorEvent",
]


@dataclass(frozen=True)
class SupervisorConfig:
    """Seconds, but for the counts.

    interval_s: between looks at the processes, which cost nothing. ask_every_s: between canaries. A
    canary that is late (`deadline_s`) `late_limit` times in a row, while its instance finishes no
    other request either, means that the instance hangs. `calm_s` without a loss forgets past
    attempts. recover: False only watches, so that readiness is known.
    """

    interval_s: float = 1.0
    ask_every_s: float = 5.0
    deadline_s: float = 10.0
    late_limit: int = 2
    first_backoff_s: float = 0.5
    longest_backoff_s: float = 30.0
    max_attempts: int = 6
    calm_s: float = 60.0
    recover: bool = True

    @property
    def watch(self) -> WatchConfig:
        return WatchConfig(self.ask_every_s, self.deadline_s, self.late_limit)


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
class Failed:
    """An attempt to bring a model back did not; `how` as in `Recovered`."""

    model: str
    how: str
    reason: str
    attempt: int


@dataclass(frozen=True)
class GaveUp:
    model: str
    reason: str
    attempts: int


@dataclass(frozen=True)
class Answered:
    """All canaries of a model were answered; the slowest one took `took_s`."""

    model: str
    took_s: float


SupervisorEvent = Answered | Lost | Failed | Recovered | GaveUp


@dataclass(frozen=True)
class Status:
    """What is true now. reason: why it is not ready, '' where it is. alive: whether there is hope
    without a restart of everything."""

    ready: bool
    alive: bool
    reason: str
    models: tuple[ModelStatus, ...]


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
        self._watches: list[Watch] = []
        self._attempts = 0
        self._last_loss_s = 0.0
        self._trouble = "starting"
        self._started = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Returns when each model was asked once."""
        self._watches = [
            Watch(self._runtime, model, self.config.watch) for model in self._runtime.models
        ]
        for watch in self._watches:
            watch.open()
        self._thread.start()
        self._started = True
        self._trouble = ""

    def stop(self) -> None:
        """Returns at once; a recovery under way ends with the runtime's stop."""
        self._trouble = self._trouble or "stopping"
        self._closed.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def status(self) -> Status:
        """From any thread, at once: what the canaries said last, and how long ago that was."""
        models = tuple(watch.status() for watch in self._watches)
        reason = self._trouble or next((m.reason for m in models if not m.up), "")
        if not reason and not self._runtime.alive:
            reason = "the server process ended"
        watching = not self._started or self._closed.is_set() or self._thread.is_alive()
        alive = watching and not self.gave_up.is_set()
        return Status(not reason and alive, alive, reason, models)

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch_all()
        except Exception as error:
            # Nobody would look after the models any more: that is to be heard.
            self._give_up("supervisor", f"{type(error).__name__}: {error}")
            raise
        finally:
            for watch in self._watches:
                watch.close()

    def _watch_all(self) -> None:
        while not self._closed.wait(self.config.interval_s):
            for watch in self._watches:
                reason = watch.check()
                if self._closed.is_set():
                    return
                if reason is None:
                    if watch.took_s is not None:
                        self._on_event(Answered(watch.model, watch.took_s))
                elif self.config.recover:
                    self._recover(watch, reason)
                elif watch.newly_lost:
                    self._on_event(Lost(watch.model, reason))
                if self.gave_up.is_set():
                    return

    def _recover(self, watch: Watch, reason: str) -> None:
        started = time.monotonic()
        self._trouble = _short(f"{watch.model}: {reason}")
        self._on_event(Lost(watch.model, reason))
        if started - self._last_loss_s > self.config.calm_s:
            self._attempts = 0
        reload_failed = False
        while not self._closed.is_set():
            self._attempts += 1
            if self._attempts > self.config.max_attempts:
                self._give_up(watch.model, reason)
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
                self._trouble = _short(f"{watch.model}: {reason}")
                self._on_event(Failed(watch.model, how, reason, self._attempts))
                reload_failed = True
                continue
            self._last_loss_s = time.monotonic()
            self._trouble = "stopping" if self._closed.is_set() else ""
            self._on_event(Recovered(watch.model, how, self._last_loss_s - started, self._attempts))
            return

    def _give_up(self, model: str, reason: str) -> None:
        self._trouble = _short(f"{model}: {reason}")
        self.gave_up.set()
        self._on_event(GaveUp(model, reason, max(0, self._attempts - 1)))


def _short(reason: str) -> str:
    """For whoever asks whether it is ready: the log has the rest."""
    return reason.splitlines()[0][:300]
