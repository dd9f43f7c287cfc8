"""Caches of whole answers that stand in front of a server: what people build without CtrlCache."""

from __future__ import annotations

import contextlib
import io
import shutil
import socket
import subprocess
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ctrlcache.errors import ConfigError
from worldserve.sequence_client import Reply

__all__ = ["DictStore", "RedisStore", "Store", "redis_missing", "redis_server"]


class Store(Protocol):
    name: str

    def get(self, key: bytes) -> Reply | None: ...
    def put(self, key: bytes, reply: Reply) -> None: ...

    @property
    def bytes_used(self) -> int: ...


class DictStore:
    """In the client's process, least recently used first out; `most` answers."""

    name = "response"

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, Reply] = OrderedDict()

    def get(self, key: bytes) -> Reply | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: bytes, reply: Reply) -> None:
        self._kept[key] = reply
        self._kept.move_to_end(key)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    @property
    def bytes_used(self) -> int:
        return sum(
            len(key) + reply.frames.nbytes + reply.states.nbytes + reply.physics.nbytes
            for key, reply in self._kept.items()
        )


class RedisStore:
    """In a Redis server with `allkeys-lru`."""

    name = "redis"

    def __init__(self, port: int) -> None:
        import redis

        self._redis: Any = redis.Redis("127.0.0.1", port)

    def get(self, key: bytes) -> Reply | None:
        raw = self._redis.get(key)
        if raw is None:
            return None
        with np.load(io.BytesIO(raw), allow_pickle=False) as arrays:
            return Reply(
                latency_ms=0.0,
                frames=arrays["frames"],
                states=arrays["states"],
                physics=arrays["physics"],
                tier=self.name,
                exact=True,
                bound=0.0,
                stages_ms=np.zeros(6, np.float32),
            )

    def put(self, key: bytes, reply: Reply) -> None:
        packed = io.BytesIO()
        np.savez(packed, frames=reply.frames, states=reply.states, physics=reply.physics)
        self._redis.set(key, packed.getvalue())

    @property
    def bytes_used(self) -> int:
        return int(self._redis.info("memory")["used_memory"])


def redis_missing() -> str:
    """What is missing for the Redis rival; '' where nothing is."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed (Debian: apt-get install redis-server)"
    try:
        import redis  # noqa: F401
    except ImportError:
        return "the Python package redis is not installed (pip install redis)"
    return ""


@contextlib.contextmanager
def redis_server(max_bytes: int) -> Iterator[RedisStore]:
    """A Redis of one's own on a free loopback port; ConfigError where it cannot start."""
    missing = redis_missing()
    if missing:
        raise ConfigError(missing)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ctrlcache-redis-") as home:
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", home]
        command += ["--save", "", "--maxmemory", str(max_bytes)]
        command += ["--maxmemory-policy", "allkeys-lru", "--logfile", str(Path(home) / "log")]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield _connected(port, process)
        finally:
            process.terminate()
            process.wait(10)


def _connected(port: int, process: subprocess.Popen[bytes]) -> RedisStore:
    import redis

    store = RedisStore(port)
    deadline = time.monotonic() + 10
    while True:
        try:
            store.bytes_used  # noqa: B018
            return store
        except redis.exceptions.ConnectionError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ConfigError("redis-server did not come up") from None
            time.sleep(0.02)
