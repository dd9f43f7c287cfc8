"""The wire contract of `world_model`: everything is checked here, before anything is touched.

Knows no Triton: the adapter hands over arrays by name, parameters by name and the sequence's flags.
Every refusal is an `InvalidInput` that names the input, what was expected and what came. What needs
the session to be judged (its clock, its history) is judged when it is opened, with the same care.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import InvalidInput
from worldserve.images import decode_frames, measure_frames, resize_frames
from worldserve.models.protocol import ModelSpec, Pixels, Rendering
from worldserve.parameters import choice, flag, integer, number, session_id, text
from worldserve.rendering import parse_rendering

__all__ = [
    "OUTPUTS",
    "CacheMode",
    "Cancelled",
    "CorrelationId",
    "Mode",
    "RawRequest",
    "Request",
    "RequestLimits",
    "parse_cold",
    "parse_request",
]

CorrelationId = int | str
Mode = Literal["probe", "advance", "seek"]
CacheMode = Literal["on", "off", "refresh"]
#: True when nobody waits for the answer any more.
Cancelled = Callable[[], bool]

OUTPUTS = (
    "PREDICTED_FRAMES",
    "STATE",
    "PHYSICS",
    "CONFIDENCE",
    "CACHE_TIER",
    "EXACT",
    "ERROR_BOUND",
    "SCORES",
    "TIMING_MS",
)
_INPUTS = {
    "CONTROL": np.float32,
    "CONTROL_TIMES": np.float64,
    "FRAMES": np.uint8,
    "FRAMES_ENCODED": np.object_,
    "FRAME_TIMES": np.float64,
    "HORIZON": np.int32,
    "TEMPLATE_CONTROLS": np.float32,
}
_PARAMETERS = (
    "cache",
    "canary",
    "cold_wait_ms",
    "device",
    "drain",
    "fork_of",
    "frame",
    "max_error",
    "mode",
    "prompt",
    "quality_db",
    "quality_error",
    "resume",
    "reuse",
    "seed",
    "steps",
    "task",
    "tenant",
    "view",
)
_MAX_WAIT_MS = 60_000
_MAX_TEXT = {"prompt": 2_000, "view": 64, "tenant": 64, "device": 64, "task": 200}


def _never() -> bool:
    return False


@dataclass(frozen=True)
class RequestLimits:
    """horizon, rendering: defaults. max_frames, max_samples: per request. max_pixels: of one frame
    as it comes;
    max_request_pixels: of all frames of a request."""

    horizon: int = 8
    max_frames: int = 256
    max_samples: int = 16_384
    max_pixels: int = 64_000_000
    max_request_pixels: int = 256_000_000
    rendering: Rendering = field(default_factory=Rendering)


@dataclass(frozen=True)
class RawRequest:
    """As it came. timeout_s: how long the caller waits, None where he did not say. request_id: the
    caller's name for it, for the log. traced: the `traceparent` of its span, "" without one."""

    inputs: Mapping[str, NDArray[Any]]
    parameters: Mapping[str, Any]
    correlation_id: CorrelationId
    start: bool = False
    end: bool = False
    outputs: frozenset[str] = frozenset(OUTPUTS)
    timeout_s: float | None = None
    cancelled: Cancelled = _never
    request_id: str = ""
    traced: str = ""
    arrived_s: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, eq=False)
class Request:
    """One valid request.

    samples (K, C) in device units. frames (T, h, w, 3) of the model's size, T = 0 where none came.
    prompt, view, device: None where not given. max_error: None for the server's default. task: name
    of the operation, where the caller knows it. templates (M, C): controls that are typical of it,
    from the cold step. canary: asked by whoever looks after the server; it has no session.
    deadline_s, arrived_s: of `time.perf_counter`.
    """

    correlation_id: CorrelationId
    samples: NDArray[np.float32]
    frames: Pixels
    sample_times: NDArray[np.float64] | None = None
    frame_times: NDArray[np.float64] | None = None
    horizon: int = 8
    start: bool = False
    end: bool = False
    mode: Mode = "probe"
    frame: int | None = None
    max_error: float | None = None
    cache: CacheMode = "on"
    prompt: str | None = None
    view: str | None = None
    seed: int = 0
    rendering: Rendering = field(default_factory=Rendering)
    resume: CorrelationId | None = None
    fork_of: CorrelationId | None = None
    tenant: str = ""
    device: str | None = None
    drain: bool = False
    canary: bool = False
    task: str = ""
    templates: NDArray[np.float32] | None = None
    outputs: frozenset[str] = frozenset(OUTPUTS)
    deadline_s: float | None = None
    cancelled: Cancelled = field(default=_never, repr=False)
    arrived_s: float = 0.0


def parse_request(raw: RawRequest, spec: ModelSpec, limits: RequestLimits) -> Request:
    """A valid Request, or InvalidInput. Encoded frames are decoded and all frames resized."""
    arrays = {name: _typed(name, array) for name, array in raw.inputs.items()}
    parameters = {k: v for k, v in raw.parameters.items() if not k.startswith("triton_")}
    for name in parameters:
        if name not in _PARAMETERS:
            raise InvalidInput(
                f"parameter {name[:80]!r} is not known; known: {', '.join(_PARAMETERS)}"
            )
    if flag(parameters, "canary"):
        return _canary(raw, spec)
    start = raw.start
    mode: Any = choice(parameters, "mode", get_args(Mode))
    cache: Any = choice(parameters, "cache", get_args(CacheMode))
    frame = integer(parameters, "frame", 0, 2**62)
    resume, fork_of = (session_id(parameters, name) for name in ("resume", "fork_of"))
    if (mode == "seek") != (frame is not None):
        raise InvalidInput(
            "parameter 'frame' (index in the session's history) and mode 'seek' need each other, "
            f"got mode {mode!r} and frame {frame!r}"
        )
    if resume is not None and fork_of is not None:
        raise InvalidInput("parameters 'resume' and 'fork_of' exclude each other, got both")
    if not start and (resume is not None or fork_of is not None):
        name = "resume" if resume is not None else "fork_of"
        raise InvalidInput(f"parameter {name!r} needs the sequence's START flag, got none")
    samples = _samples(arrays, "CONTROL", spec.control_dim, limits.max_samples)
    if samples is None:
        raise InvalidInput(f"CONTROL is required: FP32 of shape [K, {spec.control_dim}], got none")
    sample_times = _times(arrays, "CONTROL_TIMES", "row of CONTROL", len(samples))
    horizon = _horizon(arrays, spec, limits)
    max_error = number(parameters, "max_error", 0.0)
    texts = {name: text(parameters, name, most) for name, most in _MAX_TEXT.items()}
    # Last, because it is the costly part.
    frames = _frames(arrays, spec, limits)
    frame_times = _times(arrays, "FRAME_TIMES", "frame", len(frames))
    if start and resume is None and fork_of is None and not len(frames):
        raise InvalidInput(
            "the first request of a session needs FRAMES or FRAMES_ENCODED (or the parameter "
            "'resume' or 'fork_of'), got none"
        )
    return Request(
        correlation_id=raw.correlation_id,
        samples=samples,
        frames=frames,
        sample_times=sample_times,
        frame_times=frame_times,
        horizon=horizon,
        start=start,
        end=raw.end,
        mode=mode,
        frame=frame,
        max_error=max_error,
        cache=cache,
        prompt=texts["prompt"],
        view=texts["view"],
        seed=integer(parameters, "seed", 0, 2**62) or 0,
        rendering=parse_rendering(parameters, spec, limits.rendering),
        resume=resume,
        fork_of=fork_of,
        tenant=texts["tenant"] or "",
        device=texts["device"],
        drain=flag(parameters, "drain"),
        task=texts["task"] or "",
        templates=_templates(arrays, spec.control_dim),
        outputs=raw.outputs & frozenset(OUTPUTS),
        deadline_s=None if raw.timeout_s is None else raw.arrived_s + raw.timeout_s,
        cancelled=raw.cancelled,
        arrived_s=raw.arrived_s,
    )


def _canary(raw: RawRequest, spec: ModelSpec) -> Request:
    """One frame predicted from a black one, past the cache: all of the model, and no session."""
    return Request(
        correlation_id=raw.correlation_id,
        samples=np.zeros((1, spec.control_dim), np.float32),
        frames=np.zeros((1, *spec.frame_px, 3), np.uint8),
        horizon=1,
        start=True,
        cache="off",
        canary=True,
        device="",
        outputs=raw.outputs & frozenset(OUTPUTS),
        deadline_s=None if raw.timeout_s is None else raw.arrived_s + raw.timeout_s,
        cancelled=raw.cancelled,
        arrived_s=raw.arrived_s,
    )


def parse_cold(parameters: Mapping[str, Any]) -> tuple[str, float]:
    """What the cold step needs of a request's parameters: (task, seconds to wait for it)."""
    texts = {name: text(parameters, name, _MAX_TEXT[name]) for name in ("task", "prompt")}
    wait_ms = number(parameters, "cold_wait_ms", 0.0) or 0.0
    if wait_ms > _MAX_WAIT_MS:
        raise InvalidInput(
            f"parameter 'cold_wait_ms' must be at most {_MAX_WAIT_MS}, got {wait_ms}"
        )
    return (texts["task"] or texts["prompt"] or "")[: _MAX_TEXT["task"]], wait_ms / 1e3


# --- inputs ---------------------------------------------------------------------------------------


def _typed(name: str, array: NDArray[Any]) -> NDArray[Any]:
    expected = _INPUTS.get(name)
    if expected is None:
        raise InvalidInput(f"input {name!r} is not known; known: {', '.join(_INPUTS)}")
    if array.dtype != expected:
        raise InvalidInput(f"{name} must be {np.dtype(expected).name}, got {array.dtype.name}")
    return array


def _samples(
    arrays: Mapping[str, NDArray[Any]], name: str, width: int, most: int
) -> NDArray[np.float32] | None:
    array = arrays.get(name)
    if array is None:
        return None
    if array.ndim != 2 or array.shape[1] != width or not 1 <= len(array) <= most:
        raise InvalidInput(
            f"{name} must have shape [K, {width}] with K from 1 to {most}, got {list(array.shape)}"
        )
    if not np.isfinite(array).all():
        row, axis = np.argwhere(~np.isfinite(array))[0]
        raise InvalidInput(f"{name} must be finite, got {array[row, axis]} in [{row}, {axis}]")
    return np.array(array, np.float32)


def _templates(arrays: Mapping[str, NDArray[Any]], width: int) -> NDArray[np.float32] | None:
    array = arrays.get("TEMPLATE_CONTROLS")
    if array is None or not array.size:
        return None  # the cold step has none
    return _samples(arrays, "TEMPLATE_CONTROLS", width, 256)


def _times(
    arrays: Mapping[str, NDArray[Any]], name: str, of_what: str, count: int
) -> NDArray[np.float64] | None:
    """Lengths and values; their order and their place in the session's time are judged later."""
    array = arrays.get(name)
    if array is None:
        return None
    if array.shape != (count,):
        raise InvalidInput(
            f"{name} must have one entry per {of_what}, shape [{count}], got {list(array.shape)}"
        )
    if not np.isfinite(array).all():
        raise InvalidInput(f"{name} must be finite, got {array[~np.isfinite(array)][0]}")
    return np.array(array, np.float64)


def _frames(arrays: Mapping[str, NDArray[Any]], spec: ModelSpec, limits: RequestLimits) -> Pixels:
    raw, encoded = arrays.get("FRAMES"), arrays.get("FRAMES_ENCODED")
    if raw is not None and encoded is not None:
        raise InvalidInput("FRAMES and FRAMES_ENCODED exclude each other, got both")
    if raw is not None:
        if raw.ndim != 4 or raw.shape[3] != 3 or 0 in raw.shape:
            raise InvalidInput(
                f"FRAMES must have shape [T, H, W, 3] without a 0, got {list(raw.shape)}"
            )
        _at_most("FRAMES", len(raw), limits.max_frames)
        if raw.shape[1] * raw.shape[2] > limits.max_pixels:
            raise InvalidInput(
                f"FRAMES must have at most {limits.max_pixels} pixels each, got "
                f"{raw.shape[2]} x {raw.shape[1]}"
            )
        _pixels_at_most("FRAMES", math.prod(raw.shape[:3]), limits.max_request_pixels)
        return resize_frames(raw, spec.frame_px)
    if encoded is not None:
        if encoded.ndim != 1 or not len(encoded):
            raise InvalidInput(
                f"FRAMES_ENCODED must have shape [T] with T >= 1, got {list(encoded.shape)}"
            )
        _at_most("FRAMES_ENCODED", len(encoded), limits.max_frames)
        total = measure_frames(encoded, limits.max_pixels)
        _pixels_at_most("FRAMES_ENCODED", total, limits.max_request_pixels)
        return decode_frames(encoded, spec.frame_px)
    height, width = spec.frame_px
    return np.empty((0, height, width, 3), np.uint8)


def _at_most(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidInput(f"{name} may hold at most {most} frames in one request, got {count}")


def _pixels_at_most(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidInput(f"{name} may hold at most {most} pixels in one request, got {count}")


def _horizon(arrays: Mapping[str, NDArray[Any]], spec: ModelSpec, limits: RequestLimits) -> int:
    array = arrays.get("HORIZON")
    if array is None:
        return min(limits.horizon, spec.max_horizon)
    if array.shape != (1,):
        raise InvalidInput(f"HORIZON must have shape [1], got {list(array.shape)}")
    horizon = int(array[0])
    if not 1 <= horizon <= spec.max_horizon:
        raise InvalidInput(f"HORIZON must be from 1 to {spec.max_horizon}, got {horizon}")
    return horizon
