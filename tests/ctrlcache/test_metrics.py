"""Events reach a Prometheus page under the stated names, labels and values."""

from __future__ import annotations

import threading
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from ctrlcache import metrics as m

EVENTS: list[tuple[m.Event, str, dict[str, str], float]] = [
    (
        m.Lookup("hot", "exact", 3e-6),
        "ctrlcache_lookups_total",
        {"tier": "hot", "result": "exact"},
        1,
    ),
    (m.Lookup("hot", "exact", 3e-6), "ctrlcache_lookup_seconds_count", {"tier": "hot"}, 1),
    (m.Lookup("hot", "near", 3e-6), "ctrlcache_hit_ratio", {"tier": "hot"}, 1),
    (
        m.Answered("probe", "near", (("lookup", 0.001), ("total", 0.002))),
        "ctrlcache_stage_seconds_sum",
        {"stage": "total", "source": "near"},
        0.002,
    ),
    (
        m.Answered("probe", "near", (("total", 0.002),)),
        "ctrlcache_answers_total",
        {"source": "near"},
        1,
    ),
    (m.Refused("full"), "ctrlcache_refused_total", {"reason": "full"}, 1),
    (m.Scored("probe", 0.02), "ctrlcache_score_seconds_sum", {"score": "probe"}, 0.02),
    (m.Admitted("trusted"), "ctrlcache_admissions_total", {"decision": "trusted"}, 1),
    (m.TierSize("warm", 7, 99), "ctrlcache_entries", {"tier": "warm"}, 7),
    (m.TierSize("warm", 7, 99), "ctrlcache_bytes", {"tier": "warm"}, 99),
    (m.TierSize("warm", 7, 99, 1000), "ctrlcache_limit_bytes", {"tier": "warm"}, 1000),
    (m.TierFailed(), "ctrlcache_tier_failures_total", {}, 1),
    (m.FreeSpace("shm", 5, 9), "ctrlcache_free_bytes", {"place": "shm"}, 5),
    (m.FreeSpace("shm", 5, 9), "ctrlcache_space_bytes", {"place": "shm"}, 9),
    (
        m.Evicted("warm", "bytes", 3),
        "ctrlcache_evictions_total",
        {"tier": "warm", "reason": "bytes"},
        3,
    ),
    (m.HitError(0.004), "ctrlcache_hit_error_sum", {}, 0.004),
    (m.HitError(0.004, 0.004), "ctrlcache_bound_checks_total", {"result": "held"}, 1),
    (m.HitError(0.004, 0.003), "ctrlcache_bound_checks_total", {"result": "violated"}, 1),
    (m.Saved(0.25), "ctrlcache_saved_seconds_total", {}, 0.25),
    (m.SessionCount(5), "ctrlcache_sessions", {}, 5),
    (m.SessionCount(5, 9), "ctrlcache_sessions_limit", {}, 9),
    (m.Calibrated(True), "ctrlcache_calibrated", {}, 1),
    (m.EpochBegan(), "ctrlcache_calibration_epochs_total", {}, 1),
    (
        m.BackgroundLost("dropped", 3),
        "ctrlcache_background_lost_total",
        {"reason": "dropped"},
        3,
    ),
    (m.Heartbeat(17.0), "ctrlcache_heartbeat_seconds", {}, 17),
    (m.Corrupt("warm"), "ctrlcache_corrupt_total", {"tier": "warm"}, 1),
    (m.ColdRequest("timeout"), "ctrlcache_cold_requests_total", {"result": "timeout"}, 1),
    (m.BlocksDecided("reuse", 4), "worldcache_blocks_total", {"decision": "reuse"}, 4),
    (m.StoreSize("l2", 1024), "worldcache_store_bytes", {"level": "l2"}, 1024),
    (m.StoreEvicted("l1", 2), "worldcache_evictions_total", {"level": "l1"}, 2),
    (
        m.StoreLookup("l3", "hit"),
        "worldcache_lookups_total",
        {"level": "l3", "result": "hit"},
        1,
    ),
    (m.Warmed("semantic", 5), "worldcache_warmed_total", {"how": "semantic"}, 5),
]


@pytest.mark.parametrize(("event", "name", "labels", "value"), EVENTS)
def test_an_event_moves_its_metric(
    event: m.Event, name: str, labels: dict[str, str], value: float
) -> None:
    """Each kind of event is readable under its name, with the instance in the labels."""
    registry = CollectorRegistry()
    m.PrometheusSink(registry, "world_model_0")(event)
    assert registry.get_sample_value(name, {"instance": "world_model_0", **labels}) == value


def test_every_metric_has_an_event() -> None:
    """No metric of the table can stay silent for want of an event."""
    translate = m.Translator()
    seen = {x.name for event, *_ in EVENTS for x in translate(event)}
    assert seen == {metric.name for metric in m.METRICS}


def test_counters_that_alerts_watch_begin_with_zero() -> None:
    """The first damaged record is an increase for Prometheus, not a counter that begins with 1."""
    registry = CollectorRegistry()
    m.PrometheusSink(registry, "a")
    for metric in m.METRICS:
        for values in metric.initial:
            labels = {"instance": "a", **dict(zip(metric.labels, values, strict=True))}
            assert registry.get_sample_value(metric.name, labels) == 0
    assert (
        registry.get_sample_value("ctrlcache_corrupt_total", {"instance": "a", "tier": "warm"}) == 0
    )


def test_measurements_fit_the_table() -> None:
    """Every measurement names a metric of the table and brings exactly its labels."""
    table = {metric.name: metric for metric in m.METRICS}
    translate = m.Translator()
    for event, *_ in EVENTS:
        for x in translate(event):
            assert len(x.labels) == len(table[x.name].labels)


def test_instances_share_a_registry_but_no_numbers() -> None:
    """Two instances count side by side in one registry."""
    registry = CollectorRegistry()
    first, second = m.PrometheusSink(registry, "a"), m.PrometheusSink(registry, "b")
    first(m.SessionCount(2))
    second(m.SessionCount(9))
    assert registry.get_sample_value("ctrlcache_sessions", {"instance": "a"}) == 2
    assert registry.get_sample_value("ctrlcache_sessions", {"instance": "b"}) == 9


def test_hit_ratio_forgets_old_look_ups() -> None:
    """The ratio covers the last thousand look-ups of its own tier only."""
    translate = m.Translator()
    for _ in range(1_000):
        translate(m.Lookup("hot", "miss", 0))
        translate(m.Lookup("warm", "exact", 0))
    for _ in range(250):
        last = translate(m.Lookup("hot", "near", 0))
    assert [x.value for x in last if x.name == "ctrlcache_hit_ratio"] == [0.25]


def test_concurrent_look_ups_are_all_counted() -> None:
    """Threads that look up at once lose no count."""
    registry = CollectorRegistry()
    sink = m.PrometheusSink(registry, "a")

    def work() -> None:
        for _ in range(500):
            sink(m.Lookup("hot", "miss", 1e-6))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    labels = {"instance": "a", "tier": "hot", "result": "miss"}
    assert registry.get_sample_value("ctrlcache_lookups_total", labels) == 2_000


def test_fan_out_reaches_every_sink() -> None:
    """All sinks get the event, in order."""
    seen: list[tuple[str, m.Event]] = []
    sink = m.fan_out(lambda e: seen.append(("a", e)), m.ignore, lambda e: seen.append(("b", e)))
    sink(m.Admitted("trusted"))
    assert seen == [("a", m.Admitted("trusted")), ("b", m.Admitted("trusted"))]


def test_metrics_are_readable_over_http() -> None:
    """What a sink counted is on the page that Prometheus scrapes."""
    registry = CollectorRegistry()
    sink = m.PrometheusSink(registry, "x")
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        sink(m.Corrupt("warm", 3))
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        page = urllib.request.urlopen(url, timeout=5).read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert 'ctrlcache_corrupt_total{instance="x",tier="warm"} 3.0' in page
