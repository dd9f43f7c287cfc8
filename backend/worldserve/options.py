"""What a world model is served with: the parameters of its config.pbtxt, checked once.

Keys that are not known here are the cache's (`ctrlcache.config`); what neither knows is refused.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ctrlcache.errors import ConfigError
from worldserve.logs import FORMATS, LEVELS
from worldserve.models.protocol import WorldModel

__all__ = ["ServeOptions", "load_model"]


@dataclass(frozen=True)
class ServeOptions:
    """The model: world_model_class is "module:Class", whose `load(directory, dtype=, threads=)`
    makes it. weights_dir: where its weights are, by default the model version's own directory.
    threads: 0 leaves that to the environment.

    Requests: max_error is the budget of those that state none, default_horizon the predicted frames
    of those that do not say. max_frames: in one request; max_frame_pixels: of one frame;
    max_request_pixels: of all frames of one request. max_waiting: requests that may wait in an
    instance, and max_waiting_of_session of them those of one session; more are refused at once.

    Frames: generator_steps of the generator, which policy reuses what between them, and the PSNR in
    dB to frames without reuse that it must keep; requests may say otherwise. One step reuses
    nothing.

    Sessions: session_ttl_s is how long one lives without a request; longer than the batcher's idle
    time. session_displace_s: how long until it may be displaced by a new one where all places are
    taken. max_sessions: 0 for as many as fit. history_frames: kept of each. recall_contexts:
    presents kept assembled in each instance. resume: whether slices and tokens that are stored are
    used; without, a session has what it assembled itself, and encodes all else again.

    Batches: batch_wait_ms is how long a request that must be computed waits for another session's,
    while several are active; most_in_batch: requests in one.

    Thinking time: background is whether there is any. probe_radius: 0 for the calibrated one.
    probe_batch: probes per rollout. keep_probes: they are couplets of their own. prefetch: predict
    along the hand's motion. share_thinking: idle instances probe for busy ones. error_samples:
    share of approximate answers that are checked afterwards against a full computation.
    warmup_share: how much of the hot tier is filled from the warm one before the model is ready.
    keep_previous: how many warm directories are kept as they were before another model was served
    from them.

    Features (docs/worldcache.md): features_l1_mib of them as they are and features_l2_mib packed,
    in each instance; 0 and 0 keeps none. features_disk_mib in features_dir, by default beside the
    warm directory; 0 keeps none on disk.

    Warm-up: prefetch_strategy, warmup_steps, adaptive_threshold and fallback_policy, see
    `worldcache.warmup`. warm_prompts: warmed up for before the model is ready, several separated by
    `|`. language_model_url, language_model, language_model_key_file: see `worldcache.endpoint`.

    Devices: calibration_dir holds their calibrations. default_device: of requests that name none;
    "" takes controls as they are, "auto" keeps running statistics.

    Log: log_format is "text" or "json"; log_level "debug", "info", "warning" or "error". trace_url:
    of an OpenTelemetry collector, for spans of the requests that Triton traces; "" for none.
    """

    world_model_class: str = "worldserve.models.reference:ReferenceWorldModel"
    weights_dir: str = ""
    dtype: str = "float32"
    threads: int = 0
    max_error: float = 0.02
    default_horizon: int = 8
    max_frames: int = 256
    max_frame_pixels: int = 64_000_000
    max_request_pixels: int = 256_000_000
    generator_steps: int = 1
    reuse: str = "content"
    reuse_quality_db: float = 35.0
    max_waiting: int = 512
    max_waiting_of_session: int = 32
    session_ttl_s: float = 3_600.0
    session_displace_s: float = 600.0
    max_sessions: int = 0
    history_frames: int = 256
    recall_contexts: int = 16
    resume: bool = True
    batch_wait_ms: float = 2.0
    most_in_batch: int = 16
    background: bool = True
    probe_radius: float = 0.0
    probe_batch: int = 8
    keep_probes: bool = False
    prefetch: bool = True
    share_thinking: bool = True
    error_samples: float = 0.02
    warmup_share: float = 0.0
    keep_previous: int = 1
    features_l1_mib: int = 32
    features_l2_mib: int = 64
    features_disk_mib: int = 1_024
    features_dir: str = ""
    prefetch_strategy: str = "semantic"
    warmup_steps: int = 8
    adaptive_threshold: float = 0.75
    fallback_policy: str = "partial_load"
    warm_prompts: str = ""
    language_model_url: str = ""
    language_model: str = "default"
    language_model_key_file: str = ""
    calibration_dir: str = ""
    default_device: str = ""
    log_format: str = "text"
    log_level: str = "info"
    trace_url: str = ""

    def __post_init__(self) -> None:
        least: dict[str, float] = {
            "default_horizon": 1,
            "max_frames": 1,
            "max_frame_pixels": 1,
            "max_request_pixels": 1,
            "max_waiting": 1,
            "max_waiting_of_session": 1,
            "history_frames": 1,
            "most_in_batch": 1,
            "recall_contexts": 1,
            "probe_batch": 1,
        }
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not (math.isfinite(value) and value >= least.get(f.name, 0)):
                raise ConfigError(
                    f"{f.name} must be a finite number of at least {least.get(f.name, 0):g}, "
                    f"got {value}"
                )
        for name, known in (("log_format", FORMATS), ("log_level", LEVELS)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        for name in ("session_ttl_s", "session_displace_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name, most in (("error_samples", 1.0), ("probe_radius", 0.5), ("warmup_share", 0.9)):
            if getattr(self, name) > most:
                raise ConfigError(f"{name} must be at most {most}, got {getattr(self, name)}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, str]) -> tuple[ServeOptions, dict[str, str]]:
        """The options among `values`, and the other values; ConfigError names a malformed one."""
        kinds = {f.name: type(f.default) for f in fields(cls)}
        own: dict[str, Any] = {}
        others: dict[str, str] = {}
        for name, text in values.items():
            if name not in kinds:
                others[name] = text
                continue
            own[name] = _read(name, text, kinds[name])
        return cls(**own), others


def _read(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        known = {"true": True, "false": False, "1": True, "0": False}
        if text.lower() not in known:
            raise ConfigError(f"{name} must be true or false, got {text!r}")
        return known[text.lower()]
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name} must be of type {kind.__name__}, got {text!r}") from None


def load_model(options: ServeOptions, directory: Path, threads: int | None) -> WorldModel:
    """The world model; ConfigError where the class or its weights cannot be loaded."""
    module_name, _, class_name = options.world_model_class.partition(":")
    try:
        made: Any = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"world_model_class must be 'module:Class' that can be imported, got "
            f"{options.world_model_class!r}: {error}"
        ) from error
    weights = Path(options.weights_dir) if options.weights_dir else directory
    try:
        model: WorldModel = made.load(weights, dtype=options.dtype, threads=threads)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{class_name} cannot be loaded from {weights}: {error}") from error
    return model
