"""The cache's promises on the reference model: two instances, the ensemble, every place taken.

Minutes, so only where CTRLCACHE_REFERENCE is set (`CTRLCACHE_REFERENCE=1 pytest -s` prints what was
counted); the same promises are tested on the tiny model with every run. CTRLCACHE_SESSIONS: marked
sessions (24); CTRLCACHE_SESSION_ROUNDS: how often each of them is left to time out (3).
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tiny_world import Truth, clip
from wire import InferenceServerException, code, eventually, metric

from worldserve import processes
from worldserve.models.protocol import RolloutInput
from worldserve.models.reference import ReferenceWorldModel
from worldserve.runtime import Runtime, RuntimeConfig

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(3_600),
    pytest.mark.skipif(
        "CTRLCACHE_REFERENCE" not in os.environ, reason="minutes: set CTRLCACHE_REFERENCE=1"
    ),
]
REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
WEIGHTS = REPOSITORY / "world_model" / "1"
HELD = np.array([0.2, -0.1, 0.1, 1.0], np.float32)
STATES = ["STATE", "EXACT", "CACHE_TIER"]
_ONE_AT_A_TIME = threading.Lock()  # the model in this process


def begin(repository=REPOSITORY, instances=2, **options):
    parameters = {"hot_size_bytes": "4GiB", **options.pop("parameters", {})}
    config = RuntimeConfig(
        model_repository=repository,
        cold="embedded",
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        instances=instances,
        parameters=parameters,
        **options,
    )
    runtime = Runtime(config)
    runtime.start()
    return runtime


def finish(runtime):
    runtime.stop()
    assert processes.run_processes(runtime.run_id) == []
    assert processes.shm_entries(runtime.run_id, runtime.config.shm) == []


@pytest.fixture(scope="module")
def reference():
    """Two instances of the reference model, and everything around them."""
    runtime = begin()
    yield runtime
    finish(runtime)


@pytest.fixture(scope="module")
def model():
    return ReferenceWorldModel.load(WEIGHTS, threads=1)


def frames_of(number, count=3):
    """Frames that no other session has."""
    return clip(count, seed=number, size=64)


@pytest.mark.parametrize("served", ["world_model", "interactive_world"])
def test_300_probes_between_30_advances_change_nothing(reference, connect, served):
    """With whatever the cache answers in between, the session ends bit for bit where the same
    advances end without a cache."""
    wire, draw = connect(reference, model=served), np.random.default_rng(len(served))
    id, plain, frames = f"probed-{served}", f"plain-{served}", frames_of(1)
    wire.ask(HELD, id, STATES, frames=frames, start=True)
    wire.ask(HELD, plain, STATES, frames=frames, start=True, cache="off")
    hand, approximate, hits = HELD.copy(), 0, 0
    for stretch in range(30):
        for number in range(10):
            hand[:3] = np.clip(hand[:3] + draw.normal(0, 0.03, 3), -1, 1)
            # Now and then the user thinks for a while.
            drain = stretch % 3 == 0 and number == 1
            got = wire.ask(hand, id, STATES, max_error=0.05, drain=drain)
            approximate += not got["EXACT"][0]
            hits += got["CACHE_TIER"][0] != b"none"
        wire.ask(hand, id, STATES, mode="advance", max_error=0.05)
        wire.ask(hand, plain, STATES, mode="advance", cache="off")
    outputs = ["STATE", "PREDICTED_FRAMES"]
    one, two = (wire.ask(HELD, each, outputs, cache="off") for each in (id, plain))
    print(f"\n{served}: 300 probes, {hits} hits, {approximate} approximate, 30 advances")
    assert approximate > 30
    assert all(np.array_equal(one[name], two[name]) for name in outputs)


def test_the_same_control_elsewhere_is_never_a_hit(reference, connect):
    """Another scene, another tenant: never; the very same: at once."""
    wire = connect(reference)

    def tier(id, frames, **options):
        return wire.ask(HELD, id, STATES, frames=frames, start=True, **options)["CACHE_TIER"][0]

    tier("first", frames_of(2))
    wire.ask(HELD, "first", STATES, drain=True)
    scenes = [tier(f"scene-{n}", frames_of(100 + n)) for n in range(20)]
    tenants = [tier(f"tenant-{n}", frames_of(2), tenant=f"tenant-{n}") for n in range(20)]
    print(f"\n20 scenes: {scenes.count(b'none')} computed; 20 tenants: {tenants.count(b'none')}")
    assert set(scenes) | set(tenants) == {b"none"}
    assert tier("second", frames_of(2)) == b"hot"


def test_other_weights_are_never_a_hit(connect, tmp_path):
    """One warm tier, one model name, weights that differ in a single number: never a hit, and no
    approximate answer, as nobody has calibrated them; the old weights find what is theirs."""
    other = tmp_path / "repository"
    shutil.copytree(REPOSITORY, other)
    weights = other / "world_model" / "1" / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    shared = {"warm_dir": tmp_path / "warm", "parameters": {"flush_interval_s": "0.2"}}
    tiers = {}
    for name, repository in (("first", REPOSITORY), ("other", other), ("again", REPOSITORY)):
        runtime = begin(repository, models=("world_model",), **shared)
        try:
            wire = connect(runtime)
            got = wire.ask(HELD, 1, STATES, frames=frames_of(3), start=True, max_error=0.05)
            tiers[name] = got["CACHE_TIER"][0].decode()
            wire.ask(HELD, 1, STATES, drain=True)
            near = wire.ask(HELD + np.float32(0.01), 1, STATES, max_error=0.05)
            tiers[f"{name}, nearby"] = "exact" if near["EXACT"][0] else "near"
            endpoints = runtime.endpoints
            eventually(lambda e=endpoints: (metric(e, "ctrlcache_entries", tier="warm") or 0) > 0)
        finally:
            finish(runtime)
    print(f"\n{tiers}")
    assert tiers == {
        "first": "none",
        "first, nearby": "near",
        "other": "none",
        "other, nearby": "exact",
        "again": "warm",
        "again, nearby": "near",
    }


class Marked:
    """A session with frames of its own, and what the model alone makes of them."""

    def __init__(self, wire, model, number):
        self.wire, self.number, self.id = wire, number, f"marked-{number}"
        self.truth = Truth(frames_of(1_000 + number, 2), [HELD], model=model)
        self.draw = random.Random(number)
        self.resumed = self.wrong = self.answers = 0

    def expected(self, control):
        """The states of `control` held for two frames, at the session's present."""
        truth, plan = self.truth, np.repeat(control[None], 2, axis=0)
        with _ONE_AT_A_TIME:
            asked = RolloutInput(truth.memory, truth.tokens, plan, truth.conditioning)
            [out] = truth.model.rollout([asked])
        return out.states

    def leave(self, control):
        with _ONE_AT_A_TIME:
            self.truth.leave(control)

    def ask(self, control, **options):
        """An answer, coming back with `resume` where the batcher gave the place away."""
        for _ in range(60):
            try:
                return self.wire.ask(
                    control, self.id, STATES, HORIZON=np.array([2], np.int32), **options
                )
            except InferenceServerException as error:
                if code(error) not in ("invalid", "unavailable", "not found"):
                    raise
                if "frames" not in options:
                    self.resumed += 1
                    options |= {"start": True, "resume": self.id}
        raise AssertionError(f"{self.id} finds no place")

    def begin(self):
        got = self.ask(HELD, frames=frames_of(1_000 + self.number, 2), start=True)
        self.check(got, HELD)

    def check(self, got, control):
        self.answers += 1
        if got["EXACT"][0]:
            self.wrong += not np.array_equal(got["STATE"], self.expected(control))

    def live(self):
        """One probe, one advance."""
        steps = [
            np.array([*(self.draw.uniform(-1, 1) for _ in range(3)), 1.0], np.float32)
            for _ in range(2)
        ]
        self.check(self.ask(steps[0]), steps[0])
        got = self.ask(steps[1][None], mode="advance", max_error=0)
        self.check(got, steps[1])
        self.leave(steps[1])


def test_marked_sessions_never_mix(connect, repository, model, tmp_path):
    """Four places for many sessions, over the ensemble and two instances, none ended, all left to
    time out under load, again and again: every one finds its own past when it comes back."""
    sessions = int(os.environ.get("CTRLCACHE_SESSIONS", "24"))
    rounds = int(os.environ.get("CTRLCACHE_SESSION_ROUNDS", "3"))
    small = repository(
        {"600000000": "1000000", "candidate_sequences: 16384": "candidate_sequences: 4"}
    )
    for file in WEIGHTS.glob("*.safetensors"):
        shutil.copy2(file, small / "world_model" / "1")
    runtime = begin(small)
    try:
        people = [
            Marked(
                connect(runtime, model="interactive_world" if n % 2 else "world_model"), model, n
            )
            for n in range(sessions)
        ]
        with ThreadPoolExecutor(sessions) as pool:
            list(pool.map(Marked.begin, people))
            for _ in range(rounds):
                list(pool.map(Marked.live, people))
                time.sleep(1.5)  # every place is given away, by idleness
        answers, resumed = (sum(getattr(p, n) for p in people) for n in ("answers", "resumed"))
        wrong = sum(p.wrong for p in people)
        print(f"\n{sessions} sessions, {answers} answers, {resumed} returns, {wrong} wrong")
        assert answers == sessions * (1 + 2 * rounds)
        assert resumed >= sessions * (rounds - 1)
        assert wrong == 0
    finally:
        finish(runtime)
