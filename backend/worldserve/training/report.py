"""What training and evaluation leave for a reader: tables in Markdown, loss curves as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worldserve.data.dataset import clips
from worldserve.data.suites import Suite
from worldserve.models.protocol import WorldModel
from worldserve.training.evaluate import Evaluation, Prediction, evaluate
from worldserve.training.further import further_view

__all__ = ["brief", "curves", "insert", "model_card", "report_suite", "tables"]

_BEGIN, _END = "<!-- evaluation: begin -->", "<!-- evaluation: end -->"


def report_suite(
    model: WorldModel, suite: Suite, root: Path, split: str
) -> tuple[dict[str, Any], list[Prediction]]:
    """All that is measured of one suite, ready for JSON, and the predictions to be looked at."""
    front = evaluate(model, suite, root, split)
    side = evaluate(model, suite, root, split, (32,), camera=1)
    prompted = evaluate(model, suite, root, split, (1,), prompt=True)
    pairs = zip(*(clips(root, suite, split, camera) for camera in (0, 1)), strict=True)
    report = {
        "weights_digest": model.spec.weights_digest,
        "front": _keyed(front),
        "side": _keyed(side),
        "prompted": _keyed(prompted),
        "carried_over": further_view(model, pairs, starts=(40,)),
    }
    return report, front.predictions


def _keyed(evaluation: Evaluation) -> dict[str, Any]:
    return {str(context): row for context, row in evaluation.figures.items()}


def brief(name: str, row: dict[str, Any]) -> str:
    """One paragraph of the main figures at the steps measured."""
    keys = ("gripper_cm", "gripper_copy_cm", "object_moved_cm", "object_moved_copy_cm", "psnr_db")
    parts = [f"{key} {' / '.join(f'{v:.2f}' for v in row[key])}" for key in (*keys, "psnr_copy_db")]
    return f"{name}, {row['contexts']} contexts: " + "; ".join(parts) + f"; {_flags(row)}"


def tables(reports: dict[str, dict[str, Any]]) -> str:
    """Markdown of the suites' reports as `worldserve evaluate` saves them."""
    lines: list[str] = []
    for suite, report in reports.items():
        lines += [f"### {suite}", "", *_main_table(report["front"]), *_variations(report)]
        carried = report["carried_over"]
        cells = zip(
            carried["psnr_carried_db"],
            carried["psnr_own_db"],
            carried["psnr_copy_db"],
            strict=True,
        )
        lines += [
            "A further view carried over from the first one's rollout, PSNR in dB after "
            + " / ".join(str(s) for s in carried["steps"])
            + " steps (carried over, by a rollout of its own, last frame held): "
            + "; ".join(", ".join(f"{v:.1f}" for v in cell) for cell in cells)
            + ".",
            "",
        ]
    return "\n".join(lines)


def _main_table(figures: dict[str, dict[str, Any]]) -> list[str]:
    context = max(figures, key=int)
    row = figures[context]
    lines = [
        f"{context} frames of context, first view, no prompt ({row['contexts']} contexts; "
        "each cell: model, baseline):",
        "",
        "| | " + " | ".join(_steps(row)) + " |",
        "|---|" + "---|" * len(row["steps"]),
    ]
    for label, key, baseline in _ROWS:
        lines.append(f"| {label} | " + " | ".join(_cells(row[key], row[baseline])) + " |")
    moved = " / ".join(str(n) for n in row["object_moved_count"])
    lines += ["", f"Objects that moved: {moved} of {row['contexts']}. {_flags(row)}.", ""]
    return lines


def _variations(report: dict[str, Any]) -> list[str]:
    """One row for every context length, view and prompt that was tried."""
    rows = [(f"{c} frames of context", f) for c, f in sorted(report["front"].items(), key=_first)]
    rows += [(f"{c} frames, second view", f) for c, f in report["side"].items()]
    rows += [
        (f"{c} frame{'s' * (int(c) > 1)}, told what is going on", f)
        for c, f in sorted(report["prompted"].items(), key=_first)
    ]
    lines = [
        "| | gripper at 8 steps, cm | moved object at 8, cm | PSNR at 4, dB | operation, % |",
        "|---|---|---|---|---|",
    ]
    for label, row in rows:
        four, eight = row["steps"].index(4), row["steps"].index(8)
        lines.append(
            f"| {label.replace('1 frames', '1 frame')} | {row['gripper_cm'][eight]:.1f} "
            f"| {row['object_moved_cm'][eight]:.1f} | {row['psnr_db'][four]:.1f} "
            f"| {100 * row['operation_accuracy']:.1f} |"
        )
    return [*lines, ""]


def _first(item: tuple[str, Any]) -> int:
    return int(item[0])


def _steps(row: dict[str, Any]) -> list[str]:
    return [f"{s} step{'s' if s > 1 else ''}" for s in row["steps"]]


def _flags(row: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} {100 * row[f'{name}_accuracy']:.1f} % "
        f"(majority class {100 * row[f'{name}_majority']:.1f} %)"
        for name in ("grasped", "succeeded", "operation")
    )


_ROWS = (
    ("gripper, cm; true present state held", "gripper_cm", "gripper_copy_cm"),
    ("gripper where it moved, cm", "gripper_moved_cm", "gripper_moved_copy_cm"),
    ("object, cm; true present state held", "object_cm", "object_copy_cm"),
    ("object where it moved, cm", "object_moved_cm", "object_moved_copy_cm"),
    ("PSNR, dB; last frame held", "psnr_db", "psnr_copy_db"),
    ("PSNR on changed pixels, dB", "psnr_changed_db", "psnr_changed_copy_db"),
    ("SSIM; last frame held", "ssim", "ssim_copy"),
)


def _cells(values: list[float], baselines: list[float]) -> list[str]:
    pairs = zip(values, baselines, strict=True)
    return [f"{_number(value)}, {_number(baseline)}" for value, baseline in pairs]


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.1f}"


def insert(document: Path, text: str) -> None:
    """Replace what stands between the evaluation markers of `document`."""
    whole = document.read_text()
    if _BEGIN not in whole or _END not in whole:
        raise ValueError(f"{document} has no lines {_BEGIN!r} and {_END!r} to write between")
    before, rest = whole.split(_BEGIN, 1)
    _, after = rest.split(_END, 1)
    document.write_text(f"{before}{_BEGIN}\n\n{text}\n{_END}{after}")


def model_card(
    directory: Path, digest: str, training: dict[str, Any], reports: dict[str, dict[str, Any]]
) -> None:
    """Write `MODEL_CARD.md` beside the weights: data, training, digest, metrics, limits."""
    facts = "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in training.items())
    metrics = "\n".join(
        line
        for suite, report in reports.items()
        for line in (f"### {suite}", "", *_main_table(report["front"]))
    )
    (directory / "MODEL_CARD.md").write_text(
        f"""# Model card: the reference world model

- digest of weights and configuration: `{digest}`
- input: RGB frames of 64 x 64, controls in [-1, 1] at 10 Hz: (x, y, z, grip), in edudemo
  (x, height, how hard, how)
- output: predicted states, physical quantities, frames; see docs/world-model.md

## Training

Simulated episodes (Meta-World and pymunk; scripted experts, noise, random motion), made and trained
on a CPU. docs/world-model.md tells how. `minutes this run` is the time since the last resume only.

{facts}

## Metrics

On held-out test episodes; more in docs/world-model.md.

{metrics}
## Limits

Simulated scenes of one robot and of simple experiments, at 64 x 64. Meant to serve, test and
measure caches with; not for controlling anything.
"""
    )


def curves(log: Path, path: Path) -> None:
    """Every loss of every stage over its steps, from `log.jsonl`, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    stages: dict[str, list[dict[str, Any]]] = {}
    for line in log.read_text().splitlines():
        row = json.loads(line)
        stages.setdefault(row["stage"], []).append(row)
    figure, axes = plt.subplots(1, len(stages), figsize=(5 * len(stages), 3.6), squeeze=False)
    for axis, (stage, rows) in zip(axes[0], stages.items(), strict=True):
        for name in rows[0]:
            if name in ("stage", "step", "s_per_step", "gradient_norm"):
                continue
            axis.plot([r["step"] for r in rows], [r[name] for r in rows], label=name, lw=1)
        axis.set_title(f"stage: {stage}")
        axis.set_xlabel("step")
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("weighted loss")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
