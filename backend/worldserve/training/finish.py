"""What is measured of a trained network and kept beside its weights."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from worldserve.models.generator import settle
from worldserve.models.layers import channels_last
from worldserve.models.network import WorldNetwork
from worldserve.training.corpus import HORIZON, TrainingData, unroll

__all__ = ["state_scale", "still_change"]

_CONTEXT = 16
_LEVELS = (0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.13, 0.17, 0.22, 0.28, 0.35)


@torch.no_grad()
def state_scale(network: WorldNetwork, data: TrainingData, draws: int = 62) -> NDArray[np.float32]:
    """Standard deviation of every state dimension over predictions on `data`."""
    rng = np.random.default_rng(0)
    states = []
    for _ in range(draws):
        e, _, tokens, controls = data.window(rng, 4, 13)
        condition = data.condition(network, rng, e)
        with torch.autocast("cpu", torch.bfloat16):
            states.append(network.predict(tokens[:, :-1], controls, condition)[1].flatten(0, 1))
    scale = torch.cat(states).float().std(0).numpy()
    return np.where(scale > 1e-4, scale, 1.0).astype(np.float32)


@torch.no_grad()
def still_change(network: WorldNetwork, data: TrainingData, draws: int = 40) -> NDArray[np.float32]:
    """The `still` level of `generator.settle` that draws held-out frames best, shape (1,).

    Best is the mean PSNR over the frames of eight unrolled steps: training weighs changed pixels
    seven times, so that small predicted changes are more often wrong than right.
    """
    rng = np.random.default_rng(1)
    quality = np.zeros(len(_LEVELS))
    for _ in range(draws):
        e, t, tokens, controls = data.window(rng, 2, _CONTEXT + HORIZON)
        condition = data.condition(network, rng, e)
        with torch.autocast("cpu", torch.bfloat16):
            predicted, _ = unroll(network, tokens[:, :_CONTEXT], controls, condition)
            future = t[:, _CONTEXT:]
            true = data.images(e, future).flatten(0, 1)
            present = np.broadcast_to(t[:, _CONTEXT - 1 : _CONTEXT], future.shape)
            last = channels_last(data.images(e, present).flatten(0, 1))
            end = network.generator.sample(
                last, predicted.flatten(0, 1), torch.randn(last.shape), steps=1
            )
        for i, level in enumerate(_LEVELS):
            error = ((settle(end, last, level).clamp(-1, 1) - true) ** 2).mean((1, 2, 3))
            quality[i] += (10 * torch.log10(4 / error.clamp(min=1e-6))).mean().item()
    return np.array([_LEVELS[int(quality.argmax())]], np.float32)
