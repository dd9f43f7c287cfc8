"""Templates: what is typical of a task, distilled from a warm tier and kept in the object store.

A template is a couplet of another context, so it never answers anything by itself: answers stay
within their space. In a new context it serves twice (docs/tiers.md):

- its control is one that people use in this task: `typical_controls` lists what a background prober
  should compute first;
- its Jacobian may hold here as well: once the model has answered one control exactly, `adopt` asks
  whether the template would have predicted that answer within the error budget. Only then does the
  new, exact couplet inherit the template's trust, narrowed by how far the template was off.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctrlcache.clustering import k_medoids
from ctrlcache.couplet import Couplet, decode
from ctrlcache.errors import CorruptRecord
from ctrlcache.record import owner_of
from ctrlcache.scores import relative_error
from ctrlcache.tiers.base import Entry, Record
from ctrlcache.tiers.cold import ColdTier
from ctrlcache.tiers.objects import Objects
from ctrlcache.transfer import Migration

__all__ = [
    "Bounds",
    "Built",
    "adopt",
    "build",
    "decode_templates",
    "lineage",
    "prefix",
    "task_of",
    "typical_controls",
]

Float = NDArray[np.float32]
#: (what is done, of how many)
Progress = Callable[[int, int], None]
#: A cluster is found among at most this many couplets of a task, drawn at random.
_SAMPLE = 3_000
_GRID = 8
_CURVATURE_STEPS = 40


# --- names --------------------------------------------------------------------------------------


def lineage(kind: str, task: str) -> str:
    """A couplet's `lineage`: how it came to be, and for which task ("" where there is none)."""
    return f"{kind}:{task}" if task else kind


def task_of(lineage: str) -> str:
    """The task in a couplet's `lineage`."""
    return lineage.partition(":")[2]


def prefix(provenance: bytes) -> str:
    """Where the templates of a provenance (digest, 16 bytes) lie: its model and tenant's alone."""
    return f"templates/{provenance.hex()}"


# --- building -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """Templates of one task: `couplets` were looked at, `spread` is the mean distance (in
    standardised units) from a couplet to the template that stands for it."""

    provenance: bytes
    task: str
    couplets: int
    templates: int
    size_bytes: int
    spread: float


class _Source(Protocol):
    """What `build` reads: a warm tier, or any other."""

    def scan(self) -> Iterable[Entry]: ...
    def get(self, id: bytes) -> memoryview | bytes | None: ...


@dataclass(frozen=True)
class _Sample:
    id: bytes
    control: Float
    states: Float  # (2, S): mean and last of the trajectory


def build(
    source: _Source,
    objects: Objects,
    *,
    per_task: int = 16,
    least: int = 4,
    uses: Callable[[Sequence[bytes]], Sequence[float]] | None = None,
    tasks: Collection[str] | None = None,
    limit_bytes: int = 256 << 20,
    progress: Progress | None = None,
    seed: int = 0,
) -> list[Built]:
    """Cluster the couplets of each task and store the most typical ones as its templates.

    per_task: at most so many templates. least: tasks with fewer couplets get none. uses: how often
    each of some ids was used, which is its weight. tasks: only these. Templates of an earlier build
    are replaced. ObjectError where the store fails; what was complete by then is in use.
    """
    groups = _collect(source, tasks, progress, seed)
    built = []
    for (provenance, task), samples in sorted(groups.items()):
        if len(samples) < least:
            continue
        built.append(
            _store(source, objects, provenance, task, samples, per_task, uses, limit_bytes, seed)
        )
    return built


def _collect(
    source: _Source, tasks: Collection[str] | None, progress: Progress | None, seed: int
) -> dict[tuple[bytes, str], list[_Sample]]:
    rng = random.Random(seed)
    groups: dict[tuple[bytes, str], list[_Sample]] = defaultdict(list)
    seen: dict[tuple[bytes, str], int] = defaultdict(int)
    entries = [entry for entry in source.scan() if entry.control is not None]
    for done, entry in enumerate(entries):
        if progress is not None:
            progress(done, len(entries))
        payload = source.get(entry.id)
        try:
            if payload is None:
                continue
            provenance = owner_of(payload)
            couplet = decode(payload, provenance, fields=())
        except CorruptRecord:
            continue  # another kind of record, or one that the source will find damaged itself
        key = (provenance, task_of(couplet.lineage))
        if not key[1] or not couplet.held or (tasks is not None and key[1] not in tasks):
            continue
        states = np.stack([couplet.states.mean(axis=0), couplet.states[-1]])
        if not np.isfinite(states).all():
            continue
        sample = _Sample(entry.id, couplet.control.copy(), states.astype(np.float32))
        # Reservoir: every couplet of the task has the same chance to be among _SAMPLE.
        seen[key] += 1
        if len(groups[key]) < _SAMPLE:
            groups[key].append(sample)
        elif (place := rng.randrange(seen[key])) < _SAMPLE:
            groups[key][place] = sample
    if progress is not None:
        progress(len(entries), len(entries))
    return groups


def _store(
    source: _Source,
    objects: Objects,
    provenance: bytes,
    task: str,
    samples: Sequence[_Sample],
    per_task: int,
    uses: Callable[[Sequence[bytes]], Sequence[float]] | None,
    limit_bytes: int,
    seed: int,
) -> Built:
    ids = [sample.id for sample in samples]
    weights = np.ones(len(samples)) if uses is None else np.asarray(uses(ids), np.float64)
    clusters = k_medoids(_features(samples), np.maximum(weights, 1e-3), per_task, seed)
    entries = {entry.id: entry for entry in source.scan()}
    records: list[Record] = []
    notes: dict[str, Any] = {}
    for cluster in clusters:
        id = ids[cluster.medoid]
        payload, entry = source.get(id), entries.get(id)
        if payload is None or entry is None:
            continue  # evicted meanwhile
        records.append(Record(entry, bytes(payload)))
        notes[id.hex()] = {"weight": cluster.weight, "members": len(cluster.members)}
    tier = ColdTier(objects, prefix(provenance), task, limit_bytes=limit_bytes)
    with contextlib.suppress(CorruptRecord):  # it is about to be replaced
        tier.refresh()
    tier.notes = {"built_s": time.time(), "couplets": len(samples), "clusters": notes}
    # The manifest lists them in this order: the most typical first.
    tier.replace(records)
    tier.sweep()
    total = sum(cluster.weight for cluster in clusters)
    spread = sum(cluster.spread * cluster.weight for cluster in clusters) / total
    stats = tier.stats()
    return Built(provenance, task, len(samples), stats.entries, stats.size_bytes, spread)


def _features(samples: Sequence[_Sample]) -> NDArray[np.float64]:
    """(n, 2 S + C): states and controls, standardised over the task, each half of the distance."""
    states = np.stack([sample.states.ravel() for sample in samples]).astype(np.float64)
    controls = np.stack([sample.control for sample in samples]).astype(np.float64)
    return np.concatenate([_standard(states), _standard(controls)], axis=1)


def _standard(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    deviation = columns.std(axis=0)
    varies = deviation > 1e-6 * max(float(np.abs(columns).max(initial=0.0)), 1e-12)
    centred = (columns - columns.mean(axis=0))[:, varies] / deviation[varies]
    standard: NDArray[np.float64] = centred / np.sqrt(max(1, int(varies.sum())))
    return standard


# --- using --------------------------------------------------------------------------------------


def decode_templates(records: Iterable[Record], provenance: bytes) -> list[Couplet]:
    """The couplets in loaded templates; those that are damaged or of another provenance are
    passed over."""
    found = []
    for record in records:
        try:
            couplet = decode(record.payload, provenance, fields=("jacobian",))
        except CorruptRecord:
            continue
        if couplet.id == record.entry.id:
            found.append(couplet)
    return found


def typical_controls(templates: Sequence[Couplet], limit: int, apart: float = 0.05) -> Float:
    """(n, C): at most `limit` controls to compute first in a new context, most typical first.

    Controls closer than `apart` to an earlier one are left out: its couplet will cover them.
    """
    chosen: list[Float] = []
    for template in templates:
        if len(chosen) == limit:
            break
        control = template.control
        if all(
            control.shape == other.shape and np.linalg.norm(control - other) > apart
            for other in chosen
        ):
            chosen.append(control)
    return np.stack(chosen) if chosen else np.zeros((0, 0), np.float32)


class _Bounds(Protocol):
    """What `adopt` needs of a trust model."""

    def bound(self, curvature: float, distance: float) -> float: ...
    def radius(self, curvature: float, max_error: float) -> float: ...


def adopt(
    templates: Sequence[Couplet],
    exact: Couplet,
    migration: Migration,
    trust: Bounds | None,
    scale: NDArray[np.floating[Any]],
    max_error: float,
    witnesses: Sequence[Couplet] = (),
) -> Couplet | None:
    """`exact`, an unscored couplet of the present context, with the trust of the best template.

    A template qualifies where it was scored, lies at a distance d > 0 from the exact control within
    its own radius, and its migrated states differ from the exact ones by an error e within
    `max_error` (relative, see `scores.relative_error`). The states stay the exact ones; Jacobian
    and curvature come from the template. `witnesses` are other exact couplets of the same space:
    the result must predict each of them that lies within reach, too.

    The curvature is raised until the trust model's bound covers the template's own bound plus the
    steepest error per distance that was seen, on a grid of distances up to the new radius, which is
    at most d: no farther than was verified. None where no template qualifies, or there is no trust
    model: fail closed, and score by probes.
    """
    if trust is None or exact.jacobian is not None or not exact.held:
        return None
    test = _Test(exact, migration, trust, scale, max_error, witnesses)
    found = [made for made in map(test.adopted, templates) if made is not None]
    return max(found, key=lambda made: made.radius, default=None)


class Bounds(Protocol):
    """What `adopt` needs of a trust model."""

    def bound(self, curvature: float, distance: float) -> float: ...
    def radius(self, curvature: float, max_error: float) -> float: ...


@dataclass(frozen=True, eq=False)
class _Test:
    """One exact answer that templates are measured against."""

    exact: Couplet
    migration: Migration
    trust: Bounds
    scale: NDArray[np.floating[Any]]
    max_error: float
    witnesses: Sequence[Couplet]

    def adopted(self, template: Couplet) -> Couplet | None:
        exact = self.exact
        if template.jacobian is None or not template.held:
            return None
        if (template.plan.shape, template.states.shape) != (exact.plan.shape, exact.states.shape):
            return None
        distance, error = self._error(template, exact)
        # At the very same control nothing would be learnt about the Jacobian.
        if not (0.0 < distance <= template.radius and error <= self.max_error):
            return None
        made = replace(
            exact,
            jacobian=template.jacobian,
            stability=template.stability,
            transferability=template.transferability,
            lineage=lineage("adopted", task_of(template.lineage)),
        )
        steepest = error / distance
        for witness in self.witnesses:
            away, off = self._error(made, witness)
            if witness.space != exact.space or not 0.0 < away <= distance:
                continue
            if not off <= self.max_error:
                return None
            steepest = max(steepest, off / away)
        return self._with_trust(made, template.curvature, steepest, distance)

    def _error(self, source: Couplet, truth: Couplet) -> tuple[float, float]:
        """(control distance, relative error of `source` migrated to the control of `truth`)."""
        states = self.migration.migrate(
            source.states, source.jacobian, source.control, truth.control
        )
        distance = float(np.linalg.norm(truth.control - source.control))
        return distance, float(relative_error(states, truth.states, self.scale))

    def _with_trust(
        self, made: Couplet, curvature: float, steepest: float, distance: float
    ) -> Couplet | None:
        raised = max(curvature, 1e-6)
        for _ in range(_CURVATURE_STEPS):
            reach = min(distance, self.trust.radius(raised, self.max_error))
            if not reach > 0.0:
                return None
            grid = [reach * (n + 1) / _GRID for n in range(_GRID)]
            if all(
                self.trust.bound(raised, d) >= self.trust.bound(curvature, d) + steepest * d
                for d in grid
            ):
                return replace(made, curvature=raised, radius=reach)
            raised *= 1.5
        return None
