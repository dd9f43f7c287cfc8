"""What the files of dashboards and rules say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[2]
DASHBOARDS = sorted((PROJECT / "docker" / "grafana" / "dashboards").glob("*.json"))
RULES = PROJECT / "docker" / "prometheus" / "rules.yml"
RULES_TEST = PROJECT / "docker" / "prometheus" / "rules_test.yml"
RUNBOOK = PROJECT / "docs" / "operations.md"


def queries(path: Path) -> list[tuple[str, str]]:
    """(panel, PromQL) of a dashboard, with its variables filled in."""
    return [
        (
            panel["title"],
            target["expr"].replace("$instance", ".*").replace("$__rate_interval", "5m"),
        )
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]


def rules(kind: str) -> list[dict]:
    """The rules that have a `kind`: `alert` or `record`."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def metrics_of(promql: str) -> set[str]:
    """Names of metrics in an expression; recorded ones (with a colon) are not metrics."""
    names = re.findall(r"(?<![\w:])(?:ctrlcache|worldcache|nv)_[a-z0-9_]+(?![\w:])", promql)
    return set(names) | ({"up"} if re.search(r"\bup\b", promql) else set())


def anchors(path: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")
        for heading in headings
    }


def tool(name: str) -> str:
    """The program's path; the test is skipped where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; `make tools` gets it (Debian: prometheus)")
    return found
