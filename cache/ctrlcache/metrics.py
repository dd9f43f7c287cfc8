"""What happened, as events; and how events become the metrics of a Prometheus page.

The caches call a *sink* with a frozen event and know nothing else. `METRICS` describes every
metric once; `Translator` turns an event into measurements of those metrics. A sink for another
system (Triton's own endpoint, say) creates its metrics from `METRICS` and applies what `Translator`
returns, so that all endpoints show the same names, labels and buckets.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ctrlcache.events import (
    Admitted,
    Answered,
    BackgroundLost,
    BlocksDecided,
    Calibrated,
    ColdRequest,
    Corrupt,
    EpochBegan,
    Event,
    Evicted,
    FreeSpace,
    Heartbeat,
    HitError,
    Lookup,
    Refused,
    Saved,
    Scored,
    SessionCount,
    Sink,
    StoreEvicted,
    StoreLookup,
    StoreSize,
    TierFailed,
    TierSize,
    Warmed,
    fan_out,
    ignore,
)

__all__ = [
    "METRICS",
    "Admitted",
    "Answered",
    "BackgroundLost",
    "BlocksDecided",
    "Calibrated",
    "ColdRequest",
    "Corrupt",
    "EpochBegan",
    "Event",
    "Evicted",
    "FreeSpace",
    "Heartbeat",
    "HitError",
    "Lookup",
    "Measurement",
    "Metric",
    "PrometheusSink",
    "Refused",
    "Saved",
    "Scored",
    "SessionCount",
    "Sink",
    "StoreEvicted",
    "StoreLookup",
    "StoreSize",
    "TierFailed",
    "TierSize",
    "Translator",
    "Warmed",
    "fan_out",
    "ignore",
]

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; `labels` excludes `instance`, which every metric carries first. initial: values
    of the labels that are shown as 0 from the start, since Prometheus sees no increase in a counter
    that begins with 1."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    initial: tuple[tuple[str, ...], ...] = ()


_LOOKUP_S = (2e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 1e-2, 1e-1)
_STAGE_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5)
_SCORE_S = (1e-3, 5e-3, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_ERROR = (1e-4, 3e-4, 1e-3, 3e-3, 5e-3, 1e-2, 2e-2, 3e-2, 5e-2, 0.1, 0.2, 0.5)
_RATIO_WINDOW = 1_000


def _each(*values: str) -> tuple[tuple[str, ...], ...]:
    return tuple((value,) for value in values)


_SOURCES = _each("exact", "near", "computed", "bypass", "none")
_REASONS = _each(
    "invalid", "not_found", "full", "overload", "conflict", "unavailable", "cancelled", "failed"
)

_COLD = _each(
    "hit", "miss", "error", "unreachable", "timeout", "denied", "no_bucket", "garbage", "too_large"
)

_LEVELS, _HOW = _each("l1", "l2"), _each("semantic")

METRICS: tuple[Metric, ...] = (
    Metric("ctrlcache_lookups_total", "counter", "Look-ups by outcome.", ("tier", "result")),
    Metric("ctrlcache_lookup_seconds", "histogram", "Time of a look-up.", ("tier",), _LOOKUP_S),
    Metric(
        "ctrlcache_hit_ratio",
        "gauge",
        f"Share of hits among the last {_RATIO_WINDOW} look-ups.",
        ("tier",),
    ),
    Metric(
        "ctrlcache_answers_total",
        "counter",
        "Answers by where they came from.",
        ("source",),
        initial=_SOURCES,
    ),
    Metric(
        "ctrlcache_refused_total",
        "counter",
        "Requests that got an error.",
        ("reason",),
        initial=_REASONS,
    ),
    Metric(
        "ctrlcache_stage_seconds",
        "histogram",
        "Time of a stage of a request (total: all of it).",
        ("stage", "source"),
        _STAGE_S,
    ),
    Metric("ctrlcache_score_seconds", "histogram", "Time of scoring.", ("score",), _SCORE_S),
    Metric("ctrlcache_admissions_total", "counter", "Admissions by decision.", ("decision",)),
    Metric("ctrlcache_entries", "gauge", "Records in a tier.", ("tier",)),
    Metric("ctrlcache_bytes", "gauge", "Bytes in a tier.", ("tier",)),
    Metric("ctrlcache_limit_bytes", "gauge", "Bytes a tier may hold.", ("tier",)),
    Metric(
        "ctrlcache_tier_failures_total",
        "counter",
        "Writes that a tier could not take.",
        initial=((),),
    ),
    Metric("ctrlcache_free_bytes", "gauge", "Free on the file system of a place.", ("place",)),
    Metric("ctrlcache_space_bytes", "gauge", "Size of the file system of a place.", ("place",)),
    Metric(
        "ctrlcache_evictions_total",
        "counter",
        "Records evicted.",
        ("tier", "reason"),
        initial=(("hot", "bytes"), ("warm", "bytes")),
    ),
    Metric(
        "ctrlcache_hit_error",
        "histogram",
        "True relative state error of approximate answers, on sampled recomputations.",
        (),
        _ERROR,
    ),
    Metric(
        "ctrlcache_bound_checks_total",
        "counter",
        "Sampled recomputations by whether the stated error bound held.",
        ("result",),
        initial=_each("held", "violated"),
    ),
    Metric("ctrlcache_saved_seconds_total", "counter", "Computing time that hits saved."),
    Metric("ctrlcache_sessions", "gauge", "Sessions alive."),
    Metric("ctrlcache_sessions_limit", "gauge", "Sessions that may be alive at once."),
    Metric("ctrlcache_calibrated", "gauge", "1 where approximate answers can be given."),
    Metric(
        "ctrlcache_calibration_epochs_total",
        "counter",
        "Times a device's calibration changed.",
        initial=((),),
    ),
    Metric(
        "ctrlcache_background_lost_total",
        "counter",
        "Scores, probes and prefetches that were not done.",
        ("reason",),
        initial=_each("dropped", "refused"),
    ),
    Metric("ctrlcache_heartbeat_seconds", "gauge", "Unix time at which the instance last ran."),
    Metric(
        "ctrlcache_corrupt_total",
        "counter",
        "Damaged records found.",
        ("tier",),
        initial=_each("hot", "warm", "cold", "session"),
    ),
    Metric(
        "ctrlcache_cold_requests_total",
        "counter",
        "Object store requests.",
        ("result",),
        initial=_COLD,
    ),
    Metric(
        "worldcache_blocks_total",
        "counter",
        "Generator blocks by decision.",
        ("decision",),
        initial=_each("computed", "reused"),
    ),
    Metric("worldcache_store_bytes", "gauge", "Bytes in a feature store level.", ("level",)),
    Metric(
        "worldcache_evictions_total", "counter", "Features evicted.", ("level",), initial=_LEVELS
    ),
    Metric(
        "worldcache_lookups_total",
        "counter",
        "Features asked for.",
        ("level", "result"),
        initial=(("l1", "hit"), ("l2", "hit"), ("l3", "hit"), ("none", "miss")),
    ),
    Metric("worldcache_warmed_total", "counter", "Features loaded ahead.", ("how",), initial=_HOW),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Add `value` to a counter, set a gauge to it, or let a histogram observe it."""

    name: str
    labels: tuple[str, ...]
    value: float


class Translator:
    """Turns events into measurements; thread-safe; keeps only what the hit ratio needs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: dict[str, deque[bool]] = {}
        self._hits: dict[str, int] = {}

    def __call__(self, event: Event) -> Sequence[Measurement]:
        match event:
            case Lookup(tier, result, seconds):
                return (
                    Measurement("ctrlcache_lookups_total", (tier, result), 1),
                    Measurement("ctrlcache_lookup_seconds", (tier,), seconds),
                    Measurement("ctrlcache_hit_ratio", (tier,), self._ratio(tier, result)),
                )
            case Answered(_, source, stages):
                times = (
                    Measurement("ctrlcache_stage_seconds", (stage, source), s)
                    for stage, s in stages
                )
                return (Measurement("ctrlcache_answers_total", (source,), 1), *times)
            case Refused(reason):
                return (Measurement("ctrlcache_refused_total", (reason,), 1),)
            case Scored(score, seconds):
                return (Measurement("ctrlcache_score_seconds", (score,), seconds),)
            case Admitted(decision):
                return (Measurement("ctrlcache_admissions_total", (decision,), 1),)
            case TierSize(tier, entries, size_bytes, limit_bytes):
                size = (
                    Measurement("ctrlcache_entries", (tier,), entries),
                    Measurement("ctrlcache_bytes", (tier,), size_bytes),
                )
                limit = Measurement("ctrlcache_limit_bytes", (tier,), limit_bytes)
                return (*size, limit) if limit_bytes else size
            case TierFailed():
                return (Measurement("ctrlcache_tier_failures_total", (), 1),)
            case FreeSpace(place, free_bytes, space_bytes):
                return (
                    Measurement("ctrlcache_free_bytes", (place,), free_bytes),
                    Measurement("ctrlcache_space_bytes", (place,), space_bytes),
                )
            case Evicted(tier, reason, count):
                return (Measurement("ctrlcache_evictions_total", (tier, reason), count),)
            case HitError(error, bound):
                measured = Measurement("ctrlcache_hit_error", (), error)
                if bound is None:
                    return (measured,)
                result = "held" if error <= bound else "violated"
                return (measured, Measurement("ctrlcache_bound_checks_total", (result,), 1))
            case Saved(seconds):
                return (Measurement("ctrlcache_saved_seconds_total", (), seconds),)
            case SessionCount(count, limit):
                sessions = Measurement("ctrlcache_sessions", (), count)
                if not limit:
                    return (sessions,)
                return (sessions, Measurement("ctrlcache_sessions_limit", (), limit))
            case Calibrated(present):
                return (Measurement("ctrlcache_calibrated", (), float(present)),)
            case EpochBegan():
                return (Measurement("ctrlcache_calibration_epochs_total", (), 1),)
            case Heartbeat(now_s):
                return (Measurement("ctrlcache_heartbeat_seconds", (), now_s),)
            case Corrupt(tier, count):
                return (Measurement("ctrlcache_corrupt_total", (tier,), count),)
            case ColdRequest(result):
                return (Measurement("ctrlcache_cold_requests_total", (result,), 1),)
            case BlocksDecided(decision, count):
                return (Measurement("worldcache_blocks_total", (decision,), count),)
            case StoreSize(level, size_bytes):
                return (Measurement("worldcache_store_bytes", (level,), size_bytes),)
            case StoreEvicted(level, count):
                return (Measurement("worldcache_evictions_total", (level,), count),)
            case StoreLookup(level, result):
                return (Measurement("worldcache_lookups_total", (level, result), 1),)
            case BackgroundLost(reason, count):
                return (Measurement("ctrlcache_background_lost_total", (reason,), count),)
            case Warmed(how, count):
                return (Measurement("worldcache_warmed_total", (how,), count),)
        return ()

    def _ratio(self, tier: str, result: str) -> float:
        hit = result != "miss"
        with self._lock:
            recent = self._recent.get(tier)
            if recent is None:
                recent = self._recent[tier] = deque(maxlen=_RATIO_WINDOW)
                self._hits[tier] = 0
            if len(recent) == _RATIO_WINDOW:
                self._hits[tier] -= recent[0]
            recent.append(hit)
            self._hits[tier] += hit
            return self._hits[tier] / len(recent)


class PrometheusSink:
    """Shows events in a `prometheus_client` registry.

    Several sinks (one per instance) may share a registry: the first one creates the metrics, the
    others find them. A metric of that name which something else registered is an error, because
    its labels could not be told from ours.
    """

    def __init__(self, registry: CollectorRegistry, instance: str) -> None:
        self._instance = instance
        self._translate = Translator()
        with _SHARED_LOCK:
            shared = _SHARED.get(registry)
            if shared is None:
                shared = _SHARED[registry] = {m.name: _create(m, registry) for m in METRICS}
        self._metrics = shared
        self._apply: dict[tuple[str, tuple[str, ...]], Callable[[float], None]] = {}
        for metric in METRICS:
            for values in metric.initial:
                shared[metric.name].labels(instance, *values)

    def __call__(self, event: Event) -> None:
        for m in self._translate(event):
            key = (m.name, m.labels)
            apply = self._apply.get(key)
            if apply is None:
                child = self._metrics[m.name].labels(self._instance, *m.labels)
                apply = self._apply[key] = _verb(child)
            apply(m.value)


_SHARED_LOCK = threading.Lock()
_SHARED: weakref.WeakKeyDictionary[CollectorRegistry, dict[str, Counter | Gauge | Histogram]] = (
    weakref.WeakKeyDictionary()
)


def _create(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    labels = ("instance", *metric.labels)
    if metric.kind == "counter":
        return Counter(metric.name, metric.help, labels, registry=registry)
    if metric.kind == "gauge":
        return Gauge(metric.name, metric.help, labels, registry=registry)
    return Histogram(metric.name, metric.help, labels, registry=registry, buckets=metric.buckets)


def _verb(child: Counter | Gauge | Histogram) -> Callable[[float], None]:
    if isinstance(child, Counter):
        return child.inc
    return child.set if isinstance(child, Gauge) else child.observe
