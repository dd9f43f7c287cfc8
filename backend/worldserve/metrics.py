"""The cache's metrics on Triton's own endpoint.

Setting a Triton metric is a message to the server, too slow for the way of a reply. So events are
summed up here and handed over a few times a second by a thread of their own.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Protocol

from ctrlcache.metrics import METRICS, Event, Heartbeat, Metric, Translator

__all__ = ["MakeMetric", "ServerMetric", "TritonSink", "triton_metrics"]

_log = logging.getLogger(__name__)
_INTERVAL_S = 0.25
_MAX_OBSERVED = 512
_HEARTBEAT_S = 1.0


class ServerMetric(Protocol):
    """One metric with its labels, as Triton's Python backend has it."""

    def increment(self, value: float) -> None: ...
    def set(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...


#: Makes the server's metric for a description and its labels.
MakeMetric = Callable[[Metric, dict[str, str]], ServerMetric]


class TritonSink:
    """A `ctrlcache.metrics.Sink` that shows events as metrics of one model instance.

    Of a histogram, at most some hundred observations are handed over at a time, the newest ones.
    initial: names of the metrics whose series begin with zero, where not all of them are meant.
    """

    def __init__(
        self,
        make: MakeMetric,
        instance: str,
        interval_s: float = _INTERVAL_S,
        initial: Collection[str] | None = None,
    ) -> None:
        self._make = make
        self._instance = instance
        self._interval_s = interval_s
        self._translate = Translator()
        self._kinds = {metric.name: metric for metric in METRICS}
        self._metrics: dict[tuple[str, tuple[str, ...]], ServerMetric] = {}
        self._sums: dict[tuple[str, tuple[str, ...]], float] = {}
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._observed: dict[tuple[str, tuple[str, ...]], list[float]] = {}
        self._lock = threading.Lock()
        self._unshown = [
            (metric.name, values)
            for metric in METRICS
            for values in metric.initial
            if initial is None or metric.name in initial
        ]
        self._beaten_s = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        for m in self._translate(event):
            key = (m.name, m.labels)
            kind = self._kinds[m.name].kind
            with self._lock:
                if kind == "counter":
                    self._sums[key] = self._sums.get(key, 0.0) + m.value
                elif kind == "gauge":
                    self._values[key] = m.value
                else:
                    observed = self._observed.setdefault(key, [])
                    observed.append(m.value)
                    del observed[:-_MAX_OBSERVED]

    def flush(self) -> None:
        """Hand everything over now."""
        with self._lock:
            sums, self._sums = self._sums, {}
            values, self._values = self._values, {}
            observed, self._observed = self._observed, {}
        for key, value in sums.items():
            self._metric(key).increment(value)
        for key, value in values.items():
            self._metric(key).set(value)
        for key, series in observed.items():
            metric = self._metric(key)
            for value in series:
                metric.observe(value)

    def close(self) -> None:
        """Hand over what is left. An orderly end is no death: nobody is to miss the heartbeat."""
        self._closed.set()
        self._thread.join()
        self(Heartbeat(math.nan))
        with suppress(Exception):  # the server may be going as well
            self.flush()

    def _metric(self, key: tuple[str, tuple[str, ...]]) -> ServerMetric:
        made = self._metrics.get(key)
        if made is None:
            name, values = key
            description = self._kinds[name]
            labels = dict(zip(description.labels, values, strict=True))
            made = self._make(description, {"instance": self._instance, **labels})
            self._metrics[key] = made
        return made

    def _show_initial(self) -> None:
        """The series that begin with zero, once."""
        while self._unshown:
            self._metric(self._unshown[-1])
            self._unshown.pop()

    def _beat(self) -> None:
        now_s = time.time()
        if now_s - self._beaten_s >= _HEARTBEAT_S:
            self._beaten_s = now_s
            self(Heartbeat(now_s))

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self._show_initial()
                self._beat()
                self.flush()
            except Exception:
                _log.exception("metrics cannot be handed over")
        self.flush()


def triton_metrics(pb_utils: Any) -> MakeMetric:
    """MakeMetric for `triton_python_backend_utils`, which only exists inside the server."""
    families: dict[str, Any] = {}

    def make(metric: Metric, labels: dict[str, str]) -> ServerMetric:
        family = families.get(metric.name)
        if family is None:
            kind = getattr(pb_utils.MetricFamily, metric.kind.upper())
            family = families[metric.name] = pb_utils.MetricFamily(
                name=metric.name, description=metric.help, kind=kind
            )
        buckets = {"buckets": list(metric.buckets)} if metric.kind == "histogram" else {}
        made: ServerMetric = family.Metric(labels=labels, **buckets)
        return made

    return make
