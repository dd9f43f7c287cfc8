"""The cache on the real server: shared by instances, exact where it matters, and counted."""

from __future__ import annotations

import os

import numpy as np
import pytest
from tiny_world import HELD, Truth, clip, controls, equal, trust_the_tiny_model
from wire import eventually, metric

from ctrlcache.scores import relative_error
from ctrlcache.templates import build
from ctrlcache.tiers.objects import Objects
from ctrlcache.tiers.warm import WarmTier
from worldserve.gateway import Credentials
from worldserve.models.tiny import TinyWorldModel

pytestmark = pytest.mark.server


def test_probes_between_advances_change_nothing(wire, new_id):
    """Many probes, with whatever the cache answers, and advances among them: the session ends bit
    for bit where the same advances with cache=off end."""
    id, plain, frames = new_id(), new_id(), clip(4, seed=40)
    draw = np.random.default_rng(0)
    wire.ask(HELD, id, frames=frames, start=True)
    wire.ask(HELD, plain, frames=frames, start=True, cache="off")
    for _ in range(8):
        for _ in range(6):
            wire.ask(draw.uniform(-1, 1, 2), id, outputs=["STATE"], max_error=0.5)
        step = draw.uniform(-1, 1, 2).astype(np.float32)
        wire.ask(step, id, outputs=["STATE"], mode="advance", max_error=0.5)
        wire.ask(step, plain, outputs=["STATE"], mode="advance", cache="off")
    one, two = (wire.ask(HELD, each, cache="off") for each in (id, plain))
    assert np.array_equal(one["STATE"], two["STATE"])
    assert np.array_equal(one["PREDICTED_FRAMES"], two["PREDICTED_FRAMES"])


def test_a_second_session_on_the_same_clip_hits(wire, new_id):
    """What one session has computed, another one finds."""
    frames = clip(3, seed=41)
    wire.ask(HELD, new_id(), frames=frames, start=True)
    got = wire.ask(HELD, new_id(), frames=frames, start=True)
    assert got["CACHE_TIER"][0] == b"hot"
    assert got["TIMING_MS"][1] == 0
    assert equal(got, Truth(frames, [HELD] * 2).predict(HELD))


def test_approximate_answers_keep_their_word(start_tiny, connect, tmp_path):
    """Near a scored control the answer is derived, says so, and is no farther off than it says;
    the session meanwhile stays exact."""
    trust_the_tiny_model(tmp_path)
    runtime = start_tiny(parameters={"weights_dir": str(tmp_path), "error_samples": "1"})
    wire, frames, draw = connect(runtime), clip(3), np.random.default_rng(1)
    truth, scale = Truth(frames, [HELD] * 2), TinyWorldModel().spec.state_scale
    wire.ask(HELD, 1, frames=frames, start=True)
    wire.ask(HELD, 1, drain=True)
    errors, bounds = [], []
    for _ in range(60):
        near = HELD + draw.uniform(-0.04, 0.04, 2).astype(np.float32)
        got = wire.ask(near, 1, outputs=["STATE", "EXACT", "ERROR_BOUND"], max_error=0.05)
        states, _ = truth.predict(near)
        errors.append(float(relative_error(got["STATE"], states, scale)))
        bounds.append(float(got["ERROR_BOUND"][0]))
        assert got["EXACT"][0] == (bounds[-1] == 0)
        assert bounds[-1] <= 0.05
    assert sum(bound > 0 for bound in bounds) > 30
    assert all(error <= bound + 1e-7 for error, bound in zip(errors, bounds, strict=True))
    assert wire.ask(HELD + 0.01, 1, outputs=["EXACT"], max_error=0)["EXACT"][0]
    got = wire.ask(HELD + 0.02, 1, mode="advance", outputs=["EXACT"], max_error=0.05)
    truth.leave(HELD + np.float32(0.02))
    assert equal(wire.ask(-HELD, 1, cache="off"), truth.predict(-HELD))
    wire.ask(HELD, 1, drain=True)
    eventually(lambda: (metric(runtime.endpoints, "ctrlcache_hit_error_count") or 0) > 10)
    near = {"tier": "hot", "result": "near"}
    eventually(lambda: metric(runtime.endpoints, "ctrlcache_lookups_total", **near) > 30)


def test_a_neighbours_frames_are_shown_only_nearby(start_tiny, connect, tmp_path):
    """Within the reach of its frames they are shown as they are; within the reach of its slope,
    frames are drawn anew; beyond, they are computed."""
    trust = trust_the_tiny_model(tmp_path, drawn_change=(0.4,))
    settings = {"weights_dir": str(tmp_path), "trust_max_error": "2", "prefetch": "false"}
    wire = connect(start_tiny(parameters=settings))
    wire.ask(HELD, 1, frames=clip(3), start=True)
    first = wire.ask(HELD, 1, drain=True)
    stability = float(first["SCORES"][0])
    shown, drawn = trust.frame_radius(stability), trust.drawn_radius(stability)
    assert 0 < shown < drawn < trust.max_distance

    def ask(distance):
        return wire.ask(HELD + np.float32(distance / 2**0.5), 1, max_error=2)

    near = ask(shown * 0.9)
    assert not near["EXACT"][0]
    assert np.array_equal(near["PREDICTED_FRAMES"], first["PREDICTED_FRAMES"])
    between = ask((shown + drawn) / 2)
    assert not between["EXACT"][0]
    assert not np.array_equal(between["PREDICTED_FRAMES"], first["PREDICTED_FRAMES"])
    asked = HELD + np.float32((shown + drawn) / 2 / 2**0.5)
    _, truth = Truth(clip(3), [HELD] * 2).predict(asked)

    def off(frames):
        return np.abs(frames.astype(int) - truth).mean()

    assert off(between["PREDICTED_FRAMES"]) < off(first["PREDICTED_FRAMES"]) / 4
    assert ask(drawn * 1.05)["EXACT"][0]


def test_the_warm_tier_outlives_the_server(start_tiny, connect, tmp_path):
    """Flushed, a couplet is found by the next server, from disk or loaded before it was ready."""
    settings = {"warm_dir": tmp_path / "warm", "parameters": {"flush_interval_s": "0.2"}}
    frames, truth = clip(3), Truth(clip(3), [HELD] * 2)
    first = start_tiny(**settings)
    wire = connect(first)
    wire.ask(HELD, 1, frames=frames, start=True)
    wire.ask(HELD, 1, drain=True)
    eventually(lambda: (metric(first.endpoints, "ctrlcache_entries", tier="warm") or 0) > 0)
    first.stop()
    second = connect(start_tiny(**settings))
    got = second.ask(HELD, 1, frames=frames, start=True)
    assert got["CACHE_TIER"][0] == b"warm"
    assert equal(got, truth.predict(HELD))
    warmed = {**settings, "parameters": {"warmup_share": "0.5"}, "instances": 1}
    third = connect(start_tiny(**warmed))
    got = third.ask(HELD, 1, frames=frames, start=True)
    assert got["CACHE_TIER"][0] == b"hot"
    assert equal(got, truth.predict(HELD))


def test_templates_come_from_the_object_store(start_tiny, connect, tmp_path):
    """What sessions of a task did becomes templates; the next server's cold step knows them, and
    the session that follows finds the typical control computed before it is asked for."""
    trust_the_tiny_model(tmp_path)
    runtime = start_tiny(
        models=("world_model", "cold_templates", "interactive_world"),
        cold="embedded",
        warm_dir=tmp_path / "warm",
        objects_dir=tmp_path / "objects",
        parameters={"weights_dir": str(tmp_path), "flush_interval_s": "0.2"},
    )
    wire, typical = connect(runtime), np.array([0.6, -0.4], np.float32)
    for number in range(1, 7):
        wire.ask(typical, number, frames=clip(2, seed=number), start=True, task="push")
    wire.ask(typical, 6, drain=True)
    eventually(lambda: (metric(runtime.endpoints, "ctrlcache_entries", tier="warm") or 0) > 6)
    credentials = Credentials.load(runtime.run_dir / "s3-credentials.json")
    objects = Objects(
        runtime.endpoints.gateway,
        "ctrlcache-templates",
        (credentials.access_key, credentials.secret_key),
        tls=False,
    )
    objects.ensure_bucket()
    warm = WarmTier(
        tmp_path / "warm", runtime.shm_dir / "of-the-test", limit_bytes=1 << 30, read_only=True
    )
    built = build(warm, objects, least=2)
    warm.close()
    assert [item.task for item in built] == ["push"]
    ensemble = connect(runtime, model="interactive_world")
    # At once: nothing is here yet. In the background it comes.
    got = ensemble.ask(HELD, 50, frames=clip(2, seed=50), start=True, task="push")
    eventually(
        lambda: ensemble.ask(HELD, 50, outputs=["TEMPLATES", "STATE"], task="push")["TEMPLATES"][0]
    )
    got = ensemble.ask(-HELD, 51, frames=clip(2, seed=51), start=True, task="push")
    assert got["CACHE_TIER"][0] == b"none"
    ensemble.ask(-HELD, 51, drain=True)
    got = ensemble.ask(typical, 51)
    assert got["CACHE_TIER"][0] == b"hot"
    assert equal(got, Truth(clip(2, seed=51), [-HELD]).predict(typical))
    eventually(lambda: metric(runtime.endpoints, "ctrlcache_cold_requests_total", result="hit"))


def test_refresh_computes(wire, new_id):
    """The answer is there, and is computed all the same."""
    id = new_id()
    wire.ask(HELD, id, frames=clip(2, seed=42), start=True)
    assert wire.ask(HELD, id, cache="refresh")["CACHE_TIER"][0] == b"none"
    assert wire.ask(HELD, id)["CACHE_TIER"][0] == b"hot"


def test_scores_come_with_thinking_time(wire, new_id, new_scene):
    """A computed answer has none yet; once thought about, it has."""
    id = new_id()
    first = wire.ask(HELD, id, frames=clip(2, seed=new_scene()), start=True)
    assert np.isnan(first["SCORES"]).all()
    assert np.isfinite(wire.ask(HELD, id, drain=True)["SCORES"]).all()


# --- malformed ------------------------------------------------------------------------------------


def malformed(draw):
    """One request that cannot be right: options for `Wire.refused`."""
    number = draw.integers(1_000_000)
    kinds = [
        lambda: {"control": np.full((1, 2), draw.choice([np.nan, np.inf, -np.inf]))},
        lambda: {
            "control": draw.uniform(size=(int(draw.integers(1, 4)), int(draw.integers(3, 9))))
        },
        lambda: {"control": draw.uniform(size=(int(draw.integers(20, 40)), 2))},
        lambda: {
            "frames": np.zeros((1, *draw.integers(1, 9, 2), draw.choice([1, 2, 4])), np.uint8)
        },
        lambda: {"FRAMES_ENCODED": np.array([draw.bytes(int(draw.integers(0, 300)))], np.object_)},
        lambda: {"HORIZON": np.array([draw.choice([-(2**31), -1, 0, 13, 2**31 - 1])], np.int32)},
        lambda: {"CONTROL_TIMES": draw.uniform(size=int(draw.integers(2, 5)))},
        lambda: {"FRAME_TIMES": draw.uniform(size=int(draw.integers(1, 5)))},
        lambda: {
            "frames": clip(2),
            "FRAME_TIMES": np.array([1.0, draw.choice([1.0, 0.5, np.nan])]),
        },
        lambda: {"mode": f"mode-{number}"},
        lambda: {"mode": "seek"},
        lambda: {"mode": "seek", "frame": int(number + 10)},
        lambda: {"cache": f"cache-{number}"},
        lambda: {"max_error": str(draw.choice(["nan", "-1", "inf", "many"]))},
        lambda: {"seed": int(-number - 1)},
        lambda: {"device": f"device-{number}"},
        lambda: {"tenant": "x" * int(draw.integers(65, 200))},
        lambda: {"prompt": "p" * 3000},
        lambda: {"resume": f"nobody-{number}", "start": True},
        lambda: {"fork_of": int(number + 10_000_000), "start": True},
        lambda: {"start": True},
        lambda: {"resume": f"nobody-{number}"},
        lambda: {f"parameter_{number}": True},
        lambda: {"frames": clip(1), "FRAMES_ENCODED": np.array([b"x"], np.object_)},
        lambda: {"CONTROL_TIMES": np.zeros(1, np.int32)},
    ]
    return kinds[int(draw.integers(len(kinds)))]()


def test_malformed_requests_do_no_harm(wire, new_id):
    """Random nonsense: each is refused with a helpful text, and the other sessions are bit-equal
    to before."""
    count = int(os.environ.get("CTRLCACHE_MALFORMED", "60"))
    bystanders = [new_id() for _ in range(3)]
    for number, id in enumerate(bystanders):
        wire.ask(HELD, id, frames=clip(3, seed=number), start=True)
    before = [wire.ask(-HELD, id, cache="off") for id in bystanders]
    victim, draw = new_id(), np.random.default_rng(count)
    wire.ask(HELD, victim, frames=clip(3), start=True)
    for _ in range(count):
        options = malformed(draw)
        control = options.pop("control", HELD)
        id = new_id() if options.get("start") else victim
        kind, text = wire.refused(control, id, **options)
        assert kind in ("invalid", "not found"), (kind, text, options)
        assert len(text) > 30
    assert wire.client.is_server_live()
    for id, expected in zip([*bystanders], before, strict=True):
        got = wire.ask(-HELD, id, cache="off")
        assert np.array_equal(got["STATE"], expected["STATE"])
        assert np.array_equal(got["PREDICTED_FRAMES"], expected["PREDICTED_FRAMES"])
    assert equal(wire.ask(-HELD, victim, cache="off"), Truth(clip(3), [HELD] * 2).predict(-HELD))


# --- the ensemble ---------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_ensemble_passes_everything_through(tiny_server, connect, new_id, protocol):
    """Inputs, outputs, flags, ids and parameters reach the world model and come back."""
    wire, id = connect(tiny_server, protocol, "interactive_world"), new_id()
    frames, steps = clip(3, seed=50), controls(2)
    got = wire.ask(np.vstack([steps, HELD]), id, frames=frames, start=True, task="push")
    truth = Truth(frames, steps)
    assert equal(got, truth.predict(HELD))
    got = wire.ask(HELD, id, outputs=["TEMPLATES", "STATE"])
    assert got["TEMPLATES"].tolist() == [0]
    got = wire.ask(HELD, id, mode="advance", HORIZON=np.array([2], np.int32), cache="off")
    assert got["STATE"].shape == (2, 12)
    truth.leave(HELD)
    kind, text = wire.refused(HELD, id, mode="nonsense")
    assert (kind, "probe, advance, seek" in text) == ("invalid", True)
    # The same session, asked directly.
    assert equal(wire.ask(-HELD, id, model="world_model"), truth.predict(-HELD))
    wire.ask(HELD, id, outputs=["STATE"], end=True)
    kind, text = wire.refused(HELD, id)
    assert (kind, "START" in text) == ("invalid", True)
    assert equal(wire.ask(-HELD, new_id(), start=True, resume=id), truth.predict(-HELD))


def test_metrics_count_what_happens(start_tiny, connect):
    """Over HTTP, by instance: look-ups, sessions, sizes, saved time."""
    runtime = start_tiny(parameters={"flush_interval_s": "0.2"})
    wire, endpoints = connect(runtime), runtime.endpoints
    wire.ask(HELD, 1, frames=clip(2), start=True)
    for _ in range(3):
        wire.ask(HELD, 1)
    wire.ask(HELD, 1, drain=True)
    labels = {"instance": "world_model_0_0", "tier": "hot"}
    eventually(lambda: metric(endpoints, "ctrlcache_lookups_total", result="exact", **labels) == 4)
    assert metric(endpoints, "ctrlcache_lookups_total", result="miss", **labels) == 1
    assert metric(endpoints, "ctrlcache_lookup_seconds_count", **labels) == 5
    assert metric(endpoints, "ctrlcache_hit_ratio", **labels) == pytest.approx(0.8)
    assert metric(endpoints, "ctrlcache_saved_seconds_total") > 0
    assert metric(endpoints, "ctrlcache_sessions", instance="world_model_0_0") == 1
    assert metric(endpoints, "ctrlcache_score_seconds_count", score="probe") == 1
    assert metric(endpoints, "ctrlcache_admissions_total", decision="unscored") >= 1
    eventually(lambda: (metric(endpoints, "ctrlcache_entries", tier="hot") or 0) > 3)
    assert metric(endpoints, "ctrlcache_bytes", tier="hot") > 1000
