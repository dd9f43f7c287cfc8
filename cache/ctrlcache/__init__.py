"""CtrlCache: a cache of control and state together, for interactive world models.

The names most users need; each is imported when it is first used, so that one of them does not
cost the start-up time of all.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctrlcache.admission import Fixed, Trust, make_policy
    from ctrlcache.calibration import TrustModel
    from ctrlcache.config import CacheConfig
    from ctrlcache.couplet import Couplet
    from ctrlcache.key import Provenance
    from ctrlcache.metrics import PrometheusSink
    from ctrlcache.shared import SharedMemory
    from ctrlcache.tiered import CoupletCache, Hit, Query
    from ctrlcache.tiers.warm import WarmTier

__all__ = [
    "CacheConfig",
    "Couplet",
    "CoupletCache",
    "Fixed",
    "Hit",
    "PrometheusSink",
    "Provenance",
    "Query",
    "SharedMemory",
    "Trust",
    "TrustModel",
    "WarmTier",
    "make_policy",
]

_HOMES = {
    "CacheConfig": "config",
    "Couplet": "couplet",
    "CoupletCache": "tiered",
    "Fixed": "admission",
    "Hit": "tiered",
    "PrometheusSink": "metrics",
    "Provenance": "key",
    "Query": "tiered",
    "SharedMemory": "shared",
    "Trust": "admission",
    "TrustModel": "calibration",
    "WarmTier": "tiers.warm",
    "make_policy": "admission",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
