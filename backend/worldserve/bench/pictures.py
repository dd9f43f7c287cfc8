"""The benchmark's pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from worldserve.bench.report import SuiteReport
from worldserve.bench.rivals import RIVALS
from worldserve.bench.scoreboard import Played, approximate

if TYPE_CHECKING:
    from worldserve.bench.scale import Crowd, Sized

__all__ = ["error_picture", "hits_picture", "latency_picture", "scale_picture"]

_TIERS = {"hot": "tab:red", "warm": "tab:orange", "cold": "tab:blue"}


def _axes(count: int) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(6.2 * count, 4.4), squeeze=False)
    return figure, list(axes[0])


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def latency_picture(reports: Sequence[SuiteReport], path: Path) -> None:
    """Share of questions answered within a time, one line per rival."""
    figure, axes = _axes(len(reports))
    for axis, report in zip(axes, reports, strict=True):
        for name, played in report.played.items():
            took = np.sort(np.concatenate(played.latencies()))
            axis.plot(took, np.arange(1, len(took) + 1) / len(took), label=RIVALS[name].label)
        axis.axvline(report.deadline_ms, color="0.6", linestyle=":", label="deadline, scaled")
        axis.set(xscale="log", xlabel="latency, ms", ylabel="share of questions")
        axis.set_title(f"{report.suite}, {report.source}")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    _save(figure, path)


def hits_picture(reports: Sequence[SuiteReport], path: Path) -> None:
    """Where answers came from: exact and approximate per rival."""
    figure, axes = _axes(len(reports))
    for axis, report in zip(axes, reports, strict=True):
        names = [name for name, one in report.scores.items() if one.hit_rate > 0]
        for place, name in enumerate(names):
            left = 0.0
            for (tier, exact), share in _sources(report.played[name]).items():
                axis.barh(
                    place,
                    share,
                    left=left,
                    color=_TIERS.get(tier, "tab:gray"),
                    alpha=1.0 if exact else 0.45,
                    label=f"{tier}, {'exact' if exact else 'approximate'}",
                )
                left += share
        axis.set_yticks(range(len(names)), [RIVALS[name].label for name in names], fontsize=8)
        axis.set(xlim=(0, 1), xlabel="share of questions")
        axis.set_title(f"{report.suite}, {report.source}")
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        axes[0].legend(handles.values(), handles.keys(), fontsize=7, loc="lower right")
    _save(figure, path)


def _sources(played: Played) -> dict[tuple[str, bool], float]:
    answers = played.answers
    found: dict[tuple[str, bool], float] = {}
    for answer in answers:
        if answer["tier"] != "none":
            key = (answer["tier"], not approximate(answer))
            found[key] = found.get(key, 0.0) + 1 / len(answers)
    return dict(sorted(found.items(), reverse=True))


def error_picture(reports: Sequence[SuiteReport], path: Path, rival: str = "trust") -> None:
    """Measured error of approximate answers against the bound that was stated with them."""
    figure, axes = _axes(len(reports))
    for axis, report in zip(axes, reports, strict=True):
        played = report.played.get(rival)
        near = [a for a in played.answers if approximate(a)] if played is not None else []
        bound = np.array([answer["bound"] for answer in near])
        error = np.array([answer["error"] for answer in near])
        axis.loglog(np.maximum(bound, 1e-5), np.maximum(error, 1e-6), ".", alpha=0.4)
        limits = np.array([1e-5, 1e-1])
        axis.loglog(limits, limits, color="0.4", linewidth=1)
        over = (error > bound).mean() if near else 0.0
        axis.set(xlabel="stated bound", ylabel="measured error")
        axis.set_title(f"{report.suite}, {report.source}: {over:.1%} of {len(near)} over")
        axis.grid(alpha=0.3)
    _save(figure, path)


def scale_picture(crowds: Sequence[Crowd], sized: Sequence[Sized], path: Path) -> None:
    """Late answers against users at once; time of an answer against the size of the model."""
    figure, (late, cost) = _axes(2)
    for rival in dict.fromkeys(one.rival for one in crowds):
        rows = [one for one in crowds if one.rival == rival]
        late.plot(
            [r.sessions for r in rows], [r.late for r in rows], "o-", label=RIVALS[rival].label
        )
    late.set(xscale="log", xlabel="users at once", ylabel="answers over the deadline", ylim=(0, 1))
    late.set_xticks([one.sessions for one in crowds], [str(one.sessions) for one in crowds])
    late.minorticks_off()
    late.legend(fontsize=8)
    millions = [row.parameters / 1e6 for row in sized]
    cost.loglog(millions, [row.computed_ms for row in sized], "o-", label="computed")
    cost.loglog(millions, [row.found_ms for row in sized], "o-", label="found")
    for x, row in zip(millions, sized, strict=True):
        cost.annotate(
            f"{row.saving:.0f}x", (x, row.computed_ms), (0, 6), textcoords="offset points"
        )
    cost.set(xlabel="parameters, millions", ylabel="ms per question")
    cost.legend(fontsize=8)
    for axis in (late, cost):
        axis.grid(alpha=0.3)
    _save(figure, path)
