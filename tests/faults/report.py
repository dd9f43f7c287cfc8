"""What each fault did to the people at work, in one table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from worldserve.bench.report import machine

__all__ = ["Row", "markdown", "write_page", "write_results"]

PROJECT = Path(__file__).resolve().parents[2]
_BEGIN, _END = "<!-- table: make faults -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Row:
    """recovery: seconds from the harm until the median and the last person had an answer to a
    request sent after it. refused: requests that got a typed refusal or none, all tried again."""

    fault: str
    sessions: int
    exact: int
    near: int
    refused: int
    wrong: int
    over_bound: int
    lost: int
    recovery_median_s: float | None
    recovery_last_s: float | None
    supervisor: str


def markdown(rows: Iterable[Row]) -> str:
    head = (
        "| fault | sessions | answers exact + near | refused, tried again | wrong | lost sessions "
        "| back after: median, last (s) | supervisor |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        back = (
            f"{row.recovery_median_s:.1f}, {row.recovery_last_s:.1f}"
            if row.recovery_last_s is not None and row.recovery_median_s is not None
            else "-"
        )
        lines.append(
            f"| {row.fault} | {row.sessions} | {row.exact} + {row.near} | {row.refused} "
            f"| {row.wrong} | {row.lost} | {back} | {row.supervisor or '-'} |"
        )
    return "\n".join(lines) + "\n"


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def write_results(rows: list[Row], took_s: float, path: Path) -> None:
    """JSON, with the machine and the commit."""
    content = {
        "made_on": machine(),
        "took_s": round(took_s),
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_page(rows: list[Row], path: Path) -> None:
    """Put the table between its marks in the page."""
    text = path.read_text()
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    path.write_text(f"{before}{_BEGIN}\n\n{markdown(rows)}\n{_END}{after}")
