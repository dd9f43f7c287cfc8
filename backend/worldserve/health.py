"""The launcher's own small HTTP server: whether the models answer, for orchestrators and alerts.

Triton's health endpoint says "ready" while a model's stub is dead. `/ready` tells what the canaries
found; `/live` whether there is any hope without a restart of everything; `/metrics` counts what was
lost and what came back, across restarts of tritonserver.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ctrlcache.errors import ConfigError
from worldserve.supervisor import (
    Answered,
    GaveUp,
    Lost,
    Recovered,
    Status,
    Supervisor,
    SupervisorEvent,
)

__all__ = ["HealthServer", "SupervisorMetrics"]

_CANARY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_RECOVERY_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_CLIENT_TIMEOUT_S = 5.0


class SupervisorMetrics:
    """What the supervisor saw, in a registry of its own; takes its events."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._losses = Counter(
            "ctrlcache_supervisor_losses_total",
            "Models found dead or hung.",
            ["model"],
            registry=registry,
        )
        self._recoveries = Counter(
            "ctrlcache_supervisor_recoveries_total",
            "Models brought back, by reload or restart.",
            ["model", "how"],
            registry=registry,
        )
        self._recovery_s = Histogram(
            "ctrlcache_supervisor_recovery_seconds",
            "From the loss to the first answer.",
            ["model"],
            buckets=_RECOVERY_S,
            registry=registry,
        )
        self._canary_s = Histogram(
            "ctrlcache_supervisor_canary_seconds",
            "Time of the slowest canary of a round.",
            ["model"],
            buckets=_CANARY_S,
            registry=registry,
        )
        self._gave_up = Gauge(
            "ctrlcache_supervisor_gave_up",
            "1 once the supervisor stopped trying.",
            registry=registry,
        )

    def watch(self, supervisor: Supervisor) -> None:
        """Show its present status, too."""
        self.registry.register(_StatusCollector(supervisor.status))

    def __call__(self, event: SupervisorEvent) -> None:
        match event:
            case Answered(model, took_s):
                self._canary_s.labels(model).observe(took_s)
                # Series that begin with zero: an increase from nothing is none.
                self._losses.labels(model)
                for how in ("reload", "restart"):
                    self._recoveries.labels(model, how)
            case Lost(model, _):
                self._losses.labels(model).inc()
            case Recovered(model, how, took_s, _):
                self._recoveries.labels(model, how).inc()
                self._recovery_s.labels(model).observe(took_s)
            case GaveUp():
                self._gave_up.set(1)


class _StatusCollector(Collector):
    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        ready = GaugeMetricFamily(
            "ctrlcache_supervisor_ready", "1 while every model answers.", float(status.ready)
        )
        per_model = {
            "up": "1 while every instance of the model answers.",
            "instances": "Instances the model should have.",
            "instances_alive": "Instances whose process runs.",
            "answered_age_seconds": "Since all canaries of the model were answered.",
        }
        families = {
            name: GaugeMetricFamily(f"ctrlcache_supervisor_{name}", text, labels=["model"])
            for name, text in per_model.items()
        }
        for model in status.models:
            families["up"].add_metric([model.model], float(model.up))
            families["instances"].add_metric([model.model], model.instances)
            families["instances_alive"].add_metric([model.model], model.alive)
            if model.answered_ago_s is not None:
                families["answered_age_seconds"].add_metric([model.model], model.answered_ago_s)
        return [ready, *families.values()]


class HealthServer:
    """GET /ready, /live (200, or 503 with the reason; JSON) and /metrics on host:port.

    status: asked at each request. Port 0: any free one. ConfigError where the port cannot be had.
    """

    def __init__(
        self, status: Callable[[], Status], registry: CollectorRegistry, host: str, port: int
    ) -> None:
        handler = partial(_Handler, status, registry)
        try:
            self._server = (_Server6 if ":" in host else _Server)((host, port), handler)
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} cannot be used for health checks ({error.strerror}); "
                "choose another one (--health-port)"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="health", daemon=True
        )
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """host:port"""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    # A client that says nothing keeps a thread, not the server's end.
    daemon_threads = True
    block_on_close = False


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_TIMEOUT_S

    def __init__(
        self, status: Callable[[], Status], registry: CollectorRegistry, *connection: Any
    ) -> None:
        self._status = status
        self._registry = registry
        super().__init__(*connection)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._reply(200, CONTENT_TYPE_LATEST, generate_latest(self._registry))
        elif self.path in ("/ready", "/live"):
            status = self._status()
            good = status.ready if self.path == "/ready" else status.alive
            text: dict[str, Any] = {
                "ready": status.ready,
                "alive": status.alive,
                "reason": status.reason,
                "models": {
                    model.model: {
                        "up": model.up,
                        "instances": model.instances,
                        "alive": model.alive,
                        "answered_ago_s": model.answered_ago_s,
                    }
                    for model in status.models
                },
            }
            body = (json.dumps(text) + "\n").encode()
            self._reply(200 if good else 503, "application/json", body)
        else:
            self._reply(404, "text/plain", b"there are /ready, /live and /metrics\n")

    do_HEAD = do_GET

    def _reply(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Every probe of an orchestrator is not worth a line."""
