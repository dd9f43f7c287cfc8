"""Draw all dashboards from a running Prometheus, without Grafana:

python docker/grafana/picture.py http://127.0.0.1:9090 --minutes 60 --out docs/images/dashboards.png
"""

from __future__ import annotations

import argparse
import json
import math
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DASHBOARDS = ("serving.json", "cache.json", "worldcache.json")
COLUMNS, POINTS = 5, 240


def asked(api: str, promql: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
    """The series of an expression over time."""
    step = max(1.0, (end_s - start_s) / POINTS)
    promql = promql.replace("$instance", ".*").replace(
        "$__rate_interval", f"{max(60, 4 * step):.0f}s"
    )
    query = {"query": promql, "start": start_s, "end": end_s, "step": step}
    with urllib.request.urlopen(
        f"{api}/api/v1/query_range?{urllib.parse.urlencode(query)}", timeout=30
    ) as reply:
        found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
    return found


def legend(text: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def draw(axes: Any, panel: dict[str, Any], api: str, start_s: float, end_s: float) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    shown = 0
    for target in panel["targets"]:
        for series in asked(api, target["expr"], start_s, end_s):
            # What is not there is a gap, not a line.
            points = [(t, float(v)) for t, v in series["values"]]
            minutes = [(t - start_s) / 60 for t, _ in points]
            values = [v if math.isfinite(v) else math.nan for _, v in points]
            name = legend(target["legendFormat"], series["metric"])
            axes.plot(minutes, values, linewidth=1, label=name[:34])
            shown += 1
    unit = {"s": "s", "reqps": "1/s", "ops": "1/s", "percentunit": "share"}.get(
        defaults["unit"], ""
    )
    axes.set_title(panel["title"] + (f" [{unit}]" if unit else ""), fontsize=8)
    axes.tick_params(labelsize=6)
    if "scaleDistribution" in defaults["custom"]:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlim(0, (end_s - start_s) / 60)
    axes.grid(alpha=0.25)
    if 1 < shown <= 10:
        axes.legend(fontsize=5, loc="upper left", framealpha=0.6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("api", help="of Prometheus, as http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path, default=Path("dashboards.png"))
    options = parser.parse_args()
    end_s = time.time()
    start_s = end_s - 60 * options.minutes
    boards = [
        json.loads((Path(__file__).parent / "dashboards" / name).read_text()) for name in DASHBOARDS
    ]
    panels = [
        panel for board in boards for panel in board["panels"] if panel["type"] == "timeseries"
    ]
    rows = math.ceil(len(panels) / COLUMNS)
    figure, grid = plt.subplots(rows, COLUMNS, figsize=(3.4 * COLUMNS, 2.1 * rows))
    for axes, panel in zip(grid.flat, panels, strict=False):
        draw(axes, panel, options.api, start_s, end_s)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    figure.supxlabel("minutes", fontsize=8)
    figure.tight_layout()
    figure.savefig(options.out, dpi=100)


if __name__ == "__main__":
    main()
