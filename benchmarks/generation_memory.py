"""Peak memory of a long generation, with the levels and without, on the reference model.

    python benchmarks/generation_memory.py [--frames 1280] [--context 16] [--threads 1]

A storyboard of one clip and `--frames` predicted frames is made, with everything kept that a later
edit can reuse (tokens, what the model remembers of every frame, states, frames): once in the memory
of the process, as one would do it without levels, and once in levels with small budgets (L1 32 MiB,
L2 32 MiB, the rest on disk). Each in a process of its own; the peak is the kernel's, of the whole
process, model and libraries included. Both films are compared, bit for bit, and so are the films
after an edit of the last control.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from worldcache.disk import DiskConfig
from worldcache.editing import PlainStore
from worldcache.levels import Levels, LevelsConfig
from worldserve.bench.report import machine
from worldserve.models.reference import ReferenceWorldModel
from worldserve.storyboard import Anchor, Director, Film, Segment

PROJECT = Path(__file__).resolve().parent.parent
WEIGHTS = PROJECT / "model_repository" / "world_model" / "1"
CLIP = PROJECT / "client_examples" / "clips" / "drawer-open.npz"
RESULTS = Path(__file__).parent / "results" / "generation_memory.json"
MIB = 1 << 20


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fingerprint(film: Film) -> str:
    return hashlib.sha256(film.frames.tobytes() + film.states.tobytes()).hexdigest()


def run(levels: bool, args: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own."""
    model = ReferenceWorldModel.load(WEIGHTS, threads=args.threads)
    with np.load(CLIP) as clip:
        frames, controls = clip["frames"], clip["controls"].astype(np.float32)
    anchor = Anchor(frames[: args.context], controls[: args.context - 1])
    held = np.resize(controls, (args.frames, controls.shape[1]))
    board = [Segment("open the drawer", held, anchor)]
    directory = Path(tempfile.mkdtemp(prefix="generation-memory-"))
    index = Path(tempfile.mkdtemp(prefix="ctrlcache-generation-", dir="/dev/shm"))
    store: Levels | PlainStore = PlainStore()
    if levels:
        disk = DiskConfig(directory / "features", index, 8 << 30)
        store = Levels(LevelsConfig(32 * MIB, 32 * MIB, disk))
    try:
        before = peak_bytes()
        began = time.perf_counter()
        director = Director(model, store)
        film = director.make(board)
        took_s = time.perf_counter() - began
        peak = peak_bytes()
        edited = held.copy()
        edited[-1, 0] += 0.25
        again = director.make([replace(board[0], controls=edited)])
        sizes = {}
        if isinstance(store, Levels):
            sizes = {name: stats.size_bytes for name, stats in store.stats().items()}
            store.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(index, ignore_errors=True)
    return {
        "before_bytes": before,
        "peak_bytes": peak,
        "seconds": took_s,
        "film": fingerprint(film),
        "edited": fingerprint(again),
        "edit_computed": again.report.computed,
        "levels": sizes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--frames", type=int, default=1_280)
    parser.add_argument("--context", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--only", choices=("with", "without"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(run(args.only == "with", args)))
        return
    rows = {}
    for kind in ("without", "with"):
        command = [sys.executable, __file__, "--only", kind]
        for name in ("frames", "context", "threads"):
            command += [f"--{name}", str(getattr(args, name))]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows[kind] = json.loads(done.stdout.splitlines()[-1])
    table = Table("levels", "peak, MiB", "at the start", "seconds", title=f"{args.frames} frames")
    for kind, row in rows.items():
        table.add_row(
            kind,
            f"{row['peak_bytes'] / MIB:.0f}",
            f"{row['before_bytes'] / MIB:.0f}",
            f"{row['seconds']:.0f}",
        )
    less = 1 - rows["with"]["peak_bytes"] / rows["without"]["peak_bytes"]
    same = all(rows["with"][name] == rows["without"][name] for name in ("film", "edited"))
    console = Console()
    console.print(table)
    console.print(f"peak {less:.0%} less; same bits: {'yes' if same else 'NO'}")
    args.json.parent.mkdir(exist_ok=True)
    report = {"machine": machine(), "frames": args.frames, "less": less, "same": same, **rows}
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
