"""Lines that a machine can read, with ids in them and without secrets."""

from __future__ import annotations

import io
import json
import logging

import pytest
from tiny_world import HELD, TINY, clip
from wire import Wire, eventually

from ctrlcache.errors import ConfigError, InvalidInput
from ctrlcache.events import Answered, Refused
from worldserve import processes
from worldserve.accounts import Accounts, reason_of
from worldserve.engine import Abandonment, Reply
from worldserve.logs import configure, fields
from worldserve.options import ServeOptions
from worldserve.request import RawRequest
from worldserve.session_store import SessionsFull


@pytest.fixture
def lines():
    """What is logged in a form and from a level on, as text; logging is put back afterwards."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    ours = {
        name: logging.getLogger(name).level for name in ("ctrlcache", "worldcache", "worldserve")
    }
    stream = io.StringIO()

    def start(format, level="info"):
        configure(format, level, "world_model_0", stream)
        return lambda: stream.getvalue().splitlines()

    yield start
    root.handlers[:] = before
    root.setLevel(level)
    for name, was in ours.items():
        logging.getLogger(name).setLevel(was)


def test_each_line_is_one_json_object(lines):
    """Line breaks, quotes and tracebacks included; a field cannot pose as the line's own."""
    told = lines("json")
    log = logging.getLogger("worldserve.somewhere")
    log.warning('a "quoted"\nline %s', 7, extra=fields(session="s-1", request="r-2", tenant=""))
    try:
        raise ValueError("what went wrong")
    except ValueError:
        log.exception("failed", extra=fields(level="forged"))
    first, second = [json.loads(line) for line in told()]
    assert first["message"] == 'a "quoted"\nline 7'
    assert (first["level"], first["logger"]) == ("warning", "worldserve.somewhere")
    assert (first["instance"], first["session"], first["request"]) == (
        "world_model_0",
        "s-1",
        "r-2",
    )
    assert "tenant" not in first
    assert first["time"].endswith("Z")
    assert second["level"] == "error"
    assert "ValueError: what went wrong" in second["exception"]


def test_text_names_the_ids_too(lines):
    """For people: level, logger, message, and what it is about in brackets."""
    told = lines("text")
    logging.getLogger("ctrlcache.x").warning("late", extra=fields(session=3))
    assert told() == ["WARNING ctrlcache.x: late [session=3]"]


def test_other_libraries_tell_no_details(lines):
    """At level debug only our own loggers do: an HTTP library's details hold signatures."""
    told = lines("json", "debug")
    logging.getLogger("urllib3.connectionpool").debug("Authorization: ...")
    logging.getLogger("worldserve.x").debug("ours")
    assert [json.loads(line)["message"] for line in told()] == ["ours"]


def test_an_unknown_form_or_level_is_refused():
    """The setting is checked where it is read, and the text says what would be right."""
    with pytest.raises(ConfigError, match=r"log_format must be one of text, json, got 'xml'"):
        ServeOptions.from_mapping({"log_format": "xml"})
    with pytest.raises(ConfigError, match="log_level"):
        ServeOptions.from_mapping({"log_level": "loud"})


def settle(accounts, result, id="s", request="r"):
    given = []
    raw = RawRequest({}, {"tenant": "t"}, id, request_id=request)
    accounts.of(raw, given.append)(result)
    assert given == [result]


def test_answers_and_refusals_become_events_and_lines(lines):
    """Each request is one event; at level debug one line, with its ids and times."""
    told, events = lines("json", "debug"), []
    accounts = Accounts(events.append)
    account = Answered("probe", "near", (("lookup", 0.001), ("total", 0.0025)))
    settle(accounts, Reply({}, account))
    settle(accounts, InvalidInput("CONTROL must be so"))
    settle(accounts, RuntimeError("a fault of ours"))
    assert events == [account, Refused("invalid"), Refused("failed")]
    answered, refused, failed = [json.loads(line) for line in told()]
    assert answered["source"] == "near"
    assert (answered["lookup_ms"], answered["total_ms"]) == (1.0, 2.5)
    assert {line["session"] for line in (answered, refused, failed)} == {"s"}
    assert {line["request"] for line in (answered, refused, failed)} == {"r"}
    assert (refused["level"], refused["reason"]) == ("debug", "invalid")
    assert failed["level"] == "error"
    assert "RuntimeError" in failed["exception"]


def test_a_flood_of_refusals_is_no_flood_of_lines(lines):
    """Of equal warnings one a second is written, and it says how many were not."""
    told, now = lines("json"), [0.0]
    accounts = Accounts(lambda event: None, lambda: now[0])
    for number in range(50):
        settle(accounts, SessionsFull("all places are taken"), id=number)
    now[0] = 1.5
    settle(accounts, SessionsFull("all places are taken"), id="last")
    first, last = [json.loads(line) for line in told()]
    assert (first["level"], first["session"]) == ("warning", 0)
    assert "49 more like it" in last["message"]


def test_each_kind_of_refusal_has_its_label():
    """What nobody foresaw is the server's fault."""
    assert reason_of(SessionsFull("x")) == "full"
    assert reason_of(Abandonment("x")) == "cancelled"
    assert reason_of(ZeroDivisionError()) == "failed"


@pytest.mark.server
def test_a_real_servers_lines_have_ids_and_no_credentials(start_server):
    """At the most talkative level, with a real object store: requests are found by their ids, and
    neither logs, metrics nor process lists hold a key."""
    parameters = {"world_model_class": TINY, "hot_size_bytes": "64MiB", "history_frames": "64"}
    runtime = start_server(
        models=("world_model", "cold_templates"),
        parameters={**parameters, "log_format": "json", "log_level": "debug"},
    )
    wire = Wire(runtime.endpoints, "grpc")
    arguments, _ = wire.request(HELD, "talk", frames=clip(2), start=True, task="push")
    wire.client.infer("world_model", request_id="ask-1", **arguments)
    wire.refused([1.0] * 7, "talk")
    wire.close()

    def logged():
        text = runtime.log_file.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in text if line.startswith('{"time"')]

    eventually(lambda: any(line.get("reason") == "invalid" for line in logged()))
    [line] = [line for line in logged() if line.get("request") == "ask-1"]
    assert (line["session"], line["source"], line["mode"]) == ("talk", "computed", "probe")
    assert line["total_ms"] > 0
    secrets = [
        value
        for value in json.loads(runtime.store.config.credentials_file.read_text()).values()
        if isinstance(value, str)
    ]
    assert len(secrets) == 2
    told = [path.read_text(errors="replace") for path in runtime.log_file.parent.iterdir()]
    told += [" ".join(each.command) for each in processes.run_processes(runtime.run_id)]
    for secret in secrets:
        assert not any(secret in text for text in told)
