"""From raw device units to stable, calibrated controls.

A control that the cache sees is always in calibrated units: each axis in [-1, 1], clamped where
the device went beyond its calibrated range.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctrlcache.errors import CalibrationError, InvalidInput

__all__ = ["DeviceCalibration", "OnlineCalibration", "as_samples", "device_directory"]

Float = NDArray[np.float32]
Double = NDArray[np.float64]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_EPSILON = 1e-8
_FORMAT = 1


def device_directory() -> Path:
    """Where calibrated devices are kept unless told otherwise: $CTRLCACHE_DEVICES, or below the
    user's configuration."""
    chosen = os.environ.get("CTRLCACHE_DEVICES")
    if chosen:
        return Path(chosen)
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "ctrlcache" / "devices"


def as_samples(values: ArrayLike, axes: int | None, name: str = "CONTROL") -> Double:
    """Controls as float64 (K, C), finite; InvalidInput calls them by `name`."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{name} must be numbers of shape [K, C]: {error}") from None
    width = "C" if axes is None else str(axes)
    if array.ndim != 2 or array.shape[0] < 1 or (axes is not None and array.shape[1] != axes):
        raise InvalidInput(
            f"{name} must have shape [K, {width}] with K >= 1, got {list(array.shape)}"
        )
    if not np.isfinite(array).all():
        row, axis = np.argwhere(~np.isfinite(array))[0]
        raise InvalidInput(f"{name} must be finite, got {array[row, axis]} in [{row}, {axis}]")
    return array


def _digest(kind: str, *arrays: Double) -> str:
    h = hashlib.blake2b(kind.encode(), digest_size=8)
    for array in arrays:
        h.update(np.ascontiguousarray(array, dtype="<f8").tobytes())
    return f"{kind}-{h.hexdigest()}"


# --- calibration of a known device ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DeviceCalibration:
    """Maps raw device units to controls: clip((raw - zero) / scale, -1, 1), per axis.

    name: letters, digits, '.', '_', '-', at most 64. zero (C,): raw value at rest. scale (C,): raw
    units from rest to full deflection, positive; an axis that is mounted the wrong way round has a
    negative one. InvalidInput where any of these does not hold.
    """

    name: str
    zero: Double
    scale: Double

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidInput(
                "a device name has 1 to 64 letters, digits, '.', '_' or '-' and starts with a "
                f"letter or digit, got {self.name!r}"
            )
        for label in ("zero", "scale"):
            try:
                array = np.array(getattr(self, label), dtype=np.float64)
            except (TypeError, ValueError):
                raise InvalidInput(f"{label} of device {self.name!r} must be numbers") from None
            if array.ndim != 1 or not array.size or not np.isfinite(array).all():
                raise InvalidInput(
                    f"{label} of device {self.name!r} must be finite numbers, one per axis"
                )
            array.setflags(write=False)
            object.__setattr__(self, label, array)
        if self.zero.shape != self.scale.shape:
            raise InvalidInput(
                f"zero and scale of device {self.name!r} must have one number per axis each, "
                f"got {self.zero.size} and {self.scale.size}"
            )
        if (np.abs(self.scale) < _EPSILON).any():
            axis = int(np.abs(self.scale).argmin())
            raise InvalidInput(f"scale of device {self.name!r} must not be 0, axis {axis} is")

    @classmethod
    def identity(cls, axes: int) -> DeviceCalibration:
        """For controls that are in calibrated units already; only clamps."""
        return cls("unit", np.zeros(axes), np.ones(axes))

    @classmethod
    def fit(cls, name: str, rest: ArrayLike, sweep: ArrayLike) -> DeviceCalibration:
        """Calibrate from raw samples: `rest` (K, C) untouched, `sweep` (M, C) over the full range.

        The zero is the median at rest; the scale reaches the farther end of the sweep (0.5 % of
        the samples at either end are taken for glitches), so that no side is amplified.
        """
        at_rest = as_samples(rest, None, "rest samples")
        moved = as_samples(sweep, at_rest.shape[1], "sweep samples")
        zero = np.median(at_rest, axis=0)
        low, high = np.quantile(moved, (0.005, 0.995), axis=0)
        scale = np.maximum(high - zero, zero - low)
        noise = np.abs(at_rest - zero).max(axis=0)
        still = scale <= np.maximum(3 * noise, _EPSILON)
        if still.any():
            axis = int(still.argmax())
            raise InvalidInput(
                f"axis {axis} of device {name!r} moved {scale[axis]:.3g} in the sweep and "
                f"{noise[axis]:.3g} at rest: move every axis from end to end while sweeping"
            )
        return cls(name, zero, scale)

    @property
    def epoch(self) -> str:
        """Identifies the numbers in use; part of the provenance."""
        return _digest("device", self.zero, self.scale)

    def apply(self, raw: ArrayLike) -> Float:
        """raw (K, C) in device units -> (K, C) in [-1, 1]."""
        samples = as_samples(raw, self.zero.size)
        return np.clip((samples - self.zero) / self.scale, -1, 1).astype(np.float32)

    def save(self, directory: Path) -> Path:
        """Write `<directory>/<name>.json`, atomically; returns its path."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        partial = path.with_suffix(f".{os.getpid()}.partial")
        record = {
            "format": _FORMAT,
            "name": self.name,
            "zero": self.zero.tolist(),
            "scale": self.scale.tolist(),
        }
        partial.write_text(json.dumps(record, indent=2) + "\n")
        partial.replace(path)
        return path

    @classmethod
    def load(cls, directory: Path, name: str, axes: int | None = None) -> DeviceCalibration:
        """The device saved as `name`.

        InvalidInput for a name that is malformed or not there (known ones are listed), or where
        the device has not `axes` axes; CalibrationError for a file that cannot be understood.
        """
        path = directory / f"{name}.json"
        if not _NAME.fullmatch(name) or not path.is_file():
            known = sorted(p.stem for p in directory.glob("*.json")) if directory.is_dir() else []
            raise InvalidInput(
                f"device {name!r} is not calibrated; known: {', '.join(known) or 'none'}; "
                "calibrate one with `ctrlcache calibrate device`"
            )
        try:
            record = json.loads(path.read_text())
            if record["format"] != _FORMAT:
                raise ValueError(f"format {record['format']!r}, expected {_FORMAT}")
            device = cls(name, record["zero"], record["scale"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CalibrationError(f"{path} is no device calibration: {error}") from error
        if axes is not None and device.zero.size != axes:
            raise InvalidInput(
                f"device {name!r} has {device.zero.size} axes, the model takes {axes}"
            )
        return device


# --- calibration of an unknown device -------------------------------------------------------------


@dataclass
class OnlineCalibration:
    """Running statistics of an uncalibrated device, frozen into epochs.

    The numbers in use (mean, standard deviation + 1e-8) stay as they are for a whole epoch, so that
    the same position of the hand keeps the same coordinate. They are taken when the window has
    filled for the first time, and again only when the window has drifted from them by more than
    `drift_bound`: drift is the larger of |mean' - mean| / std and |ln(std' / std)|, over all axes.
    `deviations` standard deviations fill the range up to 1. Until the first epoch, samples pass as
    they are, clamped.
    """

    axes: int
    window: int = 100
    drift_bound: float = 1.0
    deviations: float = 3.0
    _recent: Double = field(init=False, repr=False)
    _mean: Double | None = field(init=False, default=None)
    _std: Double | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.axes < 1 or self.window < 2 or self.drift_bound <= 0 or self.deviations <= 0:
            raise InvalidInput(
                "axes >= 1, window >= 2, drift_bound > 0 and deviations > 0 are needed, got "
                f"{self.axes}, {self.window}, {self.drift_bound}, {self.deviations}"
            )
        self._recent = np.empty((0, self.axes))

    @property
    def epoch(self) -> str:
        """Identifies the numbers in use; the same numbers have the same epoch everywhere."""
        if self._mean is None or self._std is None:
            return DeviceCalibration.identity(self.axes).epoch
        return _digest("online", self._mean, self._std, np.array([self.deviations]))

    @property
    def drift(self) -> float:
        """How far the window has moved from the numbers in use; 0 before the first epoch."""
        if self._mean is None or self._std is None or len(self._recent) < self.window:
            return 0.0
        shift = np.abs(self._recent.mean(axis=0) - self._mean) / self._std
        spread = np.abs(np.log((self._recent.std(axis=0) + _EPSILON) / self._std))
        return float(max(shift.max(), spread.max()))

    def observe(self, raw: ArrayLike) -> bool:
        """Take samples (K, C) into the window; True when a new epoch has begun."""
        samples = as_samples(raw, self.axes)
        self._recent = np.concatenate([self._recent, samples])[-self.window :]
        full = len(self._recent) == self.window
        if not full or (self._mean is not None and self.drift <= self.drift_bound):
            return False
        self._mean = self._recent.mean(axis=0)
        self._std = self._recent.std(axis=0) + _EPSILON
        return True

    def apply(self, raw: ArrayLike) -> Float:
        """raw (K, C) -> (K, C) in [-1, 1], by the numbers of the present epoch."""
        samples = as_samples(raw, self.axes)
        if self._mean is not None and self._std is not None:
            samples = (samples - self._mean) / (self._std * self.deviations)
        return np.clip(samples, -1, 1).astype(np.float32)

    def state(self) -> dict[str, Any]:
        """All of it as plain lists and numbers, for a session record."""
        return {
            "axes": self.axes,
            "window": self.window,
            "drift_bound": self.drift_bound,
            "deviations": self.deviations,
            "recent": self._recent.tolist(),
            "mean": None if self._mean is None else self._mean.tolist(),
            "std": None if self._std is None else self._std.tolist(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> OnlineCalibration:
        """Inverse of `state`; CalibrationError for anything else."""
        try:
            made = cls(state["axes"], state["window"], state["drift_bound"], state["deviations"])
            made._recent = np.array(state["recent"], dtype=np.float64).reshape(-1, made.axes)
            if state["mean"] is not None:
                made._mean = np.array(state["mean"], dtype=np.float64).reshape(made.axes)
                made._std = np.array(state["std"], dtype=np.float64).reshape(made.axes)
        except (KeyError, TypeError, ValueError) as error:
            raise CalibrationError(f"no state of an online calibration: {error}") from error
        return made
