"""Train the state transfer adapter on pairs that the frozen model generates.

From each context the model rolls out K controls in one batch; every ordered pair of them at every
step of the horizon is a training pair (K = 9, H = 8: 576 of a context). The trained adapter is a
`ctrlcache.transfer.Adapter`, written beside the weights it belongs to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from ctrlcache.errors import CalibrationError
from ctrlcache.transfer import Adapter
from worldserve.calibrate import ADAPTER, REFERENCE, explained, interleave, load_model
from worldserve.models.protocol import ModelSpec, WorldModel
from worldserve.neighbourhood import ClipLike, Sampling, neighbourhood, presents

__all__ = ["AdapterConfig", "PairSet", "adapter_path", "command", "generate_pairs", "train_adapter"]

_SUITES = ["kitchen", "inspection", "edudemo"]
_LEAST_PAIRS = 100_000
_NEAR = 0.02  # pairs nearer than this weigh no more than if they were this far apart


def adapter_path(weights: Path, hidden: int | None = None) -> Path:
    """Where the adapter of the weights in `weights` is kept; `hidden`: one for comparison."""
    return weights / (ADAPTER if hidden is None else f"adapter-{hidden}.safetensors")


@dataclass(frozen=True)
class AdapterConfig:
    """hidden = 9 keeps a model of 256 state dimensions and 4 axes below 5,000 parameters."""

    hidden: int = 9
    steps: int = 4_000
    contexts_per_step: int = 16
    pairs_per_context: int = 16
    learning_rate: float = 3e-3
    physical_weight: float = 2.0
    semantic_weight: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.hidden, self.steps, self.contexts_per_step, self.pairs_per_context)
        if min(counts) < 1 or self.learning_rate <= 0:
            raise ValueError(f"hidden, steps, batch sizes and rate must be positive, got {self}")


@dataclass(frozen=True, eq=False)
class PairSet:
    """states (G, K, H, S) predicted in G contexts under K controls (G, K, C) each."""

    states: NDArray[np.float32]
    controls: NDArray[np.float32]

    @property
    def pairs(self) -> int:
        groups, k, horizon, _ = self.states.shape
        return groups * k * (k - 1) * horizon


def generate_pairs(
    model: WorldModel,
    clips: Iterable[ClipLike],
    contexts: int,
    *,
    sampling: Sampling | None = None,
    per_clip: int = 8,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> PairSet:
    """Roll out one control and its neighbours (`sampling.queries` of them) in up to `contexts`."""
    how = sampling or Sampling(probe_radii=())
    rng = np.random.default_rng(seed)
    states, controls = [], []
    for present in itertools.islice(presents(model, clips, per_clip, rng, how.horizon), contexts):
        around = neighbourhood(model, present, rng, how)
        states.append(np.concatenate([around.own.states[None], around.truths]))
        controls.append(np.concatenate([around.control[None], around.query_controls]))
        advance()
    if not states:
        raise ValueError("there are no clips to train on")
    return PairSet(np.stack(states), np.stack(controls))


def train_adapter(
    pairs: PairSet,
    spec: ModelSpec,
    config: AdapterConfig | None = None,
    advance: Callable[[float], None] = lambda loss: None,
) -> Adapter:
    """Fit; `advance` gets the loss of each step (per unit of control distance, standardised)."""
    how = config or AdapterConfig()
    generator = torch.Generator().manual_seed(how.seed)
    groups, k, horizon, dims = pairs.states.shape
    axes = pairs.controls.shape[-1]
    scale = torch.from_numpy(np.where(spec.state_scale > 0, spec.state_scale, np.inf))
    standard = torch.from_numpy(pairs.states) / scale.float()  # (G, K, H, S)
    controls = torch.from_numpy(pairs.controls)  # (G, K, C)
    inner = torch.randn(how.hidden, dims + 2 * axes, generator=generator) * dims**-0.5
    outer = torch.randn(dims, how.hidden, generator=generator) * 0.1 * how.hidden**-0.5
    parameters = [inner.requires_grad_(), outer.requires_grad_()]
    optimiser = torch.optim.Adam(parameters, how.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, how.learning_rate, how.steps)
    weight = _weights(spec, how)
    from_, to = (torch.from_numpy(x) for x in np.nonzero(~np.eye(k, dtype=bool)))  # (K (K - 1),)
    acted = torch.arange(1, horizon + 1) / horizon
    for _ in range(how.steps):
        chosen = torch.randint(groups, (how.contexts_per_step, 1), generator=generator)
        some = torch.randperm(len(from_), generator=generator)[: how.pairs_per_context]
        source, target = standard[chosen, from_[some]], standard[chosen, to[some]]  # (B, P, H, S)
        delta = controls[chosen, to[some]] - controls[chosen, from_[some]]  # (B, P, C)
        change = _forward(inner, outer, source, delta, acted)
        squared = (change - (target - source)).square() * weight
        distance = delta.norm(dim=-1).clamp_min(_NEAR)[..., None, None]  # (B, P, 1, 1)
        loss = (squared / distance.square()).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        advance(float(loss.detach()))
    return Adapter(
        inner.detach().numpy(),
        outer.detach().numpy(),
        np.asarray(spec.state_scale, dtype=np.float32),
        spec.weights_digest,
    )


def _forward(inner: Tensor, outer: Tensor, source: Tensor, delta: Tensor, acted: Tensor) -> Tensor:
    """The change that `Adapter.migrate` makes: source (B, P, H, S), delta (B, P, C), acted (H,)."""
    dims = source.shape[-1]
    still = source @ inner[:, :dims].T  # (B, P, H, hidden)
    step = delta[..., None, :].expand(*source.shape[:-1], -1)  # (B, P, H, C)
    moved = still + torch.cat([step, step * acted[:, None]], dim=-1) @ inner[:, dims:].T
    return (torch.tanh(moved) - torch.tanh(still)) @ outer.T


def _weights(spec: ModelSpec, config: AdapterConfig) -> Tensor:
    """(S,): loss weight of each state dimension."""
    weight = torch.ones(spec.state_dim)
    weight[slice(*spec.physical)] = config.physical_weight
    weight[slice(*spec.semantic)] = config.semantic_weight
    return weight


def command(
    weights: Annotated[
        Path, typer.Option(help="Directory of the weights; the adapter goes there.")
    ] = Path("model_repository/world_model/1"),
    data: Annotated[Path, typer.Option(help="Root of the generated episodes.")] = Path("data"),
    suite: Annotated[list[str], typer.Option(help="Suite; several times for several.")] = _SUITES,
    pairs: Annotated[int, typer.Option(help="Training pairs, at least.")] = 200_000,
    hidden: Annotated[int, typer.Option(help="Hidden units; 9 keeps it below 5,000.")] = 9,
    big: Annotated[int, typer.Option(help="Hidden units of one for comparison; 0: none.")] = 0,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 4_000,
    loader: Annotated[
        str, typer.Option(help="How to load the model: module:callable.")
    ] = REFERENCE,
) -> None:
    """Train the state transfer adapter on pairs generated by the frozen model."""
    if pairs < _LEAST_PAIRS:
        raise typer.BadParameter(f"at least {_LEAST_PAIRS} pairs are needed, got {pairs}")
    with explained():
        _train(weights, data, suite, pairs, hidden, big, steps, loader)


def _train(
    weights: Path,
    data: Path,
    suite: list[str],
    pairs: int,
    hidden: int,
    big: int,
    steps: int,
    loader: str,
) -> None:
    from worldserve.data.dataset import clips
    from worldserve.data.suites import get_suite

    model = load_model(loader, weights)
    sampling = Sampling(probe_radii=())
    each = (sampling.queries + 1) * sampling.queries * sampling.horizon
    contexts = -(-pairs // each)
    source = interleave([clips(data, get_suite(name), "train") for name in suite])
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("generating pairs", total=contexts)
        made = generate_pairs(
            model, source, contexts, sampling=sampling, advance=lambda: progress.advance(bar)
        )
        if made.pairs < _LEAST_PAIRS:
            raise CalibrationError(
                f"the clips gave {made.pairs} pairs, {_LEAST_PAIRS} are needed: generate more"
            )
        for units in filter(None, (hidden, big)):
            bar = progress.add_task(f"training {units} hidden", total=steps)

            def show(loss: float, bar: object = bar, units: int = units) -> None:
                progress.update(bar, advance=1, description=f"{units} hidden, loss {loss:.4g}")  # type: ignore[arg-type]

            config = AdapterConfig(hidden=units, steps=steps)
            adapter = train_adapter(made, model.spec, config, show)
            path = adapter_path(weights, None if units == hidden else units)
            adapter.save(path)
            progress.console.print(
                f"{adapter.parameters} parameters from {made.pairs} pairs, written to {path}"
            )
