"""The command line of tritonserver, and what its models must know of the run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from worldserve.gateway import Credentials, ObjectStore, ObjectStoreConfig
from worldserve.processes import RUN_ID_VARIABLE
from worldserve.settings import ColdStore, RuntimeConfig

__all__ = ["embedded_store", "run_parameters", "server_command", "start_guard"]


def server_command(
    config: RuntimeConfig,
    binary: Path,
    backends: Path,
    repository: Path,
    models: Sequence[str],
    ports: Sequence[int],
    region_prefix: str,
) -> list[str]:
    """With everything that is no secret. ports: of HTTP, gRPC and metrics. region_prefix: of the
    names of Triton's files in shared memory."""
    servers = config.servers
    http_port, grpc_port, metrics_port = ports
    return [
        str(binary),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in models),
        f"--http-address={servers.http}",
        f"--http-port={http_port}",
        f"--grpc-address={servers.grpc}",
        f"--grpc-port={grpc_port}",
        f"--metrics-address={servers.metrics}",
        f"--metrics-port={metrics_port}",
        "--allow-gpu-metrics=" + str(os.path.exists("/dev/nvidiactl")).lower(),
        # Regions of killed stubs are never unlinked by Triton; by this name we know them.
        f"--backend-config=python,shm-region-prefix-name={region_prefix}",
        # An interactive server always has live sequences, for which Triton would wait.
        "--exit-timeout-secs=1",
        *(config.tracing.options if config.tracing is not None else ()),
    ]


def run_parameters(
    config: RuntimeConfig, run_dir: Path, shm_dir: Path, store: ObjectStore | None
) -> dict[str, str]:
    """Settings of the models; one given by the user outranks it. store: the run's own, if any."""
    own = {
        "run_dir": str(run_dir),
        "shm_dir": str(shm_dir),
        "warm_dir": str(config.warm_dir or run_dir / "warm"),
    }
    if config.tracing is not None:
        own["trace_url"] = config.tracing.url
    if store is not None:
        own |= {
            "cold_endpoint": store.endpoint,
            "cold_tls": "false",
            "cold_credentials_file": str(store.config.credentials_file),
        }
    elif isinstance(config.cold, ColdStore):
        own |= {
            "cold_endpoint": config.cold.endpoint,
            "cold_tls": str(config.cold.tls).lower(),
        }
        if config.cold.credentials_file is not None:
            Credentials.load(config.cold.credentials_file)  # refuse a bad file early
            own["cold_credentials_file"] = str(config.cold.credentials_file)
    return own


def embedded_store(config: RuntimeConfig, run_dir: Path, run_id: str) -> ObjectStore:
    """The S3 gateway of this run, not yet started."""
    return ObjectStore(
        ObjectStoreConfig(
            directory=config.objects_dir or run_dir / "objects",
            port=config.gateway_port,
            credentials_file=run_dir / "s3-credentials.json",
            log_file=run_dir / "logs" / "gateway.log",
        ),
        environment={RUN_ID_VARIABLE: run_id},
    )


def start_guard(run_id: str, removable: Path | None) -> subprocess.Popen[bytes]:
    """The process that cleans up after a run whose launcher was killed; removable: its directory,
    where that goes with it."""
    guard = Path(__file__).with_name("guard.py")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(guard), run_id, str(removable or "")],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
