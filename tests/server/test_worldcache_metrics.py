"""WorldCache's metrics on Triton's own endpoint: each moves when what it counts has happened."""

from __future__ import annotations

import numpy as np
from tiny_world import HELD, clip
from wire import eventually, metric


def test_the_levels_are_seen_on_the_endpoint(start_tiny, connect, tmp_path):
    """Look-ups by level, bytes by level, and evictions, over HTTP from the real server."""
    runtime = start_tiny(
        parameters={
            "background": "false",
            "features_l1_mib": "1",
            "features_l2_mib": "1",
            "features_disk_mib": "8",
            "features_dir": str(tmp_path / "features"),
        },
        warm_dir=tmp_path / "warm",
    )
    wire = connect(runtime)

    def value(name, **labels):
        return metric(runtime.endpoints, f"worldcache_{name}", **labels) or 0

    def session(id, seed, prompt):
        wire.ask(HELD, id, start=True, end=True, frames=clip(64, seed), prompt=prompt, drain=True)

    session(70_001, 700, "push")
    eventually(lambda: value("lookups_total", level="none", result="miss") >= 6)
    eventually(lambda: value("store_bytes", level="l1") > 0)
    session(70_002, 700, "pull")
    eventually(lambda: value("lookups_total", level="l1", result="hit") >= 6)
    # Far more than fits: every level comes into use, and something leaves each of the first two.
    wire.ask(HELD, 70_003, start=True, frames=clip(3, 701))
    frames = ("PREDICTED_FRAMES",)
    for seed in range(80):
        horizon = np.array([12], np.int32)
        wire.ask(HELD, 70_003, frames, HORIZON=horizon, seed=seed, drain=seed % 8 == 0)
    for level in ("l1", "l2"):
        eventually(lambda level=level: value("evictions_total", level=level) > 0, 60)
        assert 0 < value("store_bytes", level=level) <= 1 << 20
    eventually(lambda: 0 < value("store_bytes", level="l3") <= 8 << 20, 60)
