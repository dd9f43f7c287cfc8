"""The supervisor and a world model: one of two instances hangs, every session's place is taken."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import threading
from pathlib import Path

import pytest
from hanging_world import HANG
from tiny_world import HELD, Truth, clip, equal
from wire import InferenceServerException, Wire, eventually

from worldserve import processes
from worldserve.runtime import Runtime, RuntimeConfig
from worldserve.supervisor import Answered, Lost, Recovered, Supervisor, SupervisorConfig

pytestmark = pytest.mark.server

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
SHARED = Path(__file__).resolve().parents[1] / "shared"
QUICK = SupervisorConfig(interval_s=0.2, ask_every_s=0.5, deadline_s=2.0, first_backoff_s=0.1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A server over two instances of a tiny world model that can be made to hang, three sessions
    and no more."""
    repository = tmp_path_factory.mktemp("world") / "repository"
    shutil.copytree(REPOSITORY, repository, ignore=shutil.ignore_patterns("*.safetensors"))
    script = repository / "world_model" / "1" / "model.py"
    script.write_text(f"import sys\n\nsys.path.append({str(SHARED)!r})\n{script.read_text()}")
    runtime = Runtime(
        RuntimeConfig.aside(
            repository,
            instances=2,
            parameters={
                "world_model_class": "hanging_world:HangingWorldModel",
                "hot_size_bytes": "64MiB",
                "history_frames": "64",
                "max_sessions": "3",
            },
        )
    )
    runtime.start()
    yield runtime
    runtime.stop()
    assert processes.run_processes(runtime.run_id) == []
    assert processes.shm_entries(runtime.run_id) == []


@pytest.fixture
def events(world):
    """What the supervisor of `world` reports, but for canaries that were answered."""
    found = queue.Queue()

    def take(event):
        if not isinstance(event, Answered):
            found.put(event)

    supervisor = Supervisor(world, QUICK, take)
    supervisor.start()
    found.status = supervisor.status
    yield found
    supervisor.stop()
    supervisor.join(30)


@pytest.fixture
def wire(world):
    client = Wire(world.endpoints, "grpc")
    yield client
    client.close()


def test_each_instance_has_a_canary_of_its_own(world, events):
    """Whatever the batcher does: two canaries, two processes."""
    eventually(lambda: events.status().ready, 30)
    [model] = events.status().models
    assert (model.instances, model.alive, model.reached) == (2, 2, 2)


def test_one_hung_instance_of_two_is_found_though_the_other_answers(world, events, wire):
    """All places are taken, one engine hangs, the other goes on answering: the hung one is found,
    and all sessions resume with everything they had committed."""
    truths = {id: Truth(clip(2, seed=id), [HELD]) for id in (1, 2, 3)}
    for id, truth in truths.items():
        wire.ask(HELD, id, frames=clip(2, seed=id), start=True)
        wire.ask(-HELD, id, mode="advance")
        truth.leave(-HELD)
    assert "all 3 sessions are taken" in wire.refused(HELD, 4, frames=clip(2), start=True)[1]
    done = threading.Event()

    def hang():
        try:
            # Triton never replies to it: this is how long the test takes.
            wire.ask([HANG, 0.0], 1, cache="off", client_timeout=15)
        except InferenceServerException:
            hung.set()
        finally:
            done.set()

    hung = threading.Event()
    threading.Thread(target=hang).start()
    answered = 0
    other = Wire(world.endpoints, "grpc")
    while not done.is_set():
        for id in (2, 3):
            try:
                got = other.ask(HELD, id, cache="off", client_timeout=1.0)
            except InferenceServerException:
                continue  # this one is at the instance that hangs, or is being loaded again
            assert equal(got, truths[id].predict(HELD))
            answered += 1
    assert hung.is_set()
    assert answered > 0
    lost = events.get(timeout=60)
    assert isinstance(lost, Lost)
    assert "(process" in lost.reason
    assert isinstance(events.get(timeout=60), Recovered)
    for id, truth in truths.items():
        got = other.ask(HELD, id, start=True, resume=id, cache="off", client_timeout=30)
        assert equal(got, truth.predict(HELD))
    other.close()
    assert events.empty()


def test_full_server_recovers_from_a_killed_stub(world, events, wire):
    """A canary takes no session's place: where all are taken, it is answered all the same."""
    truth = Truth(clip(2), [HELD])
    for id in (1, 2, 3):
        wire.ask(HELD, id, frames=clip(2), start=True)
    os.kill(world.stubs("world_model")[0].pid, signal.SIGKILL)
    assert isinstance(events.get(timeout=60), Lost)
    assert isinstance(events.get(timeout=60), Recovered)
    eventually(lambda: events.status().ready, 30)
    for id in (1, 2, 3):
        got = wire.ask(-HELD, id, start=True, resume=id, cache="off", client_timeout=30)
        assert equal(got, truth.predict(-HELD))
    assert events.empty()


def test_a_canary_leaves_nothing_behind(world, wire):
    """No session, no couplet: whoever asks for one under its id finds none."""
    canary = world.canary("world_model")
    canary.ask(30)
    assert canary.pid in {stub.pid for stub in world.stubs("world_model")}
    for _ in range(3):
        canary.ask(30)
    kind, _ = wire.refused(HELD, 9, start=True, resume=canary._sequence)
    assert kind == "not found"
    canary.end()
