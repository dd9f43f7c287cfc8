"""The cold tier: records of one task in an object store, under a manifest.

    <prefix>/<task>/manifest.json      what there is, versioned
    <prefix>/<task>/<id>.<digest>      one record each: header and payload as in a segment

Objects never change; a new version of a record is a new object, and the manifest says which one
counts. One builder per task is assumed (the last manifest wins), any number of readers. Every call
that needs the network waits for it, within the client's time-outs: on a reply path use
`cold_store.ColdStore`, which never does.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from ctrlcache import eviction
from ctrlcache.errors import CorruptRecord, InvalidInput, TierUnavailable
from ctrlcache.eviction import Usage
from ctrlcache.metrics import Corrupt, Evicted, Sink, ignore
from ctrlcache.tiers import segments
from ctrlcache.tiers.base import Candidate, Entry, Record, TierStats, reaching
from ctrlcache.tiers.objects import Objects

__all__ = ["ColdTier", "Held", "list_tasks"]

FORMAT = 1
MANIFEST_NAME = "manifest.json"
_MANIFEST_BYTES = 16 << 20
_ENTRY_BYTES = 512  # allowance in the manifest per record
_BATCH_SHARE = 4
#: Eviction makes this share of the limit free at once: each one costs a manifest.
_SLACK_SHARE = 16


@dataclass(frozen=True)
class Held:
    """A record as the manifest lists it; `object` is its name below the task's."""

    entry: Entry
    object: str
    size_bytes: int
    digest: str


class ColdTier:
    """Implements `Tier` for one task. Safe in several threads.

    limit_bytes: of all objects of the task. `notes` is a JSON object kept in the manifest, for
    whoever builds. Empty until `refresh`.
    """

    name = "cold"

    def __init__(
        self,
        objects: Objects,
        prefix: str,
        task: str,
        *,
        limit_bytes: int = 256 << 20,
        policy: str = "cost",
        on_event: Sink = ignore,
        now: Callable[[], float] = time.time,
        parallel: int = 4,
    ) -> None:
        slug = _slug(task)
        if not 1 < len(slug) <= 200:
            raise InvalidInput(f"a task's name must be 1 to 200 characters, got {task!r}")
        self.task = task
        self.notes: dict[str, Any] = {}
        self._objects = objects
        self._root = f"{prefix}/{slug}/"
        self._limit = limit_bytes
        self._policy = eviction.policy(policy)
        self._on_event = on_event
        self._now = now
        self._parallel = parallel
        self._lock = threading.RLock()  # of the client and of changes
        self._held: dict[bytes, Held] = {}
        self._uses: dict[bytes, Usage] = {}
        self._clock = 0.0
        self._manifest_bytes = 0

    def refresh(self) -> bool:
        """Read the manifest; whether there is one. ObjectError, or CorruptRecord for rubbish."""
        with self._lock:
            data = self._objects.get(self._root + MANIFEST_NAME, _MANIFEST_BYTES)
            if data is None:
                self._held, self.notes, self._manifest_bytes = {}, {}, 0
                return False
            try:
                found = json.loads(data)
                if found["format"] != FORMAT or found["task"] != self.task:
                    raise ValueError(f"format {found['format']!r}, task {found['task']!r}")
                held = dict(_parse(item) for item in found["entries"])
                notes = dict(found["notes"])
            except (
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
                ArithmeticError,
                RecursionError,
            ) as error:
                self._on_event(Corrupt(self.name))
                raise CorruptRecord(f"manifest of {self.task!r}: {str(error)[:200]}") from error
            self._held, self.notes, self._manifest_bytes = held, notes, len(data)
            return True

    def get(self, id: bytes) -> bytes | None:
        held = self._held.get(id)
        if held is None:
            return None
        try:
            return self.fetch(held)
        except TierUnavailable:
            return None

    def held(self, largest_bytes: int) -> list[Held]:
        """What the manifest lists, in its order, without objects larger than that."""
        return [held for held in self._held.values() if held.size_bytes <= largest_bytes]

    def fetch(self, held: Held) -> bytes | None:
        """The payload of what `held` gave; None where it is gone or damaged. ObjectError where
        the store fails."""
        data = self._objects.get(self._root + held.object, held.size_bytes)
        try:
            return None if data is None else self._payload(held, data)
        except CorruptRecord:
            self._on_event(Corrupt(self.name))
            with self._lock:
                if self._held.get(held.entry.id) is held:
                    self._held = {k: h for k, h in self._held.items() if h is not held}
            return None

    def neighbours(
        self, space: bytes, control: NDArray[np.float32], limit: int = 16
    ) -> list[Candidate]:
        return reaching([held.entry for held in self._held.values()], space, control, limit)

    def put(self, records: Iterable[Record]) -> int:
        """Upload; the records count once the manifest that lists them is stored."""
        stored = refused = 0
        with self._lock:
            batch: list[tuple[Held, bytes]] = []
            size = 0
            for record in {record.entry.id: record for record in records}.values():
                held, data = _pack(record)
                if held.size_bytes + _ENTRY_BYTES > self._limit // 2:
                    refused += 1
                    continue
                if batch and size + held.size_bytes > self._limit // _BATCH_SHARE:
                    self._upload(batch)
                    stored, batch, size = stored + len(batch), [], 0
                batch.append((held, data))
                size += held.size_bytes
            if batch:
                self._upload(batch)
                stored += len(batch)
        if refused and not stored:
            raise TierUnavailable(f"records larger than half of {self._limit} bytes are not kept")
        return stored

    def replace(self, records: Sequence[Record]) -> int:
        """Put `records` in the place of all there is, in this order; returns how many."""
        with self._lock:
            wanted = {record.entry.id for record in records}
            former = [id for id in self._held if id not in wanted]
            stored = self.put(records) if records else 0
            known = [record.entry.id for record in records if record.entry.id in self._held]
            gone = [self._held[id] for id in former if id in self._held]
            self._replace({id: self._held[id] for id in known}, gone)
            return stored

    def delete(self, ids: Iterable[bytes]) -> int:
        with self._lock:
            gone = [self._held[id] for id in dict.fromkeys(ids) if id in self._held]
            if gone:
                self._replace({}, gone)
            return len(gone)

    def trim(self) -> int:
        """Evict what a lower limit has no room for; how many. (Reading alone never writes.)"""
        with self._lock:
            doomed = self._choose(0, set())
            if doomed:
                self._replace({}, doomed)
                self._on_event(Evicted(self.name, "bytes", len(doomed)))
            return len(doomed)

    def touch(self, ids: Iterable[bytes]) -> None:
        now_s = self._now()
        with self._lock:
            for id in ids:
                if id in self._held:
                    usage = self._usage(self._held[id])
                    self._uses[id] = eviction.used(usage, now_s, self._clock)

    def scan(self) -> Iterator[Entry]:
        for held in list(self._held.values()):
            yield held.entry

    def stats(self) -> TierStats:
        with self._lock:
            size = sum(held.size_bytes for held in self._held.values()) + self._manifest_bytes
            return TierStats(len(self._held), size, self._limit)

    def sweep(self) -> int:
        """Delete objects that no manifest lists (of builds that were interrupted); how many."""
        with self._lock:
            known = {self._root + held.object for held in self._held.values()}
            known.add(self._root + MANIFEST_NAME)
            strays = [name for name in self._objects.names(self._root) if name not in known]
            self._objects.delete(strays)
            return len(strays)

    def close(self) -> None:
        with self._lock:
            self._objects.close()

    def _payload(self, held: Held, data: bytes) -> bytes:
        if len(data) != held.size_bytes or segments.checksum(data).hex() != held.digest:
            raise CorruptRecord(f"object {held.object} is not what the manifest says")
        header = segments.parse_header(data, 0, 0, 0)
        if header.entry.id != held.entry.id or header.end != len(data):
            raise CorruptRecord(f"object {held.object} holds another record")
        return data[header.header_bytes :]

    def _upload(self, batch: list[tuple[Held, bytes]]) -> None:
        new = {held.entry.id: held for held, _ in batch}
        # Room first, so that the limit holds at every moment.
        replaced = [self._held[id] for id in new if id in self._held]
        need = sum(h.size_bytes + _ENTRY_BYTES for h in new.values())
        doomed = self._choose(need, {h.entry.id for h in replaced})
        if doomed:
            self._replace({}, doomed)
            self._on_event(Evicted(self.name, "bytes", len(doomed)))
        with ThreadPoolExecutor(self._parallel) as pool:
            jobs = [
                pool.submit(self._objects.put, self._root + held.object, data)
                for held, data in batch
            ]
            for job in jobs:
                job.result()
        stale = [h for h in replaced if h.object != new[h.entry.id].object]
        self._replace(new, [h for h in stale if self._held.get(h.entry.id) is h])

    def _choose(self, need: int, sparing: set[bytes]) -> list[Held]:
        used = sum(held.size_bytes + _ENTRY_BYTES for held in self._held.values())
        excess = used + need - self._limit
        doomed: list[Held] = []
        if excess <= 0:
            return doomed
        excess += self._limit // _SLACK_SHARE
        now_s = self._now()
        ranked = sorted(
            self._held.values(), key=lambda held: self._policy(self._usage(held), now_s)
        )
        # What is being replaced goes last: it makes room too, but only afterwards.
        for held in sorted(ranked, key=lambda held: held.entry.id in sparing):
            if excess <= 0:
                break
            doomed.append(held)
            excess -= held.size_bytes + _ENTRY_BYTES
            self._clock = max(self._clock, self._policy(self._usage(held), now_s))
        return doomed

    def _replace(self, new: Mapping[bytes, Held], gone: list[Held]) -> None:
        """Manifest first, then the objects that it no longer lists."""
        names = {held.object for held in gone}
        others = {id: h for id, h in self._held.items() if id not in new}
        held = {**new, **{id: h for id, h in others.items() if h.object not in names}}
        self._store_manifest(held)
        for id in self._uses.keys() - held.keys():
            del self._uses[id]
        self._objects.delete(self._root + name for name in names)

    def _store_manifest(self, held: dict[bytes, Held]) -> None:
        manifest = {
            "format": FORMAT,
            "task": self.task,
            "notes": self.notes,
            "entries": [_describe(item) for item in held.values()],
        }
        data = json.dumps(manifest, separators=(",", ":"), allow_nan=False).encode()
        self._objects.put(self._root + MANIFEST_NAME, data)
        self._held, self._manifest_bytes = held, len(data)

    def _usage(self, held: Held) -> Usage:
        known = self._uses.get(held.entry.id)
        if known is not None:
            return known
        entry = held.entry
        return Usage(held.size_bytes, entry.cost_ms, entry.created_s, entry.created_s)


def list_tasks(objects: Objects, prefix: str) -> list[str]:
    """Tasks that have a manifest under `prefix`."""
    found = []
    for name in objects.names(f"{prefix}/"):
        slug, _, rest = name.removeprefix(f"{prefix}/").partition("/")
        if rest == MANIFEST_NAME:
            found.append(unquote(slug.removeprefix("~")))
    return sorted(found)


def _slug(task: str) -> str:
    """A name for a task that is no special one of any file system ("..", say)."""
    return "~" + quote(task, safe="")


def _pack(record: Record) -> tuple[Held, bytes]:
    entry = record.entry
    numbers = (entry.radius, entry.curvature, entry.cost_ms, entry.created_s)
    if not np.isfinite(numbers).all():
        raise InvalidInput(f"radius, curvature, cost and time must be finite, got {numbers}")
    digest = segments.checksum(record.payload)
    head = segments.pack_header(
        record.entry, len(record.payload), digest, segment=0, offset=0, sequence=0
    )
    data = head + record.payload
    entry = segments.parse_header(head, 0, 0, 0).entry
    whole = segments.checksum(data).hex()
    return Held(entry, f"{entry.id.hex()}.{whole[:16]}", len(data), whole), data


def _describe(held: Held) -> dict[str, Any]:
    entry = held.entry
    return {
        "id": entry.id.hex(),
        "space": entry.space.hex(),
        "control": None if entry.control is None else entry.control.tolist(),
        "radius": entry.radius,
        "curvature": entry.curvature,
        "cost_ms": entry.cost_ms,
        "created_s": entry.created_s,
        "object": held.object,
        "bytes": held.size_bytes,
        "digest": held.digest,
    }


def _parse(item: Mapping[str, Any]) -> tuple[bytes, Held]:
    """An entry of a manifest; nothing in it is taken on trust."""
    id, space = bytes.fromhex(item["id"]), bytes.fromhex(item["space"])
    control = None
    if item["control"] is not None:
        wide = np.asarray(item["control"], np.float64)
        if wide.ndim != 1 or not 0 < len(wide) <= 100 or not (np.abs(wide) < 1e30).all():
            raise ValueError("control is not 1 to 100 finite numbers")
        control = wide.astype(np.float32)
    numbers = [float(item[key]) for key in ("radius", "curvature", "cost_ms", "created_s")]
    size, name = int(item["bytes"]), str(item["object"])
    if len(id) != 16 or len(space) != 16 or not np.isfinite(numbers).all():
        raise ValueError("entry is malformed")
    if not 0 < size <= segments.MAX_PAYLOAD_BYTES or "/" in name:
        raise ValueError("object is malformed")
    return id, Held(Entry(id, space, control, *numbers), name, size, str(item["digest"]))
