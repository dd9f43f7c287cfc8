"""Recompute only what an edit has changed: results named by what they were made from.

Every result is a node, named by a digest of its kind, of the names of the nodes it was made from,
and of the inputs of its own. Changing an input changes the names of all that depends on it and of
nothing else, so what has not changed is found under its name, bit for bit as it was made. Nothing
has to be told what was edited.

    context tokens -> rollout of chunk 0 -> rollout of chunk 1 -> ...
                            |                     |
                      frames of chunk 0     frames of chunk 1 -> regions of them
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ctrlcache.key import digest

__all__ = ["Features", "Memo", "PlainStore", "Report", "content"]

Array: TypeAlias = NDArray[Any]


class Features(Protocol):
    """Where nodes are kept: `worldcache.levels.Levels`, or `PlainStore`."""

    def exact(self, id: bytes) -> Array | None: ...
    def __contains__(self, id: bytes) -> bool: ...
    def put(
        self,
        id: bytes,
        array: Array,
        *,
        kind: str = "",
        group: bytes = bytes(16),
        importance: float | None = None,
        cost_ms: float = 0.0,
    ) -> None: ...


class PlainStore:
    """Everything, in the memory of this process, without limit: what levels are compared with."""

    def __init__(self) -> None:
        self._arrays: dict[bytes, Array] = {}

    def exact(self, id: bytes) -> Array | None:
        return self._arrays.get(id)

    def __contains__(self, id: bytes) -> bool:
        return id in self._arrays

    def put(
        self,
        id: bytes,
        array: Array,
        *,
        kind: str = "",
        group: bytes = bytes(16),
        importance: float | None = None,
        cost_ms: float = 0.0,
    ) -> None:
        self._arrays.setdefault(id, array.copy() if array.base is not None else array)


@dataclass
class Report:
    """What was computed and what was reused, in nodes by kind; seconds spent computing."""

    computed: dict[str, int] = field(default_factory=dict)
    reused: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def note(self, kind: str, reused: bool) -> None:
        counts = self.reused if reused else self.computed
        counts[kind] = counts.get(kind, 0) + 1


class Memo:
    """Nodes of one provenance (model, weights, frame size ..., tenant), kept in `features`.

    Two threads that ask for the same node at once may both compute it; the result is the same.
    """

    def __init__(self, features: Features, provenance: bytes) -> None:
        self._features = features
        self._provenance = provenance
        self._lock = threading.Lock()
        self.report = Report()

    def begin(self) -> None:
        """Count from zero."""
        self.report = Report()

    def name(self, kind: str, *inputs: bytes) -> bytes:
        """Of the node of that kind, made from these: names of nodes, contents, parameters."""
        return digest(b"feature", self._provenance, kind.encode(), *inputs)

    def known(self, id: bytes, kind: str) -> Array | None:
        """The node, where it is kept."""
        found = self._features.exact(id)
        if found is not None:
            with self._lock:
                self.report.note(kind, True)
        return found

    def keep(
        self, id: bytes, array: Array, kind: str, cost_ms: float, group: bytes = bytes(16)
    ) -> None:
        """A node that was computed."""
        with self._lock:
            self.report.note(kind, False)
            self.report.seconds += cost_ms / 1e3
        self._features.put(id, array, kind=kind, group=group, cost_ms=cost_ms)

    def get(
        self, kind: str, id: bytes, make: Callable[[], Array], group: bytes = bytes(16)
    ) -> Array:
        """The node `id`, made now where it is not kept."""
        found = self.known(id, kind)
        if found is not None:
            return found
        began = time.perf_counter()
        made = make()
        self.keep(id, made, kind, (time.perf_counter() - began) * 1e3, group)
        return made

    def get_all(
        self,
        kind: str,
        ids: Mapping[bytes, bytes],
        make: Callable[[list[bytes]], dict[bytes, Array]],
    ) -> dict[bytes, Array]:
        """Nodes by id, of which the missing ones are made together. ids: group by id."""
        found = {id: array for id in ids if (array := self.known(id, kind)) is not None}
        missing = [id for id in ids if id not in found]
        if missing:
            began = time.perf_counter()
            made = make(missing)
            each_ms = (time.perf_counter() - began) * 1e3 / len(missing)
            for id, array in made.items():
                self.keep(id, array, kind, each_ms, ids[id])
            found |= made
        return found


def content(array: Array) -> bytes:
    """The digest of an array's type, shape and values."""
    about = f"{array.dtype.str}{array.shape}".encode()
    return digest(about, np.ascontiguousarray(array).tobytes())
