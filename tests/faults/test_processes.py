"""Processes that die or stop while people work: everybody goes on where they were."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from reference import play
from stand import PROJECT, stopped
from wire import metric

pytestmark = pytest.mark.server


def test_a_stub_is_killed(stand, crowd, verdict):
    """The only instance of the world model: everybody waits for the supervisor to load it again."""
    server = stand()
    people = crowd(server)
    people.settle()
    stub = server.stubs()[0]
    os.kill(stub, signal.SIGKILL)
    people.struck()
    people.recovered()
    people.settle()
    verdict("kill -9 of the stub", people, server)
    # Where the loading fails, too, the server is started again.
    assert re.match(r"world_model (reload|restart) ", server.events())


def test_the_server_is_killed(stand, crowd, verdict):
    """tritonserver itself; sessions and tiers outlive it in shared memory."""
    server = stand()
    people = crowd(server)
    people.settle()
    os.kill(server.server_pid, signal.SIGKILL)
    people.struck()
    people.recovered()
    people.settle()
    verdict("kill -9 of tritonserver", people, server)
    assert "restart" in server.events()


@pytest.mark.slow
def test_the_writer_is_killed(stand, crowd, verdict):
    """Of two instances, the one that writes the warm tier: the other one takes over, what was
    flushed stays, and more is written."""
    server = stand("--instances", "2")
    people = crowd(server)
    people.settle()

    def written() -> float:
        return metric(server.endpoints, "ctrlcache_entries", tier="warm") or 0

    people.until(lambda: written() > 0)
    writer = server.writer()
    assert writer in server.stubs()
    os.kill(writer, signal.SIGKILL)
    people.struck()
    people.recovered()
    before = written()
    people.until(lambda: server.writer() != writer and written() > before)
    verdict("kill -9 of the warm tier's writer, one of two stubs", people, server)


@pytest.mark.slow
@pytest.mark.parametrize("instances", [1, 2])
def test_a_stub_is_stopped(stand, crowd, verdict, instances):
    """SIGSTOP: it takes requests and answers none, until the supervisor's canary is late."""
    server = stand("--instances", str(instances))
    people = crowd(server)
    people.settle()
    with stopped(server.stubs()[-1]):
        people.struck()
        people.recovered()
    people.settle()
    verdict(f"SIGSTOP of a stub, {instances} in all", people, server)
    assert "world_model reload" in server.events()


@pytest.mark.slow
def test_the_server_is_stopped_for_a_while(stand, crowd, verdict):
    """SIGSTOP of tritonserver, continued after some seconds, as on a host that swaps."""
    server = stand()
    people = crowd(server)
    people.settle()
    people.struck()
    with stopped(server.server_pid):
        time.sleep(8.0)
    people.recovered()
    people.settle()
    verdict("SIGSTOP of tritonserver for 8 s", people, server)


@pytest.mark.slow
def test_stub_after_stub_is_killed(stand, crowd, verdict):
    """Three losses in a row, each as soon as the one before is mended."""
    server = stand()
    people = crowd(server)
    people.settle()
    for _ in range(3):
        stub = people.until(server.stubs)[0]
        os.kill(stub, signal.SIGKILL)
        people.struck()
        people.recovered()
    people.settle()
    verdict("kill -9 of the stub, three times", people, server)


@pytest.mark.slow
def test_slots_are_exhausted_and_time_out(stand, crowd, verdict, tmp_path):
    """The ensemble with eight places and an idle time of a second: most people lose their place
    between two requests, all the time, and none of them his session."""
    copy = tmp_path / "repository"
    copy.mkdir()
    for model in (PROJECT / "model_repository").iterdir():
        (copy / model.name).mkdir()
        for path in model.iterdir():
            if path.name != "config.pbtxt":
                (copy / model.name / path.name).symlink_to(path)
                continue
            text = path.read_text()
            if model.name == "world_model":
                text, idle = re.subn(r"(idle_microseconds): \d+", r"\1: 1000000", text)
                text, places = re.subn(r"(candidate_sequences): \d+", r"\1: 8", text)
                assert (idle, places) == (1, 1)
            (copy / model.name / path.name).write_text(text)
    server = stand("--model-repository", str(copy))
    people = crowd(server, model="interactive_world", pace_s=1.5, timeout_s=20)
    people.struck()
    people.recovered()
    people.settle(4, within_s=240)
    verdict("8 places for everybody, lost after 1 s, through the ensemble", people, server)


@pytest.mark.slow
def test_the_reference_model_loses_its_stub(stand, script_verdict):
    """The shipped weights, and two people who play the same script as others undisturbed: every
    exact answer is bit-equal, nothing that was committed is lost."""
    reference = {"weights_dir": "", "max_sessions": "8"}
    server = stand("--hot-bytes", "512MiB", tiny=False, settings=reference)
    numbers = (1, 2)
    undisturbed = [play(server, number, None) for number in numbers]

    def kill() -> None:
        os.kill(server.stubs()[0], signal.SIGKILL)

    disturbed = [play(server, number, kill) for number in numbers]
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert before.digests == after.digests
    script_verdict("kill -9 of the stub, reference model", disturbed, server)
