"""The cold tier against a real S3 gateway, and against everything that can be wrong with one."""

from __future__ import annotations

import json
import random
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import misbehaviour
import numpy as np
import object_store
import pytest
from object_store import BUCKET, forward, gateway, serving

from ctrlcache.errors import ConfigError, CorruptRecord, InvalidInput
from ctrlcache.metrics import ColdRequest, Corrupt, Event
from ctrlcache.tiers.base import Entry, Record
from ctrlcache.tiers.cold import ColdTier, list_tasks
from ctrlcache.tiers.cold_store import Breaker, ColdStore
from ctrlcache.tiers.objects import ObjectError, Objects

SECRET = "a-very-secret-key"


def record(n: int, size: int = 1000) -> Record:
    control = np.float32([n / 100, 0, 0, 0])
    entry = Entry(n.to_bytes(16, "big"), b"s" * 16, control, 0.1, 0.5, 10.0, 1e9)
    return Record(entry, random.Random(n).randbytes(size))


@pytest.fixture
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"tests/{abs(hash(tmp_path))}"


@pytest.fixture
def objects() -> Iterator[Objects]:
    objects = object_store.objects(gateway())
    yield objects
    objects.close()


def at(port: int, timeout_s: float = 0.5, **more: object) -> Objects:
    settings = {"tls": False, "timeout_s": timeout_s, **more}
    return Objects(f"127.0.0.1:{port}", BUCKET, ("key", SECRET), **settings)  # type: ignore[arg-type]


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


# --- the tier -----------------------------------------------------------------------------------


def test_tasks_are_kept_apart_and_listed(objects: Objects, prefix: str) -> None:
    """Any name of a task works, and each one has its own records."""
    names = ["pick/place", "cut with a held knife", "übung ☕", "..", "a%2Fb"]
    for n, name in enumerate(names):
        ColdTier(objects, prefix, name).put([record(n)])
    assert list_tasks(objects, prefix) == sorted(names)
    for n, name in enumerate(names):
        tier = ColdTier(objects, prefix, name)
        assert tier.refresh()
        assert [tier.get(record(k).entry.id) is not None for k in range(5)] == [
            k == n for k in range(5)
        ]
    with pytest.raises(InvalidInput, match="1 to 200 characters"):
        ColdTier(objects, prefix, "x" * 201)


def test_a_damaged_object_is_a_counted_miss(objects: Objects, prefix: str) -> None:
    """Whatever stands in its place: cut, longer, another object, nothing."""
    events: list[Event] = []
    tier = ColdTier(objects, prefix, "task", on_event=events.append)
    tier.put([record(n) for n in range(5)])
    names = {name.rsplit("/", 1)[1]: name for name in objects.names(f"{prefix}/~task/")}
    data = {}
    for n in range(5):
        (name,) = [full for short, full in names.items() if short.startswith(f"{n:032x}")]
        data[n] = (name, objects.get(name, 10_000) or b"")
    flipped = bytearray(data[1][1])
    flipped[500] ^= 1
    objects.put(data[0][0], data[0][1][:-1])
    objects.put(data[1][0], bytes(flipped))
    objects.put(data[2][0], data[3][1])
    objects.delete([data[3][0]])
    assert [tier.get(record(n).entry.id) for n in range(4)] == [None] * 4
    assert tier.get(record(4).entry.id) == record(4).payload
    assert events == [Corrupt("cold")] * 3
    objects.put(data[4][0], data[4][1] * 100)  # not even read to its end
    assert tier.get(record(4).entry.id) is None


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"\x00\xff" * 100,
        b"[]",
        b"{}",
        b'{"format": 2, "task": "task", "entries": [], "notes": {}}',
        b'{"format": 1, "task": "other", "entries": [], "notes": {}}',
        b'{"format": 1, "task": "task", "entries": [{"id": 3}], "notes": {}}',
        b'{"format": 1, "task": "task", "entries": 7, "notes": {}}',
        b"[" * 100_000,
    ],
)
def test_a_rubbish_manifest_is_refused(objects: Objects, prefix: str, manifest: bytes) -> None:
    """It is counted and raises CorruptRecord, nothing else."""
    events: list[Event] = []
    objects.put(f"{prefix}/~task/manifest.json", manifest)
    tier = ColdTier(objects, prefix, "task", on_event=events.append)
    with pytest.raises(CorruptRecord):
        tier.refresh()
    assert events == [Corrupt("cold")]
    assert tier.put([record(1)]) == 1  # a builder may start again
    assert tier.refresh()


def test_any_change_to_a_manifest_entry_is_harmless(objects: Objects, prefix: str) -> None:
    """Fields of the wrong type, size or meaning: refused, or a record that is never served."""
    tier = ColdTier(objects, prefix, "task")
    tier.put([record(1)])
    name = f"{prefix}/~task/manifest.json"
    good = json.loads(objects.get(name, 1 << 20) or b"")
    values = [None, -1, 0, 1 << 70, 1e400, "x", "../../etc", [], {}, [1e39], [[1]], "00" * 16, True]
    rng = random.Random(0)
    for _ in range(60):
        bad = json.loads(json.dumps(good))
        field = rng.choice(sorted(bad["entries"][0]))
        bad["entries"][0][field] = rng.choice(values)
        objects.put(name, json.dumps(bad).encode())
        fresh = ColdTier(objects, prefix, "task")
        try:
            fresh.refresh()
        except CorruptRecord:
            continue
        for held in fresh.held(1 << 20):
            payload = fresh.get(held.entry.id)
            assert payload is None or payload == record(1).payload


def test_an_interrupted_build_leaves_nothing_behind(objects: Objects, prefix: str) -> None:
    """Objects that were uploaded before the manifest was are swept by the next build."""
    tier = ColdTier(objects, prefix, "task")
    tier.put([record(1)])
    objects.put(f"{prefix}/~task/{2:032x}.0123", b"stray")
    assert tier.sweep() == 1
    assert len(objects.names(f"{prefix}/~task/")) == 2
    assert tier.get(record(1).entry.id) == record(1).payload


# --- the store behind the reply path --------------------------------------------------------------


@pytest.fixture
def stores() -> Iterator[Callable[..., tuple[ColdStore, list[Event]]]]:
    opened: list[ColdStore] = []

    def factory(
        objects: Objects, prefix: str = "p", **more: object
    ) -> tuple[ColdStore, list[Event]]:
        events: list[Event] = []
        settings = {"longest_pause_s": 0.2, **more}
        store = ColdStore(objects, prefix, on_event=events.append, **settings)  # type: ignore[arg-type]
        opened.append(store)
        return store, events

    yield factory
    for store in opened:
        store.close()


Stores = Callable[..., tuple[ColdStore, list[Event]]]


def test_templates_arrive_in_the_background(objects: Objects, prefix: str, stores: Stores) -> None:
    """First nothing, then all records of the task, in the manifest's order; counted as a hit. A
    task that has none is a miss, and asked for once."""
    ColdTier(objects, prefix, "cut").put([record(n) for n in range(7)])
    store, events = stores(objects, prefix)
    assert store.resident("cut") is None
    assert store.fetch_async("cut")
    found = store.wait("cut", 10.0)
    assert found is not None
    assert [r.payload for r in found.records] == [record(n).payload for n in range(7)]
    assert not store.fetch_async("cut")
    none = store.wait("pour", 10.0)
    assert none is not None
    assert none.records == ()
    assert not store.fetch_async("pour")
    assert events == [ColdRequest("hit"), ColdRequest("miss")]


def test_memory_is_bounded(objects: Objects, prefix: str, stores: Stores) -> None:
    """Tasks asked for least recently leave, and one task never takes more than there is."""
    for task in "abc":
        ColdTier(objects, prefix, task).put([record(n) for n in range(10)])
    store, _ = stores(objects, prefix, resident_bytes=25_000)
    for task in "abc":
        assert store.wait(task, 10.0)
    assert [store.resident(task) is not None for task in "abc"] == [False, True, True]
    tiny, _ = stores(object_store.objects(gateway()), prefix, resident_bytes=4_500)
    found = tiny.wait("a", 10.0)
    assert found is not None
    assert len(found.records) == 3
    small, _ = stores(object_store.objects(gateway()), prefix, record_bytes=500)
    assert small.wait("a", 10.0) == small.resident("a")


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (misbehaviour.silent, "timeout"),
        (misbehaviour.dripping, "timeout"),
        (misbehaviour.endless, "too_large"),
        (misbehaviour.rubbish, "garbage"),
        (misbehaviour.not_s3, "garbage"),
        (misbehaviour.bad_xml, "garbage"),
        (misbehaviour.rubbish_manifest, "garbage"),
        (misbehaviour.hangs_up, "unreachable"),
    ],
)
def test_a_store_that_misbehaves_is_counted(
    stores: Stores, answer: Callable[[socket.socket], None], result: str
) -> None:
    """Each way to misbehave has its name; asking never waits meanwhile, and nothing is resident."""
    with serving(answer) as port:
        store, events = stores(at(port))
        store.fetch_async("task")
        asked = 0
        slowest = 0.0
        while not any(isinstance(event, ColdRequest) for event in events):
            begin = time.thread_time()
            store.fetch_async(f"task {asked % 100}")
            assert store.resident("task") is None
            slowest = max(slowest, time.thread_time() - begin)
            asked += 1
            time.sleep(0.001)
            assert asked < 60_000
        assert next(e for e in events if isinstance(e, ColdRequest)) == ColdRequest(result)
        assert slowest < 0.2  # of this thread's own time: it did not do the work


def test_nobody_at_the_address(stores: Stores) -> None:
    """Counted as unreachable, and asked again, less and less often."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    store, events = stores(at(port))
    store.fetch_async("task")
    until(lambda: len(events) >= 3)
    assert set(events) == {ColdRequest("unreachable")}
    assert "cannot be reached" in (store.trouble or "")


def test_wrong_credentials_and_a_missing_bucket(stores: Stores) -> None:
    """Each is counted by its name; the trouble says what to check, without any secret."""
    store = gateway()
    port = int(store.endpoint.rsplit(":", 1)[1])
    wrong, events = stores(at(port, 5.0))
    wrong.fetch_async("task")
    until(lambda: len(events) > 0)
    assert events[0] == ColdRequest("denied")
    assert "check the credentials" in (wrong.trouble or "")
    assert SECRET not in (wrong.trouble or "")
    missing, events = stores(object_store.objects(store, "no-such-bucket"))
    missing.fetch_async("task")
    until(lambda: len(events) > 0)
    assert events[0] == ColdRequest("no_bucket")
    assert missing.trouble == "bucket no-such-bucket does not exist"


def test_a_store_that_dies_and_returns(tmp_path: Path, stores: Stores) -> None:
    """Killed: what is resident stays, what is asked for waits. Back: it arrives without being
    asked for again."""
    store = object_store.start(tmp_path)
    try:
        objects = object_store.objects(store)
        objects.ensure_bucket()
        for task in ("cut", "pour"):
            ColdTier(objects, "p", task).put([record(n) for n in range(3)])
        loader, events = stores(objects, "p")
        assert loader.wait("cut", 10.0)
        store.stop()
        loader.fetch_async("pour")
        until(lambda: ColdRequest("unreachable") in events)
        assert loader.resident("cut") is not None
        assert loader.resident("pour") is None
        store.start()
        until(lambda: loader.resident("pour") is not None)
        assert events[-1] == ColdRequest("hit")
        assert loader.trouble is None
    finally:
        store.stop()


def test_the_breaker_backs_off_and_forgives() -> None:
    """Pauses double up to the longest, each shortened by chance; a success ends them."""
    breaker = Breaker(longest_s=60.0, seed=0)
    pauses = []
    for _ in range(10):
        breaker.failed(100.0)
        pauses.append(breaker.retry_at_s - 100.0)
    for n, pause in enumerate(pauses):
        assert 0.75 * min(60, 2**n) <= pause <= min(60, 2**n)
    breaker.succeeded()
    assert breaker.retry_at_s == 0.0
    breaker.failed(100.0)
    assert breaker.retry_at_s <= 101.0


def test_without_a_store_nothing_happens() -> None:
    """No endpoint: nothing is resident, nothing is noted, no thread is started."""
    before = threading.active_count()
    store = ColdStore(None, "p")
    assert not store.fetch_async("task")
    assert store.resident("task") is None
    assert threading.active_count() == before
    store.close()


# --- the connection -------------------------------------------------------------------------------


def test_tls(tmp_path: Path) -> None:
    """A certificate is checked against ca_file; without trust there is no connection."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", key, "-out", certificate, "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    store = gateway()
    keys = (store.credentials.access_key, store.credentials.secret_key)
    upstream = int(store.endpoint.rsplit(":", 1)[1])
    with serving(forward(upstream), context=context) as port:
        endpoint = f"127.0.0.1:{port}"
        trusting = Objects(endpoint, BUCKET, keys, ca_file=certificate, timeout_s=5.0)
        trusting.put("tls/object", b"content")
        assert trusting.get("tls/object", 100) == b"content"
        trusting.close()
        doubting = Objects(endpoint, BUCKET, keys, timeout_s=5.0)
        with pytest.raises(ObjectError, match="TLS fails, check ca_file"):
            doubting.get("tls/object", 100)
        doubting.close()
    with pytest.raises(ConfigError, match="does not exist"):
        Objects(endpoint, BUCKET, keys, ca_file=tmp_path / "nothing.pem")


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    """Not in a repr, not in an error, not in its chain."""
    objects = at(1)
    with pytest.raises(ObjectError) as caught:
        objects.get("x", 100)
    chain: BaseException | None = caught.value
    texts = [repr(objects), repr(vars(objects))]
    while chain is not None:
        texts += [str(chain), repr(chain)]
        chain = chain.__cause__ or chain.__context__
    assert SECRET not in " ".join(texts)
