"""`ctrlcache up` and `ctrlcache validate-env`."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ctrlcache.errors import ConfigError
from worldserve.access import ACCESS_KEY_VARIABLE, AccessConfig, Tls
from worldserve.backups import BackupConfig, duration_s
from worldserve.commands.serving import ServingConfig, serve
from worldserve.runtime import ColdStore, RuntimeConfig
from worldserve.settings import default_instances
from worldserve.supervisor import SupervisorConfig
from worldserve.tracing import Tracing
from worldserve.validate import Finding, Needs, Port, passed, validate

__all__ = ["size_bytes", "up", "validate_env"]

Made = TypeVar("Made")

DEFAULT_HOT_BYTES = "2GiB"
_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]FAIL[/]"}

Repository = Annotated[Path, typer.Option(help="Model repository; it is never written to.")]
Host = Annotated[
    str, typer.Option(help="Address to listen on; others than loopback want TLS and an access key.")
]
HttpPort = Annotated[int, typer.Option(min=0, max=65535, help="HTTP; 0 is any free port.")]
GrpcPort = Annotated[int, typer.Option(min=0, max=65535, help="gRPC; 0 is any free port.")]
MetricsPort = Annotated[int, typer.Option(min=0, max=65535, help="Metrics; 0 is any free port.")]
HealthPort = Annotated[
    int, typer.Option(min=0, max=65535, help="Port of /ready and /live; 0 is any free port.")
]
HealthHost = Annotated[
    str | None, typer.Option(help="Address of /ready and /live (default: --host).")
]
Instances = Annotated[
    int | None,
    typer.Option(min=1, help="Instances of the world model (default: 2, or 1 on a single core)."),
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
    http_host: Annotated[
        str | None,
        typer.Option(help="Address of HTTP (default: --host, or loopback where gRPC has TLS)."),
    ] = None,
    metrics_host: Annotated[
        str | None, typer.Option(help="Address of the metrics (default: as for HTTP).")
    ] = None,
    health_host: HealthHost = None,
    health_port: HealthPort = 8003,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM certificate of the gRPC endpoint.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its PEM key, mode 0600.")] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="PEM certificate of the CA that must have signed a client's (mutual)."),
    ] = None,
    access_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File, mode 0600, of the key that clients must send; or the variable "
            f"{ACCESS_KEY_VARIABLE}."
        ),
    ] = None,
    allow_shared_memory: Annotated[
        bool, typer.Option("--allow-shared-memory", help="Clients may register shared memory.")
    ] = False,
    allow_admin: Annotated[
        bool,
        typer.Option("--allow-admin", help="Clients may load models, and set tracing and logging."),
    ] = False,
    backup_dir: Annotated[
        Path | None, typer.Option(help="Back the warm tier up here, by the clock.")
    ] = None,
    backup_every: Annotated[str, typer.Option(help="Time between backups, as 12h or 1d.")] = "1d",
    backup_keep: Annotated[int, typer.Option(min=1, help="Backups that are kept.")] = 7,
    run_dir: Annotated[
        Path | None, typer.Option(help="Logs and laid-out files; kept when given.")
    ] = None,
    record_trace: Annotated[
        Path | None,
        typer.Option(
            help="Append what is asked of the cache and stored to this file, for replays."
        ),
    ] = None,
    trace_url: Annotated[
        str | None,
        typer.Option(help="OpenTelemetry collector, as http://collector:4318/v1/traces."),
    ] = None,
    trace_rate: Annotated[
        int, typer.Option(min=1, help="One of so many requests is traced; 1 is each.")
    ] = Tracing.rate,
    attempts: Annotated[
        int, typer.Option(min=1, help="Attempts to bring a model back before giving up.")
    ] = SupervisorConfig.max_attempts,
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
            http_host=http_host,
            metrics_host=metrics_host,
            access=AccessConfig(
                access_key_file,
                _tls(tls_cert, tls_key, tls_client_ca),
                allow_shared_memory,
                allow_admin,
            ),
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            instances=instances or default_instances(),
            parameters=parameters | _settings(setting or []),
            cold=_cold(cold, cold_endpoint, cold_tls, cold_credentials),
            warm_dir=(warm_dir or _cache_dir() / "warm").resolve(),
            objects_dir=(objects_dir or _cache_dir() / "objects").resolve(),
            run_dir=run_dir.resolve() if run_dir is not None else None,
            tracing=Tracing(trace_url, trace_rate) if trace_url is not None else None,
        )

    config, serving = _configure(
        lambda: (
            configure(),
            ServingConfig(
                SupervisorConfig(max_attempts=attempts, recover=supervise),
                health_host or host,
                health_port,
                _backups(backup_dir, backup_every, backup_keep),
            ),
        ),
        console,
    )
    if check:
        findings = list(validate(_needs(config, health_host or host, health_port)))
        if not passed(findings):
            _report(console, findings)
            raise typer.Exit(1)
        for finding in findings:
            if finding.status == "warn":
                console.print(
                    f"{_MARKS['warn']} {finding.check}: {finding.found}. {escape(finding.cure)}"
                )
    raise typer.Exit(serve(config, serving, console))


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
    health_host: HealthHost = None,
    health_port: HealthPort = 8003,
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
            instances=instances or default_instances(),
            parameters={"hot_size_bytes": str(size_bytes(hot_bytes))},
            cold=_cold(cold, cold_endpoint, True, None),
            warm_dir=(warm_dir or _cache_dir() / "warm").resolve(),
            objects_dir=(objects_dir or _cache_dir() / "objects").resolve(),
        )

    config = _configure(configure, console)
    findings = list(validate(_needs(config, health_host or host, health_port)))
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


# -- options -------------------------------------------------------------------------------------


def _configure(make: Callable[[], Made], console: Console) -> Made:
    """What `make` makes, its warnings printed; a ConfigError ends the program."""
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


def _tls(certificate: Path | None, key: Path | None, client_ca: Path | None) -> Tls | None:
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("TLS needs both --tls-cert and --tls-key")
    return Tls(
        certificate.resolve(), key.resolve(), client_ca.resolve() if client_ca is not None else None
    )


def _backups(directory: Path | None, every: str, keep: int) -> BackupConfig | None:
    if directory is None:
        return None
    return BackupConfig(directory.resolve(), duration_s(every), keep)


def _cold(wanted: bool, endpoint: str | None, tls: bool, file: Path | None) -> ColdStore | str:
    if not wanted:
        return "none"
    if endpoint is None:
        return "embedded"
    return ColdStore(endpoint, tls, file.resolve() if file is not None else None)


def _cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "ctrlcache"


def _needs(config: RuntimeConfig, health_host: str, health_port: int) -> Needs:
    directories = [config.warm_dir, config.run_dir]
    if config.cold == "embedded":
        directories.append(config.objects_dir)
    return Needs(
        object_store=config.cold == "embedded",
        shm=config.shm,
        shm_bytes=int(config.parameters["hot_size_bytes"]),
        directories=tuple(path for path in directories if path is not None),
        ports=(
            Port("--http-port", config.servers.http, config.http_port),
            Port("--grpc-port", config.servers.grpc, config.grpc_port),
            Port("--metrics-port", config.servers.metrics, config.metrics_port),
            Port("--health-port", health_host, health_port),
        ),
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
