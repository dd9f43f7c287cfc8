"""The stages of training the reference model; each is a batch and a loss.

frames: the embedder on shuffled single frames; it is frozen afterwards, and so are its tokens.
sequences: dynamics and generator, teacher-forced, and again on the model's own predictions from a
random frame on (parallel scheduled sampling).
unrolled: eight steps through the KV cache with gradients through all of them, frames generated from
the last observed frame, as in serving.
views: the head for a further camera alone, on predictions of the finished dynamics.
drawing: the generator alone, on predictions of the finished dynamics, of either view, and on those
carried over from the other view.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from worldserve.models.network import WorldNetwork
from worldserve.training.corpus import HORIZON, TrainingData
from worldserve.training.losses import flow_loss, frame_loss, state_loss

__all__ = [
    "carry_over",
    "drawing_step",
    "frames_step",
    "sequences_step",
    "unrolled_step",
    "views_step",
]

_PIXEL_ROWS = 24  # images per batch whose reconstruction is looked at
_GENERATED = 32  # images per batch that the generator learns from
_CARRIED = 0.4  # share of the drawings whose tokens come from the other view, where there is one


def frames_step(
    network: WorldNetwork, data: TrainingData, rng: np.random.Generator, draw: torch.Generator
) -> dict[str, Tensor]:
    e = data.draw(rng, 96)
    t = rng.integers(data.episodes.frames.shape[1], size=96)
    target = data.targets(e, t)
    tokens = network.embedder(target.images)
    read = network.embedder.read(tokens)
    pixels = (network.embedder.reconstruct(tokens) - target.images).abs().mean()
    return {
        "read": frame_loss(read, target, len(network.config.operations)),
        "pixels": 0.5 * pixels,
    }


def sequences_step(
    network: WorldNetwork, data: TrainingData, rng: np.random.Generator, draw: torch.Generator
) -> dict[str, Tensor]:
    batch, frames = (6, 12) if rng.random() < 0.8 else (2, 36)
    e, t, tokens, controls = data.window(rng, batch, frames)
    condition = data.condition(network, rng, e)
    target = data.targets(e, t[:, 1:])
    true_next = tokens[:, 1:].float()
    forced, forced_states, _ = network.predict(tokens[:, :-1], controls, condition)
    start = int(rng.integers(1, frames - 3))  # from here on it eats what it predicted
    mixed = torch.cat((tokens[:, :start], forced[:, start - 1 : -1].detach()), 1)
    own, own_states, _ = network.predict(mixed, controls, condition)
    own, own_states = own[:, start:], own_states[:, start:]
    later = data.targets(e, t[:, 1 + start :]).flat()
    # Each predicted frame is drawn from an observed one up to three frames before its own.
    back = int(rng.integers(0, min(4, frames - 1)))
    source = forced if rng.random() < 0.4 else torch.cat((forced[:, :start], own), 1)
    last = data.images(e, t[:, : frames - 1 - back])
    return {
        "state_forced": state_loss(network, forced_states.flatten(0, 1), target.flat()),
        "state_own": state_loss(network, own_states.flatten(0, 1), later),
        "tokens_forced": 0.5 * F.smooth_l1_loss(forced.float(), true_next, beta=0.2),
        "tokens_own": 0.5 * F.smooth_l1_loss(own.float(), true_next[:, start:], beta=0.2),
        "pixels": _pixel_loss(network, own, later.images, draw),
        "flow": 5 * _some_flow(network, target.images[:, back:], last, source[:, back:], draw),
    }


def unrolled_step(
    network: WorldNetwork, data: TrainingData, rng: np.random.Generator, draw: torch.Generator
) -> dict[str, Tensor]:
    batch, context = ((8, int(rng.choice([1, 3, 6, 8]))), (3, 30))[int(rng.random() < 0.25)]
    e, t, tokens, controls = data.window(rng, batch, context + HORIZON)
    condition = data.condition(network, rng, e)
    true_next = tokens[:, 1:].float()
    forced, forced_states, cache = network.predict(
        tokens[:, :context], controls[:, :context], condition
    )
    step, states = forced[:, -1:], [forced_states[:, -1:]]
    predicted = [step]
    for k in range(HORIZON - 1):
        at = context + k
        step, state, cache = network.predict(
            step, controls[:, at : at + 1], condition, cache, position=at
        )
        predicted.append(step)
        states.append(state)
    own, own_states = torch.cat(predicted, 1), torch.cat(states, 1)
    future = t[:, context:]
    target = data.targets(e, future)
    last = data.images(e, np.broadcast_to(t[:, context - 1 : context], future.shape))
    flat = target.flat()
    seen = data.targets(e, t[:, 1 : context + 1]).flat()
    return {
        "state_forced": 0.5 * state_loss(network, forced_states.flatten(0, 1), seen),
        "state_own": 1.5 * state_loss(network, own_states.flatten(0, 1), flat),
        "tokens_forced": 0.25 * F.smooth_l1_loss(forced.float(), true_next[:, :context], beta=0.2),
        "tokens_own": 0.75 * F.smooth_l1_loss(own.float(), true_next[:, context - 1 :], beta=0.2),
        "pixels": _pixel_loss(network, own, flat.images, draw),
        "flow": 5 * _some_flow(network, target.images, last, own, draw),
    }


def views_step(
    network: WorldNetwork, data: TrainingData, rng: np.random.Generator, draw: torch.Generator
) -> dict[str, Tensor]:
    known, tokens = data.predictions, data.tokens
    assert known is not None
    assert tokens is not None
    i = rng.choice(np.flatnonzero(data.episodes.twin[known.e] >= 0), 32)
    k = rng.integers(HORIZON, size=32)
    carried = carry_over(network, data, i, k)
    e, t = data.episodes.twin[known.e[i]], known.t[i] + 1 + k
    true = tokens[torch.from_numpy(e), torch.from_numpy(t)].float()
    images = data.images(e, t)
    return {
        "tokens": F.smooth_l1_loss(carried.float(), true, beta=0.2),
        "pixels": (network.embedder.reconstruct(carried) - images).abs().mean(),
    }


def carry_over(
    network: WorldNetwork, data: TrainingData, i: NDArray[np.int64], k: NDArray[np.int64]
) -> Tensor:
    """Step k (M,) of predictions i (M,) as the other camera sees it: tokens (M, N, D)."""
    known, tokens = data.predictions, data.tokens
    assert known is not None
    assert tokens is not None
    assert network.cross_view is not None
    twin, t = data.episodes.twin[known.e[i]], torch.from_numpy(known.t[i])
    rows, steps = torch.from_numpy(i), torch.from_numpy(k)
    out: Tensor = network.cross_view(
        tokens[torch.from_numpy(twin), t],
        known.tokens[rows, steps],
        tokens[torch.from_numpy(known.e[i]), t],
        known.states[rows, steps],
        torch.from_numpy(data.episodes.view[twin]),
    )
    return out


def drawing_step(
    network: WorldNetwork, data: TrainingData, rng: np.random.Generator, draw: torch.Generator
) -> dict[str, Tensor]:
    assert data.predictions is not None
    known = data.predictions
    i = rng.integers(len(known.e), size=64)
    k = rng.integers(HORIZON, size=64)
    e = known.e[i]
    tokens = known.tokens[torch.from_numpy(i), torch.from_numpy(k)]
    if network.cross_view is not None:
        twin = data.episodes.twin[e]
        over = np.flatnonzero((twin >= 0) & (rng.random(len(e)) < _CARRIED))
        if len(over):
            with torch.no_grad():
                tokens = tokens.clone()
                tokens[torch.from_numpy(over)] = carry_over(network, data, i[over], k[over]).to(
                    tokens.dtype
                )
            e = e.copy()
            e[over] = twin[over]
    images = data.images(e, known.t[i] + 1 + k)
    last = data.images(e, known.t[i])
    flow = flow_loss(network, images, last, tokens, draw, at_start=0.75, changed_weight=4.0)
    return {"flow": 5 * flow}


def _pixel_loss(
    network: WorldNetwork, tokens: Tensor, images: Tensor, draw: torch.Generator
) -> Tensor:
    """tokens (B, T, N, D) against images (B * T, 3, px, px), on some of them."""
    pick = torch.randperm(len(images), generator=draw)[:_PIXEL_ROWS]
    return (network.embedder.reconstruct(tokens.flatten(0, 1)[pick]) - images[pick]).abs().mean()


def _some_flow(
    network: WorldNetwork, images: Tensor, last: Tensor, tokens: Tensor, draw: torch.Generator
) -> Tensor:
    images, last, tokens = images.flatten(0, 1), last.flatten(0, 1), tokens.flatten(0, 1)
    pick = torch.randperm(len(images), generator=draw)[:_GENERATED]
    return flow_loss(network, images[pick], last[pick], tokens[pick], draw)
