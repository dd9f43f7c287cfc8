"""What an edit costs against making everything anew, on the reference model.

    python benchmarks/editing.py [--rounds 3] [--steps 8] [--context 32] [--threads 1] [--quick]

A storyboard of three phrases, `--steps` predicted frames each, begins from `--context` frames that
were seen. In the *chain*, each phrase goes on from the one before it; *anchored*, each begins from
seen frames of its own (three clips). Each edit is made on a film that was made before, with all its
features in the levels, and compared with making the edited storyboard anew: the time (CPU of this
process and clock), how many times less, and whether the frames and states are the same bits. A
quick repaint is the one edit that is not exact: PSNR against the exact one, inside the box and in
the whole picture. Each round edits to another text, so that nothing is found by chance.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from worldcache.editing import PlainStore
from worldcache.levels import Levels, LevelsConfig
from worldserve.bench.judge import psnr_db
from worldserve.bench.report import machine
from worldserve.models.reference import ReferenceWorldModel
from worldserve.storyboard import Anchor, Director, Film, Repaint, Segment

PROJECT = Path(__file__).resolve().parent.parent
WEIGHTS = PROJECT / "model_repository" / "world_model" / "1"
CLIPS = PROJECT / "client_examples" / "clips"
RESULTS = Path(__file__).parent / "results" / "editing.json"
BOX = (20, 12, 16, 16)  # top, left, height, width: a sixteenth of the picture
Board = list[Segment]


def boards(context: int, steps: int) -> dict[str, Board]:
    """The chain and the anchored storyboard, from the clips that ship with the clients."""
    made: dict[str, Board] = {"chain": [], "anchored": []}
    for number, path in enumerate(sorted(CLIPS.glob("*.npz"))[:3]):
        with np.load(path) as clip:
            frames, controls, prompt = clip["frames"], clip["controls"], str(clip["prompt"])
        controls = controls.astype(np.float32)
        anchor = Anchor(frames[:context], controls[: context - 1])
        segment = Segment(prompt, controls[context - 1 : context - 1 + steps], anchor)
        made["anchored"].append(segment)
        made["chain"].append(segment if not number else replace(segment, anchor=None))
    return made


def edits(board: Board, kind: str) -> dict[str, Callable[[int], Board]]:
    """The edits by name; each takes a number that no other call takes."""

    def phrase(which: int) -> Callable[[int], Board]:
        def edit(n: int) -> Board:
            changed = replace(board[which], phrase=f"push the handle {n}")
            return [*board[:which], changed, *board[which + 1 :]]

        return edit

    def control(n: int) -> Board:
        controls = board[-1].controls.copy()
        controls[len(controls) // 2 :, 0] += 0.001 * (n + 1)
        return [*board[:-1], replace(board[-1], controls=controls)]

    def repaint(exact: bool) -> Callable[[int], Board]:
        def edit(n: int) -> Board:
            which = 0 if kind == "chain" else 1
            anchor = board[which].anchor
            assert anchor is not None
            top, left, height, width = BOX
            old = anchor.frames[-1, top : top + height, left : left + width]
            tint = np.array([60 + n % 40, -40, 20])
            pixels = (old.astype(int) + tint).clip(0, 255).astype(np.uint8)
            anchor = replace(anchor, repaint=Repaint(top, left, pixels, exact))
            return [*board[:which], replace(board[which], anchor=anchor), *board[which + 1 :]]

        return edit

    return {
        **{f"phrase {n + 1} of {len(board)}": phrase(n) for n in range(len(board))},
        "second half of the last control": control,
        "repaint a box, exact": repaint(True),
        "repaint a box, quick": repaint(False),
    }


def timed(director: Director, board: Board) -> tuple[Film, float, float]:
    """The film, and what making it took by the clock and of the processor, in seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    film = director.make(board)
    return film, time.perf_counter() - wall, time.process_time() - cpu


def exactly(segment: Segment) -> Segment:
    """The segment with its repaint made exactly."""
    anchor = segment.anchor
    if anchor is None or anchor.repaint is None:
        return segment
    return replace(segment, anchor=replace(anchor, repaint=replace(anchor.repaint, exact=True)))


def inside_db(film: Film, exact: Film) -> float:
    top, left, height, width = BOX
    box = (slice(None), slice(top, top + height), slice(left, left + width))
    return psnr_db(film.frames[box], exact.frames[box])


def measure(model: ReferenceWorldModel, args: argparse.Namespace) -> list[dict[str, Any]]:
    numbers = itertools.count()
    rows = []
    for kind, board in boards(args.context, args.steps).items():
        levels = Levels(LevelsConfig(l1_bytes=512 << 20))
        director = Director(model, levels)
        director.make(board)
        for name, edit in track(list(edits(board, kind).items()), description=kind):
            full_s, edit_s, ratios, same = [], [], [], True
            quality: dict[str, float] = {}
            for _ in range(args.rounds):
                changed = edit(next(numbers))
                film, wall, cpu = timed(director, changed)
                anew, anew_wall, anew_cpu = timed(Director(model, PlainStore()), changed)
                edit_s.append(wall)
                full_s.append(anew_wall)
                ratios.append(anew_cpu / cpu)
                same &= np.array_equal(film.frames, anew.frames)
                same &= np.array_equal(film.states, anew.states)
                if not film.exact:
                    exact = [exactly(segment) for segment in changed]
                    truth = Director(model, PlainStore()).make(exact)
                    quality = {
                        "psnr_db": psnr_db(film.frames, truth.frames),
                        "psnr_in_box_db": inside_db(film, truth),
                    }
            rows.append(
                {
                    "storyboard": kind,
                    "edit": name,
                    "anew_s": statistics.median(full_s),
                    "edit_s": statistics.median(edit_s),
                    "times_less_cpu": statistics.median(ratios),
                    "least": min(ratios),
                    "same_bits_as_anew": bool(same),
                    "computed": film.report.computed,
                    **quality,
                }
            )
        levels.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="predicted frames of each phrase")
    parser.add_argument("--context", type=int, default=32, help="seen frames of an anchor")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one short round, nothing written")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.context = 1, 12
    model = ReferenceWorldModel.load(WEIGHTS, threads=args.threads)
    rows = measure(model, args)
    table = Table(
        "storyboard",
        "edit",
        "anew, s",
        "edit, s",
        "times less",
        "same bits",
        title=f"3 phrases x {args.steps} frames from {args.context} seen ones",
    )
    for row in rows:
        same = "yes" if row["same_bits_as_anew"] else "no"
        if "psnr_db" in row:
            same = f"{row['psnr_db']:.1f} dB of exact, {row['psnr_in_box_db']:.1f} in the box"
        table.add_row(
            row["storyboard"],
            row["edit"],
            f"{row['anew_s']:.2f}",
            f"{row['edit_s']:.2f}",
            f"{row['times_less_cpu']:.1f}",
            same,
        )
    Console().print(table)
    if not args.quick:
        about = {"machine": machine(), "steps": args.steps, "context": args.context}
        args.json.parent.mkdir(exist_ok=True)
        args.json.write_text(json.dumps({**about, "edits": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
