"""Train the reference model: its stages, checkpoints, resume, loss curves.

Learning rates follow steps, never the clock; a run that is stopped goes on from its checkpoint with
the same random numbers. Weights are averaged (EMA) and stored in float16.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from worldserve.data.dataset import load_suites, operations_of
from worldserve.data.suites import VIEWS, Suite
from worldserve.models.network import NetworkConfig, WorldNetwork
from worldserve.models.reference import Statistics, save_weights
from worldserve.training.corpus import TrainingData
from worldserve.training.finish import state_scale, still_change
from worldserve.training.stages import (
    drawing_step,
    frames_step,
    sequences_step,
    unrolled_step,
    views_step,
)
from worldserve.training.start import start_from

__all__ = ["FURTHER", "SHARES", "STAGES", "Stage", "TrainConfig", "train"]

Step = Callable[
    [WorldNetwork, TrainingData, np.random.Generator, torch.Generator], dict[str, Tensor]
]


@dataclass(frozen=True)
class Stage:
    name: str
    step: Step
    steps: int
    learning_rate: float
    ema: float


STAGES = (
    Stage("frames", frames_step, 2500, 2e-3, 0.995),
    Stage("sequences", sequences_step, 3500, 8e-4, 0.998),
    Stage("unrolled", unrolled_step, 3500, 5e-4, 0.998),
    Stage("views", views_step, 600, 1e-3, 0.995),
    Stage("drawing", drawing_step, 2000, 1e-3, 0.995),
)

#: from the weights of an earlier training on, to which suites are added
FURTHER = (
    Stage("frames", frames_step, 2200, 1e-3, 0.995),
    Stage("sequences", sequences_step, 900, 6e-4, 0.998),
    Stage("unrolled", unrolled_step, 900, 4e-4, 0.998),
    Stage("views", views_step, 500, 1e-3, 0.99),
    Stage("drawing", drawing_step, 1000, 8e-4, 0.995),
)

#: how much of a batch comes from each suite, relative to one another
SHARES: dict[str, float] = {"kitchen": 0.45, "inspection": 0.25, "edudemo": 0.3}


@dataclass(frozen=True)
class TrainConfig:
    """data: root of the generated shards; run: checkpoints and logs; out: where weights go.

    start: directory of weights to go on from; what has their shape is taken over, and the units of
    the physical quantities are kept. predictions: how many the last two stages learn from. width,
    heads: of the network.
    """

    suites: tuple[Suite, ...]
    data: Path
    run: Path
    out: Path
    seed: int = 0
    threads: int = 2
    checkpoint_every: int = 250
    stages: tuple[Stage, ...] = STAGES
    start: Path | None = None
    predictions: int = 2000
    width: int = 192
    heads: int = 3

    @property
    def shares(self) -> list[float]:
        return [SHARES.get(suite.name, 1.0) for suite in self.suites]


def train(config: TrainConfig) -> WorldNetwork:
    """Run every stage that is not finished; returns the averaged network, also saved to `out`."""
    torch.set_flush_denormal(True)  # gradients full of denormals cost a quarter of the time
    try:
        return _train(config)
    finally:
        torch.set_flush_denormal(False)


def _train(config: TrainConfig) -> WorldNetwork:
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    config.run.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    episodes = load_suites(config.data, config.suites, "train")
    operations = tuple(operation.name for operation in operations_of(config.suites))
    network = WorldNetwork(NetworkConfig(operations, VIEWS, width=config.width, heads=config.heads))
    units = (None, None) if config.start is None else start_from(network, config.start)
    data = TrainingData.of(episodes, config.shares, *units)
    for number, stage in enumerate(config.stages):
        if stage.name != "frames" and data.tokens is None:
            data.embed(network, config.run / "tokens.bin")
        if stage.name in ("views", "drawing") and data.predictions is None:
            data.predict(network, config.seed, config.predictions)
        _run_stage(config, stage, config.seed * 1000 + number, network, data)
    card = {
        "suites": ", ".join(suite.name for suite in config.suites),
        "episodes": int(len(episodes) - (episodes.twin >= 0).sum() // 2),
        "frames": int(np.prod(episodes.frames.shape[:2])),
        "seed": config.seed,
        "steps": {stage.name: stage.steps for stage in config.stages},
        "minutes_this_run": round((time.monotonic() - started) / 60, 1),
    }
    save_weights(config.out, network, _statistics(config, network, data), card)
    return network


def _statistics(config: TrainConfig, network: WorldNetwork, data: TrainingData) -> Statistics:
    validation = TrainingData.of(
        load_suites(config.data, config.suites, "validation"), config.shares, data.mean, data.std
    )
    validation.embed(network)
    return Statistics(
        data.mean,
        data.std,
        state_scale(network, data, draws=max(1, config.predictions // 32)),
        still_change(network, validation, draws=max(1, config.predictions // 50)),
    )


def _trained_parts(network: WorldNetwork, stage: str) -> list[torch.nn.Parameter]:
    if stage == "frames":
        return list(network.embedder.parameters())
    if stage == "drawing":
        return list(network.generator.parameters())
    if stage == "views":
        return list(_head(network))
    others = {id(p) for p in (*network.embedder.parameters(), *_head(network))}
    return [p for p in network.parameters() if id(p) not in others]


def _head(network: WorldNetwork) -> Iterable[torch.nn.Parameter]:
    return () if network.cross_view is None else network.cross_view.parameters()


def _run_stage(
    config: TrainConfig, stage: Stage, seed: int, network: WorldNetwork, data: TrainingData
) -> None:
    """Train `network` in place through one stage; it leaves with the averaged weights."""
    path = config.run / f"{stage.name}.pt"
    rng = np.random.default_rng(seed)
    draw = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    parameters = _trained_parts(network, stage.name)
    for parameter in parameters:
        parameter.requires_grad_(True)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    average = copy.deepcopy(network)
    optimizer = torch.optim.AdamW(
        parameters, lr=stage.learning_rate, weight_decay=0.02, betas=(0.9, 0.98)
    )
    first = 0
    if path.exists():
        saved = torch.load(path, weights_only=False)
        first = saved["step"]
        network.load_state_dict(saved["network"])
        average.load_state_dict(saved["average"])
        if first < stage.steps:
            optimizer.load_state_dict(saved["optimizer"])
            rng.bit_generator.state = saved["rng"]
            draw.set_state(saved["draw"])
    log = (config.run / "log.jsonl").open("a")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task(stage.name, total=stage.steps, completed=first)
        losses: list[dict[str, float]] = []
        clock = time.monotonic()
        for step in range(first, stage.steps):
            for group in optimizer.param_groups:
                group["lr"] = _learning_rate(stage, step)
            with torch.autocast("cpu", torch.bfloat16):
                parts = stage.step(network, data, rng, draw)
            loss = torch.stack(list(parts.values())).sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            _average(average, network, min(stage.ema, (step + 1) / (step + 20)))
            losses.append({name: value.item() for name, value in parts.items()})
            losses[-1]["gradient_norm"] = norm.item()
            progress.advance(bar)
            if (step + 1) % 25 == 0 or step + 1 == stage.steps:
                mean = {k: round(float(np.mean([x[k] for x in losses])), 5) for k in losses[0]}
                rate = (time.monotonic() - clock) / len(losses)
                row = {"stage": stage.name, "step": step + 1, "s_per_step": round(rate, 3), **mean}
                log.write(json.dumps(row) + "\n")
                log.flush()
                losses, clock = [], time.monotonic()
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == stage.steps:
                state = {
                    "step": step + 1,
                    "network": network.state_dict(),
                    "average": average.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "rng": rng.bit_generator.state,
                    "draw": draw.get_state(),
                }
                partial = path.with_suffix(".partial")
                torch.save(state, partial)
                partial.replace(path)
    log.close()
    network.load_state_dict(average.state_dict())


def _learning_rate(stage: Stage, step: int) -> float:
    """Linear warm-up over 80 steps, then a cosine to 3 %."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / stage.steps))
    return stage.learning_rate * min(1.0, (step + 1) / 80) * (0.03 + 0.97 * cosine)


@torch.no_grad()
def _average(average: WorldNetwork, network: WorldNetwork, decay: float) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(network.parameters()), 1 - decay)
