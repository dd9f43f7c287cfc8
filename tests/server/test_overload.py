"""More than the server takes: told at once, in words, and nobody else waits for it."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tiny_world import HELD, TINY, Truth, clip, equal
from wire import InferenceServerException, code, eventually

from worldserve import processes
from worldserve.runtime import Runtime, RuntimeConfig

pytestmark = pytest.mark.server

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
CONTROL = np.atleast_2d(HELD)


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory):
    """A tiny model whose predicted steps take 60 ms each, one request at a time; four may wait, two
    of one session."""
    weights = tmp_path_factory.mktemp("weights")
    (weights / "tiny.json").write_text(json.dumps({"step_ms": 60}))
    settings = {
        "world_model_class": TINY,
        "weights_dir": str(weights),
        "hot_size_bytes": "64MiB",
        "history_frames": "64",
        "max_sessions": "20",
        "max_waiting": "4",
        "max_waiting_of_session": "2",
        "most_in_batch": "1",
        "background": "false",
    }
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    models = ("world_model",)
    runtime = Runtime(
        RuntimeConfig(REPOSITORY, models=models, cold="none", parameters=settings, **ports)
    )
    runtime.start()
    yield runtime
    runtime.stop()
    assert processes.run_processes(runtime.run_id) == []


def begun(connect, runtime, count):
    """Clients of as many sessions, by id."""
    wires = {id: connect(runtime) for id in range(1, count + 1)}
    for id, wire in wires.items():
        wire.ask(HELD, id, frames=clip(2, seed=id), start=True, outputs=["TIMING_MS"])
    return wires


# -- sessions --------------------------------------------------------------------------------------


def test_more_sessions_than_stated_are_refused_through_the_ensemble(start_tiny, connect):
    """Three are stated: the fourth is told so at once, by each protocol, and gets the place of one
    that ends; those that are there notice nothing."""
    runtime = start_tiny(
        models=("world_model", "cold_templates", "interactive_world"),
        parameters={"max_sessions": "3", "hot_size_bytes": "64MiB"},
    )
    wires = [connect(runtime, protocol, "interactive_world") for protocol in ("grpc", "http")]
    for id in (1, 2, 3):
        wires[0].ask(HELD, id, frames=clip(2, seed=id), start=True)
    for id in range(10, 60):
        kind, text = wires[id % 2].refused(HELD, id, frames=clip(2), start=True)
        assert kind == "unavailable"
        assert "all 3 sessions are taken" in text
    got = wires[1].ask(-HELD, 2)
    assert equal(got, Truth(clip(2, seed=2), [HELD]).predict(-HELD))
    wires[0].ask(HELD, 1, end=True)
    assert wires[0].ask(HELD, 60, frames=clip(2), start=True)["EXACT"][0]


# -- waiting requests ------------------------------------------------------------------------------


def test_more_waiting_requests_than_stated_are_refused(slow_server, connect):
    """Of twelve sessions that ask at once, some are told that too many wait; the others get their
    answers, and afterwards there is room again."""
    wires = begun(connect, slow_server, 12)

    def ask(id):
        try:
            return wires[id].ask(-HELD, id, cache="off")
        except InferenceServerException as error:
            return error

    with ThreadPoolExecutor(12) as pool:
        results = dict(zip(wires, pool.map(ask, wires), strict=True))
    refused = [r for r in results.values() if isinstance(r, InferenceServerException)]
    assert 1 <= len(refused) <= 8
    assert all(code(error) == "unavailable" for error in refused)
    assert all("4 requests are waiting already" in error.message() for error in refused)
    for id, result in results.items():
        if not isinstance(result, InferenceServerException):
            assert equal(result, Truth(clip(2, seed=id), [HELD]).predict(-HELD))
    for id in results:
        assert equal(ask(id), Truth(clip(2, seed=id), [HELD]).predict(-HELD))


def test_one_session_does_not_take_all_places(slow_server, connect):
    """One that sends without waiting is told to wait, while another one is answered."""
    wires = begun(connect, slow_server, 2)
    outcomes: list[InferenceServerException | None] = []
    for _ in range(8):
        arguments, _ = wires[1].request(-HELD, 1, cache="off")
        wires[1].client.async_infer(
            "world_model", callback=lambda result, error: outcomes.append(error), **arguments
        )
    assert wires[2].ask(HELD, 2, cache="off")["EXACT"][0]
    eventually(lambda: len(outcomes) == 8, 60)
    refused = [error for error in outcomes if error is not None]
    assert 1 <= len(refused) <= 6
    assert all("requests of session 1 are waiting already" in e.message() for e in refused)


def test_those_who_gave_up_cost_nothing(slow_server, connect):
    """Requests that wait behind a long one and are cancelled, or whose time is up, are refused when
    their turn comes: none of their sessions has moved."""
    wires = begun(connect, slow_server, 4)

    def give_up(id):
        arguments, _ = wires[id].request(HELD, id, cache="off", mode="advance")
        how = {"client_timeout": 0.2} if id % 2 else {"timeout": 200_000}
        with pytest.raises(InferenceServerException) as error:
            wires[id].client.infer("world_model", **arguments, **how)
        return code(error.value)

    with ThreadPoolExecutor(4) as pool:
        long_one = pool.submit(wires[1].ask, HELD, 1, cache="off", HORIZON=np.array([12], np.int32))
        codes = set(pool.map(give_up, (2, 3, 4)))
        long_one.result()
    assert codes <= {"deadline", "cancelled"}
    for id in (2, 3, 4):
        got = wires[id].ask(-HELD, id, cache="off")
        assert equal(got, Truth(clip(2, seed=id), [HELD]).predict(-HELD))


# -- slow clients ----------------------------------------------------------------------------------


def raw_request(id, whole=True):
    """Bytes of an HTTP request for predicted frames; or all but the end of it."""
    control = httpclient.InferInput("CONTROL", [1, 2], "FP32")
    control.set_data_from_numpy(CONTROL)
    frames = httpclient.InferInput("FRAMES", [2, 32, 32, 3], "UINT8")
    frames.set_data_from_numpy(clip(2, seed=id % 7))
    body, header = httpclient.InferenceServerClient.generate_request_body(
        [control, frames],
        outputs=[httpclient.InferRequestedOutput("PREDICTED_FRAMES")],
        sequence_id=id,
        sequence_start=True,
    )
    head = (
        "POST /v2/models/world_model/infer HTTP/1.1\r\nHost: here\r\n"
        f"Content-Length: {len(body)}\r\nInference-Header-Content-Length: {header}\r\n\r\n"
    ).encode()
    return head + (body if whole else body[: len(body) // 2])


def open_socket(endpoint, data):
    host, _, port = endpoint.rpartition(":")
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    made.connect((host, int(port)))
    made.sendall(data)
    return made


def test_slow_clients_hold_nobody_up(tiny_server, connect, new_id):
    """Forty that stop in the middle of a request, forty that never read their answer, forty that
    say half a greeting to gRPC: others are served over both protocols, and so is the server's own
    question."""
    endpoints = tiny_server.endpoints
    stalled = [open_socket(endpoints.http, raw_request(70_000 + n, False)) for n in range(40)]
    stalled += [open_socket(endpoints.http, raw_request(71_000 + n)) for n in range(40)]
    stalled += [open_socket(endpoints.grpc, b"PRI * HTTP/2.0\r\n\r\nSM\r\n") for _ in range(40)]
    try:
        for protocol in ("grpc", "http"):
            wire, id = connect(tiny_server, protocol), new_id()
            truth = Truth(clip(2, seed=3), [HELD])
            wire.ask(HELD, id, frames=clip(2, seed=3), start=True, cache="off")
            for step in range(10):
                control = HELD * np.float32(step / 10)
                assert equal(wire.ask(control, id, cache="off"), truth.predict(control))
        canary = tiny_server.canary("world_model")
        canary.ask(30)
        canary.end()
    finally:
        for one in stalled:
            one.close()
