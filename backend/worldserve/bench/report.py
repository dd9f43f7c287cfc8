"""The benchmark's report: JSON, a Markdown table and pictures, each with what it was made on."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from worldserve.bench.scoreboard import Played, Score, Spread, speed_up
from worldserve.settings import usable_cores

__all__ = ["SuiteReport", "machine", "markdown", "write_json"]

#: Speed-ups are stated against no cache at all, and against what an expert builds today.
AGAINST = ("recompute", "stateful")
_VERSIONS = ("ctrlcache", "torch", "numpy", "tritonclient", "nvidia-pytriton")


@dataclass(frozen=True, eq=False)
class SuiteReport:
    """One suite under one source of actions. deadline_ms: scaled; played: by rival."""

    suite: str
    source: str
    sessions: int
    deadline_ms: float
    scores: dict[str, Score]
    played: dict[str, Played] = field(repr=False)

    def speed_ups(self) -> dict[str, dict[str, Spread]]:
        """{against: {rival: ...}} for the medians, with "@p99" after the rival for those."""
        found: dict[str, dict[str, Spread]] = {}
        for against in AGAINST:
            slow = self.played.get(against)
            if slow is None:
                continue
            row = found.setdefault(against, {})
            for name, fast in self.played.items():
                if name != against:
                    row[name] = speed_up(slow, fast, 50)
                    row[f"{name}@p99"] = speed_up(slow, fast, 99)
        return found


def machine() -> dict[str, Any]:
    """What it ran on; the commit is None outside a repository."""
    processor = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        processor = names[0].split(":", 1)[1].strip() if names else processor
    found: dict[str, str | None] = {}
    for name in _VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {
        "processor": processor,
        "cores": usable_cores(),
        "python": platform.python_version(),
        "versions": found,
        "commit": _commit(),
    }


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(path: Path, reports: list[SuiteReport], settings: Mapping[str, Any]) -> None:
    content = {
        "made_on": machine(),
        "settings": dict(settings),
        "suites": [
            {
                "suite": report.suite,
                "source": report.source,
                "sessions": report.sessions,
                "deadline_ms": report.deadline_ms,
                "scores": {name: asdict(one) for name, one in report.scores.items()},
                "times_faster_than": {
                    against: {name: asdict(spread) for name, spread in row.items()}
                    for against, row in report.speed_ups().items()
                },
            }
            for report in reports
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def markdown(reports: list[SuiteReport], settings: Mapping[str, Any]) -> str:
    """One section per suite and source."""
    made_on = machine()
    lines = [
        f"{made_on['processor']}, {made_on['cores']} cores, Python {made_on['python']}, commit "
        f"{made_on['commit']}; " + ", ".join(f"{k} {v}" for k, v in settings.items()) + ".",
    ]
    for report in reports:
        lines += ["", f"## {report.suite}, {report.source}", ""]
        lines += [
            f"{report.sessions} sessions; deadline on this machine {report.deadline_ms:.0f} ms.",
            "",
            *_tables(report),
        ]
    return "\n".join(lines) + "\n"


def _tables(report: SuiteReport) -> list[str]:
    """Several narrow ones, so that each fits a terminal of 80 columns."""
    return [*_latency(report), *_answers(report), *_quality(report), *_features(report)]


def _latency(report: SuiteReport) -> list[str]:
    rows = [
        _row(
            *(name, f"{one.p50_ms:.1f}", f"{one.p90_ms:.1f}", f"{one.p99_ms:.1f}"),
            *(f"{one.worst_ms:.0f}", f"{one.misses:.1%}", _number(one.opening_ms, 0)),
            f"{one.cpu_s:.0f}",
        )
        for name, one in report.scores.items()
    ]
    lines = _table(_row("rival", "p50 ms", "p90", "p99", "worst", "late", "opening", "CPU s"), rows)
    for against, spreads in report.speed_ups().items():
        rows = [
            _row(name, str(spreads[name]), str(spreads[f"{name}@p99"]))
            for name in report.scores
            if name != against
        ]
        lines += _table(_row("rival", f"times faster than {against}, p50", "p99"), rows)
    return lines


def _answers(report: SuiteReport) -> list[str]:
    rows = [
        _row(
            *(name, f"{one.hit_rate - one.approximate:.1%}", f"{one.approximate:.1%}"),
            *(f"{one.over_bound:.1%}", f"{one.contradictions:.2%}"),
            f"{sum(one.bytes.values()) / 1e6:.0f}",
        )
        for name, one in report.scores.items()
    ]
    head = _row("rival", "exact hits", "approximate", "over bound", "contradictions", "MB")
    return _table(head, rows)


def _quality(report: SuiteReport) -> list[str]:
    rows = [
        _row(
            *(name, _percent(one.operation_right), _number(one.gripper_off_cm)),
            *(_number(one.object_off_cm), _number(one.psnr_db, 1), _number(one.ssim, 4)),
        )
        for name, one in report.scores.items()
    ]
    head = _row("rival", "operation right", "gripper off truth, cm", "object", "PSNR dB", "SSIM")
    lines = _table(head, rows)
    rows = [
        _row(name, _mean_p95(one.change_gripper_cm), _mean_p95(one.change_object_cm))
        for name, one in report.scores.items()
        if name != AGAINST[-1]
    ]
    return lines + _table(_row("rival", "gripper moved by the cache, cm (p95)", "object"), rows)


def _features(report: SuiteReport) -> list[str]:
    rows = [
        _row(name, _percent(one.features_found), _percent(one.blocks_reused), f"{one.reusing:.1%}")
        for name, one in report.scores.items()
        if one.features_found is not None or one.reusing
    ]
    return _table(_row("rival", "features found", "blocks reused", "answers with reuse"), rows)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _table(head: str, rows: Sequence[str]) -> list[str]:
    """Lines of Markdown and an empty one; none where there are no rows."""
    if not rows:
        return []
    ruler = "|---" + "|---:" * (head.count("|") - 2) + "|"
    return [head, ruler, *rows, ""]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _mean_p95(values: tuple[float, float]) -> str:
    return f"{values[0]:.3f} ({values[1]:.3f})"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
