"""What happens in WorldCache, as the events that every sink of `ctrlcache.metrics` understands.

Step reuse reports `BlocksDecided`, the feature store the rest. They stand in `ctrlcache.metrics`
with the other events, since one table describes all metrics of an endpoint.

    BlocksDecided("reuse", 12)    worldcache_blocks_total{decision="reuse"} += 12
    StoreSize("l2", 1 << 20)      worldcache_store_bytes{level="l2"} = 1048576
    StoreEvicted("l1")            worldcache_evictions_total{level="l1"} += 1
    StoreLookup("l3", "hit")      worldcache_lookups_total{level="l3",result="hit"} += 1
    Warmed("semantic", 12)        worldcache_warmed_total{how="semantic"} += 12
"""

from __future__ import annotations

from ctrlcache.metrics import (
    BlocksDecided,
    Corrupt,
    Sink,
    StoreEvicted,
    StoreLookup,
    StoreSize,
    Warmed,
    ignore,
)

__all__ = [
    "BlocksDecided",
    "Corrupt",
    "Sink",
    "StoreEvicted",
    "StoreLookup",
    "StoreSize",
    "Warmed",
    "ignore",
]
