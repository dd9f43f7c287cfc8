"""A real Prometheus that scrapes a real server, with this project's own configuration."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import yaml
from observed import PROJECT, tool
from tiny_world import HELD, clip, trust_the_tiny_model
from wire import Wire, eventually

from worldserve import processes
from worldserve.health import HealthServer, SupervisorMetrics
from worldserve.runtime import Runtime, RuntimeConfig
from worldserve.settings import free_ports
from worldserve.supervisor import Supervisor, SupervisorConfig

PROMETHEUS = PROJECT / "docker" / "prometheus"
SETTINGS = {
    "world_model_class": "worldserve.models.tiny:TinyWorldModel",
    "hot_size_bytes": "256MiB",
    "history_frames": "64",
    "max_sessions": "20",
    "error_samples": "1",
    "flush_interval_s": "1",
}


class Scraped:
    """What Prometheus knows of one run. pages: of the server and of its supervisor."""

    def __init__(self, api: str, pages: tuple[str, str]) -> None:
        self.api = api
        self.pages = pages

    def ask(self, path: str, **query: str) -> object:
        url = f"{self.api}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=20) as reply:
            return json.load(reply)["data"]

    def query(self, promql: str) -> list[float]:
        """The present values of an expression, without those that are no numbers."""
        values = [float(s["value"][1]) for s in self.ask("query", query=promql)["result"]]
        return [value for value in values if not np.isnan(value)]

    def page(self, number: int) -> str:
        with urllib.request.urlopen(f"http://{self.pages[number]}/metrics", timeout=20) as reply:
            return reply.read().decode()


def configuration(directory: Path, server: str, supervisor: str) -> Path:
    """The shipped configuration with other targets and a quicker pulse."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / "rules.yml")]
    targets = {"ctrlcache": server, "ctrlcache-supervisor": supervisor}
    config["scrape_configs"] = [
        {**job, "static_configs": [{"targets": [targets[job["job_name"]]]}]}
        for job in config["scrape_configs"]
        if job["job_name"] in targets
    ]
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def use(wire: Wire, number: int) -> None:
    """A little of everything: misses, exact and near hits, refusals, a session that ends."""
    draw = np.random.default_rng(number)
    wire.ask(HELD, number, frames=clip(3, seed=number), start=True)
    wire.ask(HELD, number, drain=True)
    for step in range(12):
        wire.ask(HELD + draw.uniform(-0.04, 0.04, 2), number, max_error=0.05)
        wire.ask(HELD, number)
        wire.ask(draw.uniform(-1, 1, 2), number)
        if step % 4 == 0:
            wire.refused(np.zeros(7), number)
    wire.ask(HELD, number, drain=True)


@pytest.fixture(scope="session")
def scraped(tmp_path_factory):
    """A served and used tiny model, its supervisor, and the Prometheus that watches both."""
    program = tool("prometheus")
    directory = tmp_path_factory.mktemp("observed")
    trust_the_tiny_model(directory)
    metrics = SupervisorMetrics()
    runtime = Runtime(
        RuntimeConfig.aside(
            PROJECT / "model_repository",
            models=("world_model", "cold_templates"),
            parameters={**SETTINGS, "weights_dir": str(directory)},
        )
    )
    runtime.start()
    supervisor = Supervisor(runtime, SupervisorConfig(ask_every_s=1.0), on_event=metrics)
    metrics.watch(supervisor)
    health = HealthServer(supervisor.status, metrics.registry, "127.0.0.1", 0)
    supervisor.start()
    port, _, _ = free_ports(("127.0.0.1",) * 3, (0, 0, 0))
    pages = (runtime.endpoints.metrics, health.endpoint)
    with open(directory / "prometheus.log", "wb") as log:
        prometheus = subprocess.Popen(
            [
                program,
                f"--config.file={configuration(directory, *pages)}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        seen = Scraped(f"http://127.0.0.1:{port}", pages)
        eventually(lambda: _up(seen), 60)
        wire = Wire(runtime.endpoints, "grpc")
        # Rates need a series to be there before it moves: the first use makes, the second counts.
        use(wire, 1)
        began = time.time()
        eventually(lambda: _scraped_after(seen, began), 60)
        use(wire, 2)  # a new scene: all of it once more
        wire.close()
        began = time.time()
        eventually(lambda: _scraped_after(seen, began + 6), 60)  # vitals come every 5 seconds
        yield seen
    finally:
        prometheus.terminate()
        prometheus.wait(20)
        supervisor.stop()
        health.close()
        runtime.stop()
        supervisor.join(20)
        assert processes.run_processes(runtime.run_id) == []
        assert processes.shm_entries(runtime.run_id, runtime.config.shm) == []


def _up(seen: Scraped) -> bool:
    try:
        return seen.query("up") == [1.0, 1.0]
    except OSError:
        return False


def _scraped_after(seen: Scraped, moment: float) -> bool:
    times = seen.query("timestamp(up)")
    return len(times) == 2 and min(times) > moment
