"""Fixtures shared by all tests: the real tritonserver, started once, gone without a trace.

`server` is one server over the project's own model repository for the whole session; tests use
correlation ids of their own. `start_server` starts further ones (another repository, other
settings) that live as long as the test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hunting import load_profile

from worldserve import processes
from worldserve.runtime import Runtime, RuntimeConfig

load_profile()

PROJECT = Path(__file__).resolve().parent.parent
StartServer = Callable[..., Runtime]


def assert_no_trace(runtime: Runtime) -> None:
    """No process, no file in shared memory, no run directory is left of a run."""
    assert processes.run_processes(runtime.run_id) == []
    assert processes.shm_entries(runtime.run_id, runtime.config.shm) == []
    assert runtime.config.run_dir is not None or not runtime.run_dir.exists()


def start(log: Callable[[str], None] | None = None, **settings: Any) -> Runtime:
    """A started Runtime on free ports; the caller stops it."""
    settings.setdefault("model_repository", PROJECT / "model_repository")
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    runtime = Runtime(RuntimeConfig(**{**ports, **settings}), log)
    runtime.start()
    return runtime


@pytest.fixture(scope="session")
def server() -> Iterator[Runtime]:
    """The server most tests talk to: `server.endpoints.grpc`, `.http`, `.metrics`, `.gateway`."""
    runtime = start()
    try:
        yield runtime
    finally:
        runtime.stop()
        assert_no_trace(runtime)


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Start more servers: `start_server(model_repository=..., instances=2, parameters={...})`."""
    with ExitStack() as stack:

        def factory(**settings: Any) -> Runtime:
            runtime = start(**settings)
            stack.callback(assert_no_trace, runtime)
            stack.callback(runtime.stop)
            return runtime

        yield factory


@pytest.fixture
def second_server(start_server: StartServer) -> Runtime:
    """One more server over the project's repository, for this test alone."""
    return start_server()


_ids = itertools.count(1)


@pytest.fixture
def correlation_id(request: pytest.FixtureRequest) -> str:
    """A sequence id that no other test uses."""
    return f"{request.node.name}-{next(_ids)}"
