"""Calibrate the trust in approximate answers of one model: `ctrlcache calibrate model`.

Generates held-out pairs of controls with the frozen model, through the `WorldModel` protocol only,
and hands them to `ctrlcache.conformal`. The result goes beside the weights as `trust.json`.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, cast

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ctrlcache.calibration import TrustModel, trust_path
from ctrlcache.conformal import BUDGETS, Pairs, fit
from ctrlcache.errors import CalibrationError, CtrlCacheError
from ctrlcache.lending import with_lending
from ctrlcache.scores import relative_error
from ctrlcache.transfer import Adapter, Jacobian, Migration, make_migration
from worldserve.lending import AGEING, collect_ages, psnr_db
from worldserve.models.protocol import WorldModel
from worldserve.neighbourhood import ClipLike, Neighbourhood, Sampling, neighbourhood, presents

__all__ = [
    "calibrate_model",
    "collect",
    "explained",
    "load_model",
    "model_command",
    "pairs_of",
    "psnr_db",
]

ADAPTER = "adapter.safetensors"
REFERENCE = "worldserve.models.reference:ReferenceWorldModel.load"
_SUITES, _PROBE_RADII = ["kitchen", "inspection", "edudemo"], [0.1]
_PER_CLIP = 8  # contexts of one clip, about a second apart: nearly independent scenes


def collect(
    model: WorldModel,
    clips: Iterable[ClipLike],
    contexts: int,
    sampling: Sampling,
    *,
    migration: Migration | None = None,
    frames_every: int = 4,
    per_clip: int = _PER_CLIP,
    families: Mapping[str, str] = MappingProxyType({}),
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> dict[float, Pairs]:
    """Pairs per probe radius, from up to `contexts` contexts of `clips`.

    frames_every: frames are generated and compared in every n-th context; 0: never. families: of
    a clip by its operation (`Pairs.family`).
    """
    rng = np.random.default_rng(seed)
    parts: dict[float, list[Pairs]] = {r: [] for r in sampling.probe_radii}
    points = itertools.islice(presents(model, clips, per_clip, rng, sampling.horizon), contexts)
    for number, present in enumerate(points):
        around = neighbourhood(model, present, rng, sampling)
        with_frames = frames_every > 0 and number % frames_every == 0
        psnr = _frames_psnr(model, around) if with_frames else None
        for radius in sampling.probe_radii:
            parts[radius].append(
                replace(
                    pairs_of(around, number, radius, model.spec.state_scale, migration, psnr),
                    family=np.full(len(around.answers), families.get(present.operation, "")),
                )
            )
        advance()
    if not any(parts.values()):
        raise CalibrationError("there are no clips to calibrate on")
    return {radius: Pairs.join(made) for radius, made in parts.items()}


def pairs_of(
    around: Neighbourhood,
    context: int,
    radius: float,
    scale: NDArray[np.float32],
    migration: Migration | None = None,
    psnr: NDArray[np.float64] | None = None,
) -> Pairs:
    """One couplet against each of its m queries. `psnr` (m,): see `Pairs.psnr_db`."""
    move = migration or Jacobian()
    scores = around.scores(radius, scale, move)
    moved = move.migrate(around.own.states, scores.jacobian, around.control, around.query_controls)
    away = around.query_controls.astype(np.float64) - around.control
    m = len(around.answers)
    return Pairs(
        context=np.full(m, context),
        curvature=np.full(m, scores.curvature),
        sensitivity=np.full(m, scores.sensitivity),
        transferability=np.full(m, scores.transferability),
        distance=around.distances,
        main_axis=np.square(away).max(axis=-1) / np.maximum(np.square(away).sum(axis=-1), 1e-30),
        error=relative_error(moved, around.truths, scale),
        psnr_db=np.full(m, np.nan) if psnr is None else psnr,
    )


def calibrate_model(
    model: WorldModel,
    clips: Iterable[ClipLike],
    measured_on: Iterable[ClipLike] | None = None,
    aged_on: Iterable[ClipLike] | None = None,
    *,
    contexts: int = 240,
    contexts_apart: int | None = None,
    sampling: Sampling | None = None,
    delta: float = 0.05,
    budgets: Sequence[float] = BUDGETS,
    migration: Migration | None = None,
    frames_every: int = 4,
    families: Mapping[str, str] = MappingProxyType({}),
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> tuple[TrustModel, dict[float, float]]:
    """The calibration, and the mean trust radius that each probe radius would give.

    Of several probe radii, the one with the largest mean trust radius is taken. `measured_on`:
    clips for the coverage table; without them a third of `clips` is set aside. aged_on: clips to
    find out what probes are worth some frames later; without them, nothing is lent from one frame
    to the next, and no frames are drawn. contexts_apart: of either of these, `contexts` by default.
    families: of a clip by its operation; the bound must hold in each of them.
    """
    how = sampling or Sampling()
    apart_contexts = contexts if contexts_apart is None else contexts_apart
    spec = model.spec
    move = migration or Jacobian()
    found = collect(
        model,
        clips,
        contexts,
        how,
        migration=move,
        frames_every=frames_every,
        families=families,
        seed=seed,
        advance=advance,
    )
    apart: dict[float, Pairs] = {}
    if measured_on is not None:
        apart = collect(
            model,
            measured_on,
            apart_contexts,
            how,
            migration=move,
            frames_every=0,
            families=families,
            seed=seed + 1,
            advance=advance,
        )
    fitted = {
        radius: fit(
            pairs,
            weights_digest=spec.weights_digest,
            migration=move.name,
            probe_radius=radius,
            horizon=how.horizon,
            delta=delta,
            budgets=budgets,
            measured=apart.get(radius),
            seed=seed,
        )
        for radius, pairs in found.items()
    }
    reach = {r: trust.mean_radius(found[r].curvature, budgets) for r, trust in fitted.items()}
    best = max(reach, key=lambda radius: reach[radius])
    trust = fitted[best]
    if aged_on is not None:
        aged = collect_ages(
            model,
            aged_on,
            apart_contexts,
            trust,
            move,
            sampling=replace(AGEING, horizon=how.horizon),
            families=families,
            seed=seed + 2,
            advance=advance,
        )
        trust = with_lending(trust, aged, budgets)
    return trust, reach


def _frames_psnr(model: WorldModel, around: Neighbourhood) -> NDArray[np.float64]:
    """(m,): the couplet's frames against each query's own, the worst frame of the horizon."""
    outputs = [around.own, *around.answers]
    made = model.generate(
        [around.present.frame] * len(outputs), [o.tokens for o in outputs], [0] * len(outputs)
    )
    own, others = made[0], np.stack(made[1:])  # (H, h, w, 3), (m, H, h, w, 3)
    worst: NDArray[np.float64] = psnr_db(others, own).min(axis=-1)
    return worst


def load_model(loader: str, weights: Path) -> WorldModel:
    """Call `loader`, written as package.module:name, with the directory of the weights."""
    module, _, name = loader.partition(":")
    if not name:
        raise CalibrationError(f"a model loader is written package.module:name, got {loader!r}")
    try:
        made: Any = importlib.import_module(module)
        for part in name.split("."):
            made = getattr(made, part)
        return cast(WorldModel, made(weights))
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise CalibrationError(
            f"cannot load a model by {loader} from {weights}: {error}"
        ) from error


def model_command(
    weights: Annotated[
        Path, typer.Option(help="Directory of the weights; trust.json goes there.")
    ] = Path("model_repository/world_model/1"),
    data: Annotated[Path, typer.Option(help="Root of the generated episodes.")] = Path("data"),
    suite: Annotated[
        list[str], typer.Option(help="Suite; give it several times for several.")
    ] = _SUITES,
    contexts: Annotated[
        int, typer.Option(help="Scenes per suite; half as many where others are used.")
    ] = 240,
    delta: Annotated[
        float, typer.Option(help="Share of answers that may exceed the bound.")
    ] = 0.05,
    probe_radius: Annotated[
        list[float], typer.Option(help="Given several times, the best one is found by measurement.")
    ] = _PROBE_RADII,
    measure: Annotated[
        bool, typer.Option(help="Measure coverage on the test split, calibrate on validation.")
    ] = True,
    migration: Annotated[str, typer.Option(help="What the bounds are to hold for.")] = "jacobian",
    loader: Annotated[
        str, typer.Option(help="How to load the model: module:callable.")
    ] = REFERENCE,
) -> None:
    """Calibrate how far a model's cached answers can be trusted (writes trust.json)."""
    from worldserve.data.dataset import clips
    from worldserve.data.suites import get_suite

    with explained():
        console = Console()
        model = load_model(loader, weights)
        suites = [get_suite(name) for name in suite]

        def of(split: str) -> Iterable[ClipLike]:
            views = [(s, camera) for s in suites for camera in range(len(s.cameras))]
            return interleave([clips(data, s, split, camera) for s, camera in views])

        adapter = None
        if migration == "adapter":
            adapter = Adapter.load(weights / ADAPTER, model.spec.weights_digest)
        moved = make_migration(migration, adapter)
        sampling = Sampling(probe_radii=tuple(probe_radius))
        wanted = contexts * len(suites)
        with Progress(
            TextColumn("probing"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        ) as progress:
            bar = progress.add_task("contexts", total=wanted + wanted // 2 * (2 if measure else 1))
            trust, reach = calibrate_model(
                model,
                of("validation"),
                of("test") if measure else None,
                of("validation"),
                contexts=wanted,
                contexts_apart=wanted // 2,
                sampling=sampling,
                delta=delta,
                migration=moved,
                families={o.name: s.name for s in suites for o in s.operations},
                advance=lambda: progress.advance(bar),
            )
        path = trust_path(weights)
        trust.save(path)
        console.print(_summary(trust, reach))
        console.print(f"written to {path}")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """What is wrong with a command's input, or missing, ends it with one line and status 1."""
    try:
        yield
    except (CtrlCacheError, FileNotFoundError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def interleave(sources: Sequence[Iterable[ClipLike]]) -> Iterable[ClipLike]:
    """One clip of each source in turn, until all are used up."""
    for row in itertools.zip_longest(*sources):
        yield from (clip for clip in row if clip is not None)


def _summary(trust: TrustModel, reach: dict[float, float]) -> Table:
    table = Table(title=f"trust of weights {trust.weights_digest[:12]}", title_justify="left")
    for column in ("group", "budget", "accepted", "over bound", "share"):
        table.add_column(column, justify="left" if column == "group" else "right")
    for row in trust.coverage:
        if row.accepted:
            table.add_row(
                row.group, f"{row.budget:g}", str(row.accepted), str(row.over), f"{row.share:.1%}"
            )

    def ages(values: Sequence[float], unit: float = 1.0) -> str:
        return ", ".join(f"{value / unit:.2f}" for value in values if unit) or "never"

    radii = ", ".join(f"{r:g}: {mean:.3f}" for r, mean in reach.items())
    table.caption = (
        f"bound = {trust.floor:.2g} + {trust.q:.3g} (curvature + {trust.kappa0:.3g})"
        f"^{trust.curvature_power:g} distance^{trust.distance_power:g}, up to "
        f"{trust.max_distance:.2f}; mean trust radius by probe radius: {radii}\n"
        f"frames are shown within {trust.frame_distance:.3f}, and drawn so many times as far, "
        f"by age of the slope: {ages(trust.drawn_change, trust.frame_change)}\n"
        f"a slope is taken to be so many times as curved when lent 1, 2, ... frames on: "
        f"{ages(trust.lent_curvature)}"
    )
    return table
