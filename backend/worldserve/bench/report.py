"""The benchmark's report: JSON, a Markdown table and pictures, each with what it was made on."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from worldserve.bench.rivals import RIVALS
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
            *_latency_table(report),
            "",
            *_quality_table(report),
        ]
    return "\n".join(lines) + "\n"


def _latency_table(report: SuiteReport) -> list[str]:
    ups = report.speed_ups()
    head = "| rival | p50 ms | p90 | p99 | worst | hits | approximate | late |"
    head += "".join(f" x {against} p50 | p99 |" for against in ups)
    lines = [head, "|---" * (8 + 2 * len(ups)) + "|"]
    for name, one in report.scores.items():
        row = (
            f"| {_label(name)} | {one.p50_ms:.1f} | {one.p90_ms:.1f} | {one.p99_ms:.1f} | "
            f"{one.worst_ms:.0f} | {one.hit_rate:.1%} | {one.approximate:.1%} | {one.misses:.1%} |"
        )
        for against, spreads in ups.items():
            for key in (name, f"{name}@p99"):
                row += f" {spreads[key]} |" if name != against else " 1 |"
        lines.append(row)
    return lines


def _quality_table(report: SuiteReport) -> list[str]:
    lines = [
        "| rival | over bound | operation right | gripper off truth, cm | object off | gripper "
        "moved by the cache, cm, mean (p95) | object | PSNR dB | SSIM | contradictions | CPU s | "
        "MB |",
        "|---" * 12 + "|",
    ]
    for name, one in report.scores.items():
        right = "" if one.operation_right is None else f"{one.operation_right:.1%}"
        stored = sum(one.bytes.values()) / 1e6
        lines.append(
            f"| {_label(name)} | {one.over_bound:.1%} | {right} | "
            f"{_number(one.gripper_off_cm)} | {_number(one.object_off_cm)} | "
            f"{one.change_gripper_cm[0]:.3f} ({one.change_gripper_cm[1]:.3f}) | "
            f"{one.change_object_cm[0]:.3f} ({one.change_object_cm[1]:.3f}) | "
            f"{'' if one.psnr_db is None else f'{one.psnr_db:.1f}'} | "
            f"{'' if one.ssim is None else f'{one.ssim:.4f}'} | {one.contradictions:.2%} | "
            f"{one.cpu_s:.0f} | {stored:.0f} |"
        )
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _label(name: str) -> str:
    return RIVALS[name].label if name in RIVALS else name
