"""Traces for an OpenTelemetry collector: Triton's own spans, and below them those of our stages.

Triton 2.51 exports what it sees of a request, and hands its trace context to the Python backend. So
each traced request gets one more span, with one below it for each stage, sent as OTLP over HTTP in
JSON by a thread of its own, never on the way of a reply. Requests that Triton does not trace cost
nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import secrets
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctrlcache.errors import ConfigError

__all__ = ["Spans", "Tracing", "parent_of"]

_log = logging.getLogger(__name__)
_SERVICE = "ctrlcache"
_MOST_WAITING = 2_000
_MOST_AT_ONCE = 200
_GATHER_S = 0.5
_TIMEOUT_S = 5.0
#: W3C trace context: version, trace id, span id, flags.
_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_SPAN_KIND_INTERNAL = 1


@dataclass(frozen=True)
class Tracing:
    """url: of the collector's OTLP over HTTP. rate: one of so many requests is traced."""

    url: str
    rate: int = 100

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://\S+", self.url):
            raise ConfigError(
                f"trace url {self.url!r}; expected one as http://collector:4318/v1/traces"
            )
        if self.rate < 1:
            raise ConfigError(f"trace rate is {self.rate}; expected at least 1 (every request)")

    @property
    def options(self) -> list[str]:
        """Arguments of tritonserver."""
        settings = (
            "mode=opentelemetry",
            f"rate={self.rate}",
            "level=TIMESTAMPS",
            f"opentelemetry,url={self.url}",
            f"opentelemetry,resource=service.name={_SERVICE}",
        )
        return [f"--trace-config={setting}" for setting in settings]


def parent_of(context: str | None) -> str:
    """The `traceparent` of what Triton says of a request's trace; '' where it is not traced."""
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        text = json.loads(context or "{}").get("traceparent", "")
        if _PARENT.fullmatch(text):
            return str(text)
    return ""


class Spans:
    """Sends spans to `url` from a thread of its own. instance: named in each of them.

    A collector that is away costs spans, and one line in the log; nobody waits for it.
    """

    def __init__(self, url: str, instance: str) -> None:
        self._url = url
        self._instance = instance
        self._waiting: queue.Queue[list[dict[str, Any]] | None] = queue.Queue(_MOST_WAITING)
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def answered(
        self, parent: str, took_s: float, stages: Sequence[tuple[str, float]], **known: object
    ) -> None:
        """A request that was answered now, `took_s` after it came. stages: (name, seconds) in
        their order; what they leave of the whole was waiting, which is told before them."""
        match = _PARENT.fullmatch(parent)
        if match is None:
            return
        trace, above = match.groups()
        end_ns = time.time_ns()
        began_ns = end_ns - int(took_s * 1e9)
        root = self._span(trace, above, "world_model", began_ns, end_ns, known)
        spans = [root]
        lasting = sum(seconds for _, seconds in stages)
        at_ns = end_ns - int(min(lasting, took_s) * 1e9)
        parts = [("wait", (at_ns - began_ns) / 1e9), *stages]
        at_ns = began_ns
        for name, seconds in parts:
            until_ns = min(end_ns, at_ns + int(seconds * 1e9))
            spans.append(self._span(trace, root["spanId"], name, at_ns, until_ns, {}))
            at_ns = until_ns
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(spans)

    def close(self) -> None:
        """Send what waits; at most as long as one attempt lasts."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(_TIMEOUT_S)

    def _span(
        self,
        trace: str,
        parent: str,
        name: str,
        began_ns: int,
        ended_ns: int,
        known: dict[str, Any],
    ) -> dict[str, Any]:
        told = {"model_instance": self._instance, **known}
        return {
            "traceId": trace,
            "spanId": secrets.token_hex(8),
            "parentSpanId": parent,
            "name": name,
            "kind": _SPAN_KIND_INTERNAL,
            "startTimeUnixNano": str(began_ns),
            "endTimeUnixNano": str(ended_ns),
            "attributes": [
                {"key": key, "value": {"stringValue": str(value)}}
                for key, value in told.items()
                if value not in (None, "")
            ],
        }

    def _run(self) -> None:
        open_ = True
        while open_:
            spans = self._waiting.get()
            gathered: list[dict[str, Any]] = []
            until_s = time.monotonic() + _GATHER_S
            while open_ := spans is not None:
                gathered += spans or []
                if len(gathered) >= _MOST_AT_ONCE:
                    break
                try:
                    spans = self._waiting.get(timeout=max(0.0, until_s - time.monotonic()))
                except queue.Empty:
                    break
            if gathered:
                self._send(gathered)

    def _send(self, spans: list[dict[str, Any]]) -> None:
        resource = {"attributes": [{"key": "service.name", "value": {"stringValue": _SERVICE}}]}
        body = {
            "resourceSpans": [
                {
                    "resource": resource,
                    "scopeSpans": [{"scope": {"name": _SERVICE}, "spans": spans}],
                }
            ]
        }
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()
        except (OSError, ValueError) as error:
            if not self._failed:
                _log.warning("spans cannot be sent to %s: %s; those are lost", self._url, error)
            self._failed = True
        else:
            self._failed = False
