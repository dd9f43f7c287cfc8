"""What dashboards are made of: queries, panels and their places, as Grafana wants them."""

from __future__ import annotations

from typing import Any

SOURCE = {"type": "prometheus", "uid": "prometheus"}
OURS = 'instance=~"$instance"'
WIDTH, HEIGHT = 24, 8

Query = tuple[str, str]


def rate(metric: str, by: str, more: str = "") -> str:
    labels = OURS + (f", {more}" if more else "")
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def quantile(q: float, metric: str, by: str, more: str = "") -> str:
    return f"histogram_quantile({q}, {rate(metric + '_bucket', by + ', le', more)})"


def gauge(metric: str, by: str, more: str = "", fold: str = "max") -> str:
    labels = OURS + (f", {more}" if more else "")
    return f"{fold} by ({by}) ({metric}{{{labels}}})"


def panel(
    title: str, about: str, queries: list[Query], unit: str = "short", width: int = 8, **custom: Any
) -> dict[str, Any]:
    """A graph over time; queries: (PromQL, legend)."""
    return {
        "type": "timeseries",
        "title": title,
        "description": about,
        "datasource": SOURCE,
        "gridPos": {"w": width, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "min": 0,
                "custom": {"lineWidth": 2, "fillOpacity": 8, "showPoints": "never", **custom},
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend, "datasource": SOURCE}
            for i, (expr, legend) in enumerate(queries)
        ],
    }


def stacked(*args: Any, **named: Any) -> dict[str, Any]:
    return panel(*args, stacking={"mode": "normal"}, **named)


def number(title: str, about: str, expr: str, unit: str, bad_below: float | None = None) -> Any:
    """The present value, large; red below `bad_below`."""
    made = panel(title, about, [(expr, "")], unit, width=4)
    made["type"] = "stat"
    made["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if bad_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": bad_below}]
    made["fieldConfig"]["defaults"]["thresholds"] = {"mode": "absolute", "steps": steps}
    made["gridPos"]["h"] = 4
    return made


def dashboard(uid: str, title: str, about: str, panels: list[dict[str, Any]]) -> dict[str, Any]:
    x = y = row = 0
    for id, made in enumerate(panels, 1):
        place = made["gridPos"]
        if x + place["w"] > WIDTH:
            x, y, row = 0, y + row, 0
        place |= {"x": x, "y": y}
        x, row = x + place["w"], max(row, place["h"])
        made["id"] = id
    return {
        "uid": uid,
        "title": title,
        "description": about,
        "tags": ["ctrlcache"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "instance",
                    "label": "server",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": {"query": "label_values(ctrlcache_heartbeat_seconds, instance)"},
                    "definition": "label_values(ctrlcache_heartbeat_seconds, instance)",
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                    "refresh": 2,
                    "current": {"text": "All", "value": "$__all"},
                }
            ]
        },
        "links": [
            {"type": "dashboards", "tags": ["ctrlcache"], "title": "CtrlCache", "asDropdown": True}
        ],
        "panels": panels,
    }
