"""A served tiny model in this process: everything but Triton."""

from __future__ import annotations

import itertools
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from worldserve.models.tiny import TinyWorldModel
from worldserve.request import OUTPUTS, RawRequest
from worldserve.service import WorldService

_numbers = itertools.count()
TINY = "worldserve.models.tiny:TinyWorldModel"


class Client:
    """Asks a service as a client asks the server; raises what it answers with."""

    def __init__(self, service: WorldService) -> None:
        self.service = service

    def send(self, control, id="s", frames=None, start=False, end=False, outputs=OUTPUTS, **extra):
        """Put a request; returns a function that waits for its outcome."""
        inputs = {"CONTROL": np.atleast_2d(np.asarray(control, np.float32))}
        if frames is not None:
            inputs["FRAMES"] = frames
        cancelled = extra.pop("cancelled", lambda: False)
        timeout_s = extra.pop("timeout_s", None)
        for name in [name for name in extra if name.isupper()]:
            inputs[name] = np.asarray(extra.pop(name))
        done, box = threading.Event(), []
        raw = RawRequest(
            inputs, extra, id, start, end, frozenset(outputs), timeout_s, cancelled=cancelled
        )

        def deliver(result):
            box.append(result)
            done.set()

        self.service.put(raw, deliver)

        def outcome():
            assert done.wait(30)
            [result] = box
            if isinstance(result, Exception):
                raise result
            return result.outputs

        return outcome

    def ask(self, control, id="s", **options):
        return self.send(control, id, **options)()


def clip(length, seed=0, size=32):
    """Frames (T, size, size, 3) of something that moves smoothly, different for each seed."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size] / size
    phase = draw.uniform(0, 6, 3)
    frames = [
        np.stack([128 + 100 * np.sin(5 * x + 3 * y + p + 0.2 * t) for p in phase], -1)
        for t in range(length)
    ]
    return np.stack(frames).round().astype(np.uint8)


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
