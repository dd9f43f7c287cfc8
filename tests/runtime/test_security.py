"""Who is let in: TLS both ways, keys, what is closed to clients; and where no key shows."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
import warnings
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from certificates import Authority
from tritonclient.utils import InferenceServerException

from ctrlcache.errors import ConfigError
from worldserve import processes
from worldserve.access import (
    ACCESS_HEADER,
    ADMIN_HEADER,
    Access,
    AccessConfig,
    Tls,
    grpc_header,
)
from worldserve.dial import ClientAccess, dial
from worldserve.runtime import ColdStore, Runtime, RuntimeConfig

REPOSITORY = Path(__file__).parent / "repository"
KEY = "the-key-of-this-test-0123456789"
S3_SECRET = "the-secret-of-the-object-store"
GOOD = {grpc_header(ACCESS_HEADER): KEY}


def private(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """Files: a CA with a server and a client, and another CA with a client nobody knows."""
    directory = tmp_path_factory.mktemp("pki")
    ours, theirs = Authority(directory, "ours"), Authority(directory, "theirs")
    return {
        "ca": ours.certificate,
        "other_ca": theirs.certificate,
        "server": ours.issue("server"),
        "client": ours.issue("client"),
        "stranger": theirs.issue("stranger"),
    }


@pytest.fixture(scope="module")
def secured(pki, tmp_path_factory):
    """A server with mutual TLS, an access key, and the keys of an object store."""
    directory = tmp_path_factory.mktemp("secured")
    key_file = private(directory / "key", KEY + "\n")
    store = private(
        directory / "s3.json", f'{{"access_key": "reader", "secret_key": "{S3_SECRET}"}}'
    )
    config = RuntimeConfig(
        REPOSITORY,
        canary="echo",
        cold=ColdStore("127.0.0.1:9", tls=False, credentials_file=store),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        run_dir=directory / "run",
        access=AccessConfig(key_file, Tls(*pki["server"], client_ca=pki["ca"])),
    )
    runtime = Runtime(config)
    runtime.start()
    yield runtime
    runtime.stop()
    assert processes.run_processes(runtime.run_id) == []


@pytest.fixture
def connect(secured, pki):
    """gRPC clients that are closed afterwards: `connect("client", ca="ca")`."""
    clients = []

    def to(who, ca="ca"):
        certificate, key = pki[who] if who else (None, None)
        clients.append(
            grpcclient.InferenceServerClient(
                secured.endpoints.grpc,
                ssl=True,
                root_certificates=str(pki[ca]),
                certificate_chain=certificate and str(certificate),
                private_key=key and str(key),
            )
        )
        return clients[-1]

    yield to
    for client in clients:
        client.close()


def ask(client, headers):
    tensor = grpcclient.InferInput("X", [1], "FP32")
    tensor.set_data_from_numpy(np.array([4], np.float32))
    result = client.infer(
        "echo", [tensor], sequence_id=5, sequence_start=True, headers=headers, client_timeout=20
    )
    return float(result.as_numpy("Y")[0])


def status(secured, path, headers=None, method="GET"):
    request = urllib.request.Request(
        f"http://{secured.endpoints.http}{path}",
        headers=headers or {},
        method=method,
        data=b"{}" if method == "POST" else None,
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.server
def test_who_has_certificate_and_key_is_served(connect):
    """The one who may."""
    assert ask(connect("client"), GOOD) == 8


@pytest.mark.server
def test_the_programs_of_the_project_are_let_in(secured, pki, tmp_path):
    """`dial`, as `ctrlcache warmup` uses it, with the same files; without the key it is refused."""
    certificate, key = pki["client"]
    key_file = private(tmp_path / "key", KEY)
    with dial(
        secured.endpoints.grpc, ClientAccess(pki["ca"], certificate, key, key_file)
    ) as client:
        assert ask(client, {}) == 8
    with (
        dial(secured.endpoints.grpc, ClientAccess(pki["ca"], certificate, key)) as client,
        pytest.raises(InferenceServerException, match="restricted"),
    ):
        ask(client, {})
    with pytest.raises(ConfigError, match="need each other"):
        ClientAccess(pki["ca"], certificate)


@pytest.mark.server
@pytest.mark.parametrize(("who", "ca"), [(None, "ca"), ("stranger", "ca"), ("client", "other_ca")])
def test_wrong_certificates_do_not_connect(connect, who, ca):
    """No certificate, one of another CA, and a client that does not trust the server's."""
    with pytest.raises(InferenceServerException, match=r"UNAVAILABLE|failed to connect"):
        ask(connect(who, ca), GOOD)


@pytest.mark.server
def test_plain_text_is_not_served(secured):
    """TLS is not only offered."""
    with (
        grpcclient.InferenceServerClient(secured.endpoints.grpc) as client,
        pytest.raises(InferenceServerException),
    ):
        ask(client, GOOD)


@pytest.mark.server
@pytest.mark.parametrize(
    "headers", [{}, {grpc_header(ACCESS_HEADER): KEY[:-1]}, {ACCESS_HEADER: KEY}]
)
def test_wrong_keys_are_refused(connect, headers):
    """No key, another key, the key under another name: neither predictions nor descriptions."""
    client = connect("client")
    with pytest.raises(InferenceServerException, match="restricted"):
        ask(client, headers)
    with pytest.raises(InferenceServerException, match="restricted"):
        client.get_model_config("echo", headers=headers)
    assert client.is_server_live()


@pytest.mark.server
def test_clients_can_neither_load_code_nor_map_memory_nor_write_files(connect):
    """With the key of a client these stay closed: repository, shared memory, trace, log."""
    client = connect("client")
    for attempt in (
        lambda: client.load_model("plain", headers=GOOD),
        lambda: client.unload_model("echo", headers=GOOD),
        lambda: client.register_system_shared_memory("mine", "/mine", 64, headers=GOOD),
        lambda: client.update_trace_settings(settings={"trace_file": "/x"}, headers=GOOD),
        lambda: client.update_log_settings({"log_file": "/x"}, headers=GOOD),
    ):
        with pytest.raises(InferenceServerException, match="restricted"):
            attempt()
    assert ask(client, GOOD) == 8


@pytest.mark.server
def test_http_wants_the_same_keys(secured):
    """Health is open; everything else asks for its key; the run's admin key lies in its directory,
    for its owner alone."""
    admin_file = secured.run_dir / "admin-key"
    admin = admin_file.read_text().strip()
    assert admin_file.stat().st_mode & 0o777 == 0o600
    assert status(secured, "/v2/health/ready") == 200
    assert status(secured, "/v2/models/echo/stats") == 403
    assert status(secured, "/v2/models/echo/stats", {ACCESS_HEADER: KEY}) == 200
    for path, method in (
        ("/v2/repository/index", "POST"),
        ("/v2/systemsharedmemory/status", "GET"),
        ("/v2/logging", "GET"),
        ("/v2/trace/setting", "GET"),
    ):
        assert status(secured, path, {ACCESS_HEADER: KEY}, method) == 403
        assert status(secured, path, {ADMIN_HEADER: admin}, method) == 200


@pytest.mark.server
def test_secrets_show_nowhere(secured, connect):
    """After service and refusals: no command line, log, metric, configuration or description of the
    run holds a key; the environment that stubs hand on does not either."""
    ask(connect("client"), GOOD)
    with pytest.raises(InferenceServerException):
        ask(connect("client"), {grpc_header(ACCESS_HEADER): "wrong"})
    secured.reload_model("echo")
    admin = (secured.run_dir / "admin-key").read_text().strip()
    places = {}
    for process in processes.run_processes(secured.run_id):
        places[f"command line of {process.pid}"] = " ".join(process.command)
    for stub in secured.stubs("echo"):
        places[f"environment of {stub.pid}"] = Path(f"/proc/{stub.pid}/environ").read_text()
    page = urllib.request.urlopen(f"http://{secured.endpoints.metrics}/metrics", timeout=20)
    places["metrics"] = page.read().decode()
    for path in secured.run_dir.rglob("*"):
        if path.is_file() and path.name != "admin-key" and path.suffix != ".so":
            places[str(path)] = path.read_bytes().decode(errors="replace")
    assert any("tritonserver.log" in name for name in places)
    assert sum("command line" in name for name in places) >= 3
    for name, text in places.items():
        for secret in (KEY, admin, S3_SECRET):
            assert secret not in text, name


# -- what a start says ---------------------------------------------------------------------------


def warned(**settings) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        RuntimeConfig(REPOSITORY, **settings)
    return [str(warning.message) for warning in caught]


def test_a_start_on_another_address_warns_until_it_is_closed(pki, tmp_path):
    """Each warning names the address and the options that are missing; with TLS and a key there is
    none, and what cannot speak TLS stays on loopback."""
    tls = Tls(*pki["server"])
    key = private(tmp_path / "key", KEY)
    assert warned() == []
    grpc, http = warned(host="0.0.0.0")
    assert "--tls-cert" in grpc
    assert "--access-key-file" in grpc
    assert "proxy" in http
    [grpc] = warned(host="0.0.0.0", access=AccessConfig(tls=tls))
    assert "--tls-cert" not in grpc
    assert "--access-key-file" in grpc
    closed = AccessConfig(key, tls)
    assert warned(host="0.0.0.0", access=closed) == []
    assert tuple(RuntimeConfig(REPOSITORY, host="0.0.0.0", access=closed).servers) == (
        "127.0.0.1",
        "0.0.0.0",
        "127.0.0.1",
    )
    [http] = warned(host="0.0.0.0", http_host="0.0.0.0", access=closed)
    assert "proxy" in http
    [admin] = warned(host="0.0.0.0", access=AccessConfig(key, tls, admin=True))
    assert "any code" in admin


def test_keys_that_cannot_be_used_are_refused_without_showing_them(tmp_path, monkeypatch):
    """Too short, or readable by others; and the variable is as good as the file."""
    for text in ("short", "sixteen characters, but with blanks"):
        with pytest.raises(ConfigError, match="16 to 256") as refusal:
            Access.open(AccessConfig(private(tmp_path / "key", text)))
        assert text not in str(refusal.value)
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(ConfigError, match="0600"):
        Access.open(AccessConfig(tmp_path / "key"))
    monkeypatch.setenv("CTRLCACHE_ACCESS_KEY", KEY)
    opened = Access.open(AccessConfig())
    assert opened.access_key == KEY
    assert KEY not in repr(opened)
    assert KEY not in opened.without_secrets(os.environ).values()


def test_certificates_that_cannot_be_used_are_refused(pki, tmp_path):
    """A file that is not there, one that is no PEM, a key that others can read."""
    certificate, key = pki["server"]
    with pytest.raises(ConfigError, match="nowhere"):
        Tls(Path("/nowhere"), key)
    with pytest.raises(ConfigError, match="no PEM"):
        Tls(private(tmp_path / "x", "x"), key)
    open_key = tmp_path / "open.key"
    open_key.write_bytes(key.read_bytes())
    open_key.chmod(0o644)
    with pytest.raises(ConfigError, match="0600"):
        Tls(certificate, open_key)
