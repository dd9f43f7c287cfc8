"""What the server cannot help: its object store, and the time of day."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import misbehaviour
import object_store
import pytest
from tiny_world import HELD, clip
from wire import Wire, metric

from ctrlcache.templates import build
from ctrlcache.tiers.warm import WarmTier
from worldserve.gateway import ObjectStore

pytestmark = pytest.mark.server


class Relay:
    """Between the server and its object store; `treat` is what it does with a connection now."""

    def __init__(self) -> None:
        self.treat: Callable[[socket.socket], None] = misbehaviour.hangs_up

    def __call__(self, connection: socket.socket) -> None:
        self.treat(connection)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    store = object_store.start(tmp_path)
    yield store
    store.stop()


def make_templates(stand, store: ObjectStore, directory: Path) -> None:
    """Sessions of the task "push" become its templates."""
    server = stand(directory=directory)
    wire = Wire(server.endpoints, "grpc")
    for number in range(1, 7):
        wire.ask(HELD, number, frames=clip(2, seed=number), start=True, task="push")
    wire.ask(HELD, 6, drain=True)
    wire.close()
    server.close()
    objects = object_store.objects(store, "ctrlcache-templates")
    objects.ensure_bucket()
    index = directory / "index"
    warm = WarmTier(server.warm_dir, index, limit_bytes=1 << 30, read_only=True)
    assert [item.task for item in build(warm, objects, least=2)] == ["push"]
    warm.close()


@pytest.mark.slow
def test_the_object_store_is_lost_slow_and_lying(stand, crowd, verdict, store, tmp_path):
    """Gone, silent, dripping, rubbish, endless: no answer waits for it, none is wrong. When it is
    well again, the templates arrive by themselves."""
    make_templates(stand, store, tmp_path / "before")
    relay = Relay()
    with object_store.serving(relay) as port:
        server = stand(
            *("--cold-endpoint", f"127.0.0.1:{port}", "--no-cold-tls"),
            *("--cold-credentials", str(tmp_path / "credentials.json")),
            settings={"cold_timeout_s": "1", "cold_min_confidence": "0"},
        )
        people = crowd(server, model="interactive_world", task="push")
        people.settle()
        people.struck()
        relay.treat = misbehaviour.silent
        people.recovered()
        for bad in (
            misbehaviour.dripping,
            misbehaviour.rubbish,
            misbehaviour.endless,
            misbehaviour.not_s3,
        ):
            relay.treat = bad
            assert people.work(3) > 0
        seen = metric(server.endpoints, "ctrlcache_cold_requests_total", result="hit") or 0
        assert seen == 0
        relay.treat = object_store.forward(int(store.endpoint.rsplit(":", 1)[1]))
        hit = {"result": "hit"}
        people.until(lambda: metric(server.endpoints, "ctrlcache_cold_requests_total", **hit))
        store.stop()
        people.settle()
        row = verdict("object store gone, silent, dripping, lying, endless", people, server)
    assert row.refused == 0
    assert not server.events()


# Read by each interpreter as it starts. libfaketime would reach Triton too, but breaks sleeping in
# Python 3.11 (clock_nanosleep: EINVAL).
_CLOCK = """
import time
_true = time.time
def _set():
    with open({path!r}) as file:
        return _true() + float(file.read() or 0)
time.time = _set
"""


@pytest.mark.slow
def test_the_clock_jumps(stand, crowd, verdict, tmp_path):
    """Two days on, a week back, and true again: no session is forgotten for it."""
    clock, day = tmp_path / "clock", 86_400
    clock.write_text("0")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_CLOCK.format(path=str(clock)))
    server = stand(environment={"PYTHONPATH": str(tmp_path / "site")})
    people = crowd(server)
    people.settle()
    for jump in (2 * day, -7 * day, 0):
        clock.write_text(str(jump))
        people.struck()
        people.recovered()
        people.work(11)  # longer than housekeeping sleeps
    verdict("clock two days on, a week back, true again", people, server)
    assert not server.events()
