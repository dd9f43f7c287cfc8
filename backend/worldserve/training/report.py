"""What training and evaluation leave for a reader: tables in Markdown, loss curves as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["curves", "insert", "model_card", "tables"]

_BEGIN, _END = "<!-- evaluation: begin -->", "<!-- evaluation: end -->"


def tables(figures: dict[int, dict[str, Any]]) -> str:
    """Markdown of `Evaluation.figures`: positions, flags and pixels, by context and step."""
    steps = next(iter(figures.values()))["steps"]
    head = " | ".join(f"{s} step{'s' if s > 1 else ''}" for s in steps)
    lines: list[str] = []
    for context, row in sorted(figures.items()):
        frames = "1 frame" if context == 1 else f"{context} frames"
        lines += [
            f"**{frames} of context** ({row['contexts']} contexts; each cell: model, baseline)",
            "",
            f"| | {head} |",
            "|---|" + "---|" * len(steps),
        ]
        for label, key, baseline in _ROWS:
            cells = _cells(row[key], row[baseline])
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        moved = " / ".join(str(n) for n in row["object_moved_count"])
        lines += [
            "",
            f"Objects that moved: {moved} of {row['contexts']}. "
            + "; ".join(
                f"{name} {100 * row[f'{key}_accuracy']:.1f} % "
                f"(majority class {100 * row[f'{key}_majority']:.1f} %)"
                for name, key in (
                    ("grasped", "grasped"),
                    ("succeeded", "succeeded"),
                    ("operation", "operation"),
                )
            )
            + ".",
            "",
        ]
    return "\n".join(lines)


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
    directory: Path, digest: str, training: dict[str, Any], figures: dict[int, dict[str, Any]]
) -> None:
    """Write `MODEL_CARD.md` beside the weights: data, training, digest, metrics, limits."""
    longest = figures[max(figures)]
    steps = " / ".join(str(s) for s in longest["steps"])
    rows = "\n".join(
        f"| {label} | {' / '.join(map(_number, longest[key]))} "
        f"| {' / '.join(map(_number, longest[baseline]))} |"
        for label, key, baseline in _ROWS
    )
    flags = ", ".join(
        f"{name} {100 * longest[f'{name}_accuracy']:.1f} % "
        f"({100 * longest[f'{name}_majority']:.1f} %)"
        for name in ("operation", "grasped", "succeeded")
    )
    facts = "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in training.items())
    (directory / "MODEL_CARD.md").write_text(
        f"""# Model card: the reference world model

- digest of weights and configuration: `{digest}`
- input: RGB frames of 64 x 64, controls (x, y, z, grip) in [-1, 1] at 10 Hz
- output: predicted states, physical quantities, frames; see docs/world-model.md

## Training

Simulated episodes (Meta-World; scripted experts, noise, random motion), made and trained on a CPU.
docs/world-model.md tells how. `minutes this run` is the time since the last resume only.

{facts}

## Metrics

On held-out test episodes, {max(figures)} frames of context, {steps} steps ahead
({longest["contexts"]} contexts; more in docs/world-model.md).

| | model | baseline |
|---|---|---|
{rows}

Shares told rightly (majority class in brackets): {flags}.

## Limits

Simulated scenes of one robot from one camera, at 64 x 64. Meant to serve, test and measure caches
with; not for controlling anything.
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
