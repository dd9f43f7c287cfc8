"""Serve until a signal comes: what `ctrlcache up` does once it knows what it is to start."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ctrlcache.errors import CtrlCacheError
from worldserve.backups import BackupConfig, Backups
from worldserve.health import HealthServer, SupervisorMetrics
from worldserve.runtime import ColdStore, Runtime, RuntimeConfig
from worldserve.settings import threads_per_instance
from worldserve.supervisor import (
    Answered,
    Failed,
    GaveUp,
    Lost,
    Recovered,
    Supervisor,
    SupervisorConfig,
    SupervisorEvent,
)

__all__ = ["ServingConfig", "serve"]


@dataclass(frozen=True)
class ServingConfig:
    """Beside the run itself: who looks after it, and where that can be asked. Port 0: any free."""

    supervisor: SupervisorConfig
    health_host: str
    health_port: int
    backups: BackupConfig | None


def serve(config: RuntimeConfig, serving: ServingConfig, console: Console) -> int:
    """Start, serve, and leave nothing behind; the exit status. Only from the main thread."""
    metrics = SupervisorMetrics()

    def told(event: SupervisorEvent) -> None:
        metrics(event)
        _tell(console, event)

    with ExitStack() as stack:
        try:
            runtime = Runtime(config, log=console.print)
            supervisor = Supervisor(runtime, serving.supervisor, told)
            metrics.watch(supervisor)
            # From the first moment on: an orchestrator asks while the models are being loaded, too.
            health = HealthServer(
                supervisor.status, metrics.registry, serving.health_host, serving.health_port
            )
            stack.callback(health.close)
            backups = None
            if serving.backups is not None:
                assert config.warm_dir is not None
                backups = Backups(config.warm_dir, serving.backups, console.print, metrics.registry)
                stack.callback(backups.close)
            signals = stack.enter_context(_Signals())
            try:
                with console.status("starting the server and its models ..."):
                    runtime.start()
                signals.starting = False
            except _Stop:
                runtime.stop()
                console.print("stopped while starting, nothing left behind")
                return 130
            return _until_stopped(runtime, supervisor, backups, health, console, signals)
        except CtrlCacheError as error:
            console.print(f"[red]not started:[/] {escape(str(error))}", highlight=False)
            return 1


class _Stop(BaseException):
    """A signal that came while starting."""


class _Signals:
    """SIGINT, SIGTERM and SIGHUP: while starting they interrupt, later they set `stopped`.

    No threading.Event: its lock may be held by the very thread that the handler interrupts.
    """

    def __init__(self) -> None:
        self.stopped = False
        self.starting = True
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only the first one interrupts: the clean-up that it causes must not be interrupted.
        interrupt = self.starting and not self.stopped
        self.stopped = True
        if interrupt:
            raise _Stop


def _until_stopped(
    runtime: Runtime,
    supervisor: Supervisor,
    backups: Backups | None,
    health: HealthServer,
    console: Console,
    signals: _Signals,
) -> int:
    """Until a signal comes or the supervisor gives up; the exit status."""
    try:
        if backups is not None:
            backups.start()
        supervisor.start()
        _announce(runtime, console, health.endpoint)
        while not signals.stopped:
            time.sleep(0.1)
            if supervisor.gave_up.is_set():
                break
            if not (supervisor.config.recover or runtime.alive):
                console.print("[bold red]the server process ended[/]")
                break
    finally:
        began = time.monotonic()
        # First nobody is sent here any more, then what runs ends.
        supervisor.stop()
        runtime.stop()
    console.print(f"stopped in {time.monotonic() - began:.1f} s, nothing left behind")
    return 0 if signals.stopped else 1


def _announce(runtime: Runtime, console: Console, health: str) -> None:
    """What was started, and where."""
    config, endpoints = runtime.config, runtime.endpoints
    count = runtime.instances[runtime.canary_model]
    table = Table.grid(padding=(0, 2))
    rows = {
        "server": f"tritonserver ({runtime.server_version}), process {runtime.server_pid}",
        "models": ", ".join(runtime.all_models),
        "instances": f"{count}, {threads_per_instance(count)} threads each",
        "gRPC": endpoints.grpc,
        "HTTP": f"http://{endpoints.http}",
        "metrics": f"http://{endpoints.metrics}/metrics",
        "health": f"http://{health}/ready, /live, /metrics",
    }
    if endpoints.gateway:
        rows["S3 gateway"] = f"{endpoints.gateway} (objects in {config.objects_dir})"
    elif isinstance(config.cold, ColdStore):
        rows["object store"] = config.cold.endpoint
    rows |= {
        "warm tier": str(config.warm_dir),
        "shared memory": str(runtime.shm_dir),
        "logs": str(runtime.log_file.parent),
    }
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/]", value)
    console.print(table)
    console.print(f"{runtime.canary_model} answers. Ctrl-C stops everything.")


def _tell(console: Console, event: SupervisorEvent) -> None:
    clock = time.strftime("%H:%M:%S")
    match event:
        case Answered():
            pass
        case Lost(model, reason):
            console.print(f"{clock} [yellow]{model} lost:[/] {escape(reason)}", highlight=False)
        case Failed(model, how, reason, attempt):
            console.print(
                f"{clock} [yellow]{model} is not back[/] by {how}, attempt {attempt}: "
                f"{escape(reason)}",
                highlight=False,
            )
        case Recovered(model, how, took_s, attempt):
            console.print(
                f"{clock} [green]{model} is back[/] after {took_s:.1f} s by {how}, "
                f"attempt {attempt}",
                highlight=False,
            )
        case GaveUp(model, reason, attempts):
            console.print(
                f"{clock} [bold red]{model} does not come back after {attempts} attempts; "
                f"the server stops.[/] {escape(reason)}",
                highlight=False,
            )
