"""What the stages of training draw their batches from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor

from worldserve.data.dataset import Episodes
from worldserve.models.network import WorldNetwork
from worldserve.training.losses import Targets

__all__ = ["HORIZON", "Predictions", "TrainingData", "unroll"]

HORIZON = 8
_UNPROMPTED = 0.3  # share of the sessions that come without a prompt


@dataclass(frozen=True)
class Predictions:
    """What the dynamics predict: tokens (n, HORIZON, N, D) after present frames e, t (n,).

    states (n, HORIZON, S) of the same frames.
    """

    e: NDArray[np.int64]
    t: NDArray[np.int64]
    tokens: Tensor
    states: Tensor


@dataclass
class TrainingData:
    """Episodes with their physical quantities standardised, and (after stage 1) their tokens.

    share (E,): how likely a batch draws each row; suites weigh as `weights` says, not by size.
    """

    episodes: Episodes
    mean: NDArray[np.float32]
    std: NDArray[np.float32]
    share: NDArray[np.float64]
    tokens: Tensor | None = None  # (E, T, N, D) bfloat16
    predictions: Predictions | None = None

    @classmethod
    def of(
        cls,
        episodes: Episodes,
        weights: Sequence[float] = (1.0,),
        mean: NDArray[np.float32] | None = None,
        std: NDArray[np.float32] | None = None,
    ) -> TrainingData:
        """Standardised by `mean` and `std` (7,) where given, by the episodes' own otherwise."""
        if mean is None or std is None:
            physical = episodes.physics[..., :7].reshape(-1, 7)
            mean, std = physical.mean(0), physical.std(0)
        share = np.array(weights, np.float64)[episodes.suite]
        share /= np.bincount(episodes.suite)[episodes.suite]
        return cls(episodes, mean, std, share / share.sum())

    def draw(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Rows of a batch, (size,)."""
        return rng.choice(len(self.episodes), size, p=self.share)

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
    def embed(self, network: WorldNetwork, store: Path | None = None) -> None:
        """Tokens of every frame by the frozen embedder.

        store: a file to map them into, so that a resumed run finds them and memory stays free; it
        belongs to one embedder and one set of episodes, and is made again for any other.
        """
        E, T = self.episodes.frames.shape[:2]
        N, D = network.embedder.tokens, network.config.width
        shape = (E, T, N, D)
        if store is None:
            self.tokens = torch.empty(shape, dtype=torch.bfloat16)
        else:
            key = store.with_suffix(".key")
            identity = f"{shape} {_fingerprint(network.embedder)}"
            known = key.exists() and store.exists() and key.read_text() == identity
            self.tokens = torch.from_file(
                str(store), shared=True, size=E * T * N * D, dtype=torch.bfloat16
            ).view(shape)
            if known:
                return
            key.unlink(missing_ok=True)
        for e in track(range(E), description="embedding episodes"):
            with torch.autocast("cpu", torch.bfloat16):
                self.tokens[e] = network.embedder(self.images(np.full(T, e), np.arange(T)))
        if store is not None:
            key.write_text(identity)

    @torch.no_grad()
    def predict(self, network: WorldNetwork, seed: int, count: int = 2000) -> None:
        """Predictions from random presents, after short and long contexts.

        Every second one is of a row that has a twin, where there are any.
        """
        rng = np.random.default_rng(seed)
        paired = np.flatnonzero(self.episodes.twin >= 0)
        made: list[tuple[NDArray[np.int64], NDArray[np.int64], Tensor, Tensor]] = []
        for number in track(range(count // 8), description="predicting"):
            context = int(rng.choice([2, 6, 16]))
            rows = rng.choice(paired, 8) if number % 2 and len(paired) else None
            e, t, tokens, controls = self.window(rng, 8, context + HORIZON, rows)
            condition = self.condition(network, rng, e)
            with torch.autocast("cpu", torch.bfloat16):
                after, states = unroll(network, tokens[:, :context], controls, condition)
            made.append((e[:, 0], t[:, context - 1], after.to(torch.bfloat16), states.float()))
        self.predictions = Predictions(
            np.concatenate([part[0] for part in made]),
            np.concatenate([part[1] for part in made]),
            torch.cat([part[2] for part in made]),
            torch.cat([part[3] for part in made]),
        )

    def window(
        self,
        rng: np.random.Generator,
        batch: int,
        frames: int,
        rows: NDArray[np.int64] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Tensor, Tensor]:
        """Random stretches: e (B, 1), t (B, T), tokens (B, T, N, D), controls (B, T - 1, C)."""
        assert self.tokens is not None
        total = self.episodes.frames.shape[1]
        e = (self.draw(rng, batch) if rows is None else rows)[:, None]
        t = rng.integers(total - frames + 1, size=(batch, 1)) + np.arange(frames)
        controls = torch.from_numpy(self.episodes.controls[e, t[:, :-1]])
        return e, t, self.tokens[torch.from_numpy(e), torch.from_numpy(t)], controls

    def condition(
        self, network: WorldNetwork, rng: np.random.Generator, e: NDArray[np.int64]
    ) -> Tensor:
        """A third of the sessions come without a prompt: the model must do without."""
        prompts = []
        for i in e.ravel():
            known = self.episodes.prompts[self.episodes.operation[i]]
            prompts.append(known[rng.integers(len(known))] if rng.random() > _UNPROMPTED else "")
        return network.condition(prompts, self.episodes.view[e.ravel()].tolist())


def _fingerprint(module: torch.nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in module.state_dict().values():
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def unroll(
    network: WorldNetwork, tokens: Tensor, controls: Tensor, condition: Tensor
) -> tuple[Tensor, Tensor]:
    """Predicted tokens (B, HORIZON, N, D), states (B, HORIZON, S) after `tokens` (B, T, N, D)."""
    context = tokens.shape[1]
    after, read, cache = network.predict(tokens, controls[:, :context], condition)
    step = after[:, -1:]
    predicted, states = [step], [read[:, -1:]]
    for at in range(context, context + HORIZON - 1):
        step, state, cache = network.predict(step, controls[:, at : at + 1], condition, cache, at)
        predicted.append(step)
        states.append(state)
    return torch.cat(predicted, 1), torch.cat(states, 1)
