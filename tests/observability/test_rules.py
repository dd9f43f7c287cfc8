"""Alerts fire when they should, are computed from what exists, and lead to a page that helps."""

from __future__ import annotations

import subprocess

import pytest
import yaml
from observed import RULES, RULES_TEST, RUNBOOK, anchors, metrics_of, rules, tool


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        [tool("promtool"), *arguments], cwd=RULES.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_alert_passes_its_unit_test():
    """promtool replays series and sees each alert fire, and not a moment before."""
    assert "SUCCESS" in promtool("test", "rules", RULES_TEST.name)


def test_the_configuration_is_valid():
    """Prometheus would start with it."""
    promtool("check", "config", "prometheus.yml")


def test_each_alert_has_a_unit_test_of_both_kinds():
    """One moment at which it fires, one at which it does not."""
    cases = [
        case
        for test in yaml.safe_load(RULES_TEST.read_text())["tests"]
        for case in test.get("alert_rule_test", [])
    ]
    for rule in rules("alert"):
        mine = [bool(case["exp_alerts"]) for case in cases if case["alertname"] == rule["alert"]]
        assert True in mine, f"{rule['alert']} is never seen to fire"
        assert False in mine, f"{rule['alert']} is never seen to keep quiet"


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda rule: rule["alert"])
def test_each_alert_leads_to_its_section(rule):
    """Whoever is woken finds what to do."""
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert page == "docs/operations.md"
    assert anchor in anchors(RUNBOOK)
    assert rule["labels"]["severity"] in ("critical", "warning")


@pytest.mark.server
def test_each_rule_is_computed_from_what_a_server_shows(scraped):
    """No alert waits for a metric that does not exist."""
    shown = scraped.page(0) + scraped.page(1)
    for rule in rules("alert") + rules("record"):
        for name in metrics_of(rule["expr"]) - {"up"}:
            assert f"\n{name}" in shown, f"{name} is on no page: {rule}"


@pytest.mark.server
def test_a_healthy_server_rings_no_bell(scraped):
    """All rules are evaluated without an error, and none is firing on a run that is well."""
    found = [rule for group in scraped.ask("rules")["groups"] for rule in group["rules"]]
    assert len(found) == len(rules("alert")) + len(rules("record"))
    assert [rule["name"] for rule in found if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in found if rule.get("state") == "firing"] == []
