"""A real S3 gateway for the tests, started when first needed, and servers that misbehave."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from ctrlcache.tiers.objects import Objects
from worldserve.gateway import ObjectStore, ObjectStoreConfig

BUCKET = "ctrlcache-tests"


def start(directory: Path, port: int = 0) -> ObjectStore:
    store = ObjectStore(
        ObjectStoreConfig(
            directory / "store", directory / "credentials.json", directory / "log", port=port
        )
    )
    store.start()
    return store


@lru_cache
def gateway() -> ObjectStore:
    """One for the whole run; in shared memory, since it syncs its metadata all the time."""
    directory = Path(tempfile.mkdtemp(prefix="ctrlcache-test-s3-", dir="/dev/shm"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    store = start(directory)
    atexit.register(store.stop)
    objects(store).ensure_bucket()
    return store


def objects(store: ObjectStore, bucket: str = BUCKET, **more: object) -> Objects:
    keys = (store.credentials.access_key, store.credentials.secret_key)
    settings = {"tls": False, "timeout_s": 5.0, **more}
    return Objects(store.endpoint, bucket, keys, **settings)  # type: ignore[arg-type]


@contextlib.contextmanager
def serving(
    answer: Callable[[socket.socket], None], port: int = 0, context: ssl.SSLContext | None = None
) -> Iterator[int]:
    """A TCP server on 127.0.0.1 that treats each connection with `answer`; its port."""
    listener = socket.create_server(("127.0.0.1", port))
    listener.settimeout(0.1)
    stop = threading.Event()

    def treat(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(10.0)
            if context is not None:
                with context.wrap_socket(connection, server_side=True) as secure:
                    answer(secure)
            else:
                answer(connection)

    def accept() -> None:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                threading.Thread(target=treat, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        thread.join()
        listener.close()


def forward(port: int) -> Callable[[socket.socket], None]:
    """Pass everything on to a port, both ways."""

    def answer(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", port)) as upstream:

            def back() -> None:
                with contextlib.suppress(OSError):
                    while data := upstream.recv(65536):
                        connection.sendall(data)
                    connection.shutdown(socket.SHUT_RDWR)

            thread = threading.Thread(target=back, daemon=True)
            thread.start()
            with contextlib.suppress(OSError):
                while data := connection.recv(65536):
                    upstream.sendall(data)
            upstream.close()
            thread.join()

    return answer
