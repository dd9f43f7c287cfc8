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

__all__ = [
    "METRICS",
    "Admitted",
    "BlocksDecided",
    "ColdRequest",
    "Corrupt",
    "Event",
    "Evicted",
    "HitError",
    "Lookup",
    "Measurement",
    "Metric",
    "PrometheusSink",
    "Saved",
    "Scored",
    "SessionCount",
    "Sink",
    "StoreEvicted",
    "StoreSize",
    "TierSize",
    "Translator",
    "fan_out",
    "ignore",
]

Kind = Literal["counter", "gauge", "histogram"]


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lookup:
    """One look-up in one tier; result: `exact`, `near` (a neighbour within trust) or `miss`."""

    tier: str
    result: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Scored:
    """A couplet was scored; score: `probe`, `stability`, `transferability`; seconds it took."""

    score: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Admitted:
    """An admission was decided; decision: the `reason` of the Admission."""

    decision: str


@dataclass(frozen=True, slots=True)
class TierSize:
    """A tier's present size."""

    tier: str
    entries: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """Records left a tier; reason: `bytes`, `entries`, `expired`, `superseded` ..."""

    tier: str
    reason: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class HitError:
    """True relative state error of an approximate answer, from a sampled recomputation."""

    error: float


@dataclass(frozen=True, slots=True)
class Saved:
    """Seconds of computation that a hit made unnecessary."""

    seconds: float


@dataclass(frozen=True, slots=True)
class SessionCount:
    """Sessions alive now."""

    count: int


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Stored bytes of a tier failed their checksum or layout."""

    tier: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class ColdRequest:
    """A request to the object store ended; result: `hit`, `miss`, `error`, `timeout` ..."""

    result: str


@dataclass(frozen=True, slots=True)
class BlocksDecided:
    """Generator blocks computed or reused; decision: `compute` or `reuse`."""

    decision: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class StoreSize:
    """Present size of a feature store level: `l1`, `l2`, `l3`."""

    level: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoreEvicted:
    """Features left a store level."""

    level: str
    count: int = 1


Event = (
    Lookup
    | Scored
    | Admitted
    | TierSize
    | Evicted
    | HitError
    | Saved
    | SessionCount
    | Corrupt
    | ColdRequest
    | BlocksDecided
    | StoreSize
    | StoreEvicted
)
#: Takes an event; quick, thread-safe, and never raises for an event it does not care about.
Sink = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The sink for those who measure nothing."""


def fan_out(*sinks: Sink) -> Sink:
    """One sink that hands every event to all of `sinks`, in order."""

    def send(event: Event) -> None:
        for sink in sinks:
            sink(event)

    return send


# --- metrics ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; `labels` excludes `instance`, which every metric carries first."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_LOOKUP_S = (2e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 1e-2, 1e-1)
_SCORE_S = (1e-3, 5e-3, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_ERROR = (1e-4, 3e-4, 1e-3, 3e-3, 5e-3, 1e-2, 2e-2, 3e-2, 5e-2, 0.1, 0.2, 0.5)
_RATIO_WINDOW = 1_000

METRICS: tuple[Metric, ...] = (
    Metric("ctrlcache_lookups_total", "counter", "Look-ups by outcome.", ("tier", "result")),
    Metric("ctrlcache_lookup_seconds", "histogram", "Time of a look-up.", ("tier",), _LOOKUP_S),
    Metric(
        "ctrlcache_hit_ratio",
        "gauge",
        f"Share of hits among the last {_RATIO_WINDOW} look-ups.",
        ("tier",),
    ),
    Metric("ctrlcache_score_seconds", "histogram", "Time of scoring.", ("score",), _SCORE_S),
    Metric("ctrlcache_admissions_total", "counter", "Admissions by decision.", ("decision",)),
    Metric("ctrlcache_entries", "gauge", "Records in a tier.", ("tier",)),
    Metric("ctrlcache_bytes", "gauge", "Bytes in a tier.", ("tier",)),
    Metric("ctrlcache_evictions_total", "counter", "Records evicted.", ("tier", "reason")),
    Metric(
        "ctrlcache_hit_error",
        "histogram",
        "True relative state error of approximate answers, on sampled recomputations.",
        (),
        _ERROR,
    ),
    Metric("ctrlcache_saved_seconds_total", "counter", "Computing time that hits saved."),
    Metric("ctrlcache_sessions", "gauge", "Sessions alive."),
    Metric("ctrlcache_corrupt_total", "counter", "Damaged records found.", ("tier",)),
    Metric("ctrlcache_cold_requests_total", "counter", "Object store requests.", ("result",)),
    Metric("worldcache_blocks_total", "counter", "Generator blocks by decision.", ("decision",)),
    Metric("worldcache_store_bytes", "gauge", "Bytes in a feature store level.", ("level",)),
    Metric("worldcache_evictions_total", "counter", "Features evicted.", ("level",)),
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
            case Scored(score, seconds):
                return (Measurement("ctrlcache_score_seconds", (score,), seconds),)
            case Admitted(decision):
                return (Measurement("ctrlcache_admissions_total", (decision,), 1),)
            case TierSize(tier, entries, size_bytes):
                return (
                    Measurement("ctrlcache_entries", (tier,), entries),
                    Measurement("ctrlcache_bytes", (tier,), size_bytes),
                )
            case Evicted(tier, reason, count):
                return (Measurement("ctrlcache_evictions_total", (tier, reason), count),)
            case HitError(error):
                return (Measurement("ctrlcache_hit_error", (), error),)
            case Saved(seconds):
                return (Measurement("ctrlcache_saved_seconds_total", (), seconds),)
            case SessionCount(count):
                return (Measurement("ctrlcache_sessions", (), count),)
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
