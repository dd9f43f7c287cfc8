"""Templates of tasks, where answers are given: asked for after a miss, used when they are here.

Nothing here waits for the network, except for a caller of `ColdStep` who asked to wait.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import numpy as np

from ctrlcache.config import ColdConfig
from ctrlcache.couplet import Couplet
from ctrlcache.errors import ConfigError
from ctrlcache.metrics import Sink, ignore
from ctrlcache.shared import SharedMemory
from ctrlcache.templates import decode_templates, lineage, prefix, typical_controls
from ctrlcache.tiered import ADOPTED
from ctrlcache.tiers.cold_store import ColdStore, Templates
from ctrlcache.tiers.objects import Objects
from worldserve.inheritance import Inheritance
from worldserve.models.protocol import Float, ModelSpec

__all__ = ["ColdStep", "TaskTemplates", "announce_model", "open_cold_store"]

_MODELS = "models"


def open_cold_store(config: ColdConfig, provenance: bytes, on_event: Sink = ignore) -> ColdStore:
    """The loader of one model's templates; without an endpoint, one that never has any."""
    objects = None
    if config.endpoint:
        objects = Objects(
            config.endpoint,
            config.bucket,
            config.credentials(),
            tls=config.tls,
            timeout_s=config.timeout_s,
        )
    return ColdStore(objects, prefix(provenance), on_event=on_event)


class TaskTemplates:
    """What templates can do for a model that computes couplets.

    min_confidence: of the task, below which nothing is loaded. inheritance: how a couplet comes by
    a template's trust.
    """

    def __init__(
        self,
        store: ColdStore,
        provenance: bytes,
        min_confidence: float,
        inheritance: Inheritance,
    ) -> None:
        self._store = store
        self._provenance = provenance
        self._min_confidence = min_confidence
        self._inheritance = inheritance
        self._decoded: tuple[Templates | None, list[Couplet]] = (None, [])
        self._lock = threading.Lock()

    def missed(self, task: str, confidence: float) -> None:
        """Hot and warm tier had nothing: have the task's templates loaded, if it is a sure one."""
        if confidence >= self._min_confidence:
            self._store.fetch_async(task)

    def sure(self, confidence: float) -> bool:
        return confidence >= self._min_confidence

    def controls(self, task: str, limit: int) -> list[Float]:
        """Controls that are typical of the task, where its templates are here."""
        found = self._couplets(task)
        return list(typical_controls(found, limit)) if found else []

    def adopted(self, task: str, couplet: Couplet) -> Couplet | None:
        """An exact, unscored couplet with the trust of a template that has foretold it."""
        made = self._inheritance.from_neighbour(self._couplets(task), couplet)
        return made and replace(made, lineage=lineage(ADOPTED, task))

    def _couplets(self, task: str) -> list[Couplet]:
        templates = self._store.resident(task) if task else None
        if templates is None:
            return []
        with self._lock:
            if self._decoded[0] is not templates:
                self._decoded = (
                    templates,
                    decode_templates(templates.records, self._provenance),
                )
            return self._decoded[1]

    def close(self) -> None:
        self._store.close()


def announce_model(memory: SharedMemory, spec: ModelSpec, provenance: bytes) -> None:
    """Tell the server's other processes which model is served."""
    row = {"provenance": provenance.hex(), "control_dim": spec.control_dim}
    memory.table(_MODELS).put(b"served", json.dumps(row).encode())


class ColdStep:
    """The first step of the ensemble: which controls are typical of a task, if known."""

    def __init__(self, memory: SharedMemory, config: ColdConfig, on_event: Sink = ignore) -> None:
        self._table = memory.table(_MODELS)
        self._config = config
        self._on_event = on_event
        self._store: tuple[bytes, ColdStore] | None = None
        self._lock = threading.Lock()

    def controls(self, task: str, limit: int = 8, wait_s: float = 0.0) -> Float:
        """(n, C), n >= 0: at once what is here, and the rest is loaded in the background; or, for a
        caller who is willing to wait, once it is here or his time is up."""
        row = self._table.get(b"served")
        if row is None:
            return np.zeros((0, 1), np.float32)
        served = json.loads(row)
        nothing: Float = np.zeros((0, int(served["control_dim"])), np.float32)
        provenance = bytes.fromhex(served["provenance"])
        store = self._of(provenance)
        if not task or store is None:
            return nothing
        if wait_s > 0:
            templates = store.wait(task, wait_s)
        else:
            store.fetch_async(task)
            templates = store.resident(task)
        if templates is None:
            return nothing
        found = typical_controls(decode_templates(templates.records, provenance), limit)
        return found if len(found) else nothing

    def close(self) -> None:
        if self._store is not None:
            self._store[1].close()

    def _of(self, provenance: bytes) -> ColdStore | None:
        with self._lock:
            if self._store is None or self._store[0] != provenance:
                self.close()
                try:
                    store = open_cold_store(self._config, provenance, self._on_event)
                except ConfigError:
                    return None
                self._store = (provenance, store)
            return self._store[1]
