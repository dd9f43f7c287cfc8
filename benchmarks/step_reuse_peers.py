"""A small WanTransformer3DModel under every policy and under its peers, for step_reuse.py.

The model is drawn at random: what is compared is who skips what at which error on the same model,
schedule and seeds, not pictures. Peers: FirstBlockCache of diffusers, DBCache of cache-dit.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import worldcache
from worldcache.content import peak_db
from worldcache.fitting import fit_table, rmse_levels
from worldcache.policies import thresholds
from worldcache.reuse_calibration import make
from worldcache.steps import Policy, Reuses

LAYERS, STEPS, SHIFT = 6, 12, 3.0
LEVELS = 32.0  # 8-bit levels per unit of a latent: four standard deviations each way
_SIZE, _TEXT = (2, 12, 12), (12, 64)
FIRST_BLOCK = (0.02, 0.05, 0.08, 0.12, 0.16, 0.2, 0.3)
DB_CACHE = (0.02, 0.05, 0.08, 0.12, 0.16, 0.24, 0.4)
Row = dict[str, Any]


def wan(seed: int = 0) -> nn.Module:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(seed)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=8,
        out_channels=8,
        text_dim=_TEXT[1],
        freq_dim=64,
        ffn_dim=512,
        num_layers=LAYERS,
        rope_max_seq_len=64,
    )
    return model.eval()


class Sampler:
    """Flow matching by Euler steps on shifted sigmas, without guidance."""

    def __init__(self, model: nn.Module, steps: int = STEPS) -> None:
        self.model: Any = model
        self.steps = steps
        even = np.linspace(1, 0, steps + 1)
        self.sigmas = (SHIFT * even / (1 + (SHIFT - 1) * even)).tolist()

    def __call__(self, seed: int, keep: list[Tensor] | None = None) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(1, 8, *_SIZE, generator=draw)
        text = torch.randn(1, *_TEXT, generator=draw)
        with torch.no_grad():
            for now, after in zip(self.sigmas[:-1], self.sigmas[1:], strict=True):
                time = torch.full((1,), now * 1000)
                flow = self.model(
                    hidden_states=x, timestep=time, encoder_hidden_states=text, return_dict=False
                )[0]
                if keep is not None:
                    keep.append(flow)
                x = x + (after - now) * flow
        return x


@dataclass(frozen=True, eq=False)
class _Run:
    frames: NDArray[Any]
    skipped: float
    activity: NDArray[np.float64]


class Subject:
    """`worldcache.fitting.Subject` on a wrapped model."""

    def __init__(self, model: nn.Module, first_seed: int, steps: int = STEPS) -> None:
        self.steps, self._first = steps, first_seed
        self._wrapped = worldcache.wrap(model)
        self._sample = Sampler(model, steps)
        self._activities: dict[int, NDArray[np.float64]] = {}

    def outputs(self, case: int, reuses: Reuses = "step") -> list[Tensor]:
        flows: list[Tensor] = []
        entered: list[Tensor] = []
        left: list[Tensor] = []
        blocks = self._sample.model.blocks
        hooks = (
            blocks[0].register_forward_pre_hook(lambda _, given: entered.append(given[0])),
            blocks[len(blocks) - 1].register_forward_hook(lambda *given: left.append(given[2])),
        )
        self._sample(self._first + case, flows)
        for hook in hooks:
            hook.remove()
        if reuses == "step":
            return flows
        return [out - given for out, given in zip(left, entered, strict=True)]

    def run(self, case: int, policy: Policy) -> _Run:
        with self._wrapped.request(policy, self.steps) as request:
            latents = self._sample(self._first + case)
        return _Run(latents.numpy() * LEVELS, request.tally.skipped, self._activity(case))

    def _activity(self, case: int) -> NDArray[np.float64]:
        if case not in self._activities:
            from worldcache.wrapping import activity_of

            self._activities[case] = activity_of(self.outputs(case)[0])
        return self._activities[case]

    def close(self) -> None:
        self._wrapped.unwrap()


def curves(cases: int, calibrated_on: int, progress: Callable[[str], None]) -> list[Row]:
    """PSNR and skipped share for every policy, and the peers, where they are installed."""
    torch.set_num_threads(1)
    model = wan()
    progress("wan: calibrating")
    learning = Subject(model, first_seed=1_000)
    table = fit_table(learning, calibrated_on, policies=(), reuses=("step", "blocks"))
    learning.close()
    subject = Subject(model, first_seed=0)
    truths = [subject.run(case, make("none", 0)).frames for case in range(cases)]
    rows: list[Row] = []
    for name in ("teacache", "easycache", "control"):
        progress(f"wan: {name}")
        rows += [
            _measured(subject, truths, name, knob, make(name, knob)) for knob in thresholds(name)
        ]
    progress("wan: content")
    rows += [
        _measured(subject, truths, "content", len(rung.steps), table.alone(rung))
        for rung in table.ladder
    ]
    subject.close()
    progress("wan: peers")
    return rows + _peers(model, truths)


def _measured(
    subject: Subject, truths: list[NDArray[Any]], name: str, knob: float, policy: Policy
) -> Row:
    runs = [subject.run(case, policy) for case in range(len(truths))]
    return _row(name, knob, [run.frames for run in runs], truths, [run.skipped for run in runs])


def _row(
    name: str,
    knob: float,
    made: list[NDArray[Any]],
    truths: list[NDArray[Any]],
    skipped: list[float],
) -> Row:
    levels = np.concatenate([rmse_levels(a, b) for a, b in zip(made, truths, strict=True)])
    return {
        "policy": name,
        "knob": knob,
        "skipped": float(np.mean(skipped)),
        "psnr_db": peak_db(float(np.sqrt(np.square(levels).mean()))),
    }


def _peers(model: nn.Module, truths: list[NDArray[Any]]) -> list[Row]:
    rows = []
    for name, knobs, applied in (
        ("diffusers FirstBlockCache", FIRST_BLOCK, _first_block),
        ("cache-dit DBCache", DB_CACHE, _db_cache),
    ):
        for knob in knobs:
            made, skipped = [], []
            for seed in range(len(truths)):
                own, count = _counted(model)
                try:
                    with applied(own, knob) as context, context:
                        made.append(Sampler(own)(seed).numpy() * LEVELS)
                except ImportError as error:
                    warnings.warn(f"{name} is left out: {error}", stacklevel=2)
                    return rows
                skipped.append(1 - count[0] / (LAYERS * STEPS))
            rows.append(_row(name, knob, made, truths, skipped))
    return rows


def _counted(model: nn.Module) -> tuple[Any, list[int]]:
    """A copy of the model whose blocks count when they really compute."""
    own: Any = copy.deepcopy(model)
    count = [0]

    def one() -> None:
        count[0] += 1

    for block in own.blocks:  # hooks of its own would also see calls that a peer answers
        block.attn1.register_forward_pre_hook(lambda *_: one())
    return own, count


@contextlib.contextmanager
def _first_block(model: Any, threshold: float) -> Iterator[Any]:
    from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache

    apply_first_block_cache(model, FirstBlockCacheConfig(threshold=threshold))
    yield model.cache_context("prompt")


@contextlib.contextmanager
def _db_cache(model: Any, threshold: float) -> Iterator[Any]:
    os.environ.setdefault("CACHE_DIT_LOG_LEVEL", "error")
    import cache_dit
    from cache_dit import BlockAdapter, DBCacheConfig, ForwardPattern

    logging.disable(logging.WARNING)
    adapter = BlockAdapter(
        transformer=model,
        blocks=model.blocks,
        forward_pattern=ForwardPattern.Pattern_2,
    )
    config = DBCacheConfig(
        num_inference_steps=STEPS,
        Fn_compute_blocks=1,
        Bn_compute_blocks=0,
        residual_diff_threshold=threshold,
        max_warmup_steps=2,
    )
    try:
        cache_dit.enable_cache(adapter, cache_config=config)
        yield contextlib.nullcontext()
        cache_dit.disable_cache(adapter)
    finally:
        logging.disable(logging.NOTSET)
