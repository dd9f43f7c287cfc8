"""The supervisor against stubs that are really dead, stopped or hung."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from tritonclient.utils import InferenceServerException

from worldserve.runtime import Runtime
from worldserve.supervisor import (
    Answered,
    Failed,
    GaveUp,
    Lost,
    Recovered,
    Supervisor,
    SupervisorConfig,
)

pytestmark = pytest.mark.server

QUICK = SupervisorConfig(interval_s=0.2, ask_every_s=0.2, deadline_s=2.0, first_backoff_s=0.1)


class Events(queue.Queue):  # type: ignore[type-arg]
    """What happened beside canaries that were answered."""

    def take(self, event: object) -> None:
        if not isinstance(event, Answered):
            self.put(event)

    def next(self, kind: type, within_s: float = 40) -> object:
        event = self.get(timeout=within_s)
        assert isinstance(event, kind), event
        return event


@pytest.fixture
def supervise() -> Iterator[Callable[..., tuple[Supervisor, Events]]]:
    with ExitStack() as stack:

        def factory(
            runtime: Runtime, config: SupervisorConfig = QUICK
        ) -> tuple[Supervisor, Events]:
            events = Events()
            supervisor = Supervisor(runtime, config, events.take)
            supervisor.start()
            stack.callback(supervisor.join, 30)
            stack.callback(supervisor.stop)
            return supervisor, events

        yield factory


def set_parameter(runtime: Runtime, key: str, value: str) -> None:
    """From the next load on, in the laid-out copy of the echo model."""
    config = runtime.run_dir / "repository" / "echo" / "config.pbtxt"
    entry = f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
    config.write_text(f"{config.read_text()}\n{entry}\n")


@pytest.mark.parametrize("victim", ["echo", "plain"])
def test_killed_stub_comes_back(start_echo, connect, supervise, victim):
    """kill -9 of a stub, of a sequence model or a stateless one: alone it would stay dead."""
    runtime = start_echo()
    _, events = supervise(runtime)
    (stub,) = runtime.stubs(victim)
    os.kill(stub.pid, signal.SIGKILL)
    assert events.next(Lost).model == victim
    recovered = events.next(Recovered)
    assert (recovered.model, recovered.how) == (victim, "reload")
    assert connect(runtime).double(4, model="pair") == 10


def test_one_dead_stub_of_two_is_noticed(start_echo, supervise):
    """With two instances the other one goes on answering; the loss is noticed all the same."""
    runtime = start_echo(instances=2)
    _, events = supervise(runtime)
    os.kill(runtime.stubs("echo")[1].pid, signal.SIGKILL)
    assert "1 of 2" in events.next(Lost).reason
    events.next(Recovered)
    assert len(runtime.stubs("echo")) == 2


def test_stopped_stub_is_replaced(start_echo, connect, supervise):
    """A stub that is stopped answers nothing, though its process is there."""
    runtime = start_echo()
    _, events = supervise(runtime)
    (stub,) = runtime.stubs("echo")
    os.kill(stub.pid, signal.SIGSTOP)
    events.next(Lost)
    events.next(Recovered)
    assert not stub.alive
    assert connect(runtime).double() == 6


def test_hung_request_is_ended(start_echo, connect, supervise):
    """A request that never ends blocks its instance: it is ended, and others are served."""
    runtime = start_echo()
    _, events = supervise(runtime)
    echo = connect(runtime)
    with pytest.raises(InferenceServerException):
        echo.double(parameters={"sleep_s": "600"}, timeout=0.5)
    events.next(Lost)
    events.next(Recovered)
    assert echo.double() == 6


def test_busy_model_is_left_alone(start_echo, connect, supervise):
    """A queue longer than the canary's deadline is no fault while requests are being finished."""
    runtime = start_echo()
    _, events = supervise(runtime, SupervisorConfig(0.1, 0.1, deadline_s=1.2, late_limit=3))
    stop = threading.Event()

    def load(sequence: int) -> None:
        echo = connect(runtime)
        while not stop.is_set():
            echo.double(sequence_id=sequence, parameters={"sleep_s": "0.5"})

    threads = [threading.Thread(target=load, args=(number,)) for number in (11, 12, 13)]
    for thread in threads:
        thread.start()
    time.sleep(8)
    stop.set()
    for thread in threads:
        thread.join()
    assert events.empty()


def test_full_batcher_is_left_alone(start_echo, connect, supervise):
    """All slots taken by idle sequences: new ones wait, but the canary holds a slot of its own."""
    runtime = start_echo()
    _, events = supervise(runtime)
    echo = connect(runtime)
    for sequence in (11, 12, 13):  # three of four slots; the canary has the fourth
        echo.double(sequence_id=sequence)
    with pytest.raises(InferenceServerException):
        echo.double(sequence_id=14, timeout=1)
    time.sleep(3 * QUICK.deadline_s)
    assert events.empty()


def test_dead_server_is_restarted(start_echo, connect, supervise):
    """kill -9 of tritonserver itself: started again on the same ports, the old stubs gone."""
    runtime = start_echo()
    _, events = supervise(runtime)
    old_stubs = runtime.stubs("echo")
    os.kill(runtime.server_pid, signal.SIGKILL)
    events.next(Lost)
    assert events.next(Recovered).how == "restart"
    assert connect(runtime).double() == 6
    assert not any(stub.alive for stub in old_stubs)


def test_stopped_server_is_not_waited_for(start_echo, connect, supervise):
    """It takes requests and answers none, whatever it is asked to load."""
    runtime = start_echo()
    _, events = supervise(runtime)
    os.kill(runtime.server_pid, signal.SIGSTOP)
    events.next(Lost)
    failed = events.next(Failed)
    assert (failed.how, failed.attempt) == ("reload", 1)
    assert "the server process is stopped" in failed.reason
    assert events.next(Recovered).how == "restart"
    assert connect(runtime).double() == 6


def test_gives_up_when_nothing_helps(start_echo, supervise):
    """A model that can no longer load: reload, restart, back off, then say so and stop trying."""
    runtime = start_echo()
    supervisor, events = supervise(runtime, replace(QUICK, longest_backoff_s=1.0, max_attempts=3))
    set_parameter(runtime, "fail_to_load", "true")
    os.kill(runtime.stubs("echo")[0].pid, signal.SIGKILL)
    events.next(Lost)
    assert [events.next(Failed).how for _ in range(3)] == ["reload", "restart", "restart"]
    assert events.next(GaveUp).attempts == 3
    assert supervisor.gave_up.is_set()
    supervisor.join(5)


def test_stop_does_not_wait_for_a_recovery(start_echo, supervise):
    """Ctrl-C while the supervisor waits for a server to start: everything is gone within 10 s."""
    runtime = start_echo()
    supervisor, events = supervise(runtime)
    set_parameter(runtime, "load_s", "60")
    os.kill(runtime.server_pid, signal.SIGKILL)
    events.next(Lost)
    time.sleep(1.0)  # it is now waiting for the slow model
    began = time.monotonic()
    supervisor.stop()
    runtime.stop()
    supervisor.join(10)
    assert time.monotonic() - began < 10
