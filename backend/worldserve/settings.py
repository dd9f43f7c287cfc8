"""What a run may be told, and what the machine grants it."""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctrlcache.errors import ConfigError
from worldserve import processes
from worldserve.access import AccessConfig
from worldserve.tracing import Tracing

__all__ = [
    "ColdStore",
    "Endpoints",
    "RuntimeConfig",
    "Servers",
    "default_instances",
    "free_ports",
    "threads_per_instance",
    "usable_cores",
]

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ColdStore:
    """An external MinIO/S3: `endpoint` as host:port, `tls`, credentials in a file of mode 0600.

    Without a file they come from CTRLCACHE_S3_ACCESS_KEY and CTRLCACHE_S3_SECRET_KEY.
    """

    endpoint: str
    tls: bool = True
    credentials_file: Path | None = None


@dataclass(frozen=True)
class Servers:
    """Addresses listened on, by interface."""

    http: str
    grpc: str
    metrics: str

    def __iter__(self) -> Iterator[str]:
        return iter((self.http, self.grpc, self.metrics))


@dataclass(frozen=True)
class RuntimeConfig:
    """Port 0: any free one. warm_dir and objects_dir None: inside the run directory, gone with it.

    host: address of gRPC. http_host, metrics_host: None for the same, but loopback where gRPC has
    TLS, which neither of them can speak. access: keys and certificates.

    cold: "embedded" starts an S3 gateway of this run, "none" goes without, or an external store.
    parameters: settings of the models, `key` for all or `model.key` for one.
    models: those to load, all of the repository by default. canary: the model that must answer.
    tracing: where spans go, None for none.
    """

    model_repository: Path
    models: tuple[str, ...] = ()
    canary: str = "world_model"
    host: str = "127.0.0.1"
    http_host: str | None = None
    metrics_host: str | None = None
    access: AccessConfig = field(default_factory=AccessConfig)
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    gateway_port: int = 0
    instances: int | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    cold: ColdStore | str = "embedded"
    warm_dir: Path | None = None
    objects_dir: Path | None = None
    run_dir: Path | None = None
    shm: Path = processes.SHM
    tracing: Tracing | None = None
    ready_timeout_s: float = 180.0
    flush_timeout_s: float = 4.0

    @classmethod
    def aside(cls, model_repository: Path, **other: Any) -> RuntimeConfig:
        """Of a server beside whatever runs: on free ports, the world model alone, no object store,
        unless `other` fields say so."""
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        return cls(
            model_repository, **{"models": ("world_model",), "cold": "none", **ports, **other}
        )

    def __post_init__(self) -> None:
        if not self.model_repository.is_dir():
            raise ConfigError(
                f"model_repository {str(self.model_repository)!r} is not a directory; "
                "expected one that holds <model>/config.pbtxt"
            )
        for name in ("http_port", "grpc_port", "metrics_port", "gateway_port"):
            port = getattr(self, name)
            if not 0 <= port <= 65535:
                raise ConfigError(f"{name} is {port}; expected 0 (any free port) to 65535")
        if self.instances is not None and self.instances < 1:
            raise ConfigError(f"instances is {self.instances}; expected at least 1")
        if isinstance(self.cold, str) and self.cold not in ("embedded", "none"):
            raise ConfigError(
                f"cold is {self.cold!r}; expected 'embedded', 'none' or an external store"
            )
        for text in self._exposed():
            warnings.warn(text, stacklevel=3)

    @property
    def servers(self) -> Servers:
        """The addresses that are really listened on."""
        other = LOOPBACK[0] if self.access.tls is not None else self.host
        return Servers(self.http_host or other, self.host, self.metrics_host or other)

    def _exposed(self) -> Iterator[str]:
        """What whoever reaches the machine can do, in words; nothing for loopback."""
        servers = self.servers
        if servers.grpc not in LOOPBACK:
            lacks = [] if self.access.tls is not None else ["TLS (--tls-cert, --tls-key)"]
            if not self.access.has_key:
                lacks.append("an access key (--access-key-file)")
            if lacks:
                yield (
                    f"gRPC listens on {servers.grpc} without {' and without '.join(lacks)}: "
                    "whoever reaches this address can read along or use every model; "
                    "docs/security.md says how to close it"
                )
        if servers.http not in LOOPBACK:
            use = "" if self.access.has_key else " and, without an access key, use every model"
            yield (
                f"HTTP listens on {servers.http}, and Triton's HTTP has no TLS: whoever reaches "
                f"this address can read along{use}; put a proxy in front that ends TLS "
                "(docs/security.md)"
            )
        if self.access.admin and not {servers.grpc, servers.http} <= set(LOOPBACK):
            yield (
                "clients may load models from other addresses (--allow-admin): that is to run any "
                "code on this machine"
            )


@dataclass(frozen=True)
class Endpoints:
    """Each as host:port; gateway None where no gateway of this run was started."""

    http: str
    grpc: str
    metrics: str
    gateway: str | None = None


def usable_cores() -> int:
    """Cores this process may use: affinity, and the container's quota where there is one."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def default_instances() -> int:
    """Instances that a launched server has: on two cores, two sessions are then computed at once,
    while one alone has as many threads as it would have with one instance."""
    return min(2, usable_cores())


def threads_per_instance(instances: int) -> int:
    """Threads that compute, in each instance: one of its cores is left to its thinking time."""
    return max(1, usable_cores() // instances - 1)


def free_ports(hosts: Sequence[str], wanted: Sequence[int]) -> tuple[int, ...]:
    """The wanted ports, each of its host, with each 0 replaced by a free one; ConfigError names one
    that is taken."""
    if isinstance(hosts, str):  # which is a sequence of hosts of one letter, too
        raise TypeError(f"hosts must be several, got the text {hosts!r}")
    with contextlib.ExitStack() as stack:
        ports = []
        # All held at once, so that no port is handed out twice.
        for host, port in zip(hosts, wanted, strict=True):
            held = stack.enter_context(
                socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            )
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind((host, port))
            except OSError as error:
                raise ConfigError(
                    f"port {port} on {host} cannot be used ({error.strerror}); "
                    "choose another one (--http-port, --grpc-port, --metrics-port)"
                ) from None
            ports.append(held.getsockname()[1])
    return tuple(ports)
