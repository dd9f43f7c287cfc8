"""Step reuse: quality against what is skipped, for every policy, an oracle, and the peers.

    python benchmarks/step_reuse.py [--quick] [--data DIR] [--json FILE] [--png FILE]

On the reference generator, in 8 steps, from predictions on clips: PSNR against the same generation
without reuse, share of block evaluations skipped, time; the oracle knows the error of every
schedule of every frame beforehand. Then what 30 chunks of advance, the flow between successive
frames, the analysers and the settings show. On a small Wan transformer (random weights): the same
curves beside FirstBlockCache of diffusers and DBCache of cache-dit (extra `bench`).

DIR: .npz with `frames` and `controls`, not those that the calibration was made on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from step_reuse_checks import analysers, coherence, drift, settings_table

from worldcache.content import peak_db
from worldcache.fitting import rmse_levels
from worldcache.policies import Always, Schedule, thresholds
from worldcache.reuse_calibration import ReuseCalibration, make, reuse_path
from worldcache.steps import Policy
from worldserve.bench.report import machine
from worldserve.models.reference import ReferenceWorldModel
from worldserve.reuse import GeneratorSubject, cases_of, clips_in

PROJECT = Path(__file__).resolve().parent.parent
WEIGHTS = PROJECT / "model_repository" / "world_model" / "1"
CLIPS = PROJECT / "client_examples" / "clips"
RESULTS = PROJECT / "benchmarks" / "results"
STEPS = 8
BUDGETS = (24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46, 48, 52)
NAMED = ("teacache", "easycache", "control", "chunk")
Row = dict[str, Any]
console = Console()


def pooled(levels: NDArray[np.float64]) -> float:
    return peak_db(float(np.sqrt(np.square(levels).mean())))


class Stage:
    """The reference generator on held-out cases, and its frames without reuse."""

    def __init__(self, model: ReferenceWorldModel, calibration: ReuseCalibration, cases: Any):
        self.calibration = calibration
        self.subject = GeneratorSubject(
            model, cases, STEPS, calibration.settings, calibration.change
        )
        self.count = len(cases)
        self.plain, self.plain_ms = [], []
        for case in range(self.count):
            began = time.perf_counter()
            self.plain.append(self.subject.draw(case, Always())[0])
            self.plain_ms.append((time.perf_counter() - began) * 1e3)

    def measure(self, name: str, knob: float, policy: Policy) -> Row:
        levels, skipped, ratios = [], [], []
        for case, truth in enumerate(self.plain):
            began = time.perf_counter()
            frames, reuse = self.subject.draw(case, policy)
            took = (time.perf_counter() - began) * 1e3
            # A fresh plain run beside each: the machine may have other things to do.
            began = time.perf_counter()
            self.subject.draw(case, Always())
            ratios.append(took / ((time.perf_counter() - began) * 1e3))
            levels.append(rmse_levels(frames, truth))
            skipped.append(reuse.tally.skipped)
        flat = np.concatenate(levels)
        return {
            "policy": name,
            "knob": knob,
            "skipped": float(np.mean(skipped)),
            "psnr_db": pooled(flat),
            "worst_5_percent_db": peak_db(float(np.quantile(flat, 0.95))),
            "frame_time": float(np.median(ratios)),
        }

    def oracle(self, longest: int) -> list[Row]:
        """Of all schedules with as many steps, the best of each frame; extrapolated or held."""
        slopes = tuple(self.calibration.tables[STEPS].slopes.items())
        rows = []
        for inner in range(longest - 1):
            best: list[NDArray[np.float64]] = [np.full(len(p), np.inf) for p in self.plain]
            for middle in itertools.combinations(range(1, STEPS - 1), inner):
                steps = (0, *middle, STEPS - 1)
                for along in (slopes, ()):
                    policy = Schedule(steps=(steps,), slopes=along)
                    for case, truth in enumerate(self.plain):
                        frames, _ = self.subject.draw(case, policy)
                        best[case] = np.minimum(best[case], rmse_levels(frames, truth))
            flat = np.concatenate(best)
            rows.append(
                {
                    "policy": "oracle",
                    "knob": inner + 2,
                    "skipped": 1 - (inner + 2) / STEPS,
                    "psnr_db": pooled(flat),
                    "worst_5_percent_db": peak_db(float(np.quantile(flat, 0.95))),
                    "frame_time": None,
                }
            )
        return rows


def curves(stage: Stage, quick: bool) -> list[Row]:
    rows = []
    for name in NAMED:
        console.print(f"[dim]{name}")
        knobs = thresholds(name)
        rows += [stage.measure(name, k, make(name, k)) for k in knobs[:: 2 if quick else 1]]
    console.print("[dim]content")
    for budget in BUDGETS[:: 2 if quick else 1]:
        policy = stage.calibration.policy("content", STEPS, budget)
        rows.append(stage.measure("content", budget, policy))
    console.print("[dim]oracle")
    return rows + stage.oracle(3 if quick else 5)


def on_or_above(rows: list[Row], name: str = "content", margin_db: float = 0.1) -> list[Row]:
    """Points of other policies that lie above the curve of `name`; the oracle's do not count."""
    # Every curve begins where nothing is skipped and nothing lost.
    mine = [(0.0, peak_db(0.0))]
    mine += [(r["skipped"], r["psnr_db"]) for r in rows if r["policy"] == name]
    above = []
    for row in rows:
        if row["policy"] in (name, "oracle") or row["skipped"] < 0.02:
            continue
        if row["psnr_db"] > curve_at(mine, row["skipped"]) + margin_db:
            above.append(row)
    return above


def curve_at(points: list[tuple[float, float]], skipped: float) -> float:
    """PSNR of a curve where it skips as much: between its points, a straight line."""
    more = [p for p in points if p[0] >= skipped]
    less = [p for p in points if p[0] < skipped]
    if not more:
        return -np.inf
    low = min(more)
    if not less:
        return low[1]
    high = max(less)
    share = (low[0] - skipped) / max(low[0] - high[0], 1e-9)
    return low[1] + share * (high[1] - low[1])


def show(rows: list[Row], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("policy", "setting", "skipped", "PSNR, dB", "worst 5 %", "frame time"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        worst, took = row.get("worst_5_percent_db"), row.get("frame_time")
        table.add_row(
            row["policy"],
            f"{row['knob']:g}",
            f"{row['skipped']:.1%}",
            f"{row['psnr_db']:.1f}",
            "" if worst is None else f"{worst:.1f}",
            "" if took is None else f"{took:.2f}",
        )
    console.print(table)


def draw(parts: dict[str, list[Row]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(parts), figsize=(7 * len(parts), 5), squeeze=False)
    for axis, (title, rows) in zip(axes[0], parts.items(), strict=True):
        by_name: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            by_name[row["policy"]].append(row)
        for name, points in by_name.items():
            points.sort(key=lambda r: r["skipped"])
            shown = [p for p in points if p["psnr_db"] < 70]
            bold = {"linewidth": 2.5} if name == "content" else {"linewidth": 1.2}
            style = "k--" if name == "oracle" else "o-"
            x, y = [100 * p["skipped"] for p in shown], [p["psnr_db"] for p in shown]
            axis.plot(x, y, style, label=name, markersize=3, **bold)
        axis.set(title=title, xlabel="block evaluations skipped, %", ylabel="PSNR to no reuse, dB")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases and settings")
    parser.add_argument("--data", type=Path, default=CLIPS)
    parser.add_argument("--json", type=Path, default=RESULTS / "step_reuse.json")
    parser.add_argument("--png", type=Path, default=RESULTS / "step_reuse.png")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = ReferenceWorldModel.load(WEIGHTS)
    calibration = ReuseCalibration.load(reuse_path(WEIGHTS), model.spec.weights_digest)
    cases = cases_of(model, clips_in(args.data), 3 if args.quick else 6, per_clip=2)
    stage = Stage(model, calibration, cases)
    rows = curves(stage, args.quick)
    show(rows, f"reference generator, {STEPS} steps, {len(cases)} requests of 8 frames")
    report: dict[str, Any] = {
        "machine": machine(),
        "weights": model.spec.weights_digest,
        "quick": args.quick,
        "steps": STEPS,
        "requests": len(cases),
        "reference": rows,
        "above_content": [f"{r['policy']} {r['knob']:g}" for r in on_or_above(rows)],
        "drift": drift(model, calibration, args.data, STEPS, 10 if args.quick else 30),
        "coherence": coherence(stage),
        "analysers": analysers(stage, args.data),
        "settings": settings_table(stage),
    }
    parts = {f"reference generator, {STEPS} steps": rows}
    try:
        import step_reuse_peers as peers

        wan = peers.curves(2 if args.quick else 4, 3 if args.quick else 6, console.print)
        show(wan, f"WanTransformer3DModel, random weights, {peers.STEPS} steps")
        report["wan"] = wan
        report["wan_above_content"] = [f"{r['policy']} {r['knob']:g}" for r in on_or_above(wan)]
        parts[f"WanTransformer3DModel, {peers.STEPS} steps"] = wan
    except ImportError as error:
        console.print(f"[yellow]the peers are left out: {error}")
    for name in (
        "above_content",
        "drift",
        "coherence",
        "analysers",
        "settings",
        "wan_above_content",
    ):
        console.print(name, report.get(name))
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    draw(parts, args.png)
    console.print(f"written to {args.json} and {args.png}")


if __name__ == "__main__":
    main()
