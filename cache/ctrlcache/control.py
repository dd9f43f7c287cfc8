"""Give every frame transition and every predicted step its control.

Controls come in calibrated units (see `devices`); a controller at 120 Hz meets frames at 10 to 30.
The texts of `InvalidInput` use the names of the wire contract.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctrlcache.devices import DeviceCalibration, OnlineCalibration, as_samples
from ctrlcache.errors import InvalidInput

__all__ = ["Aligned", "DeviceCalibration", "OnlineCalibration", "align"]

Float = NDArray[np.float32]
Double = NDArray[np.float64]


class Aligned(NamedTuple):
    """transitions (n, C): to commit; plan (H, C): of the predicted steps; given: how many of the
    plan's steps the caller's samples really cover (at least 1)."""

    transitions: Float
    plan: Float
    given: int


def align(
    samples: ArrayLike,
    sample_times: ArrayLike | None,
    n_transitions: int,
    horizon: int,
    frame_times: ArrayLike | None = None,
    previous_time: float | None = None,
    interval_s: float = 0.1,
) -> Aligned:
    """Give every transition between frames and every predicted step its control.

    samples (K, C): calibrated controls, oldest first. sample_times (K,): seconds, or None.
    n_transitions: transitions that the new frames make: one less than frames for a session without
    a present frame, else as many. frame_times (T,): seconds, of the new frames. previous_time: of
    the session's present frame, where there is one and its time is known.

    With sample_times, a transition takes the control interpolated at the time of the frame it
    leaves, predicted step k at (last frame time + k * interval_s); times outside the samples take
    the nearest sample. A session whose present frame has no time takes it to be one interval before
    the first new frame; without new frames, at the oldest sample. Without sample_times, the first n
    samples belong to the transitions, the rest (at most H) to the plan, the last one is held; fewer
    than n + 1 samples are the newest ones, the first one is held backwards.

    InvalidInput says what was wrong.
    """
    controls = as_samples(samples, None)
    if n_transitions < 0 or horizon < 1:
        raise InvalidInput(
            f"transitions >= 0 and horizon >= 1 are needed, got {n_transitions} and {horizon}"
        )
    if not (math.isfinite(interval_s) and interval_s > 0):
        raise InvalidInput(f"the frame interval must be positive, got {interval_s}")
    frames = None if frame_times is None else _times(frame_times, "FRAME_TIMES")
    if frames is not None:
        if frames.size not in (n_transitions, n_transitions + 1):
            raise InvalidInput(
                f"FRAME_TIMES must have one entry per frame of FRAMES, got {frames.size} for "
                f"{n_transitions} transitions"
            )
        if previous_time is not None and frames.size and frames[0] <= previous_time:
            raise InvalidInput(
                f"FRAME_TIMES must be after the session's last frame ({previous_time}), "
                f"but begin at {frames[0]}"
            )
    if sample_times is None:
        return _by_order(controls, n_transitions, horizon)
    times = _times(sample_times, "CONTROL_TIMES")
    if times.size != len(controls):
        raise InvalidInput(
            f"CONTROL_TIMES must have one entry per row of CONTROL ({len(controls)}), "
            f"got {times.size}"
        )
    if n_transitions and frames is None:
        raise InvalidInput("FRAMES with CONTROL_TIMES need FRAME_TIMES as well")
    leaving, present = _leaving(frames, n_transitions, previous_time, interval_s, times[0])
    steps = present + interval_s * np.arange(horizon)
    covered = math.floor((times[-1] - present) / interval_s + 1e-3) + 1
    values = _interpolate(np.concatenate([leaving, steps]), times, controls)
    return Aligned(
        values[:n_transitions], values[n_transitions:], min(max(int(covered), 1), horizon)
    )


def _leaving(
    frames: Double | None,
    n_transitions: int,
    previous_time: float | None,
    interval_s: float,
    oldest_sample: float,
) -> tuple[Double, float]:
    """Times of the frames that transitions leave (n,), and of the present frame after them."""
    if frames is None or not frames.size:
        return np.empty(0), float(oldest_sample if previous_time is None else previous_time)
    if frames.size == n_transitions + 1:  # a session without a present frame
        return frames[:-1], float(frames[-1])
    before = frames[0] - interval_s if previous_time is None else previous_time
    return np.concatenate([[before], frames[:-1]]), float(frames[-1])


def _by_order(controls: Double, n: int, horizon: int) -> Aligned:
    count = len(controls)
    if count > n + horizon:
        raise InvalidInput(
            f"CONTROL without CONTROL_TIMES may have at most {n + horizon} rows here ({n} for the "
            f"frames, {horizon} for the horizon), got {count}"
        )
    shift = min(count - (n + 1), 0)  # negative: the samples are the newest ones
    index = np.clip(np.arange(n + horizon) + shift, 0, count - 1)
    values = controls[index].astype(np.float32)
    return Aligned(values[:n], values[n:], max(count - n, 1))


def _interpolate(at: Double, times: Double, controls: Double) -> Float:
    """Linear in between, constant outside: at (M,), times (K,), controls (K, C) -> (M, C)."""
    if len(times) == 1:
        return np.repeat(controls, len(at), axis=0).astype(np.float32)
    right = np.clip(np.searchsorted(times, at), 1, len(times) - 1)  # (M,)
    left = right - 1
    share = np.clip((at - times[left]) / (times[right] - times[left]), 0, 1)[:, None]  # (M, 1)
    values: Double = controls[left] * (1 - share) + controls[right] * share
    return values.astype(np.float32)


def _times(values: ArrayLike, name: str) -> Double:
    try:
        times = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{name} must be numbers: {error}") from None
    if times.ndim != 1:
        raise InvalidInput(f"{name} must have one dimension, got shape {list(times.shape)}")
    if not np.isfinite(times).all():
        entry = int(np.argmax(~np.isfinite(times)))
        raise InvalidInput(f"{name} must be finite, entry {entry} is {times[entry]}")
    back = np.flatnonzero(np.diff(times) <= 0)
    if back.size:
        entry = int(back[0]) + 1
        raise InvalidInput(
            f"{name} must increase strictly, but entry {entry} ({times[entry]}) is not after "
            f"entry {entry - 1} ({times[entry - 1]})"
        )
    return times
