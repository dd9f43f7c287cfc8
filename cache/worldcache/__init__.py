"""WorldCache: content-aware reuse inside a generation, and across generations that share content.

The names most users need; each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worldcache.adapters import Adapter
    from worldcache.analyze import Analysis, AnalyzeConfig
    from worldcache.reuse_calibration import ReuseCalibration
    from worldcache.weights import WeightMatrix, WeightSettings
    from worldcache.wrapping import Wrapped, wrap

__all__ = [
    "Adapter",
    "Analysis",
    "AnalyzeConfig",
    "ReuseCalibration",
    "WeightMatrix",
    "WeightSettings",
    "Wrapped",
    "wrap",
]

_HOMES = {
    "Adapter": "adapters",
    "Analysis": "analyze",
    "AnalyzeConfig": "analyze",
    "ReuseCalibration": "reuse_calibration",
    "WeightMatrix": "weights",
    "WeightSettings": "weights",
    "Wrapped": "wrapping",
    "wrap": "wrapping",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
