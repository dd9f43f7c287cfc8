"""Error against control distance, for each way of moving a couplet to a neighbouring control.

Plain reuse, the state transfer adapter (STA, below 5,000 parameters), one with 128 hidden units,
first order by the couplet's Jacobian, and second order along the axes (from the same probes). Per
suite, split into what is physical (centimetres) and what is semantic (standard deviations); and the
time of each per state, batched.

    python benchmarks/migration.py --data data --suite kitchen --suite inspection
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ctrlcache.errors import CalibrationError
from ctrlcache.scores import relative_error
from ctrlcache.transfer import Adapter, Jacobian, Migration, Reuse
from worldserve.calibrate import REFERENCE, load_model
from worldserve.data.dataset import clips
from worldserve.data.suites import get_suite
from worldserve.models.protocol import ModelSpec, WorldModel
from worldserve.neighbourhood import Neighbourhood, Sampling, neighbourhood, presents
from worldserve.training.adapter import adapter_path

DISTANCES = (0.01, 0.03, 0.05, 0.1, 0.2, 0.4)
_STATES_TIMED, _REPEATS = 4_096, 15


@dataclass(frozen=True)
class Moved:
    """Errors of one migration in one suite; each array is (contexts, distances).

    relative: state error, worst step. centimetres: per physical group (gripper, object), last step.
    semantic: root mean square over the semantic dimensions in standard deviations, last step.
    """

    relative: NDArray[np.float64]
    centimetres: dict[str, NDArray[np.float64]]
    semantic: NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=Path, default=Path("model_repository/world_model/1"))
    parser.add_argument("--loader", default=REFERENCE)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--suite", action="append", default=[])
    parser.add_argument("--contexts", type=int, default=120, help="per suite")
    parser.add_argument("--probe-radius", type=float, default=0.05)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    model = load_model(options.loader, options.weights)
    sampling = Sampling(probe_radii=(options.probe_radius,), distances=DISTANCES)
    migrations = known_migrations(options.weights, model.spec)
    console = Console()
    results: dict[str, Any] = {
        "weights_digest": model.spec.weights_digest,
        "distances": DISTANCES,
        "us_per_state": {m.name: time_per_state(m, model.spec) for m in migrations},
        "parameters": {m.name: m.parameters for m in migrations if isinstance(m, Adapter)},
    }
    for suite in options.suite or ["kitchen"]:
        rng = np.random.default_rng(0)
        source = clips(options.data, get_suite(suite), "test")
        points = itertools.islice(
            presents(model, source, 4, rng, sampling.horizon), options.contexts
        )
        arounds = (
            neighbourhood(model, point, rng, sampling)
            for point in track(points, f"{suite} contexts", total=options.contexts)
        )
        errors = measure(model, arounds, migrations, options.probe_radius)
        results[suite] = {name: summary(moved) for name, moved in errors.items()}
        contexts = len(errors["reuse"].relative)
        results[suite]["contexts"] = contexts
        console.print(table(f"{suite}, {contexts} contexts", results[suite]))
    for name, (middle, low, high) in results["us_per_state"].items():
        console.print(f"{name}: {middle:.2f} µs per state ({low:.2f}-{high:.2f})")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "migration.json").write_text(json.dumps(results, indent=1) + "\n")


def known_migrations(weights: Path, spec: ModelSpec) -> list[Migration]:
    """All that can be had for these weights; adapters that were not trained are left out, aloud."""
    made: list[Migration] = [Reuse()]
    for hidden in (None, 128):
        path = adapter_path(weights, hidden)
        try:
            adapter = Adapter.load(path, spec.weights_digest)
        except CalibrationError as error:
            print(f"left out: {error}")
            continue
        object.__setattr__(adapter, "name", "STA" if hidden is None else f"STA {hidden} hidden")
        made.append(adapter)
    return [*made, Jacobian()]


def measure(
    model: WorldModel, arounds: Iterable[Neighbourhood], migrations: list[Migration], radius: float
) -> dict[str, Moved]:
    """Errors of each migration, and of second order along the axes; `arounds` are not kept."""
    scale = model.spec.state_scale
    truths: list[NDArray[np.float32]] = []
    moved: dict[str, list[NDArray[np.float32]]] = {m.name: [] for m in migrations}
    moved["second order, axes"] = []
    for around in arounds:
        jacobian = around.scores(radius, scale).jacobian
        for m in migrations:
            moved[m.name].append(
                m.migrate(around.own.states, jacobian, around.control, around.query_controls)
            )
        moved["second order, axes"].append(second_order(around, jacobian, radius))
        truths.append(around.truths)
    true = np.stack(truths)  # (contexts, distances, H, S)
    return {name: errors_of(model, np.stack(states), true, scale) for name, states in moved.items()}


def second_order(
    around: Neighbourhood, jacobian: NDArray[np.float16], radius: float
) -> NDArray[np.float32]:
    """First order plus half the second differences along each axis."""
    controls, probes = around.probes[radius]
    axes = np.arange(around.control.size)
    a = (controls[0::2][axes, axes] - around.control)[:, None, None]
    b = (controls[1::2][axes, axes] - around.control)[:, None, None]
    at_a, at_b = probes[0::2] - around.own.states, probes[1::2] - around.own.states
    bend = 2 * (at_a / a - at_b / b) / (a - b)  # (C, H, S)
    step = around.query_controls - around.control  # (m, C)
    first = Jacobian().migrate(around.own.states, jacobian, around.control, around.query_controls)
    moved: NDArray[np.float32] = first + np.einsum("mc,chs->mhs", step**2 / 2, bend)
    return moved


def errors_of(
    model: WorldModel,
    states: NDArray[np.float32],
    truths: NDArray[np.float32],
    scale: NDArray[np.float32],
) -> Moved:
    spec = model.spec
    physics = model.physics(states[..., -1, :]) - model.physics(truths[..., -1, :])
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(spec.physics_names):
        for axis in ("_x_m", "_y_m", "_z_m"):
            if name.endswith(axis):
                groups.setdefault(name.removesuffix(axis), []).append(index)
    semantic = slice(*spec.semantic)
    safe = np.where(scale > 0, scale, np.inf)
    off = ((states - truths) / safe)[..., -1, semantic]
    return Moved(
        relative_error(states, truths, scale),
        {
            name: 100 * np.linalg.norm(physics[..., where], axis=-1)
            for name, where in groups.items()
        },
        np.sqrt(np.square(off).mean(axis=-1)),
    )


def summary(moved: Moved) -> dict[str, Any]:
    def mean_p95(values: NDArray[np.float64]) -> list[list[float]]:
        return [
            [float(values[:, i].mean()), float(np.quantile(values[:, i], 0.95))]
            for i in range(values.shape[1])
        ]

    return {
        "relative": mean_p95(moved.relative),
        **{f"{name}_cm": mean_p95(values) for name, values in moved.centimetres.items()},
        "semantic": mean_p95(moved.semantic),
    }


def time_per_state(migration: Migration, spec: ModelSpec) -> tuple[float, float, float]:
    """Microseconds per state of one step, batched: median, least and most of the repeats."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(_STATES_TIMED // 8, 8, spec.state_dim)).astype(np.float32)
    jacobian = rng.normal(size=(*states.shape, spec.control_dim)).astype(np.float16)
    control, query = rng.uniform(-1, 1, (2, len(states), spec.control_dim)).astype(np.float32)
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        migration.migrate(states, jacobian, control, query)
        taken.append((time.perf_counter() - start) / _STATES_TIMED * 1e6)
    return float(np.median(taken)), min(taken), max(taken)


def table(title: str, rows: dict[str, Any]) -> Table:
    made = Table(title=f"{title}: mean (p95) by control distance", title_justify="left")
    made.add_column("error")
    made.add_column("migration")
    for distance in DISTANCES:
        made.add_column(f"{distance:g}", justify="right")
    names = [name for name in rows if name != "contexts"]
    for error in rows[names[0]]:
        for name in names:
            cells = [f"{mean:.3g} ({p95:.3g})" for mean, p95 in rows[name][error]]
            made.add_row(error if name == names[0] else "", name, *cells)
    return made


if __name__ == "__main__":
    main()
