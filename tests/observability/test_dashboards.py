"""Dashboards show what is really there: every metric exists, every query returns data."""

from __future__ import annotations

import json

import generate
import pytest
import yaml
from observed import DASHBOARDS, PROJECT, metrics_of, queries

GRAFANA = PROJECT / "docker" / "grafana"
SCREENS = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


def test_the_files_are_what_the_generator_writes():
    """Nobody has changed a dashboard without its source, or the source without the dashboard."""
    assert sorted(generate.DASHBOARDS) == [path.name for path in DASHBOARDS]
    for path in DASHBOARDS:
        assert path.read_text() == generate.text_of(path.name), "run docker/grafana/generate.py"


@SCREENS
def test_grafana_can_place_what_it_is_given(path):
    """Panels do not overlap, carry ids of their own, and ask the source that is provisioned."""
    board = json.loads(path.read_text())
    [source] = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    taken = set()
    for panel in board["panels"]:
        assert panel["datasource"] == {"type": source["type"], "uid": source["uid"]}
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


@SCREENS
@pytest.mark.server
def test_every_query_names_what_the_server_shows(path, scraped):
    """A metric that was renamed leaves no empty panel behind."""
    shown = scraped.page(0) + scraped.page(1)
    for title, promql in queries(path):
        assert metrics_of(promql), promql
        for name in metrics_of(promql):
            assert f"\n{name}" in shown, f"{title!r}: {name} is on no page"


@SCREENS
@pytest.mark.server
def test_every_query_returns_data_from_a_live_run(path, scraped):
    """Prometheus, scraping a served model, has numbers for every panel."""
    empty = [(title, promql) for title, promql in queries(path) if not scraped.query(promql)]
    assert empty == []
