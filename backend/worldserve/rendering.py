"""How a request wants its frames drawn: steps of the generator, and reuse between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from ctrlcache.errors import ConfigError, InvalidInput
from ctrlcache.key import digest
from worldcache.reuse_calibration import quality_db
from worldserve.models.protocol import (
    Checkpoint,
    Float,
    ModelSpec,
    Pixels,
    Rendering,
    WorldModel,
)

__all__ = ["PARAMETERS", "configured", "draw", "marked", "parse_rendering"]

PARAMETERS = ("quality_db", "quality_error", "reuse", "steps")
_MOST_DB = 100.0


def configured(spec: ModelSpec, steps: int, reuse: str, quality: float) -> Rendering:
    """The rendering of requests that say nothing; ConfigError where the model cannot do it."""
    if not spec.reuse:
        if steps != 1:
            raise ConfigError(f"generator_steps: model {spec.name!r} has no steps, got {steps}")
        return Rendering()
    if not 1 <= steps <= spec.max_steps:
        raise ConfigError(f"generator_steps must be from 1 to {spec.max_steps}, got {steps}")
    if reuse not in spec.reuse:
        raise ConfigError(f"reuse must be one of {', '.join(spec.reuse)}, got {reuse!r}")
    if not 0 < quality <= _MOST_DB:
        raise ConfigError(f"reuse_quality_db must be over 0 and at most 100, got {quality}")
    return Rendering(steps, reuse, quality, spec.reuse_calibration)


def parse_rendering(
    parameters: Mapping[str, Any], spec: ModelSpec, default: Rendering
) -> Rendering:
    """The request parameters `steps`, `reuse`, and `quality_db` or `quality_error`; InvalidInput
    names the one that is wrong."""
    given = [name for name in PARAMETERS if name in parameters]
    if not given:
        return default
    if not spec.reuse:
        raise InvalidInput(
            f"parameter {given[0]!r}: model {spec.name!r} draws its frames in one way only"
        )
    if "quality_db" in parameters and "quality_error" in parameters:
        raise InvalidInput("parameters 'quality_db' and 'quality_error' exclude each other")
    steps = parameters.get("steps", default.steps)
    whole = int(steps) if isinstance(steps, str) and steps.isdecimal() else steps
    if isinstance(whole, bool) or not isinstance(whole, int) or not 1 <= whole <= spec.max_steps:
        raise InvalidInput(
            f"parameter 'steps' must be a whole number from 1 to {spec.max_steps}, got {steps!r}"
        )
    reuse = parameters.get("reuse", default.reuse)
    if reuse not in spec.reuse:
        raise InvalidInput(
            f"parameter 'reuse' must be one of {', '.join(spec.reuse)}, got {reuse!r}"
        )
    quality = default.quality_db
    if "quality_db" in parameters:
        quality = _positive(parameters, "quality_db", _MOST_DB)
    elif "quality_error" in parameters:
        quality = quality_db(_positive(parameters, "quality_error", 1.0))
    return Rendering(whole, str(reuse), quality, spec.reuse_calibration)


def _positive(parameters: Mapping[str, Any], name: str, most: float) -> float:
    value = parameters[name]
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= most:
        raise InvalidInput(
            f"parameter {name!r} must be a number over 0 and at most {most:g}, got {value!r}"
        )
    return number


def marked(space: bytes, rendering: Rendering) -> bytes:
    """The space of answers whose frames are drawn this way; the plain way has the space itself."""
    return digest(b"rendering", space, rendering.mark) if rendering.mark else space


def draw(
    model: WorldModel,
    base: Pixels,
    tokens: Float,
    seed: int,
    rendering: Rendering,
    plan: Float,
    checkpoint: Checkpoint | None = None,
) -> Pixels:
    """Frames (H, h, w, 3) of one prediction. Nothing of it goes back into the model's memory."""
    if model.spec.reuse:
        generate = cast(Any, model).generate
        frames: Pixels = generate([base], [tokens], [seed], checkpoint, [rendering], [plan])[0]
        return frames
    return model.generate([base], [tokens], [seed], checkpoint)[0]
