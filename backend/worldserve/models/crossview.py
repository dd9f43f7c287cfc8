"""Predictions of one view of a scene carried over to another camera.

A further view shares the rollout: what happens has been predicted; only what it looks like from
over there is missing. The head sees the last frame of that camera, what the first view predicts and
by how much it differs from its own last frame, and the predicted state, and says how the other
camera's tokens change. All steps of a horizon are one batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldserve.models.layers import SelfAttention, attend

__all__ = ["CrossView"]

_LAYERS = 2


class _CrossLayer(nn.Module):
    """Attention to the other view, among the own tokens, then a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_cross, self.norm_self, self.norm_ff = (nn.LayerNorm(width) for _ in range(3))
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.keys_values = nn.Linear(width, 2 * width)
        self.attention = SelfAttention(width, heads)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        """x (M, N, D) attends to other (M, K, D)."""
        M, N, D = x.shape
        q = self._heads(self.query(self.norm_cross(x)))
        k, v = (self._heads(part) for part in self.keys_values(other).chunk(2, -1))
        x = x + self.out(attend(q, k, v).transpose(1, 2).reshape(M, N, D))
        x = x + self.attention(self.norm_self(x))
        out: Tensor = x + self.feed_forward(self.norm_ff(x))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """(M, N, D) -> (M, h, N, d)."""
        M, N, D = x.shape
        return x.view(M, N, self.heads, D // self.heads).transpose(1, 2)


class CrossView(nn.Module):
    def __init__(self, width: int, heads: int, tokens: int, state: int, views: int) -> None:
        super().__init__()
        self.width = width
        self.own_in = nn.Linear(width, width)
        self.other_in = nn.Linear(2 * width, width)
        self.state_in = nn.Sequential(nn.Linear(state, width), nn.SiLU(), nn.Linear(width, width))
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.other_position = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.views = nn.Embedding(views, width)
        self.layers = nn.ModuleList(_CrossLayer(width, heads) for _ in range(_LAYERS))
        self.norm = nn.LayerNorm(width)
        self.difference = nn.Linear(width, width)
        nn.init.zeros_(self.difference.weight)
        nn.init.zeros_(self.difference.bias)

    def forward(
        self, last: Tensor, predicted: Tensor, present: Tensor, states: Tensor, view: Tensor
    ) -> Tensor:
        """Tokens (M, N, D) of M predicted frames as camera `view` (M,) sees them.

        last (M, N, D): tokens of that camera's last frame. predicted, present (M, N, D): tokens of
        the first view's predicted and last frame. states (M, S): predicted states, standardised as
        the network reads them.
        """
        state = self.state_in(states.to(last.dtype) / 4)[:, None]  # (M, 1, D)
        other = self.other_in(torch.cat((predicted, predicted - present), -1)) + self.other_position
        other = torch.cat((other, state.to(other.dtype)), 1)  # (M, N + 1, D)
        x = self.own_in(last) + self.position + self.views(view)[:, None] + state
        for layer in self.layers:
            x = layer(x, other)
        change = self.difference(self.norm(x))
        return F.layer_norm((last + change).float(), (self.width,)).to(change.dtype)
