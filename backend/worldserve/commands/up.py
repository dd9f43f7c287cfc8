"""`ctrlcache up` and `ctrlcache validate-env`."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ctrlcache.errors import ConfigError, CtrlCacheError
from worldserve.runtime import ColdStore, Runtime, RuntimeConfig
from worldserve.settings import threads_per_instance
from worldserve.supervisor import GaveUp, Lost, Recovered, Supervisor, SupervisorEvent
from worldserve.validate import Finding, Needs, passed, validate

__all__ = ["size_bytes", "up", "validate_env"]

DEFAULT_HOT_BYTES = "2GiB"
_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]FAIL[/]"}

Repository = Annotated[Path, typer.Option(help="Model repository; it is never written to.")]
Host = Annotated[
    str, typer.Option(help="Address to listen on. Others than loopback are open to all.")
]
HttpPort = Annotated[int, typer.Option(min=0, max=65535, help="HTTP; 0 is any free port.")]
GrpcPort = Annotated[int, typer.Option(min=0, max=65535, help="gRPC; 0 is any free port.")]
MetricsPort = Annotated[int, typer.Option(min=0, max=65535, help="Metrics; 0 is any free port.")]
Instances = Annotated[
    int | None, typer.Option(min=1, help="Instances of the world model (default: as configured).")
]
WarmDir = Annotated[Path | None, typer.Option(help="Warm tier (default: ~/.cache/ctrlcache/warm).")]
ObjectsDir = Annotated[
    Path | None,
    typer.Option(help="Objects of the embedded S3 gateway (default: ~/.cache/ctrlcache/objects)."),
]
HotBytes = Annotated[
    str, typer.Option(help="Shared memory of sessions and hot tier, as 512MB or 2GiB.")
]
Cold = Annotated[bool, typer.Option("--cold/--no-cold", help="Whether there is a cold tier.")]
ColdEndpoint = Annotated[
    str | None, typer.Option(help="An external MinIO/S3, host:port, instead of the embedded one.")
]


def up(
    model_repository: Repository = Path("model_repository"),
    model: Annotated[
        list[str] | None, typer.Option(help="Load only these models; several times for several.")
    ] = None,
    instances: Instances = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value for all models, or model.key=value for one."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="What the model computes in, as float32 or bfloat16.")
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Sessions that can be alive at once.")
    ] = None,
    hot_bytes: HotBytes = DEFAULT_HOT_BYTES,
    warm_dir: WarmDir = None,
    cold: Cold = True,
    objects_dir: ObjectsDir = None,
    cold_endpoint: ColdEndpoint = None,
    cold_tls: Annotated[bool, typer.Option(help="Whether the external store speaks TLS.")] = True,
    cold_credentials: Annotated[
        Path | None,
        typer.Option(
            help='JSON {"access_key", "secret_key"}, mode 0600. Without it: the variables '
            "CTRLCACHE_S3_ACCESS_KEY and CTRLCACHE_S3_SECRET_KEY."
        ),
    ] = None,
    host: Host = "127.0.0.1",
    http_port: HttpPort = 8000,
    grpc_port: GrpcPort = 8001,
    metrics_port: MetricsPort = 8002,
    run_dir: Annotated[
        Path | None, typer.Option(help="Logs and laid-out files; kept when given.")
    ] = None,
    record_trace: Annotated[
        Path | None,
        typer.Option(
            help="Append what is asked of the cache and stored to this file, for replays."
        ),
    ] = None,
    supervise: Annotated[bool, typer.Option(help="Bring a dead or hung model back.")] = True,
    check: Annotated[bool, typer.Option(help="Look at the machine first (validate-env).")] = True,
) -> None:
    """Start the server with all it needs; Ctrl-C stops it and leaves nothing behind."""
    console = Console(soft_wrap=True)

    def configure() -> RuntimeConfig:
        parameters = {"hot_size_bytes": str(size_bytes(hot_bytes))}
        if dtype is not None:
            parameters["dtype"] = dtype
        if sessions is not None:
            parameters["max_sessions"] = str(sessions)
        if record_trace is not None:
            parameters["trace_file"] = str(record_trace.resolve())
        return RuntimeConfig(
            model_repository=model_repository,
            models=tuple(model or ()),
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            instances=instances,
            parameters=parameters | _settings(setting or []),
            cold=_cold(cold, cold_endpoint, cold_tls, cold_credentials),
            warm_dir=(warm_dir or _cache_dir() / "warm").resolve(),
            objects_dir=(objects_dir or _cache_dir() / "objects").resolve(),
            run_dir=run_dir.resolve() if run_dir is not None else None,
        )

    config = _configure(configure, console)
    if check:
        findings = list(validate(_needs(config)))
        if not passed(findings):
            _report(console, findings)
            raise typer.Exit(1)
        for finding in findings:
            if finding.status == "warn":
                console.print(
                    f"{_MARKS['warn']} {finding.check}: {finding.found}. {escape(finding.cure)}"
                )
    runtime = Runtime(config, log=console.print)
    with _Signals() as signals:
        try:
            with console.status("starting the server and its models ..."):
                runtime.start()
            signals.starting = False
        except CtrlCacheError as error:
            console.print(f"[red]not started:[/] {escape(str(error))}", highlight=False)
            raise typer.Exit(1) from None
        except _Stop:
            runtime.stop()
            console.print("stopped while starting, nothing left behind")
            raise typer.Exit(130) from None
        code = _serve(runtime, console, signals, supervise)
    raise typer.Exit(code)


def validate_env(
    model_repository: Repository = Path("model_repository"),
    instances: Instances = None,
    hot_bytes: HotBytes = DEFAULT_HOT_BYTES,
    warm_dir: WarmDir = None,
    cold: Cold = True,
    objects_dir: ObjectsDir = None,
    cold_endpoint: ColdEndpoint = None,
    host: Host = "127.0.0.1",
    http_port: HttpPort = 8000,
    grpc_port: GrpcPort = 8001,
    metrics_port: MetricsPort = 8002,
) -> None:
    """Look whether this machine can serve, and say for each fault how to mend it."""
    console = Console(soft_wrap=True)

    def configure() -> RuntimeConfig:
        return RuntimeConfig(
            model_repository=model_repository,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            instances=instances,
            parameters={"hot_size_bytes": str(size_bytes(hot_bytes))},
            cold=_cold(cold, cold_endpoint, True, None),
            warm_dir=(warm_dir or _cache_dir() / "warm").resolve(),
            objects_dir=(objects_dir or _cache_dir() / "objects").resolve(),
        )

    config = _configure(configure, console)
    findings = list(validate(_needs(config)))
    _report(console, findings)
    raise typer.Exit(0 if passed(findings) else 1)


def size_bytes(text: str) -> int:
    """'512MB' or '2GiB' -> bytes, as the settings of the cache read them; ConfigError otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is no size; expected for example 512MB or 2GiB")
    return int(
        float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")
    )


# -- serving -----------------------------------------------------------------------------------


class _Stop(BaseException):
    """A signal that came while starting."""


class _Signals:
    """SIGINT, SIGTERM and SIGHUP: while starting they interrupt, later they set `stop`."""

    def __init__(self) -> None:
        self.stop = threading.Event()
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
        interrupt = self.starting and not self.stop.is_set()
        self.stop.set()
        if interrupt:
            raise _Stop


def _serve(runtime: Runtime, console: Console, signals: _Signals, supervise: bool) -> int:
    """Until a signal comes or the supervisor gives up; the exit status."""
    supervisor = Supervisor(runtime, on_event=lambda event: _tell(console, event))
    try:
        _announce(runtime, console)
        if supervise:
            supervisor.start()
        while not signals.stop.wait(0.2):
            if supervisor.gave_up.is_set() or not (supervise or runtime.alive):
                break
    finally:
        began = time.monotonic()
        supervisor.stop()
        runtime.stop()
    console.print(f"stopped in {time.monotonic() - began:.1f} s, nothing left behind")
    return 0 if signals.stop.is_set() else 1


def _announce(runtime: Runtime, console: Console) -> None:
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
        case Lost(model, reason):
            console.print(f"{clock} [yellow]{model} lost:[/] {escape(reason)}", highlight=False)
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


# -- options -------------------------------------------------------------------------------------


def _configure(make: Callable[[], RuntimeConfig], console: Console) -> RuntimeConfig:
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = make()
    except ConfigError as error:
        console.print(f"[red]not started:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    for warning in caught:
        console.print(f"[yellow]warning:[/] {escape(str(warning.message))}", highlight=False)
    return config


def _settings(pairs: list[str]) -> dict[str, str]:
    parsed = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {pair!r}; expected key=value or model.key=value")
        parsed[key] = value
    return parsed


def _cold(wanted: bool, endpoint: str | None, tls: bool, file: Path | None) -> ColdStore | str:
    if not wanted:
        return "none"
    if endpoint is None:
        return "embedded"
    return ColdStore(endpoint, tls, file.resolve() if file is not None else None)


def _cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "ctrlcache"


def _needs(config: RuntimeConfig) -> Needs:
    directories = [config.warm_dir, config.run_dir]
    if config.cold == "embedded":
        directories.append(config.objects_dir)
    return Needs(
        object_store=config.cold == "embedded",
        shm=config.shm,
        shm_bytes=int(config.parameters["hot_size_bytes"]),
        directories=tuple(path for path in directories if path is not None),
        host=config.host,
        ports=(config.http_port, config.grpc_port, config.metrics_port),
        instances=config.instances or 1,
    )


def _report(console: Console, findings: list[Finding]) -> None:
    table = Table("", "check", "found", box=None, pad_edge=False)
    for finding in findings:
        table.add_row(_MARKS[finding.status], finding.check, escape(finding.found))
    console.print(table)
    for finding in findings:
        if finding.cure:
            console.print(
                f"{_MARKS[finding.status]} [bold]{finding.check}[/]: {escape(finding.cure)}",
                highlight=False,
            )
