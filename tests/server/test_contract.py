"""The wire contract against the real server: what comes back, and what is refused."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from tiny_world import HELD, Truth, clip, controls, equal
from wire import NAMES

pytestmark = pytest.mark.server


def test_every_output_is_as_documented(wire, new_id):
    """Shapes, types and, where the model decides, values."""
    frames, steps = clip(4), controls(3)
    got = wire.ask(np.vstack([steps, HELD]), new_id(), frames=frames, start=True, cache="off")
    truth = Truth(frames, steps)
    assert equal(got, truth.predict(HELD))
    assert got["PREDICTED_FRAMES"].shape == (8, 32, 32, 3)
    assert got["PREDICTED_FRAMES"].dtype == np.uint8
    assert got["STATE"].shape == (8, 12)
    assert np.array_equal(got["PHYSICS"], truth.model.physics(got["STATE"]))
    assert got["CONFIDENCE"] == np.float32(truth.model.confidence(got["STATE"]))
    assert got["CACHE_TIER"].tolist() == [b"none"]
    assert got["EXACT"].tolist() == [True]
    assert got["ERROR_BOUND"].tolist() == [0.0]
    assert got["SCORES"].shape == (2,)
    align, encode, lookup, dynamics, decode, total = got["TIMING_MS"]
    assert min(align, encode, dynamics, decode) > 0
    assert total >= align + encode + lookup + dynamics + decode


def test_only_what_is_asked_for_comes_back(wire, new_id):
    """One output at a time, each as in the whole answer."""
    id = new_id()
    whole = wire.ask(HELD, id, frames=clip(2), start=True)
    for name in ("STATE", "PHYSICS", "PREDICTED_FRAMES", "CONFIDENCE"):
        assert np.array_equal(wire.ask(HELD, id, outputs=[name])[name], whole[name])
    assert wire.ask(HELD, id, outputs=["CACHE_TIER"])["CACHE_TIER"][0] == b"hot"


def test_horizons(wire, new_id):
    """As many frames as asked for."""
    id = new_id()
    wire.ask(HELD, id, frames=clip(2), start=True)
    for horizon in (1, 3, 12):
        got = wire.ask(HELD, id, HORIZON=np.array([horizon], np.int32))
        assert equal(got, Truth(clip(2), [HELD]).predict(HELD, horizon))


def test_seeds_give_other_grain(wire, new_id):
    """The same state, another draw."""
    id = new_id()
    wire.ask(HELD, id, frames=clip(2), start=True)
    one, two = wire.ask(HELD, id, seed=1), wire.ask(HELD, id, seed=2)
    assert np.array_equal(one["STATE"], two["STATE"])
    assert not np.array_equal(one["PREDICTED_FRAMES"], two["PREDICTED_FRAMES"])
    assert equal(two, Truth(clip(2), [HELD]).predict(HELD, seed=2))


def test_advance_and_seek(wire, new_id):
    """Forward by what was given, back to where one was, and on from there."""
    id, frames, steps = new_id(), clip(3), controls(3, 5)
    truth = Truth(frames, [HELD, HELD])
    wire.ask(HELD, id, frames=frames, start=True)
    got = wire.ask(steps, id, mode="advance")
    assert equal(got, truth.predict(np.concatenate([steps, np.repeat(steps[-1:], 5, 0)])))
    for step in steps:
        truth.leave(step)
    assert equal(wire.ask(-HELD, id), truth.predict(-HELD))
    back = wire.ask(-HELD, id, mode="seek", frame=1)
    assert equal(back, Truth(frames[:2], [HELD]).predict(-HELD))
    # What lay beyond is still there, until something else follows.
    assert equal(wire.ask(-HELD, id, mode="seek", frame=5), truth.predict(-HELD))
    wire.ask(-HELD, id, mode="seek", frame=1)
    wire.ask(HELD, id, mode="advance")
    kind, text = wire.refused(HELD, id, mode="seek", frame=5)
    assert (kind, "0 to 2, got 5" in text) == ("invalid", True)


def encoded(frames, kind):
    made = []
    for frame in frames:
        file = io.BytesIO()
        Image.fromarray(frame).save(file, kind, **({"quality": 95} if kind == "JPEG" else {}))
        made.append(file.getvalue())
    return np.array(made, np.object_)


def test_png_is_as_good_as_raw(wire, new_id):
    """Lossless images give the very same session."""
    frames, steps = clip(3), controls(2)
    plan = np.vstack([steps, HELD])
    got = wire.ask(plan, new_id(), FRAMES_ENCODED=encoded(frames, "PNG"), start=True)
    assert equal(got, Truth(frames, steps).predict(HELD))


def test_jpeg_of_any_size(wire, new_id):
    """What a camera sends: larger, lossy, and close to the raw frames."""
    large = clip(2, size=320)
    got = wire.ask(HELD, new_id(), FRAMES_ENCODED=encoded(large, "JPEG"), start=True)
    raw = wire.ask(HELD, new_id(), frames=large, start=True)
    assert np.abs(got["STATE"] - raw["STATE"]).max() < 0.1


def test_samples_are_aligned_by_time(wire, new_id):
    """A controller at 120 Hz against frames at 10 Hz: each transition at its frame's time."""
    frames = clip(3)
    times = np.arange(0, 0.6, 1 / 120)
    samples = np.stack([np.sin(times), np.cos(times)], -1).astype(np.float32)
    frame_times = np.array([0.05, 0.15, 0.25])
    got = wire.ask(
        samples,
        new_id(),
        frames=frames,
        start=True,
        CONTROL_TIMES=times,
        FRAME_TIMES=frame_times,
        HORIZON=np.array([3], np.int32),
    )

    def at(moment):
        return np.stack([np.interp(moment, times, samples[:, i]) for i in range(2)], -1)

    truth = Truth(frames, at(frame_times[:2]))
    states, _ = truth.predict(at(0.25 + 0.1 * np.arange(3)))
    assert np.allclose(got["STATE"], states, atol=1e-5)


REFUSED = {
    "nan": {"control": [np.nan, 0], "text": "CONTROL must be finite, got nan"},
    "infinity": {"control": [0, np.inf], "text": "CONTROL must be finite, got inf"},
    "width": {"control": [0, 0, 0], "text": "[K, 2]"},
    "channels": {"frames": np.zeros((1, 8, 8, 4), np.uint8), "text": "[1, 8, 8, 4]"},
    "image": {"FRAMES_ENCODED": np.array([b"\xff\xd8rubbish"], np.object_), "text": "JPEG or PNG"},
    "horizon": {"HORIZON": np.array([99], np.int32), "text": "1 to 12, got 99"},
    "mode": {"mode": "jump", "text": "probe, advance, seek"},
    "cache": {"cache": "perhaps", "text": "on, off, refresh"},
    "parameter": {"max_errr": 1, "text": "'max_errr' is not known"},
    "error": {"max_error": -1.0, "text": "at least 0"},
    "seek": {"mode": "seek", "frame": 77, "text": "0 to 2, got 77"},
    "resume": {
        "resume": "nobody",
        "start": True,
        "text": "no session 'nobody'",
        "kind": "not found",
    },
    "times": {"CONTROL_TIMES": np.zeros(3), "text": "CONTROL_TIMES"},
    "backwards": {
        "frames": clip(2, 9),
        "FRAME_TIMES": np.array([9.0, 8.0]),
        "text": "must increase strictly",
    },
    "past": {
        "frames": clip(1, 9),
        "FRAME_TIMES": np.array([0.0]),
        "text": "after the session's last",
    },
    "device": {"device": "unheard-of", "text": "device"},
    "type": {"CONTROL_TIMES": np.zeros(1, np.float32), "text": "CONTROL_TIMES"},
    "rank": {"FRAMES": np.zeros((8, 8, 3), np.uint8), "text": "FRAMES"},
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_and_changes_nothing(wire, new_id, case):
    """A typed error that helps; the session's predictions are bit-equal before and after."""
    id, frames = new_id(), clip(3)
    wire.ask(HELD, id, frames=frames, start=True, FRAME_TIMES=np.arange(3.0))
    before = wire.ask(-HELD, id, cache="off")
    options = dict(REFUSED[case])
    control, text = options.pop("control", HELD), options.pop("text")
    expected = options.pop("kind", "invalid")
    for extra in ({}, {"mode": "advance"}):
        kind, said = wire.refused(control, id, **{**extra, **options})
        assert (kind, text in said) == (expected, True), said
        if options.get("start"):
            break  # the batcher takes the sequence for a new one; see the next line
    if options.get("start"):
        wire.ask(HELD, id, resume=id, start=True)
    after = wire.ask(-HELD, id, cache="off")
    for name in ("STATE", "PREDICTED_FRAMES", "PHYSICS", "CONFIDENCE"):
        assert np.array_equal(before[name], after[name])


def test_a_missing_control_is_refused(wire, new_id):
    """By the server itself, which knows that it is not optional."""
    kind, text = wire.refused(None, new_id(), frames=clip(1), start=True)
    assert kind == "invalid"
    assert "CONTROL" in text or "expected" in text


def test_metadata_names_the_contract(wire):
    """What a client can ask the server for about inputs and outputs."""
    found = wire.client.get_model_metadata("world_model")
    if wire.protocol == "grpc":
        outputs = [tensor.name for tensor in found.outputs]
    else:
        outputs = [tensor["name"] for tensor in found["outputs"]]
    assert tuple(outputs) == NAMES
