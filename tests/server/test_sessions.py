"""Sessions on the real server: they outlive what serves them, and never meet."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tiny_world import HELD, Truth, clip, controls, equal
from wire import InferenceServerException, code, eventually, metric

pytestmark = pytest.mark.server


# --- outliving ------------------------------------------------------------------------------------


def test_resume_after_the_stub_was_killed(start_tiny, connect):
    """kill -9, unload and load, resume: the predictions are those of an undisturbed session."""
    runtime = start_tiny()
    wire, frames, steps = connect(runtime), clip(6), controls(8)
    undisturbed = Truth(frames, steps[:5])
    wire.ask(np.vstack([steps[:5], HELD]), 7, frames=frames, start=True)
    wire.ask(steps[5], 7, mode="advance")
    undisturbed.leave(steps[5])
    [stub] = runtime.stubs("world_model")
    os.kill(stub.pid, signal.SIGKILL)
    runtime.reload_model("world_model")
    again = connect(runtime)
    got = again.ask(HELD, 7, start=True, resume=7, cache="off")
    assert equal(got, undisturbed.predict(HELD))
    again.ask(steps[6], 7, mode="advance", cache="off")
    undisturbed.leave(steps[6])
    # Another id, as from a client library that makes up a new one.
    got = again.ask(-HELD, "later", start=True, resume=7, cache="off")
    assert equal(got, undisturbed.predict(-HELD))


def test_resume_after_the_batcher_forgot(start_tiny, repository, connect):
    """An idle sequence loses its place, not its session."""
    short = repository({"600000000": "1000000"})
    wire, frames = connect(start_tiny(model_repository=short)), clip(3)
    wire.ask(HELD, 3, frames=frames, start=True)

    def forgotten():
        time.sleep(1.5)
        try:
            wire.ask(HELD, 3)
        except InferenceServerException as error:
            return "START" in error.message()
        return False

    eventually(forgotten, 30)
    truth = Truth(frames, [HELD] * 2)
    assert equal(wire.ask(-HELD, 3, start=True, resume=3), truth.predict(-HELD))


def test_resume_after_end(wire, new_id):
    """END gives the place back; the session can be taken up again until it is forgotten."""
    id, other, frames = new_id(), new_id(), clip(3)
    wire.ask(HELD, id, frames=frames, start=True)
    wire.ask(HELD, id, mode="advance", end=True)
    kind, text = wire.refused(HELD, id)
    assert (kind, "START" in text) == ("invalid", True)
    truth = Truth(frames, [HELD] * 2)
    truth.leave(HELD)
    assert equal(wire.ask(-HELD, other, start=True, resume=id), truth.predict(-HELD))
    kind, text = wire.refused(HELD, id, start=True, resume=id)
    assert kind == "not found"


def test_a_session_is_forgotten_in_time(start_tiny, connect):
    """After its time to live there is nothing to resume, and the metric says so."""
    runtime = start_tiny(parameters={"session_ttl_s": "1"})
    wire = connect(runtime)
    wire.ask(HELD, 1, frames=clip(2), start=True)
    time.sleep(1.5)
    kind, text = wire.refused(HELD, 2, start=True, resume=1)
    assert (kind, "no session 1 (a number)" in text) == ("not found", True)


# --- isolation ------------------------------------------------------------------------------------


def test_start_on_a_live_id_is_a_new_session(wire, new_id):
    """Nothing of the one before shows."""
    id = new_id()
    wire.ask(HELD, id, frames=clip(5), start=True)
    wire.ask(HELD, id, mode="advance")
    got = wire.ask(HELD, id, frames=clip(2, seed=3), start=True)
    assert equal(got, Truth(clip(2, seed=3), [HELD]).predict(HELD))


def test_an_id_that_ended_can_be_used_anew(wire, new_id):
    """Reuse after END without a trace of the first session."""
    id = new_id()
    wire.ask(HELD, id, frames=clip(5), start=True, end=True)
    got = wire.ask(HELD, id, frames=clip(2, seed=3), start=True)
    assert equal(got, Truth(clip(2, seed=3), [HELD]).predict(HELD))


def test_end_without_start(wire, new_id):
    """Refused, by name, and nothing comes of it."""
    id = new_id()
    kind, text = wire.refused(HELD, id, end=True, frames=clip(1))
    assert (kind, "START" in text) == ("invalid", True)
    kind, _ = wire.refused(HELD, new_id(), start=True, resume=id)
    assert kind == "not found"


def test_numbers_and_texts_are_different_ids(wire):
    """7 and "7" do not meet."""
    wire.ask(HELD, 987, frames=clip(2), start=True)
    wire.ask(HELD, "987", frames=clip(2, seed=1), start=True)
    assert equal(wire.ask(-HELD, 987), Truth(clip(2), [HELD]).predict(-HELD))
    assert equal(wire.ask(-HELD, "987"), Truth(clip(2, seed=1), [HELD]).predict(-HELD))


@pytest.mark.parametrize(
    "other", [{"tenant": "b"}, {"prompt": "another"}, {"frames": clip(3, seed=8)}, {"seed": 1}]
)
def test_the_same_control_elsewhere_is_never_a_hit(wire, new_id, new_scene, other):
    """Another tenant, prompt, scene or seed."""
    frames = clip(3, seed=new_scene())
    wire.ask(HELD, new_id(), frames=frames, start=True, drain=True)
    got = wire.ask(HELD, new_id(), start=True, **{"frames": frames, **other})
    assert got["CACHE_TIER"][0] == b"none" or "frames" in other
    got = wire.ask(HELD, new_id(), start=True, frames=frames)
    assert got["CACHE_TIER"][0] == b"hot"


def test_one_tenant_cannot_reach_anothers_session(wire, new_id):
    """Not by asking, not by resuming, not by forking."""
    id = new_id()
    wire.ask(HELD, id, frames=clip(3), start=True, tenant="a")
    assert wire.refused(HELD, id)[0] == "not found"
    assert wire.refused(HELD, id, tenant="b")[0] == "not found"
    for parameter in ("resume", "fork_of"):
        kind, _ = wire.refused(HELD, new_id(), start=True, tenant="b", **{parameter: id})
        assert kind == "not found"
    assert wire.ask(HELD, id, tenant="a")["EXACT"][0]


def test_racing_clients_are_one_after_the_other(tiny_server, connect, new_id):
    """Two clients advance one session at once: each step counts, none is lost."""
    id, frames, rounds = new_id(), clip(1), 12
    first, second = connect(tiny_server), connect(tiny_server, "http")
    first.ask(HELD, id, frames=frames, start=True)

    def race(wire):
        for _ in range(rounds):
            wire.ask(HELD, id, outputs=["STATE"], mode="advance")

    threads = [threading.Thread(target=race, args=(wire,)) for wire in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    truth = Truth(frames)
    for _ in range(2 * rounds):
        truth.leave(HELD)
    assert equal(first.ask(-HELD, id, cache="off"), truth.predict(-HELD))


def test_racing_starts_leave_one_whole_session(start_tiny, connect):
    """Clients that begin, move and end one id against each other, on two instances: in the end,
    the session is one that some client could have made."""
    runtime = start_tiny(instances=2)
    scenes = [clip(2, seed=seed) for seed in range(3)]

    def race(seed):
        wire = connect(runtime)
        for _ in range(8):
            try:
                wire.ask(HELD, 5, frames=scenes[seed], start=True)
                wire.ask(HELD, 5, outputs=["STATE"], mode="advance")
            except InferenceServerException as error:
                outcomes.add(code(error))

    outcomes: set[str] = set()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(race, range(3)))
    assert outcomes <= {"invalid", "unavailable", "not found"}
    wire = connect(runtime)
    got = wire.ask(-HELD, 5, start=True, resume=5, cache="off")
    possible = []
    for scene in scenes:
        truth = Truth(scene, [HELD])
        for _ in range(4):
            possible.append(truth.predict(-HELD))
            truth.leave(HELD)
    assert any(equal(got, one) for one in possible)


# --- cancelling -----------------------------------------------------------------------------------


def slow_weights(tmp_path, step_ms):
    (tmp_path / "tiny.json").write_text(json.dumps({"step_ms": step_ms}))
    return {"weights_dir": str(tmp_path)}


def test_cancelled_and_timed_out_requests_move_nothing(start_tiny, connect, tmp_path):
    """Whoever hangs up, or says how long he waits, finds his session where it was."""
    runtime = start_tiny(parameters=slow_weights(tmp_path, 40))
    wire, frames = connect(runtime), clip(2)
    wire.ask(HELD, 9, frames=frames, start=True)
    with pytest.raises(InferenceServerException) as hung_up:
        wire.ask(-HELD, 9, mode="advance", client_timeout=0.1)
    assert code(hung_up.value) == "deadline"
    arguments, _ = wire.request(2 * HELD, 9, mode="advance")
    with pytest.raises(InferenceServerException) as late:
        wire.client.infer("world_model", timeout=100_000, **arguments)
    assert code(late.value) == "cancelled"
    assert "time is up" in late.value.message()
    got = wire.ask(-HELD, 9, cache="off")
    assert equal(got, Truth(frames, [HELD]).predict(-HELD))


def test_waiting_sessions_are_computed_as_one_batch(start_tiny, connect, tmp_path):
    """Eight sessions that ask at once take far fewer rollouts than eight."""
    runtime = start_tiny(parameters=slow_weights(tmp_path, 10))
    wires = [connect(runtime) for _ in range(8)]
    for id, wire in enumerate(wires, 1):
        wire.ask(HELD, id, frames=clip(2, seed=id), start=True, cache="off")

    def ask(id):
        return wires[id - 1].ask(-HELD, id, cache="off")

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(1, 9)))
    for id, got in enumerate(answers, 1):
        assert equal(got, Truth(clip(2, seed=id), [HELD]).predict(-HELD))


# --- bounds ---------------------------------------------------------------------------------------


def test_abandoned_sessions_leave_nothing(start_tiny, connect):
    """200 sessions are begun and left: as many as stated are kept, the memory stays within its
    bound, and when their time is over there is room again."""
    parameters = {"max_sessions": "40", "session_ttl_s": "20", "hot_size_bytes": "256MiB"}
    runtime = start_tiny(parameters=parameters)
    wire = connect(runtime)
    refusals = []
    for number in range(1, 201):
        try:
            wire.ask(HELD, number, frames=clip(8, seed=number), start=True, outputs=["STATE"])
        except InferenceServerException as error:
            refusals.append((code(error), error.message()))
    assert len(refusals) >= 100
    assert all(kind == "unavailable" for kind, _ in refusals)
    assert all("all 40 sessions are taken" in text for _, text in refusals)
    held = sum(f.stat().st_blocks * 512 for f in runtime.shm_dir.rglob("*") if f.is_file())
    assert held <= (256 << 20) + (8 << 20)
    eventually(lambda: metric(runtime.endpoints, "ctrlcache_sessions") == 40)

    def room_again():
        try:
            wire.ask(HELD, 999, frames=clip(2), start=True, outputs=["STATE"])
        except InferenceServerException:
            return False
        return True

    eventually(room_again, 60)
    eventually(lambda: metric(runtime.endpoints, "ctrlcache_sessions") <= 2, 60)


def test_a_long_session_stays_small(start_tiny, connect):
    """2,000 observed frames: memory stays flat, and the predictions are the full computation's."""
    count = int(os.environ.get("CTRLCACHE_LONG_SESSION", "400"))
    runtime = start_tiny(parameters={"hot_size_bytes": "64MiB", "max_sessions": "4"})
    wire, frames, steps = connect(runtime), clip(count), controls(count)
    truth = Truth(frames, steps[: count - 1])
    wire.ask(HELD, 1, frames=frames[:1], start=True)
    [stub] = runtime.stubs("world_model")
    sizes = []
    for at in range(1, count, 4):
        part = frames[at : at + 4]
        plan = np.vstack([steps[at - 1 : at - 1 + len(part)], HELD])
        wire.ask(plan, 1, frames=part, outputs=["STATE"], cache="off")
        if at > count // 2:
            status = Path(f"/proc/{stub.pid}/status").read_text()
            sizes.append(int(status.split("RssAnon:")[1].split()[0]))
    assert equal(wire.ask(HELD, 1, cache="off"), truth.predict(HELD))
    assert max(sizes) < 1.1 * min(sizes)
