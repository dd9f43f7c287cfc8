"""The proxy in front of a real server: TLS, the key, and nothing that operates the server."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from dockerfile import DOCKER
from tiny_world import HELD, TINY, clip
from wire import Wire, eventually

from worldserve.access import AccessConfig
from worldserve.settings import free_ports

KEY = "0123456789abcdef-a-key"


def certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "proxy")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .sign(key, hashes.SHA256())
    )
    crt, pem = directory / "tls.crt", directory / "tls.key"
    crt.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return crt, pem


@pytest.fixture
def proxied(start_server, tmp_path):
    """(https port, gRPC port, certificate, runtime): the shipped configuration, other addresses."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed; `make tools` gets it (Debian: nginx-light)")
    secret = tmp_path / "access_key"
    secret.write_text(KEY + "\n")
    secret.chmod(0o600)
    crt, pem = certificate(tmp_path)
    runtime = start_server(
        models=("world_model",),
        cold="none",
        access=AccessConfig(access_key_file=secret),
        parameters={"world_model_class": TINY, "hot_size_bytes": "64MiB", "history_frames": "64"},
    )
    https, grpc, health = free_ports(("127.0.0.1",) * 3, (0, 0, 0))
    text = (DOCKER / "nginx" / "nginx.conf").read_text()
    for old, new in {
        "/tmp/": f"{tmp_path}/",  # first: the others may bring it in
        "ctrlcache:8000": runtime.endpoints.http,
        "ctrlcache:8001": runtime.endpoints.grpc,
        "ctrlcache:8003": f"127.0.0.1:{health}",
        "listen 8443": f"listen 127.0.0.1:{https}",
        "listen 8444": f"listen 127.0.0.1:{grpc}",
        "/run/secrets/tls.crt": str(crt),
        "/run/secrets/tls.key": str(pem),
        "/dev/stdout": str(tmp_path / "access.log"),
        "/dev/stderr": str(tmp_path / "error.log"),
    }.items():
        assert old in text, old
        text = text.replace(old, new)
    (tmp_path / "nginx.conf").write_text(text)
    places = {"ACCESS_KEY_FILE": str(secret), "ACCESS_KEY_MAP": str(tmp_path / "access-key.conf")}
    script = DOCKER / "nginx" / "20-access-key.sh"
    subprocess.run(["sh", script], env={**os.environ, **places}, check=True)
    # Where the tests run as root, nginx's workers are someone else, who must get in.
    (tmp_path / "access-key.conf").chmod(0o644)
    command = [program, "-c", str(tmp_path / "nginx.conf"), "-g", "daemon off; user root;"]
    if os.geteuid():
        command[-1] = "daemon off;"
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: _listens(https), 30)
        yield https, grpc, crt, runtime, tmp_path
    finally:
        process.terminate()
        process.wait(20)


def _listens(port: int) -> bool:
    try:
        return bool(ssl.get_server_certificate(("127.0.0.1", port), timeout=2))
    except OSError:
        return False


@pytest.mark.server
def test_tls_and_key_over_http_and_grpc(proxied):
    """Who has the key is served as by the server itself; who has not is told so, and nobody
    reaches what operates the server."""
    https, grpc, crt, runtime, tmp_path = proxied
    trusting = ssl.create_default_context(cafile=str(crt))

    def get(path: str, key: str | None = None, method: str = "GET") -> tuple[int, str]:
        headers = {} if key is None else {"ctrlcache-key": key}
        url = f"https://127.0.0.1:{https}{path}"
        request = urllib.request.Request(url, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, context=trusting, timeout=20) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    code, text = get("/v2/models/world_model", KEY)
    assert (code, json.loads(text)["name"]) == (200, "world_model")
    assert get("/v2/models/world_model")[0] == 401
    assert get("/v2/models/world_model", KEY + "x")[0] == 401
    for path in ("/v2/repository/models/world_model/unload", "/v2/trace/setting", "/metrics"):
        assert get(path, KEY, "POST")[0] == 404

    pem = crt.read_bytes()
    wire = Wire(runtime.endpoints, "grpc")
    arguments, _ = wire.request(HELD, 1, frames=clip(2), start=True)
    wire.close()
    options = grpcclient.InferenceServerClient(
        f"127.0.0.1:{grpc}", ssl=True, root_certificates=_written(tmp_path, pem)
    )
    headers = {"triton-grpc-protocol-ctrlcache-key": KEY}
    answer = options.infer("world_model", headers=headers, **arguments)
    assert np.isfinite(answer.as_numpy("STATE")).all()
    with pytest.raises(grpcclient.InferenceServerException) as refused:
        options.infer("world_model", **arguments)
    assert refused.value.status() == "StatusCode.UNAUTHENTICATED"
    options.close()
    logged = (tmp_path / "access.log").read_text()
    assert "/v2/models/world_model" in logged
    assert KEY not in logged


def _written(directory: Path, pem: bytes) -> str:
    path = directory / "root.pem"
    path.write_bytes(pem)
    return str(path)


def test_a_malformed_key_starts_no_proxy(tmp_path):
    """What is no key cannot end up in nginx's configuration."""
    secret = tmp_path / "access_key"
    secret.write_text('x" 1; default 1;\n')
    places = {"ACCESS_KEY_FILE": str(secret), "ACCESS_KEY_MAP": str(tmp_path / "map")}
    script = DOCKER / "nginx" / "20-access-key.sh"
    done = subprocess.run(["sh", script], env={**os.environ, **places}, capture_output=True)
    assert done.returncode == 1
    assert not (tmp_path / "map").exists()
