"""The small files beside the segments: who writes, which store this is, what is in quarantine, and
how often records were used. All of them may be lost or damaged without a wrong answer."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from ctrlcache.tiers.segments import checksum, fsync_directory

__all__ = ["Quarantine", "WriterLock", "disk_bytes", "load_uses", "save_uses", "store_id"]

LOCK_NAME = "writer.lock"
STORE_NAME = "store.json"
QUARANTINE_NAME = "quarantine.log"
USES_NAME = "uses.bin"
BLOCK = 4096
_USES_MAGIC = b"CTRLUSE\x01"
_USES_ROW = struct.Struct("<16sfd")
_QUARANTINE_LIMIT = 1 << 20


def disk_bytes(directory: Path) -> int:
    """Bytes of all files in `directory`, each rounded up to whole blocks."""
    total = 0
    with os.scandir(directory) as entries:
        for item in entries:
            with contextlib.suppress(FileNotFoundError):
                total += -(-item.stat(follow_symlinks=False).st_size // BLOCK) * BLOCK
    return total


class WriterLock:
    """The right to write a warm directory, and to maintain the index of this server.

    Two file locks, which the kernel releases when the process ends, however it ends: one in the
    warm directory for all servers, one beside the index for the processes of this server.
    """

    def __init__(self, directory: Path, index_directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._local_path = index_directory / "maintainer.lock"
        self._fd: int | None = None
        self._local: int | None = None

    def acquire(self, wait_s: float = 10.0) -> bool:
        """Whether we may write; OSError where the lock file cannot be opened."""
        if not self.held():
            self.release()
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not _flock(fd):
                os.close(fd)
                return False
            self._fd = fd
        # A sibling that follows holds the local lock only for moments, unless it is rebuilding.
        deadline = time.monotonic() + wait_s
        while not self.acquire_local():
            if time.monotonic() > deadline:
                self.release()
                return False
            time.sleep(0.01)
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        assert self._fd is not None
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text, 0)
        return self.held()

    def acquire_local(self) -> bool:
        """Only the right to maintain this server's index; False while a sibling does."""
        if self._local is not None:
            return True
        fd = os.open(self._local_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _flock(fd):
            os.close(fd)
            return False
        self._local = fd
        return True

    def held(self) -> bool:
        """Whether we hold the lock of the directory that is at the path now."""
        if self._fd is None:
            return False
        try:
            ours, there = os.fstat(self._fd), os.stat(self._path)
        except OSError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self.release_local()

    def release_local(self) -> None:
        if self._local is not None:
            os.close(self._local)
            self._local = None

    def holder(self) -> str:
        """Who has the lock, as well as can be known."""
        try:
            found = json.loads(self._path.read_bytes()[:1000])
            return f"process {int(found['pid'])} on {str(found['host'])[:100]}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"


def _flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        os.close(fd)
        raise
    return True


def store_id(directory: Path, create: bool = False) -> bytes:
    """What tells this store from another that was at the same path; b"" where there is none."""
    path = directory / STORE_NAME
    try:
        found = json.loads(path.read_bytes()[:1000])
        return str(found["store"]).encode()[:64]
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError):
        if not create:
            return b"damaged"
    if not create:
        return b""
    name = secrets.token_hex(16)
    _replace(path, json.dumps({"format": 1, "store": name}).encode())
    return name.encode()


class Quarantine:
    """Records that were found damaged: a log that every process appends to."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / QUARANTINE_NAME

    def add(self, segment: int, offset: int, id: bytes, reason: str) -> None:
        """id is empty where it cannot be known. Best effort: on a disk that cannot be written the
        damage is found again next time."""
        line = json.dumps(
            {
                "segment": segment,
                "offset": offset,
                "id": id.hex(),
                "reason": reason[:200],
                "time_s": round(time.time(), 3),
            }
        )
        with contextlib.suppress(OSError):
            if self._path.exists() and self._path.stat().st_size > _QUARANTINE_LIMIT:
                return
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(fd, line.encode() + b"\n")
            finally:
                os.close(fd)

    def load(self) -> set[tuple[int, int, bytes]]:
        """(segment, offset, id) of every record in the log."""
        found: set[tuple[int, int, bytes]] = set()
        try:
            data = self._path.read_bytes()
        except OSError:
            return found
        for line in data.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                item = json.loads(line)
                found.add((int(item["segment"]), int(item["offset"]), bytes.fromhex(item["id"])))
        return found

    def prune(self, segments: Collection[int]) -> None:
        """Drop what is said of segments that no longer exist."""
        try:
            lines = self._path.read_bytes().splitlines(keepends=True)
        except OSError:
            return
        kept = [line for line in lines if _segment_of(line) in segments]
        if len(kept) < len(lines):
            _replace(self._path, b"".join(kept))


def _segment_of(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["segment"])
    except (ValueError, KeyError, TypeError):
        return None


def save_uses(directory: Path, uses: Iterable[tuple[bytes, float, float]], limit: int) -> None:
    """Keep the `limit` bytes' worth of most used (id, hits, last_used_s) over a restart."""
    ranked = sorted(uses, key=lambda use: use[1], reverse=True)
    rows = [_USES_ROW.pack(*use) for use in ranked[: max(0, limit // _USES_ROW.size)]]
    body = b"".join(rows)
    _replace(directory / USES_NAME, _USES_MAGIC + checksum(body) + body)


def load_uses(directory: Path) -> list[tuple[bytes, float, float]]:
    """What `save_uses` kept; nothing where it is damaged."""
    try:
        data = (directory / USES_NAME).read_bytes()
    except OSError:
        return []
    head = len(_USES_MAGIC) + 16
    body = data[head:]
    if data[:head] != _USES_MAGIC + checksum(body) or len(body) % _USES_ROW.size:
        return []
    return list(_USES_ROW.iter_unpack(body))


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_suffix(".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(fd)
    os.replace(temporary, path)
    fsync_directory(path.parent)
