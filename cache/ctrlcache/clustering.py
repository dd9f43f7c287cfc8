"""k-medoids: the members of a set that stand best for all of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import InvalidInput

__all__ = ["Cluster", "k_medoids"]

Double = NDArray[np.float64]
_ROUNDS = 50


@dataclass(frozen=True)
class Cluster:
    """medoid: index of the member that stands for the others. weight: of all members together.
    spread: mean distance of the members to the medoid."""

    medoid: int
    members: tuple[int, ...]
    weight: float
    spread: float


def k_medoids(points: Double, weights: Double, k: int, seed: int = 0) -> list[Cluster]:
    """At most `k` clusters of points (n, d) with positive weights (n,), the heaviest first.

    Seeded as k-means++ is, then refined by turns (assign to the nearest medoid, move each medoid to
    the member with the least weighted distance to the others; Park and Jun 2009) until nothing
    changes. Every point is in one cluster; equal points never make two clusters.
    """
    if points.ndim != 2 or weights.shape != (len(points),) or k < 1:
        raise InvalidInput(
            f"points must be (n, d), weights (n,), k 1 or more; "
            f"got {points.shape}, {weights.shape}, {k}"
        )
    if not len(points):
        return []
    distances = _distances(points)
    medoids = _seeds(distances, weights, k, np.random.default_rng(seed))
    for _ in range(_ROUNDS):
        owner = distances[:, medoids].argmin(axis=1)
        moved = []
        for n in range(len(medoids)):
            members = np.flatnonzero(owner == n)
            inside = distances[np.ix_(members, members)] @ weights[members]
            moved.append(int(members[inside.argmin()]))
        if moved == medoids:
            break
        medoids = moved
    owner = distances[:, medoids].argmin(axis=1)
    clusters = []
    for n, medoid in enumerate(medoids):
        members = np.flatnonzero(owner == n)
        spread = float(np.average(distances[medoid, members], weights=weights[members]))
        total = float(weights[members].sum())
        clusters.append(Cluster(medoid, tuple(members.tolist()), total, spread))
    return sorted(clusters, key=lambda cluster: -cluster.weight)


def _distances(points: Double) -> Double:
    """Euclidean, (n, n)."""
    squares = np.square(points).sum(axis=1)
    sums = squares[:, None] + squares[None, :]
    squared = sums - 2.0 * (points @ points.T)
    # What rounding leaves between equal points is in proportion to their size.
    squared[squared < 1e-12 * sums] = 0.0
    np.fill_diagonal(squared, 0.0)
    distances: Double = np.sqrt(squared)
    return distances


def _seeds(distances: Double, weights: Double, k: int, rng: np.random.Generator) -> list[int]:
    """The heaviest point, then points with a chance that grows with their squared distance."""
    medoids = [int(weights.argmax())]
    nearest = distances[medoids[0]].copy()
    while len(medoids) < k:
        chance = weights * np.square(nearest)
        if not chance.sum() > 0:
            break
        chosen = int(rng.choice(len(chance), p=chance / chance.sum()))
        medoids.append(chosen)
        nearest = np.minimum(nearest, distances[chosen])
    return medoids
