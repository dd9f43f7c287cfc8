"""A served tiny model in this process: everything but Triton."""

from __future__ import annotations

import itertools
import shutil
import threading
from pathlib import Path

import pytest
from tiny_world import TINY, Client

from worldserve.models.tiny import TinyWorldModel
from worldserve.service import WorldService

_numbers = itertools.count()


@pytest.fixture
def shm():
    """A directory in shared memory, removed afterwards."""
    path = Path("/dev/shm") / f"ctrlcache-test-{threading.get_native_id()}-{next(_numbers)}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def serve(shm, tmp_path):
    """Start services: `serve(model=..., **parameters)` -> Client. One at a time in one memory."""
    running = []

    def start(model=None, **parameters):
        settings = {
            "world_model_class": TINY,
            "shm_dir": str(shm),
            "hot_size_bytes": "64MiB",
            "max_sessions": "8",
            **{key: str(value) for key, value in parameters.items()},
        }
        service = WorldService(settings, tmp_path, model=model or TinyWorldModel())
        running.append(service)
        return Client(service)

    def stop(client):
        running.remove(client.service)
        client.service.close()

    start.stop = stop
    yield start
    for service in running:
        service.close()
