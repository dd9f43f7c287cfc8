"""A cache over real shared memory and a tier below it, in a small world whose model is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tier_openers import shm_path

from ctrlcache.admission import Trust
from ctrlcache.calibration import TrustModel
from ctrlcache.config import CacheConfig
from ctrlcache.couplet import Couplet
from ctrlcache.key import digest
from ctrlcache.metrics import Event
from ctrlcache.scores import Scores, probe_controls, scores_from_probes
from ctrlcache.shared import SharedMemory
from ctrlcache.tiered import CoupletCache, Query
from ctrlcache.tiers.memory import MemoryTier
from ctrlcache.transfer import Jacobian
from ctrlcache.upkeep import FLUSH_OWNER

H, C, S = 4, 3, 6
PROVENANCE = digest(b"provenance")
SPACE = digest(b"space")
SCALE = np.ones(S, np.float32)
# Bound: twice curvature times squared distance, ample for the quadratic world below.
MODEL = TrustModel(
    weights_digest="w", migration="jacobian", delta=0.05, q=2.0, kappa0=0.0, curvature_power=1.0,
    distance_power=2.0, floor=0.0, max_distance=0.4, probe_radius=0.05, horizon=8, rho_max=1.0,
    stability_threshold=0.0, transferability_threshold=0.0, frame_psnr_db=35.0,
    frame_distance=0.1, frame_change=0.01, pairs=1, contexts=1, created="",
)  # fmt: skip

_rng = np.random.default_rng(0)
_A, _B = _rng.normal(size=(H, S, C)), _rng.normal(size=(H, S, C, C)) * 0.3


def world(control: np.ndarray) -> np.ndarray:
    """States (H, S) of a world that is quadratic in the control: the model that is cached."""
    control = np.asarray(control, np.float64)
    curved = np.einsum("hscd,c,d->hs", _B, control, control)
    return (5.0 + _A @ control + curved).astype(np.float32)


def couplet(control: object, space: bytes = SPACE, **more: object) -> Couplet:
    plan = np.tile(np.asarray(control, np.float32), (H, 1))
    base: dict[str, object] = {
        "space": space, "plan": plan, "states": world(plan[0]), "cost_ms": 30.0,
        "tokens": _rng.normal(size=(H, 2, 5)).astype(np.float32),
        "slice": _rng.normal(size=(2, 2, 3, 5)).astype(np.float32),
    }  # fmt: skip
    return Couplet(**{**base, **more})  # type: ignore[arg-type]


def scores_of(made: Couplet) -> Scores:
    probes = probe_controls(made.control, 0.05)
    states = np.stack([world(probe) for probe in probes])
    return scores_from_probes(made.states, made.control, states, probes, SCALE)


def frames(value: int = 0) -> np.ndarray:
    return np.full((H, 4, 5, 3), value, np.uint8)


class Setting:
    """A cache over real shared memory and a tier below it; time moves when told."""

    def __init__(self, place: Path, warm: object = None, **config: object) -> None:
        self.place = place
        self.now_s = 0.0
        self.events: list[Event] = []
        self.warm = MemoryTier(64 << 20) if warm is None else warm
        self.config = CacheConfig(**config)  # type: ignore[arg-type]
        self.memory = SharedMemory(place, 64 << 20)
        self.cache = self.make()

    def make(self, **more: object) -> CoupletCache:
        arguments: dict[str, object] = {
            "memory": self.memory, "warm": self.warm, "provenance": PROVENANCE,
            "policy": Trust(MODEL, 0.1), "migration": Jacobian(), "config": self.config,
            "on_event": self.events.append, "monotonic": lambda: self.now_s, "background": False,
        }  # fmt: skip
        return CoupletCache(**{**arguments, **more})  # type: ignore[arg-type]

    def forget_hot(self) -> None:
        """As if everything had been evicted."""
        hot = self.memory.hot
        hot.unpin(FLUSH_OWNER)
        hot.delete([entry.id for entry in list(hot.scan())])

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


@contextmanager
def opened(tmp_path: Path, **config: object) -> Iterator[Setting]:
    """A Setting, gone afterwards without a trace."""
    made = Setting(shm_path(tmp_path), **config)
    try:
        yield made
    finally:
        made.memory.close()
        SharedMemory.remove(made.place)


def ask(control: object, max_error: float = 0.0, **more: object) -> Query:
    plan = np.tile(np.asarray(control, np.float32), (H, 1))
    return Query(SPACE, plan, max_error, **more)  # type: ignore[arg-type]
