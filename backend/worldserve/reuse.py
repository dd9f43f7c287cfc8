"""Calibrate step reuse of the reference model: `ctrlcache calibrate reuse`.

Frames are drawn from predictions on held-out clips, with reuse and without; `worldcache.fitting`
finds what keeps which quality. The result goes beside the weights as `reuse.json`.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor

from ctrlcache.errors import CalibrationError
from worldcache.fitting import fit_table
from worldcache.reuse_calibration import ReuseCalibration, reuse_path
from worldcache.running import Reuse
from worldcache.steps import Policy, Reuses
from worldcache.weights import WeightSettings
from worldserve.calibrate import explained, interleave
from worldserve.data.dataset import clips
from worldserve.data.suites import get_suite
from worldserve.models import stepping
from worldserve.models.generator import NOISE
from worldserve.models.protocol import Float, Pixels, RolloutInput
from worldserve.models.reference import ReferenceWorldModel
from worldserve.neighbourhood import ClipLike, presents

__all__ = ["Case", "Drawn", "GeneratorSubject", "calibrate_reuse", "cases_of", "reuse_command"]

_STEPS = [8]
_PER_CLIP = 2


@dataclass(frozen=True, eq=False)
class Case:
    """Something to draw: the last frame (h, w, 3), tokens (H, N, D), controls (H, C), the true
    frames (up to H, h, w, 3), and the seed."""

    frame: Pixels
    tokens: Float
    plan: Float
    truth: Pixels
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Drawn:
    """What `worldcache.fitting` wants to know of one generation."""

    frames: Pixels
    skipped: float
    activity: NDArray[np.float64]


def cases_of(
    model: ReferenceWorldModel,
    clips: Iterable[ClipLike],
    count: int,
    horizon: int = 8,
    per_clip: int = _PER_CLIP,
) -> list[Case]:
    """Predictions at moments of the clips; every second one of a held control."""
    rng = np.random.default_rng(0)
    made: list[Case] = []
    for present in itertools.islice(presents(model, clips, per_clip, rng, horizon), count):
        plan = np.repeat(present.control[None], horizon, axis=0)
        if len(made) % 2 and len(present.controls_after) >= horizon:
            plan = np.asarray(present.controls_after[:horizon], np.float32)
        item = RolloutInput(present.memory, present.tokens, plan, present.conditioning)
        [out] = model.rollout([item])
        truth = present.frames_after[:horizon]
        made.append(Case(present.frame, out.tokens, plan, truth, seed=len(made)))
    if not made:
        raise CalibrationError("there are no clips to calibrate on")
    return made


class GeneratorSubject:
    """Implements `worldcache.fitting.Subject` on the generator of the reference model."""

    def __init__(
        self,
        model: ReferenceWorldModel,
        cases: Sequence[Case],
        steps: int,
        settings: WeightSettings,
        change: NDArray[np.float32] | None = None,
    ) -> None:
        self.steps = steps
        self.model = model
        self.cases = cases
        with torch.no_grad():
            self.change = self._change() if change is None else change
        self.activities = self.activities_with(settings)

    def outputs(self, case: int, reuses: Reuses = "step") -> list[Tensor]:
        last, tokens, noise = self._flow(self.cases[case])
        generator, x, ends = self.model.network.generator, last + NOISE * noise, []
        with torch.no_grad():
            for step in range(self.steps):
                t = step / self.steps
                ends.append(generator(x, x.new_full((len(x),), t), last, tokens))
                x = x + (ends[-1] - x) / ((1 - t) * self.steps)
        return ends

    def run(self, case: int, policy: Policy) -> Drawn:
        frames, reuse = self.draw(case, policy)
        return Drawn(frames, reuse.tally.skipped, self.activities[case])

    def draw(self, case: int, policy: Policy) -> tuple[Pixels, Reuse]:
        item = self.cases[case]
        return self.model.draw(item.frame, item.tokens, item.seed, self.steps, policy, item.plan)

    def _flow(self, case: Case) -> tuple[Tensor, Tensor, Tensor]:
        return self.model.flow(case.frame, case.tokens, case.seed)

    def _change(self) -> NDArray[np.float32]:
        generator, few = self.model.network.generator, self.cases[:8]
        maps = [stepping.block_change(generator, *self._flow(c), self.steps) for c in few]
        mean: NDArray[np.float32] = np.mean(maps, axis=0).astype(np.float32)
        return mean

    def activities_with(self, settings: WeightSettings) -> list[NDArray[np.float64]]:
        """Activity (H,) of every case, under these settings."""
        with torch.no_grad():
            return [self._activity(case, settings) for case in self.cases]

    def _activity(self, case: Case, settings: WeightSettings) -> NDArray[np.float64]:
        last, tokens, noise = self._flow(case)
        x = last + NOISE * noise
        end = self.model.network.generator(x, x.new_zeros(len(x)), last, tokens)
        return stepping.weigh(last, end, tokens, self.change, settings)


def calibrate_reuse(
    model: ReferenceWorldModel,
    cases: Sequence[Case],
    steps: Sequence[int],
    settings: WeightSettings,
    delta: float = 0.05,
    advance: Callable[[], None] = lambda: None,
) -> ReuseCalibration:
    """A calibration of the model's weights for each number of steps."""
    made = ReuseCalibration(
        weights_digest=model.spec.weights_digest,
        tables={},
        settings=settings,
        delta=delta,
        cases=len(cases),
        created=datetime.date.today().isoformat(),
    )
    for count in steps:
        change = made.change if made.change.size else None
        subject = GeneratorSubject(model, cases, count, settings, change)
        made = replace(made, change=subject.change)
        model.recalibrate(made)
        table = fit_table(subject, len(cases), delta=delta, advance=advance)
        made = made.with_table(count, table)
    model.recalibrate(made)
    return made


def reuse_command(
    weights: Annotated[
        Path, typer.Option(help="Directory of the weights; reuse.json goes there.")
    ] = Path("model_repository/world_model/1"),
    data: Annotated[
        Path, typer.Option(help="Directory of held-out clips (.npz); root of the suites.")
    ] = Path("client_examples/clips"),
    suite: Annotated[
        list[str], typer.Option(help="Suite, on its validation episodes; several for several.")
    ] = [],  # noqa: B006 - typer copies it
    steps: Annotated[
        list[int], typer.Option(help="Steps of the generator; several times for several.")
    ] = _STEPS,
    cases: Annotated[int, typer.Option(help="Generations to calibrate on, at most.")] = 24,
    delta: Annotated[float, typer.Option(help="Share of frames that may miss the budget.")] = 0.05,
    sensitivity: Annotated[float, typer.Option(help="See docs/worldcache.md.")] = 0.7,
    window: Annotated[int, typer.Option(help="See docs/worldcache.md.")] = 2,
    semantics: Annotated[float, typer.Option(help="See docs/worldcache.md.")] = 0.3,
) -> None:
    """Calibrate which quality step reuse keeps (writes reuse.json)."""
    with explained():
        settings = WeightSettings(sensitivity, window, semantics)
        model = ReferenceWorldModel.load(weights)
        for count in steps:
            if not 2 <= count <= model.spec.max_steps:
                raise ValueError(f"steps must be from 2 to {model.spec.max_steps}, got {count}")
        found = cases_of(model, _validation(data, suite) if suite else clips_in(data), cases)
        console = Console()
        columns = (TextColumn("drawing"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("cases", total=None)
            made = calibrate_reuse(
                model, found, steps, settings, delta, lambda: progress.advance(bar)
            )
        path = reuse_path(weights)
        made.save(path)
        console.print(_summary(made))
        console.print(f"written to {path}")


@dataclass(frozen=True, eq=False)
class _Clip:
    frames: Pixels
    controls: Float
    prompt: str = ""
    view: str = ""
    operation: str = ""


def _validation(root: Path, names: Sequence[str]) -> Iterable[ClipLike]:
    suites = [get_suite(name) for name in names]
    views = [(suite, camera) for suite in suites for camera in range(len(suite.cameras))]
    return interleave([clips(root, suite, "validation", camera) for suite, camera in views])


def clips_in(directory: Path) -> Iterable[ClipLike]:
    """Clips of .npz files: `frames` (T, h, w, 3) or (E, T, V, h, w, 3), and `controls`."""
    for path in sorted(directory.rglob("*.npz")):
        with np.load(path, allow_pickle=False) as data:
            frames, controls = data["frames"], data["controls"].astype(np.float32)
        if frames.ndim == 4:
            frames, controls = frames[None, :, None], controls[None]
        for episode, plan in zip(frames, controls, strict=True):
            yield _Clip(episode[:, 0], plan)


def _summary(made: ReuseCalibration) -> Table:
    table = Table(title=f"step reuse of weights {made.weights_digest[:12]}", title_justify="left")
    for column in ("steps", "policy", "setting", "kept, dB", "skipped"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for steps, part in made.tables.items():
        for name, knobs in part.knobs.items():
            for knob in knobs:
                row = (f"{knob.value:g}", f"{knob.kept_db:.1f}", f"{knob.skipped:.0%}")
                table.add_row(str(steps), name, *row)
        for rung in part.ladder:
            chosen = " ".join(map(str, rung.steps))
            kept = f"{rung.bound_db(5.0):.1f} at activity 5"
            table.add_row(str(steps), "content", chosen, kept, f"{1 - len(rung.steps) / steps:.0%}")
    return table
