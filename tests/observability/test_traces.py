"""A traced request: Triton's spans and, below them, those of our stages, at one collector."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from observed import PROJECT
from tiny_world import HELD, TINY, clip
from wire import Wire, eventually

from ctrlcache.errors import ConfigError
from worldserve.runtime import Runtime, RuntimeConfig
from worldserve.tracing import Spans, Tracing, parent_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONTEXT = f"00-{TRACE}-{PARENT}-01"


class Collector:
    """Keeps what is sent to it, as OTLP in JSON; `url` is its address."""

    def __init__(self) -> None:
        self.posts: list[bytes] = []
        posts = self.posts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                posts.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def spans(self, ours: bool = True) -> list[dict]:
        """Those of our stages, or Triton's own."""
        return [
            span
            for body in list(self.posts)
            for resource in json.loads(body)["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
            if (scope["scope"]["name"] == "ctrlcache") == ours
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector():
    made = Collector()
    yield made
    made.close()


def attributes(span: dict) -> dict[str, str]:
    return {one["key"]: one["value"]["stringValue"] for one in span["attributes"]}


@pytest.mark.server
def test_the_stages_of_a_request_are_spans_below_tritons(collector):
    """Every request is traced: Triton exports its spans, ours hang below them and fill the time."""
    config = RuntimeConfig.aside(
        PROJECT / "model_repository",
        parameters={"world_model_class": TINY, "hot_size_bytes": "64MiB", "history_frames": "64"},
        tracing=Tracing(collector.url, rate=1),
    )
    with Runtime(config) as runtime:
        wire = Wire(runtime.endpoints, "grpc")
        wire.ask(HELD, 1, frames=clip(2), start=True)
        wire.ask(HELD, 1)
        wire.close()

        def ours() -> list[dict]:
            return [s for s in collector.spans() if attributes(s).get("session") == "1"]

        eventually(lambda: len(ours()) == 2, 30)
        roots = {attributes(span)["source"]: span for span in ours()}
        assert roots.keys() == {"computed", "exact"}
        above = {root["parentSpanId"]: root["traceId"] for root in roots.values()}

        def tritons() -> list[dict]:
            return [span for span in collector.spans(ours=False) if span["spanId"] in above]

        eventually(lambda: len(tritons()) == 2, 60)
        for span in tritons():
            assert span["traceId"] == above[span["spanId"]]
    for root in roots.values():
        parts = [span for span in collector.spans() if span["parentSpanId"] == root["spanId"]]
        assert [span["name"] for span in parts][:2] == ["wait", "align"]
        ends = [root["startTimeUnixNano"]]
        for span in parts:
            assert span["traceId"] == root["traceId"]
            assert span["startTimeUnixNano"] == ends[-1]
            ends.append(span["endTimeUnixNano"])
        assert abs(int(ends[-1]) - int(root["endTimeUnixNano"])) < 1e6
    assert "dynamics" in {span["name"] for span in collector.spans()}


def test_spans_follow_each_other_within_the_request(collector):
    """What the stages leave of the time was waiting, and comes first."""
    spans = Spans(collector.url, "model_0")
    spans.answered(CONTEXT, 0.010, [("align", 0.001), ("dynamics", 0.006)], session=7, tenant=None)
    spans.close()
    root, *parts = collector.spans()
    assert (root["traceId"], root["parentSpanId"]) == (TRACE, PARENT)
    assert attributes(root) == {"model_instance": "model_0", "session": "7"}
    lasted = [(int(s["endTimeUnixNano"]) - int(s["startTimeUnixNano"])) / 1e6 for s in parts]
    assert [span["name"] for span in parts] == ["wait", "align", "dynamics"]
    assert np.allclose(lasted, [3, 1, 6], atol=0.01)


def test_a_collector_that_is_away_harms_nobody(collector, caplog):
    """Its spans are lost, which is said once."""
    collector.close()
    spans = Spans(collector.url, "model_0")
    for _ in range(3):
        spans.answered(CONTEXT, 0.01, [("align", 0.001)])
        spans._send([])
    spans.close()
    assert len([line for line in caplog.messages if "spans cannot be sent" in line]) == 1


@pytest.mark.parametrize(
    "context",
    [None, "", "no JSON", "[]", "{}", '{"traceparent": "00-0-0-01"}', '{"traceparent": 3}'],
)
def test_a_context_that_is_none_makes_no_spans(context):
    """Requests that Triton does not trace, and texts that it should not give."""
    assert parent_of(context) == ""


def test_a_context_of_tritons_is_taken():
    assert parent_of(json.dumps({"traceparent": CONTEXT})) == CONTEXT


@pytest.mark.parametrize("wrong", [{"url": "collector:4318"}, {"url": "http://c/", "rate": 0}])
def test_a_wrong_setting_is_refused(wrong):
    """With what would be right."""
    with pytest.raises(ConfigError, match="expected"):
        Tracing(**wrong)
