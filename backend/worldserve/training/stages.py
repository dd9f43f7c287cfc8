"""The three stages of training the reference model; each is a batch and a loss.

frames: the embedder on shuffled single frames; it is frozen afterwards, and so are its tokens.
sequences: dynamics and generator, teacher-forced, and again on the model's own predictions from a
random frame on (parallel scheduled sampling).
unrolled: eight steps through the KV cache with gradients through all of them, frames generated from
the last observed frame, as in serving.
drawing: the generator alone, on predictions of the finished dynamics.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from worldserve.data.dataset import Episodes
from worldserve.models.network import WorldNetwork
from worldserve.training.losses import Targets, flow_loss, frame_loss, state_loss

__all__ = [
    "HORIZON",
    "Predictions",
    "TrainingData",
    "drawing_step",
    "frames_step",
    "sequences_step",
    "unroll",
    "unrolled_step",
]

HORIZON = 8
_PIXEL_ROWS = 24  # images per batch whose reconstruction is looked at
_GENERATED = 32  # images per batch that the generator learns from


@dataclass(frozen=True)
class Predictions:
    """What the dynamics predict: tokens (n, HORIZON, N, D) after present frames e, t (n,)."""

    e: NDArray[np.int64]
    t: NDArray[np.int64]
    tokens: Tensor


@dataclass
class TrainingData:
    """Episodes with their physical quantities standardised, and (after stage 1) their tokens."""

    episodes: Episodes
    mean: NDArray[np.float32]
    std: NDArray[np.float32]
    tokens: Tensor | None = None  # (E, T, N, D) bfloat16
    predictions: Predictions | None = None

    @classmethod
    def of(cls, episodes: Episodes) -> TrainingData:
        physical = episodes.physics[..., :7].reshape(-1, 7)
        return cls(episodes, physical.mean(0), physical.std(0))

    def images(self, e: NDArray[np.int64], t: NDArray[np.int64]) -> Tensor:
        """Index arrays that broadcast to (...) -> (..., 3, px, px) in [-1, 1]."""
        pixels = torch.from_numpy(self.episodes.frames[e, t])
        return pixels.movedim(-1, -3).float() / 127.5 - 1

    def targets(self, e: NDArray[np.int64], t: NDArray[np.int64]) -> Targets:
        physics = self.episodes.physics[e, t]
        operation = np.broadcast_to(self.episodes.operation[e], t.shape)
        return Targets(
            physical=torch.from_numpy((physics[..., :7] - self.mean) / self.std),
            flags=torch.from_numpy(physics[..., 7:9]),
            operation=torch.from_numpy(operation.copy()),
            images=self.images(e, t),
            previous=self.images(e, np.maximum(t - 1, 0)),
        )

    @torch.no_grad()
    def embed(self, network: WorldNetwork) -> None:
        """Tokens of every frame by the frozen embedder."""
        E, T = self.episodes.frames.shape[:2]
        N, D = network.embedder.tokens, network.config.width
        self.tokens = torch.empty(E, T, N, D, dtype=torch.bfloat16)
        for e in range(E):
            with torch.autocast("cpu", torch.bfloat16):
                self.tokens[e] = network.embedder(self.images(np.full(T, e), np.arange(T)))

    @torch.no_grad()
    def predict(self, network: WorldNetwork, seed: int, count: int = 2000) -> None:
        """Predictions from random presents, after short and long contexts."""
        rng = np.random.default_rng(seed)
        made: list[tuple[NDArray[np.int64], NDArray[np.int64], Tensor]] = []
        for _ in range(count // 8):
            context = int(rng.choice([2, 6, 16]))
            e, t, tokens, controls = self.window(rng, 8, context + HORIZON)
            condition = self.condition(network, rng, e)
            with torch.autocast("cpu", torch.bfloat16):
                after = unroll(network, tokens[:, :context], controls, condition)
            made.append((e[:, 0], t[:, context - 1], after.to(torch.bfloat16)))
        self.predictions = Predictions(
            np.concatenate([part[0] for part in made]),
            np.concatenate([part[1] for part in made]),
            torch.cat([part[2] for part in made]),
        )

    def window(
        self, rng: np.random.Generator, batch: int, frames: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Tensor, Tensor]:
        """Random stretches: e (B, 1), t (B, T), tokens (B, T, N, D), controls (B, T - 1, C)."""
        assert self.tokens is not None
        total = self.episodes.frames.shape[1]
        e = rng.integers(len(self.episodes), size=(batch, 1))
        t = rng.integers(total - frames + 1, size=(batch, 1)) + np.arange(frames)
        controls = torch.from_numpy(self.episodes.controls[e, t[:, :-1]])
        return e, t, self.tokens[torch.from_numpy(e), torch.from_numpy(t)], controls

    def condition(
        self, network: WorldNetwork, rng: np.random.Generator, e: NDArray[np.int64]
    ) -> Tensor:
        """Half of the sessions come without a prompt: the model must do without."""
        prompts = [
            self.episodes.prompts[self.episodes.operation[i]] if rng.random() < 0.5 else ""
            for i in e.ravel()
        ]
        return network.condition(prompts, [0] * len(prompts))


def frames_step(
    network: WorldNetwork, data: TrainingData, rng: np.random.Generator, draw: torch.Generator
) -> dict[str, Tensor]:
    e = rng.integers(len(data.episodes), size=96)
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


def drawing_step(
    network: WorldNetwork, data: TrainingData, rng: np.random.Generator, draw: torch.Generator
) -> dict[str, Tensor]:
    assert data.predictions is not None
    known = data.predictions
    i = rng.integers(len(known.e), size=64)
    k = rng.integers(HORIZON, size=64)
    images = data.images(known.e[i], known.t[i] + 1 + k)
    last = data.images(known.e[i], known.t[i])
    tokens = known.tokens[torch.from_numpy(i), torch.from_numpy(k)]
    flow = flow_loss(network, images, last, tokens, draw, at_start=0.75, changed_weight=4.0)
    return {"flow": 5 * flow}


def unroll(network: WorldNetwork, tokens: Tensor, controls: Tensor, condition: Tensor) -> Tensor:
    """Predicted tokens (B, HORIZON, N, D) after the context `tokens` (B, T, N, D)."""
    context = tokens.shape[1]
    after, _, cache = network.predict(tokens, controls[:, :context], condition)
    step = after[:, -1:]
    predicted = [step]
    for at in range(context, context + HORIZON - 1):
        step, _, cache = network.predict(step, controls[:, at : at + 1], condition, cache, at)
        predicted.append(step)
    return torch.cat(predicted, 1)


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
