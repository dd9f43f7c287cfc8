"""Step reuse over the wire: two instances of the reference model, every policy, no leaks."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from wire import Wire, metric

from worldcache.content import Rung
from worldcache.reuse_calibration import Knob, ReuseCalibration, StepTable, reuse_path
from worldcache.weights import WeightSettings
from worldserve import processes
from worldserve.models.reference import ReferenceWorldModel
from worldserve.runtime import Runtime, RuntimeConfig

pytestmark = [pytest.mark.server]
WEIGHTS = Path(__file__).resolve().parents[2] / "model_repository" / "world_model" / "1"
CLIPS = Path(__file__).resolve().parents[2] / "client_examples" / "clips"
REUSING = ("teacache", "easycache", "control", "chunk", "content")
STEPS = 4
FRAMES = ["PREDICTED_FRAMES", "STATE", "EXACT"]


def calibrate(directory):
    """A calibration for the test, with which every policy skips something at 35 dB."""
    knobs = {"teacache": 0.8, "easycache": 0.8, "control": 3, "chunk": 2, "content": 30.0}
    table = StepTable(
        knobs={name: (Knob(value, 40.0, 45.0, 0.5),) for name, value in knobs.items()},
        ladder=(Rung((0, STEPS - 1), 0.4, 0.1),),
        slopes={},
    )
    spec = ReferenceWorldModel.load(directory).spec
    change = np.full((3, 8, 8), 0.5, np.float32)
    made = ReuseCalibration(spec.weights_digest, {STEPS: table}, WeightSettings(), change)
    made.save(reuse_path(directory))


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    directory = tmp_path_factory.mktemp("weights")
    for name in ("weights.safetensors", "config.json"):
        shutil.copy(WEIGHTS / name, directory)
    calibrate(directory)
    config = RuntimeConfig.aside(
        WEIGHTS.parents[1],
        instances=2,
        parameters={
            "weights_dir": str(directory),
            "background": "false",
            "hot_size_bytes": "1GiB",
            "history_frames": "64",
            "max_sessions": "40",
        },
    )
    started = Runtime(config)
    started.start()
    yield started
    started.stop()
    assert processes.run_processes(started.run_id) == []
    assert processes.shm_entries(started.run_id, config.shm) == []


def scene(name, frames, size):
    """The first frames of a clip, enlarged to a size of their own."""
    with np.load(CLIPS / f"{name}.npz") as clip:
        part = clip["frames"][:frames]
    rows, columns = (np.arange(n) * 64 // n for n in size)
    return np.ascontiguousarray(part[:, rows][:, :, columns])


REQUESTS = (
    {"frames": scene("door-open", 3, (64, 64)), "prompt": "open the door", "horizon": 2},
    {"frames": scene("coffee-pull", 2, (96, 130)), "prompt": "pull the mug", "horizon": 5},
)


def ask(client, id, which, end=True, **how):
    request = REQUESTS[which]
    control = np.array([0.4, -0.2, 0.3, 1.0], np.float32) * (1 - 2 * which)
    horizon = np.array([request["horizon"]], np.int32)
    options = {"frames": request["frames"], "start": True, "prompt": request["prompt"], "end": end}
    return client.ask(
        control, id, outputs=FRAMES, cache="off", HORIZON=horizon, seed=which, **options, **how
    )


def test_requests_in_turns_are_each_as_alone(runtime):
    """Two clients with other sizes, horizons and prompts, at once and in turns, under every
    policy: what each gets is bit for bit what it gets alone."""
    clients = [Wire(runtime.endpoints, "grpc") for _ in REQUESTS]
    try:
        plain = [ask(clients[i], f"plain-{i}", i, steps=STEPS, reuse="none") for i in (0, 1)]
        for policy in REUSING:
            how = {"steps": STEPS, "reuse": policy}
            alone = [ask(clients[i], f"alone-{policy}-{i}", i, **how) for i in (0, 1)]
            for i in (0, 1):
                assert np.array_equal(alone[i]["STATE"], plain[i]["STATE"])
                assert not alone[i]["EXACT"][0]
                assert plain[i]["EXACT"][0]

            def turns(which, policy=policy, how=how):
                return [
                    ask(clients[which], f"{policy}-{which}-{turn}", which, **how)
                    for turn in range(3)
                ]

            with ThreadPoolExecutor(2) as pool:
                for which, made in enumerate(pool.map(turns, (0, 1))):
                    for one in made:
                        for name in ("PREDICTED_FRAMES", "STATE"):
                            assert np.array_equal(one[name], alone[which][name]), policy
        changed = ask(clients[0], "changed", 0, steps=STEPS, reuse="easycache")
        assert not np.array_equal(changed["PREDICTED_FRAMES"], plain[0]["PREDICTED_FRAMES"])
        assert metric(runtime.endpoints, "worldcache_blocks_total", decision="reused") > 0
    finally:
        for client in clients:
            client.close()


def test_reuse_never_reaches_the_memory(runtime):
    """Sessions that advance under reuse and without end in the very same state."""
    client = Wire(runtime.endpoints, "grpc")
    ends = []
    try:
        for name in ("none", "content"):
            id, how = f"walk-{name}", {"steps": STEPS, "reuse": name}
            ask(client, id, 0, end=False, **how)
            for step in range(3):
                control = np.array([0.1 * step, 0.2, -0.1, 1.0], np.float32)
                client.ask(control, id, outputs=FRAMES, mode="advance", **how)
            ends.append(client.ask(control, id, outputs=["STATE"], cache="off")["STATE"])
    finally:
        client.close()
    assert np.array_equal(*ends)


def test_answers_are_kept_apart_by_how_they_were_drawn(runtime):
    """A cached answer is found again by the same rendering, and by no other."""
    client = Wire(runtime.endpoints, "grpc")
    id, control = "apart", np.array([0.3, 0.1, 0.0, 1.0], np.float32)
    outputs = ["PREDICTED_FRAMES", "CACHE_TIER"]
    try:
        ask(client, id, 0, end=False, steps=1)
        seen = {}
        for how in ((1, "none", 35), (STEPS, "none", 35), (STEPS, "easycache", 35)):
            options = dict(zip(("steps", "reuse", "quality_db"), how, strict=True))
            first = client.ask(control, id, outputs=outputs, **options)
            again = client.ask(control, id, outputs=outputs, **options)
            assert first["CACHE_TIER"][0] == b"none"
            assert again["CACHE_TIER"][0] == b"hot"
            assert np.array_equal(first["PREDICTED_FRAMES"], again["PREDICTED_FRAMES"])
            seen[how] = first["PREDICTED_FRAMES"].tobytes()
        assert len(set(seen.values())) == 3
    finally:
        client.close()


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"reuse": "magic"}, "'reuse' must be one of none, teacache"),
        ({"steps": 0}, "'steps' must be a whole number from 1 to 64"),
        ({"steps": "many"}, "'steps' must be"),
        ({"quality_db": -3}, "'quality_db' must be a number over 0"),
        ({"quality_error": 1.5}, "'quality_error' must be a number over 0 and at most 1"),
        ({"quality_db": 30, "quality_error": 0.1}, "exclude each other"),
    ],
)
def test_impossible_renderings_are_refused(runtime, parameters, named):
    client = Wire(runtime.endpoints, "grpc")
    try:
        kind, text = client.refused(
            np.zeros(4, np.float32),
            "refused",
            start=True,
            frames=REQUESTS[0]["frames"],
            **parameters,
        )
    finally:
        client.close()
    assert kind == "invalid"
    assert named in text
