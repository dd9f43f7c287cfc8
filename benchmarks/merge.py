"""What merging similar frames saves on clips of a fixed camera, and what it costs in precision.

    python benchmarks/merge.py [--clips DIR] [--json FILE]

Every clip's frames go through the levels' own packing, one after the other as they come: each is
stored alone, or as a difference to the most similar one that stands alone. Stored bytes include
headers and checksums; *without* is each frame stored alone, compressed the same way. Three modes:
exact, within 2 and within 4 of 255 levels; everything is restored, and the largest error measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ctrlcache.key import digest
from worldcache.merge import pack_alone, restore
from worldcache.similar import Similar
from worldserve.bench.report import machine

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "merge.json"
MODES = {"exact": 0.0, "within 2 levels": 0.008, "within 4 levels": 0.016}
MARK = bytes(16)
GROUP = ("frame", bytes(16))


def merged(frames: np.ndarray[Any, Any], max_error: float) -> dict[str, float]:
    """One clip, packed and restored."""
    similar = Similar(MARK, max_error)
    stored: dict[bytes, bytes] = {}
    whole: dict[bytes, np.ndarray[Any, Any]] = {}
    bound, worst, took = 0.0, 0, 0.0
    for number, frame in enumerate(frames):
        id = digest(b"%d" % number)
        began = time.perf_counter()
        packed = similar.pack(frame, GROUP, whole.get)
        took += time.perf_counter() - began
        similar.add(id, packed, frame, GROUP)
        stored[id] = packed.payload
        whole[id] = frame
        bound = max(bound, packed.bound)
        restored = restore(packed.payload, MARK, whole.get)
        assert restored is not None
        worst = max(worst, int(np.abs(restored[0].astype(int) - frame).max()))
    alone = sum(len(pack_alone(frame, MARK).payload) for frame in frames)
    return {
        "share": sum(map(len, stored.values())) / alone,
        "of_raw": sum(map(len, stored.values())) / frames.nbytes,
        "bound": bound,
        "worst_error": worst,
        "pack_ms": took / len(frames) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clips", type=Path, default=PROJECT / "client_examples" / "clips")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for path in sorted(args.clips.glob("*.npz")):
        with np.load(path) as clip:
            frames = clip["frames"]
        rows[path.stem] = {mode: merged(frames, error) for mode, error in MODES.items()}
    table = Table("clip", "mode", "stored, of without", "of raw", "bound", "worst", "ms per frame")
    for name, modes in rows.items():
        for mode, row in modes.items():
            table.add_row(
                name,
                mode,
                f"{row['share']:.1%}",
                f"{row['of_raw']:.1%}",
                f"{row['bound']:.0f}",
                f"{row['worst_error']:.0f}",
                f"{row['pack_ms']:.1f}",
            )
    for mode in MODES:
        mean = statistics.mean(modes[mode]["share"] for modes in rows.values())
        table.add_row("all", mode, f"{mean:.1%}", "", "", "", "")
    Console().print(table)
    args.json.parent.mkdir(exist_ok=True)
    args.json.write_text(json.dumps({"machine": machine(), "clips": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
