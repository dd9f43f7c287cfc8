"""Templates: what is chosen, what is stored, and what one may do in another context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import object_store
import pytest
from hunting import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ctrlcache.clustering import k_medoids
from ctrlcache.couplet import Couplet, encode
from ctrlcache.errors import InvalidInput
from ctrlcache.key import digest
from ctrlcache.scores import relative_error
from ctrlcache.templates import (
    adopt,
    build,
    decode_templates,
    lineage,
    prefix,
    task_of,
    typical_controls,
)
from ctrlcache.tiers.base import Entry, Record
from ctrlcache.tiers.cold import ColdTier, list_tasks
from ctrlcache.tiers.memory import MemoryTier
from ctrlcache.tiers.objects import ObjectError, Objects
from ctrlcache.transfer import Jacobian

PROVENANCE, OTHER = digest(b"model"), digest(b"another tenant")
H, S, C = 3, 12, 4
SCALE = np.ones(S)


@pytest.fixture
def objects() -> Iterator[Objects]:
    objects = object_store.objects(object_store.gateway())
    for task_prefix in (prefix(PROVENANCE), prefix(OTHER)):
        objects.delete(objects.names(task_prefix))
    yield objects
    objects.close()


def couplet(
    control: NDArray[np.float32],
    centre: float = 1.0,
    task: str = "cut",
    space: bytes = bytes(16),
    seed: int = 0,
) -> Couplet:
    rng = np.random.default_rng(seed)
    plan = np.broadcast_to(np.float32(control), (H, C)).copy()
    states = (centre + rng.normal(0, 0.05, (H, S))).astype(np.float32)
    return Couplet(
        space,
        plan,
        states,
        jacobian=np.zeros((H, S, C), np.float16),
        radius=0.3,
        curvature=0.1,
        cost_ms=50.0,
        created_s=1e9,
        lineage=lineage("session", task),
    )


def as_record(item: Couplet, provenance: bytes = PROVENANCE) -> Record:
    entry = Entry(item.id, item.space, item.control, item.radius, item.curvature, 50.0, 1e9)
    return Record(entry, encode(item, provenance, "stored"))


def memory(*records: Record) -> MemoryTier:
    tier = MemoryTier(1 << 30)
    tier.put(records)
    return tier


# --- clustering -----------------------------------------------------------------------------------


def test_clusters_that_are_there_are_found() -> None:
    """Three clouds give three medoids, one in each, the heaviest cloud first."""
    rng = np.random.default_rng(0)
    clouds = [rng.normal(centre, 0.1, (count, 3)) for centre, count in ((0, 50), (5, 20), (9, 30))]
    points = np.concatenate(clouds)
    clusters = k_medoids(points, np.ones(100), 3)
    assert [len(cluster.members) for cluster in clusters] == [50, 30, 20]
    assert [round(float(points[cluster.medoid].mean())) for cluster in clusters] == [0, 9, 5]


@settings(max_examples=examples(60))
@given(
    points=st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=1, max_size=40),
    k=st.integers(1, 12),
    seed=st.integers(0, 100),
)
def test_clusters_are_a_partition(points: list[tuple[float, float]], k: int, seed: int) -> None:
    """Every point is in one cluster, the one whose medoid is nearest; medoids are distinct points;
    weights add up."""
    array = np.asarray(points)
    weights = np.arange(1.0, len(points) + 1)
    clusters = k_medoids(array, weights, k, seed)
    members = [member for cluster in clusters for member in cluster.members]
    assert sorted(members) == list(range(len(points)))
    assert 1 <= len(clusters) <= k
    medoids = [cluster.medoid for cluster in clusters]
    assert len({tuple(array[m]) for m in medoids}) == len(medoids)
    assert sum(cluster.weight for cluster in clusters) == pytest.approx(weights.sum())
    for cluster in clusters:
        assert cluster.medoid in cluster.members
        for member in cluster.members:
            away = np.linalg.norm(array[member] - array[cluster.medoid])
            nearest = min(np.linalg.norm(array[member] - array[m]) for m in medoids)
            assert away <= nearest + 1e-3


def test_wrong_clustering_arguments_are_refused() -> None:
    """The error shows the shapes."""
    with pytest.raises(InvalidInput, match=r"\(3, 2\), \(2,\), 1"):
        k_medoids(np.zeros((3, 2)), np.ones(2), 1)


# --- building -------------------------------------------------------------------------------------


def test_a_build_stores_what_is_typical_per_task_and_provenance(objects: Objects) -> None:
    """Couplets of two modes give a template from each; tasks and tenants are kept apart; slices,
    couplets without a task and rare tasks give none; the most typical comes first."""
    rng = np.random.default_rng(1)
    records = []
    for n in range(30):
        left, right = rng.normal(-0.5, 0.02, C), rng.normal(0.5, 0.02, C)
        records.append(as_record(couplet(left, centre=-1, seed=n, space=digest(b"%d" % n))))
        if n % 3 == 0:
            records.append(as_record(couplet(right, centre=1, seed=n, space=digest(b"%d" % n))))
        records.append(as_record(couplet(right, task="pour", seed=n), OTHER))
    records.append(as_record(couplet(left, task="")))
    records.append(as_record(couplet(left, task="rare")))
    records.append(Record(Entry(digest(b"slice"), bytes(16), None, 0, 0, 1, 0), b"slice"))
    records.append(Record(Entry(digest(b"junk"), bytes(16), left, 0, 0, 1, 0), b"junk" * 20))
    seen: list[tuple[int, int]] = []
    built = build(memory(*records), objects, per_task=2, progress=lambda *p: seen.append(p))
    facts = {(b.provenance, b.task): (b.couplets, b.templates) for b in built}
    assert facts == {(PROVENANCE, "cut"): (40, 2), (OTHER, "pour"): (30, 2)}
    assert seen[-1][0] == seen[-1][1]
    assert list_tasks(objects, prefix(PROVENANCE)) == ["cut"]
    tier = ColdTier(objects, prefix(PROVENANCE), "cut")
    assert tier.refresh()
    loaded = [Record(h.entry, tier.get(h.entry.id) or b"") for h in tier.held(1 << 20)]
    templates = decode_templates(loaded, PROVENANCE)
    assert [round(float(t.control.mean()), 1) for t in templates] == [-0.5, 0.5]
    assert tier.notes["couplets"] == 40
    assert decode_templates(loaded, OTHER) == []


def test_a_new_build_replaces_the_old_one(objects: Objects) -> None:
    """Templates, manifest and objects are those of the last build alone."""
    first = memory(*(as_record(couplet(np.full(C, n / 20), seed=n)) for n in range(10)))
    second = memory(*(as_record(couplet(np.full(C, -n / 20), seed=n)) for n in range(1, 11)))
    build(first, objects, per_task=4)
    build(second, objects, per_task=3)
    tier = ColdTier(objects, prefix(PROVENANCE), "cut")
    tier.refresh()
    assert {entry.id for entry in tier.scan()} <= {entry.id for entry in second.scan()}
    assert len(objects.names(prefix(PROVENANCE))) == 3 + 1


def test_what_is_used_weighs_more(objects: Objects) -> None:
    """With one template to give, it stands where the uses are."""
    records = [as_record(couplet(np.full(C, -0.5 + n / 1000), centre=-1)) for n in range(20)]
    popular = [as_record(couplet(np.full(C, 0.5 + n / 1000), centre=1)) for n in range(5)]
    ids = {record.entry.id for record in popular}
    build(
        memory(*records, *popular),
        objects,
        per_task=1,
        uses=lambda asked: [100.0 if id in ids else 1.0 for id in asked],
    )
    tier = ColdTier(objects, prefix(PROVENANCE), "cut")
    tier.refresh()
    (entry,) = tier.scan()
    assert entry.id in ids


def test_lineage_carries_the_task() -> None:
    """Kind and task go in and the task comes out, whatever characters it has."""
    assert lineage("session", "") == "session"
    assert task_of("session") == task_of("") == ""
    assert task_of(lineage("probe", "cut: with a knife")) == "cut: with a knife"


# --- using ----------------------------------------------------------------------------------------


def test_typical_controls_are_spread() -> None:
    """In order, without those that an earlier one covers, no more than asked for."""
    templates = [couplet(np.float32([x, 0, 0, 0])) for x in (0.0, 0.01, 0.3, 0.32, -0.6)]
    found = typical_controls(templates, 3)
    assert found[:, 0].tolist() == pytest.approx([0.0, 0.3, -0.6])
    assert typical_controls(templates, 1).shape == (1, C)
    assert len(typical_controls([], 5)) == 0


class Line:
    """bound = 2 curvature distance², as far as 0.5."""

    def bound(self, curvature: float, distance: float) -> float:
        return 2 * curvature * distance**2 if distance <= 0.5 else float("inf")

    def radius(self, curvature: float, max_error: float) -> float:
        return min(0.5, float(np.sqrt(max_error / (2 * curvature))))


def quadratic(
    control: NDArray[np.float64], bend: float, tilt: float, shift: float
) -> NDArray[np.float32]:
    """A scene whose states follow the control: slope, curvature, and an offset of its own."""
    t = float(control[0])
    row = np.ones(S) + shift
    row[0] += t * (1 + tilt) + bend * t * t
    return np.broadcast_to(row, (H, S)).astype(np.float32)


def scene(
    t: float, bend: float = 0.2, tilt: float = 0.0, shift: float = 0.0, **more: float
) -> Couplet:
    control = np.array([t, 0, 0, 0])
    jacobian = np.zeros((H, S, C), np.float16)
    jacobian[:, 0, 0] = (1 + tilt) + 2 * bend * t
    item = couplet(np.float32(control))
    return replace(item, states=quadratic(control, bend, tilt, shift), jacobian=jacobian, **more)


def unscored(item: Couplet) -> Couplet:
    return replace(item, jacobian=None, radius=0.0, curvature=0.0, lineage="session")


@settings(max_examples=examples(100))
@given(
    at=st.floats(-0.5, 0.5),
    away=st.floats(-0.3, 0.3),
    bend=st.floats(0, 0.5),
    tilt=st.floats(-0.3, 0.3),
    shift=st.floats(-0.05, 0.05),
)
def test_adoption_keeps_what_is_exact_and_never_widens_trust(
    at: float, away: float, bend: float, tilt: float, shift: float
) -> None:
    """States stay exact, the radius is no larger than the distance that was verified, curvature is
    no lower than the template's, and the stated bound stays within the budget up to the radius."""
    trust, budget = Line(), 0.05
    template = scene(at, bend, curvature=max(bend, 1e-3), radius=0.3)
    exact = unscored(scene(at + away, bend, tilt, shift))
    adopted = adopt([template], exact, Jacobian(), trust, SCALE, budget)
    if adopted is None:
        return
    assert np.array_equal(adopted.states, exact.states)
    assert adopted.id == exact.id
    distance = float(np.linalg.norm(exact.control - template.control))
    assert 0 < adopted.radius <= distance + 1e-9
    assert adopted.curvature >= template.curvature
    assert trust.bound(adopted.curvature, adopted.radius) <= budget + 1e-9


@pytest.mark.parametrize("witnessed", [False, True])
def test_adopted_couplets_rarely_break_their_bound(witnessed: bool) -> None:
    """Over contexts whose slope and offset differ at random, an adopted couplet's true error at a
    random control within its radius exceeds the stated bound in at most 5 % of the cases, with and
    without a witness from the same context."""
    rng = np.random.default_rng(7)
    trust, budget = Line(), 0.05
    over = used = 0
    for _ in range(600):
        at, bend = rng.uniform(-0.5, 0.5), rng.uniform(0.02, 0.5)
        tilt, shift = rng.normal(0, 0.05), rng.normal(0, 0.01)
        q = at + rng.uniform(-0.3, 0.3)
        template = scene(at, bend, curvature=bend, radius=0.3)
        witness = unscored(scene(q + rng.uniform(-0.2, 0.2), bend, tilt, shift))
        adopted = adopt(
            [template],
            unscored(scene(q, bend, tilt, shift)),
            Jacobian(),
            trust,
            SCALE,
            budget,
            [witness] if witnessed else [],
        )
        if adopted is None:
            continue
        step = rng.uniform(-adopted.radius, adopted.radius)
        query = adopted.control + np.float32([step, 0, 0, 0])
        answer = Jacobian().migrate(adopted.states, adopted.jacobian, adopted.control, query)
        truth = quadratic(query.astype(np.float64), bend, tilt, shift)
        used += 1
        over += float(relative_error(answer, truth, SCALE)) > trust.bound(
            adopted.curvature, abs(step)
        )
    assert used > 150
    assert over / used <= 0.05


def test_a_witness_that_disagrees_prevents_adoption() -> None:
    """The template fits the exact answer by chance, but not another one of the same context."""
    template = scene(-0.1, 0.0, curvature=0.01, radius=0.3)
    exact = unscored(scene(0.0, 0.0, tilt=4.0))  # at the origin a wrong slope does not show
    witness = unscored(scene(0.08, 0.0, tilt=4.0))
    free = adopt([template], exact, Jacobian(), Line(), SCALE, 0.05)
    assert free is not None
    assert adopt([template], exact, Jacobian(), Line(), SCALE, 0.05, [witness]) is None
    elsewhere = replace(witness, space=digest(b"elsewhere"))
    assert adopt([template], exact, Jacobian(), Line(), SCALE, 0.05, [elsewhere]) is not None


def test_the_same_scene_is_adopted_and_another_is_not() -> None:
    """Where the template predicts the exact answer it lends its trust; where it does not, never."""
    trust = Line()
    template = scene(0.0, curvature=0.2, radius=0.3)
    here = adopt([template], unscored(scene(0.1)), Jacobian(), trust, SCALE, 0.05)
    assert here is not None
    assert here.radius > 0.05
    assert task_of(here.lineage) == "cut"
    moved = unscored(scene(0.1, shift=0.5))
    assert adopt([template], moved, Jacobian(), trust, SCALE, 0.05) is None
    assert adopt([], unscored(scene(0.1)), Jacobian(), trust, SCALE, 0.05) is None


def test_adoption_fails_closed() -> None:
    """Without a trust model, a scored template, a distance to learn from, or a fitting shape there
    is no adoption; and what has its own scores keeps them."""
    trust = Line()
    template = scene(0.0, curvature=0.2, radius=0.3)
    exact = unscored(scene(0.1))

    def tried(a: Couplet = template, b: Couplet = exact, model: Line | None = trust) -> object:
        return adopt([a], b, Jacobian(), model, SCALE, 0.05)

    assert tried() is not None
    assert tried(model=None) is None
    assert tried(a=replace(template, jacobian=None)) is None
    assert tried(a=replace(template, radius=0.05)) is None
    assert tried(b=unscored(scene(0.0))) is None
    assert tried(b=scene(0.1)) is None
    assert tried(a=replace(template, states=template.states[:, :-1])) is None
    assert tried(a=replace(template, states=np.full_like(template.states, np.nan))) is None
    varied = exact.plan.copy()
    varied[1] += 0.1
    assert tried(b=replace(exact, plan=varied)) is None


def test_templates_that_are_damaged_are_passed_over() -> None:
    """A flipped byte, another provenance or an id that does not fit: not a template."""
    good, bad = as_record(couplet(np.zeros(C))), as_record(couplet(np.full(C, 0.1)))
    flipped = bytearray(bad.payload)
    flipped[60] ^= 1
    wrong_id = Record(replace(bad.entry, id=digest(b"x")), bad.payload)
    records = [good, Record(bad.entry, bytes(flipped)), wrong_id]
    assert [t.id for t in decode_templates(records, PROVENANCE)] == [good.entry.id]
    assert decode_templates(records, OTHER) == []


def test_a_build_without_a_store_fails_clearly(tmp_path: Path) -> None:
    """ObjectError says which endpoint cannot be reached."""
    nowhere = Objects("127.0.0.1:1", "bucket", ("a", "b"), tls=False, timeout_s=0.5)
    records = [as_record(couplet(np.full(C, n / 20), seed=n)) for n in range(5)]
    with pytest.raises(ObjectError, match=r"127\.0\.0\.1:1 cannot be reached"):
        build(memory(*records), nowhere)


def test_equal_points_far_from_the_origin_are_one_cluster() -> None:
    """What rounding leaves between equal points does not make two clusters of them."""
    points = np.array([[1 / 3, 443.9315937850216]] * 2)
    assert len(k_medoids(points, np.ones(2), 2)) == 1
