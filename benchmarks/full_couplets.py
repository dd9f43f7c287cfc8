"""Couplets of the reference model's shapes for the benchmarks, about 150 KB each as stored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ctrlcache.couplet import Couplet, encode
from ctrlcache.tiers.base import Entry, Record

PROVENANCE = bytes(16)
HORIZON, TOKENS, WIDTH, STATES, CONTROLS, PIXELS = 8, 65, 192, 256, 4, 64


def full_couplet(seed: int) -> Couplet:
    """Tokens and slice as noise (they compress no better), frames as a scene that moves."""
    rng = np.random.default_rng(seed)
    control = rng.uniform(-1, 1, CONTROLS).astype(np.float32)
    return Couplet(
        rng.bytes(16),
        np.broadcast_to(control, (HORIZON, CONTROLS)).copy(),
        rng.normal(size=(HORIZON, STATES)).astype(np.float32),
        tokens=rng.normal(size=(HORIZON, TOKENS, WIDTH)).astype(np.float32),
        slice=rng.normal(size=(4, 2, TOKENS + 1, WIDTH)).astype(np.float32),
        frames=_frames(rng),
        jacobian=rng.normal(size=(HORIZON, STATES, CONTROLS)).astype(np.float16),
        stability=0.5,
        transferability=100.0,
        curvature=0.2,
        radius=0.1,
        cost_ms=120.0,
        created_s=time.time(),
    )


def _frames(rng: np.random.Generator) -> NDArray[np.uint8]:
    y, x = np.mgrid[:PIXELS, :PIXELS]
    scene = 120 + 40 * np.sin(x / 9 + rng.uniform(0, 6)) + 30 * np.cos(y / 7)
    frames = np.repeat(scene[None, :, :, None], HORIZON, axis=0) + np.zeros(3)
    for step in range(HORIZON):
        frames[step, 10 + step : 26 + step, 20:36] += 50
    frames += rng.integers(-1, 2, frames.shape)
    return np.clip(frames, 0, 255).astype(np.uint8)


def identity(n: int) -> bytes:
    return blake2b(n.to_bytes(8, "little"), digest_size=16).digest()


class Factory:
    """Records with ids of their own around a few encoded couplets, so that making thousands does
    not take longer than storing them."""

    def __init__(self, distinct: int = 32) -> None:
        self._couplets = [full_couplet(seed) for seed in range(distinct)]
        self._payloads = [encode(c, PROVENANCE, "stored") for c in self._couplets]

    @property
    def mean_bytes(self) -> float:
        return sum(map(len, self._payloads)) / len(self._payloads)

    def record(self, n: int) -> Record:
        base = self._couplets[n % len(self._couplets)]
        entry = Entry(
            identity(n), identity(n // 8), base.control, base.radius, base.curvature, 120.0, 1e9
        )
        return Record(entry, self._payloads[n % len(self._payloads)])

    def batches(self, count: int, size: int, start: int = 0) -> Iterator[list[Record]]:
        for at in range(start, start + count, size):
            yield [self.record(n) for n in range(at, min(at + size, start + count))]


def percentiles(seconds: list[float]) -> dict[str, float]:
    """In microseconds."""
    array = np.asarray(seconds) * 1e6
    names = {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    return {name: float(np.percentile(array, q)) for name, q in names.items()} | {
        "max": float(array.max())
    }
