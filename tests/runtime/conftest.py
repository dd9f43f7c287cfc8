"""A tiny repository (a sequence model, a stateless one, an ensemble of both) on the real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from worldserve.runtime import Runtime

REPOSITORY = Path(__file__).parent / "repository"
StartEcho = Callable[..., Runtime]


class Echo:
    """A client of the echo model."""

    def __init__(self, runtime: Runtime) -> None:
        self.client = grpcclient.InferenceServerClient(runtime.endpoints.grpc)

    def ask(
        self, x: float = 3.0, *, model: str = "echo", timeout: float = 20, **options: Any
    ) -> Any:
        """The result of one request; a sequence of its own unless one is given."""
        tensor = grpcclient.InferInput("X", [1], "FP32")
        tensor.set_data_from_numpy(np.array([x], np.float32))
        options.setdefault("sequence_id", 7)
        options.setdefault("sequence_start", True)
        return self.client.infer(model, [tensor], client_timeout=timeout, **options)

    def double(self, x: float = 3.0, **options: Any) -> float:
        return float(self.ask(x, **options).as_numpy("Y")[0])

    def about(self, **options: Any) -> dict[str, Any]:
        about: dict[str, Any] = json.loads(self.ask(**options).as_numpy("ABOUT")[0])
        return about


@pytest.fixture
def start_echo(start_server: StartEcho) -> StartEcho:
    """Start a server over the tiny repository, without a cold store unless told."""

    def factory(**settings: Any) -> Runtime:
        return start_server(
            **{"model_repository": REPOSITORY, "canary": "echo", "cold": "none", **settings}
        )

    return factory


@pytest.fixture
def connect() -> Iterator[Callable[[Runtime], Echo]]:
    clients: list[Echo] = []

    def factory(runtime: Runtime) -> Echo:
        clients.append(Echo(runtime))
        return clients[-1]

    yield factory
    for echo in clients:
        echo.client.close()
