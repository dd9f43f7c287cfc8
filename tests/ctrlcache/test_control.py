"""Devices become calibrated controls; controls meet frame times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hunting import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ctrlcache.control import DeviceCalibration, OnlineCalibration, align
from ctrlcache.errors import CalibrationError, InvalidInput

finite = st.floats(-1e3, 1e3, width=32)


def ramp(times: np.ndarray) -> np.ndarray:
    """A control that is linear in time, so that interpolation must be exact."""
    return np.stack([0.1 * times, -0.2 * times, 0.3 - 0.05 * times, 0 * times], axis=1)


# --- devices --------------------------------------------------------------------------------------


def test_device_maps_rest_to_zero_and_full_deflection_to_one() -> None:
    """Fitting finds zero and range in spite of noise and lopsided travel; outside is clamped."""
    rng = np.random.default_rng(0)
    rest = np.array([512.0, 10.0]) + rng.normal(0, 0.5, (200, 2))
    sweep = np.stack([np.linspace(12, 812, 2_000), np.linspace(9, 30, 2_000)], axis=1)
    device = DeviceCalibration.fit("stick", rest, sweep)
    made = device.apply([[512, 10], [12, 30], [2_000, -500], [762, 10]])
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, [[0, 0], [-1, 1], [1, -1], [0.5, 0]], atol=0.02)


def test_device_with_a_still_axis_is_refused() -> None:
    """A sweep that forgot an axis names the axis."""
    rest = np.random.default_rng(0).normal(0, 0.1, (50, 3))
    sweep = np.random.default_rng(1).uniform(-1, 1, (500, 3))
    sweep[:, 1] = rest[:1, 1]
    with pytest.raises(InvalidInput, match="axis 1"):
        DeviceCalibration.fit("stick", rest, sweep)


def test_device_survives_saving(tmp_path: Path) -> None:
    """A saved device gives the same controls and the same epoch."""
    device = DeviceCalibration("pad-2", np.array([1.5, 2]), np.array([3.0, -0.1]))
    device.save(tmp_path)
    again = DeviceCalibration.load(tmp_path, "pad-2", axes=2)
    raw = np.random.default_rng(0).normal(0, 3, (20, 2))
    assert (again.apply(raw) == device.apply(raw)).all()
    assert again.epoch == device.epoch
    other = DeviceCalibration("pad-2", np.array([1.5, 2]), np.array([3.0, -0.2]))
    assert other.epoch != device.epoch


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 65, "a b", "pad\n"])
def test_device_names_cannot_leave_the_directory(tmp_path: Path, name: str) -> None:
    """A name that comes over the wire is no path."""
    with pytest.raises(InvalidInput):
        DeviceCalibration.load(tmp_path, name)
    with pytest.raises(InvalidInput):
        DeviceCalibration(name, np.zeros(2), np.ones(2))


def test_unknown_device_names_the_known_ones(tmp_path: Path) -> None:
    """The error for an unknown device tells which exist and what to do."""
    DeviceCalibration("wheel", np.zeros(4), np.ones(4)).save(tmp_path)
    with pytest.raises(InvalidInput, match=r"known: wheel.*ctrlcache calibrate device"):
        DeviceCalibration.load(tmp_path, "stick")
    with pytest.raises(InvalidInput, match="has 4 axes, the model takes 3"):
        DeviceCalibration.load(tmp_path, "wheel", axes=3)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 1}', '{"format": 2, "name": "a", "zero": [0], "scale": [1]}']
    + [
        json.dumps({"format": 1, "name": "a", "zero": zero, "scale": scale})
        for zero, scale in [([0], [0]), ([0, 1], [1]), (["x"], [1]), ([], []), (None, [1])]
    ],
)
def test_damaged_device_file_is_a_calibration_error(tmp_path: Path, text: str) -> None:
    """Whatever is wrong with the file, the error names the file."""
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(CalibrationError, match=r"a\.json"):
        DeviceCalibration.load(tmp_path, "a")


@given(arrays(np.float64, (7, 3), elements=finite))
def test_identity_device_only_clamps(raw: np.ndarray) -> None:
    """Controls in calibrated units pass as they are."""
    made = DeviceCalibration.identity(3).apply(raw)
    assert (made == np.clip(raw, -1, 1).astype(np.float32)).all()


# --- online ---------------------------------------------------------------------------------------


def test_online_epoch_keeps_the_coordinates() -> None:
    """Within an epoch, one raw value has one coordinate, however the window moves."""
    rng = np.random.default_rng(0)
    online = OnlineCalibration(2)
    assert online.observe(rng.normal((5, -3), (2, 0.1), (100, 2)))
    epoch, point = online.epoch, online.apply([[6, -3.05]])
    for _ in range(20):
        assert not online.observe(rng.normal((5, -3), (2, 0.1), (10, 2)))
        assert online.epoch == epoch
        assert (online.apply([[6, -3.05]]) == point).all()


def test_online_epoch_is_standardised() -> None:
    """The numbers in use are the window's mean and deviation; three of these fill the range."""
    samples = np.random.default_rng(0).normal((5, -3), (2, 0.1), (100, 2))
    online = OnlineCalibration(2)
    online.observe(samples)
    expected = (samples - samples.mean(0)) / (3 * (samples.std(0) + 1e-8))
    np.testing.assert_allclose(online.apply(samples), np.clip(expected, -1, 1), atol=1e-6)


def test_online_starts_a_new_epoch_only_beyond_the_bound() -> None:
    """A shift of less than the bound changes nothing, a greater one starts an epoch."""
    base = np.linspace(-1, 1, 100)[:, None]
    online = OnlineCalibration(1, drift_bound=1.0)
    online.observe(base)
    first = online.epoch
    assert not online.observe(base + 0.9 * base.std())
    assert online.epoch == first
    assert online.observe(base + 1.2 * base.std())
    assert online.epoch != first


def test_online_passes_controls_until_its_window_is_full() -> None:
    """Before the first epoch a control is taken as calibrated already."""
    online = OnlineCalibration(1)
    assert not online.observe(np.full((99, 1), 7.0))
    assert online.apply([[0.25], [7]]).tolist() == [[0.25], [1.0]]
    assert online.epoch == DeviceCalibration.identity(1).epoch


def test_online_survives_a_constant_axis() -> None:
    """A device that never moved yields zeros, not infinities."""
    online = OnlineCalibration(2)
    online.observe(np.full((100, 2), 4.0))
    assert online.apply([[4, 4]]).tolist() == [[0, 0]]


def test_online_state_round_trips_through_json() -> None:
    """Another process goes on exactly where this one stopped."""
    rng = np.random.default_rng(0)
    online = OnlineCalibration(3)
    online.observe(rng.normal(size=(130, 3)))
    again = OnlineCalibration.from_state(json.loads(json.dumps(online.state())))
    more = rng.normal(2, 1, size=(60, 3))
    assert online.observe(more) == again.observe(more)
    assert online.epoch == again.epoch
    assert (online.apply(more) == again.apply(more)).all()
    with pytest.raises(CalibrationError):
        OnlineCalibration.from_state({"axes": 3})


# --- alignment ------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_present", [False, True])
def test_timed_controls_are_taken_when_their_frame_is_left(with_present: bool) -> None:
    """120 Hz samples of a ramp give the ramp's own value at every frame and predicted step."""
    times = np.arange(0, 3, 1 / 120)
    frames = np.array([1.0, 1.11, 1.19, 1.3])
    n = 4 if with_present else 3
    made = align(ramp(times), times, n, 8, frames, 0.9 if with_present else None, 0.1)
    leaving = np.concatenate([[0.9], frames])[:-1] if with_present else frames[:-1]
    np.testing.assert_allclose(made.transitions, ramp(leaving), atol=1e-6)
    np.testing.assert_allclose(made.plan, ramp(1.3 + 0.1 * np.arange(8)), atol=1e-6)
    assert made.given == 8


def test_times_outside_the_samples_take_the_nearest() -> None:
    """Nothing is extrapolated, and only covered steps count as given."""
    times = np.array([1.0, 1.1, 1.2])
    made = align([[0.1], [0.2], [0.3]], times, 1, 4, [1.05, 1.1], None, 0.1)
    np.testing.assert_allclose(made.transitions[:, 0], [0.15], atol=1e-6)
    np.testing.assert_allclose(made.plan[:, 0], [0.2, 0.3, 0.3, 0.3], atol=1e-6)
    assert made.given == 2
    early = align([[0.1], [0.2], [0.3]], times + 50, 1, 2, [1.05, 1.1])
    assert early.plan[:, 0].tolist() == pytest.approx([0.1, 0.1])


def test_timed_probe_without_frames() -> None:
    """Without new frames the plan starts at the session's present, or at the oldest sample."""
    times = 10 + np.arange(0, 1, 0.05)
    known = align(ramp(times), times, 0, 3, None, 10.2, 0.1)
    np.testing.assert_allclose(known.plan, ramp(10.2 + 0.1 * np.arange(3)), atol=1e-6)
    unknown = align(ramp(times), times, 0, 3, None, None, 0.1)
    np.testing.assert_allclose(unknown.plan, ramp(10 + 0.1 * np.arange(3)), atol=1e-6)
    assert known.transitions.shape == (0, 4)


def test_unknown_time_of_the_present_is_one_interval_back() -> None:
    """A session whose frames had no times so far can start to have them."""
    times = np.arange(0, 1, 0.01)
    made = align(ramp(times), times, 2, 1, [0.5, 0.6], None, 0.1)
    np.testing.assert_allclose(made.transitions, ramp(np.array([0.4, 0.5])), atol=1e-6)


@pytest.mark.parametrize(
    ("count", "n", "horizon", "transitions", "plan", "given_steps"),
    [
        (1, 0, 3, [], [0, 0, 0], 1),
        (2, 0, 3, [], [0, 1, 1], 2),
        (5, 2, 3, [0, 1], [2, 3, 4], 3),
        (3, 2, 3, [0, 1], [2, 2, 2], 1),
        (2, 2, 2, [0, 0], [1, 1], 1),
        (1, 3, 2, [0, 0, 0], [0, 0], 1),
        (3, 4, 1, [0, 0, 0, 1], [2], 1),
    ],
)
def test_untimed_controls_go_by_order(
    count: int, n: int, horizon: int, transitions: list[int], plan: list[int], given_steps: int
) -> None:
    """Transitions first, then the plan; too few samples are the newest ones."""
    samples = np.arange(count, dtype=np.float32)[:, None]
    made = align(samples, None, n, horizon)
    assert made.transitions[:, 0].tolist() == transitions
    assert made.plan[:, 0].tolist() == plan
    assert made.given == given_steps


ok = np.zeros((3, 2))
BAD = [
    ({"samples": np.zeros((0, 2))}, "CONTROL must have shape"),
    ({"samples": np.zeros(3)}, "CONTROL must have shape"),
    ({"samples": [["a", "b"]]}, "CONTROL must be numbers"),
    ({"samples": [[0, np.nan]]}, r"CONTROL must be finite, got nan in \[0, 1\]"),
    ({"samples": [[np.inf, 0]]}, "CONTROL must be finite"),
    ({"samples": np.zeros((6, 2))}, "at most 5 rows here .1 for the frames, 4 .*got 6"),
    ({"sample_times": [0, 1]}, r"one entry per row of CONTROL \(3\), got 2"),
    ({"sample_times": [0, 2, 2]}, "entry 2 .2.0. is not after entry 1"),
    ({"sample_times": [0, 3, 2]}, "CONTROL_TIMES must increase"),
    ({"sample_times": [0, np.nan, 2]}, "CONTROL_TIMES must be finite, entry 1"),
    ({"sample_times": [[0, 1, 2]]}, "CONTROL_TIMES must have one dimension"),
    ({"sample_times": ["a"]}, "CONTROL_TIMES must be numbers"),
    ({"sample_times": [0, 1, 2]}, "need FRAME_TIMES"),
    ({"frame_times": [0, 1, 2]}, "one entry per frame of FRAMES, got 3"),
    ({"frame_times": [1, 0]}, "FRAME_TIMES must increase"),
    ({"frame_times": [1.0], "previous_time": 1.0}, "after the session's last frame"),
    ({"horizon": 0}, "horizon >= 1"),
    ({"n_transitions": -1}, "transitions >= 0"),
    ({"interval_s": 0.0}, "interval must be positive"),
    ({"interval_s": float("nan")}, "interval must be positive"),
]


@pytest.mark.parametrize(("change", "text"), BAD)
def test_bad_arguments_are_named(change: dict[str, object], text: str) -> None:
    """Every wrong argument raises InvalidInput that says what was wrong."""
    arguments: dict[str, object] = {
        "samples": ok,
        "sample_times": None,
        "n_transitions": 1,
        "horizon": 4,
        "frame_times": None,
    }
    with pytest.raises(InvalidInput, match=text):
        align(**(arguments | change))  # type: ignore[arg-type]


@settings(max_examples=examples(60))
@given(
    st.integers(1, 40),
    st.integers(0, 6),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_interpolation_equals_numpy(k: int, n: int, horizon: int, seed: int, known: bool) -> None:
    """Vectorised interpolation agrees with numpy.interp axis by axis, wherever times lie."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.uniform(0.001, 0.2, k))
    samples = rng.uniform(-1, 1, (k, 3))
    frames = rng.uniform(-1, 3) + np.cumsum(rng.uniform(0.01, 0.2, n)) if n else None
    previous = (frames[0] - 0.07 if frames is not None else 0.5) if known else None
    made = align(samples, times, n, horizon, frames, previous, 0.1)
    if frames is None:
        present = 0.5 if known else times[0]
        leaving = np.empty(0)
    else:
        present = frames[-1]
        leaving = np.concatenate([[frames[0] - (0.07 if known else 0.1)], frames[:-1]])
    at = np.concatenate([leaving, present + 0.1 * np.arange(horizon)])
    expected = np.stack([np.interp(at, times, samples[:, i]) for i in range(3)], axis=1)
    np.testing.assert_allclose(np.concatenate([made.transitions, made.plan]), expected, atol=1e-5)
    assert 1 <= made.given <= horizon
