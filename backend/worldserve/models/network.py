"""The reference network: embedder, dynamics, state read-out and generator."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from worldserve.models.crossview import CrossView
from worldserve.models.dynamics import Dynamics, LayerCache
from worldserve.models.embedder import FrameEmbedder
from worldserve.models.generator import Generator
from worldserve.models.layers import in_blocks

__all__ = ["NetworkConfig", "StateLayout", "WorldNetwork", "prompt_words"]

_VOCABULARY = 512


@dataclass(frozen=True)
class StateLayout:
    """Which of the 256 numbers of a state mean what; ranges are [start, stop).

    physical: gripper x y z, opening, object x y z, standardised. flags: logits of grasped and
    succeeded. operations: one logit per operation slot. thumbnail: the frame as 8 x 8 RGB block
    means in [-1, 1]. motion: how much each cell of a 4 x 4 grid changes to this frame.
    """

    physical: tuple[int, int] = (0, 7)
    flags: tuple[int, int] = (7, 9)
    operations: tuple[int, int] = (9, 48)
    thumbnail: tuple[int, int] = (48, 240)
    motion: tuple[int, int] = (240, 256)
    size: int = 256

    @property
    def frame_readout(self) -> int:
        """The first dimensions, those that a single frame can tell."""
        return self.operations[1]


@dataclass(frozen=True)
class NetworkConfig:
    """Everything needed to build the network; stored beside its weights."""

    operations: tuple[str, ...]
    views: tuple[str, ...] = ("front",)
    width: int = 192
    heads: int = 3
    embedder_blocks: int = 1
    dynamics_layers: int = 4
    generator_blocks: int = 3
    window: int = 32
    frame_px: int = 64
    control_dim: int = 4
    state: StateLayout = field(default_factory=StateLayout)

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} does not give {self.heads} heads an even size")
        slots = self.state.operations[1] - self.state.operations[0]
        if len(self.operations) > slots:
            raise ValueError(f"{len(self.operations)} operations; the state has {slots} slots")

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> NetworkConfig:
        raw = dict(raw)
        layout: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in raw.pop("state").items()
        }
        state = StateLayout(**layout)
        return cls(
            operations=tuple(raw.pop("operations")),
            views=tuple(raw.pop("views")),
            state=state,
            **raw,
        )


def prompt_words(prompt: str) -> list[int]:
    """Vocabulary slots of the words of a prompt; a hash, so that no word is unknown."""
    words = re.findall(r"[a-z0-9]+", prompt.lower())
    return [
        int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "little")
        % _VOCABULARY
        for word in words
    ]


class WorldNetwork(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        width, heads = config.width, config.heads
        self.embedder = FrameEmbedder(
            width, heads, config.embedder_blocks, config.state.frame_readout, config.frame_px
        )
        self.words = nn.EmbeddingBag(_VOCABULARY, width, mode="mean")
        self.views = nn.Embedding(len(config.views), width)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.views.weight, std=0.02)
        self.dynamics = Dynamics(
            width,
            heads,
            config.dynamics_layers,
            config.window,
            self.embedder.tokens,
            config.control_dim,
        )
        self.squeeze = nn.Linear(width, 24)
        last = nn.Linear(384, config.state.size)
        with torch.no_grad():  # the read-out of a single frame comes first, corrections later
            last.weight[: config.state.frame_readout] *= 0.05
        self.readout = nn.Sequential(
            nn.Linear(24 * self.embedder.tokens + width, 384), nn.SiLU(), last
        )
        self.generator = Generator(width, heads, config.generator_blocks, self.embedder.grid)
        self.cross_view = (
            CrossView(width, heads, self.embedder.tokens, config.state.size, len(config.views))
            if len(config.views) > 1
            else None
        )

    def condition(self, prompts: Sequence[str], views: Sequence[int]) -> Tensor:
        """(B, D); an empty prompt contributes nothing."""
        indices: list[int] = []
        offsets: list[int] = []
        for prompt in prompts:
            offsets.append(len(indices))
            indices += prompt_words(prompt)
        device = self.words.weight.device
        text = self.words(
            torch.tensor(indices, dtype=torch.long, device=device),
            torch.tensor(offsets, device=device),
        )
        out: Tensor = text + self.views(torch.tensor(list(views), device=device))
        return out

    def read(self, tokens: Tensor, control_tokens: Tensor) -> Tensor:
        """States (M, S) of predicted frames: tokens (M, N, D), control tokens (M, D)."""
        summary = torch.cat((self.squeeze(tokens).flatten(-2), control_tokens), -1)
        state = in_blocks(self.readout, summary).float()
        seen = in_blocks(self.embedder.readout, self.embedder.summary(tokens)).float()
        state = torch.cat((state[:, : seen.shape[1]] + seen, state[:, seen.shape[1] :]), -1)
        first, last = self.config.state.operations
        unused = first + len(self.config.operations)
        state[:, unused:last] = 0
        return state

    def predict(
        self,
        tokens: Tensor,
        controls: Tensor,
        condition: Tensor,
        cache: list[LayerCache] | None = None,
        position: int = 0,
    ) -> tuple[Tensor, Tensor, list[LayerCache]]:
        """Training's forward pass: tokens (B, T, N, D) -> next tokens, states (B, T, S), cache."""
        after, control_tokens, cache = self.dynamics(tokens, controls, condition, cache, position)
        states = self.read(after.flatten(0, 1), control_tokens.flatten(0, 1))
        return after, states.view(*after.shape[:2], -1), cache
