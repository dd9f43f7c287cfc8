"""The real server with the tiny model: fast enough to ask it thousands of things."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from wire import Wire

from worldserve import processes
from worldserve.runtime import Runtime, RuntimeConfig

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
TINY = "worldserve.models.tiny:TinyWorldModel"
SETTINGS = {
    "world_model_class": TINY,
    "hot_size_bytes": "1GiB",
    "history_frames": "64",
    "max_sessions": "400",
}

_ids = itertools.count(1)


def begin(**options):
    """A started server; the caller stops it."""
    parameters = {**SETTINGS, **options.pop("parameters", {})}
    config = {
        "model_repository": REPOSITORY,
        "models": ("world_model",),
        "cold": "none",
        "http_port": 0,
        "grpc_port": 0,
        "metrics_port": 0,
        **options,
    }
    runtime = Runtime(RuntimeConfig(parameters=parameters, **config))
    runtime.start()
    return runtime


def finish(runtime):
    runtime.stop()
    assert processes.run_processes(runtime.run_id) == []
    assert processes.shm_entries(runtime.run_id, runtime.config.shm) == []


@pytest.fixture(scope="session")
def tiny_server():
    """One server with one instance, for tests that only use ids of their own."""
    runtime = begin(models=("world_model", "cold_templates", "interactive_world"))
    yield runtime
    finish(runtime)


@pytest.fixture
def start_tiny():
    """Further servers, for tests that break something: `start_tiny(instances=2, ...)`."""
    running = []

    def start(**options):
        running.append(begin(**options))
        return running[-1]

    yield start
    for runtime in running:
        finish(runtime)


@pytest.fixture
def connect():
    """Clients that are closed afterwards: `connect(runtime, "http")`."""
    clients = []

    def to(runtime, protocol="grpc", model="world_model"):
        clients.append(Wire(runtime.endpoints, protocol, model))
        return clients[-1]

    yield to
    for client in clients:
        client.close()


@pytest.fixture(params=["grpc", "http"])
def wire(request, tiny_server, connect):
    """A client of the shared server, over each protocol."""
    return connect(tiny_server, request.param)


@pytest.fixture
def new_id():
    """Correlation ids that nobody else uses: numbers and texts in turn."""

    def make():
        number = next(_ids)
        return 10_000 + number if number % 2 else f"session-{number}"

    return make


@pytest.fixture
def new_scene():
    """Seeds of clips that the shared server has never seen."""
    return lambda: 1_000 + next(_ids)


@pytest.fixture
def repository(tmp_path):
    """A copy of the repository to change: `repository({"600000000": "2000000"})`."""

    def make(changes):
        target = tmp_path / "repository"
        shutil.copytree(REPOSITORY, target, ignore=shutil.ignore_patterns("*.safetensors"))
        config = target / "world_model" / "config.pbtxt"
        text = config.read_text()
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        config.write_text(text)
        return target

    return make
