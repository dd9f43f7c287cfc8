"""A record of what is asked of a cache and what is stored in it, for replaying policies on it.

One JSON object per line, in the order of time within a process; all instances of a server append
to one file, each a whole line at a time, so that a reader sorts by time:

    {"time_s": 1790000000.125, "op": "get", "session": "7", "key": "9f86d081884c7d65",
     "kind": "couplet", "size_bytes": 501234, "cost_ms": 81.5, "hit": true}

op: `get` is a look-up, `put` a store. time_s: Unix time. session: whoever asked, empty where that
is unknown. key: names the record that answered, or that was asked for where none did. kind: what
sort of record (`couplet`, `array`, `feature` ...). size_bytes and cost_ms: of the record, 0 in a
`get` that missed, since nobody knows them yet: `requests` takes them from the `put` that follows.
hit: whether a `get` was answered, false in a `put`.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ctrlcache.errors import ConfigError, InvalidInput

__all__ = ["Access", "Recorder", "Request", "accesses", "requests", "write"]

log = logging.getLogger(__name__)
_FLUSH_S = 0.5
_MOST_WAITING = 65_536
_MOST_KNOWN = 262_144
_KEY_BYTES = 8
#: Gives the size in bytes and the cost in milliseconds of a record.
Facts = Callable[[], tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Access:
    """One line of a trace, fields as in the module's text."""

    time_s: float
    op: str
    session: str
    key: str
    kind: str
    size_bytes: int
    cost_ms: float
    hit: bool


@dataclass(frozen=True, slots=True)
class Request:
    """One step of a replay: `asked` for a record of that size and cost, or (not asked) a record
    that was stored without anybody having asked for it, as a prefetch is."""

    time_s: float
    session: str
    key: str
    kind: str
    size_bytes: int
    cost_ms: float
    asked: bool


class Recorder:
    """Appends accesses to a file, from a thread of its own: whoever reports one never waits.

    Safe in several threads and processes. A file that cannot be written ends the recording with a
    warning; it never ends anything else. ConfigError where it cannot be opened to begin with.
    """

    def __init__(self, path: str | Path, now: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._now = now
        self._waiting: list[Access] = []
        self._lock = threading.Lock()
        self._known: dict[bytes, tuple[int, float]] = {}
        self.dropped = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: int | None = os.open(
                self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise ConfigError(f"cannot record a trace in {path}: {error}") from error
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ctrlcache-trace", daemon=True)
        self._thread.start()

    def got(
        self, key: bytes, kind: str, hit: bool, facts: Facts | None = None, session: str = ""
    ) -> None:
        """A look-up. key: of the record that answered, or that was asked for. facts: asked for
        (size_bytes, cost_ms) of a record that answers without having been stored here before."""
        size, cost_ms = 0, 0.0
        if hit:
            known = self._known.get(key)
            if known is None and facts is not None:
                known = self._learn(key, *facts())
            size, cost_ms = known or (size, cost_ms)
        self._note("get", key, kind, hit, size, cost_ms, session)

    def put(
        self, key: bytes, kind: str, size_bytes: int, cost_ms: float, session: str = ""
    ) -> None:
        """A record was stored, anew or again."""
        self._learn(key, size_bytes, cost_ms)
        self._note("put", key, kind, False, size_bytes, cost_ms, session)

    def _learn(self, key: bytes, size_bytes: int, cost_ms: float) -> tuple[int, float]:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = size_bytes, cost_ms
        return size_bytes, cost_ms

    def _note(
        self, op: str, key: bytes, kind: str, hit: bool, size: int, cost_ms: float, session: str
    ) -> None:
        name = key[:_KEY_BYTES].hex()
        access = Access(self._now(), op, session, name, kind, size, cost_ms, hit)
        with self._lock:
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.append(access)
            else:
                self.dropped += 1

    def flush(self) -> None:
        """Write what was reported up to now."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            if self._file is None or not waiting:
                return
            try:
                # One write of whole lines, at the end of the file whoever else appends to it.
                os.write(self._file, b"".join(map(_line, waiting)))
            except OSError as error:
                log.warning("no trace is recorded any more in %s: %s", self.path, error)
                os.close(self._file)
                self._file = None

    def close(self) -> None:
        """Write what waits and close the file."""
        self._closed.set()
        self._thread.join()
        self.flush()
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None
        if self.dropped:
            log.warning("the trace %s lacks %d accesses", self.path, self.dropped)

    def _run(self) -> None:
        while not self._closed.wait(_FLUSH_S):
            self.flush()


def _line(access: Access) -> bytes:
    row = {name: getattr(access, name) for name in _NAMES}
    row["time_s"] = round(access.time_s, 4)
    row["cost_ms"] = round(access.cost_ms, 3)
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


_NAMES = tuple(field.name for field in fields(Access))
_KINDS: dict[str, Any] = {
    "time_s": int | float,
    "op": str,
    "session": str,
    "key": str,
    "kind": str,
    "size_bytes": int,
    "cost_ms": int | float,
    "hit": bool,
}


def write(path: str | Path, rows: Iterable[Access]) -> None:
    """Write a trace; a name that ends in `.gz` is compressed."""
    with _open(Path(path), "wb") as file:
        for row in rows:
            file.write(_line(row))


def accesses(path: str | Path) -> list[Access]:
    """A trace by time. A last line that was cut off by a crash is passed over; InvalidInput names
    any other line that is no access, and what is wrong with it."""
    rows: list[Access] = []
    with _open(Path(path), "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                rows.append(_access(line))
            except (ValueError, InvalidInput) as error:
                if not line.endswith(b"\n"):
                    break
                raise InvalidInput(f"{path}, line {number}: {error}") from error
    return sorted(rows, key=lambda row: row.time_s)


def _open(path: Path, mode: str) -> Any:
    return gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode)


def _access(line: bytes) -> Access:
    row = json.loads(line)
    if not isinstance(row, dict) or set(row) != set(_KINDS):
        raise InvalidInput(f"expected an object with {', '.join(_NAMES)}, got {row!r}")
    for name, kind in _KINDS.items():
        if not isinstance(row[name], kind) or isinstance(row[name], bool) != (kind is bool):
            raise InvalidInput(f"{name} must be {kind}, got {row[name]!r}")
    if row["op"] not in ("get", "put"):
        raise InvalidInput(f"op must be get or put, got {row['op']!r}")
    return Access(**row)


def requests(rows: Iterable[Access]) -> Iterator[Request]:
    """What a replay does, by time: each look-up, with the size and cost that the record had or
    came to have, and each store that no look-up before it stands for.

    A look-up of what was never stored and never answered is left out: no cache could have kept it.
    """
    rows = list(rows)
    later: dict[str, tuple[int, float]] = {}
    sized: list[Access] = []
    for row in reversed(rows):  # what a miss came to be is said further on
        if row.size_bytes:
            later[row.key] = row.size_bytes, row.cost_ms
        elif row.key in later:
            size, cost_ms = later[row.key]
            row = replace(row, size_bytes=size, cost_ms=cost_ms)
        sized.append(row)
    before: dict[str, tuple[int, float]] = {}
    asked: set[str] = set()
    for row in reversed(sized):
        size, cost_ms = row.size_bytes, row.cost_ms
        if not size:
            if row.key not in before:
                continue
            size, cost_ms = before[row.key]
        before[row.key] = size, cost_ms
        if row.op == "put" and row.key in asked:
            continue
        if row.op == "get":
            asked.add(row.key)
        yield Request(row.time_s, row.session, row.key, row.kind, size, cost_ms, row.op == "get")
