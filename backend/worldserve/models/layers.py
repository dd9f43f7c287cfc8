"""Building blocks of the reference world model, shared by training and serving.

Shape letters: B batch, T frames, N tokens of a frame, D width, h heads, d = D / h, M images.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "FeedForward",
    "ModulatedBlock",
    "SpatialBlock",
    "Stem",
    "attend",
    "band_mask",
    "channels_last",
    "in_blocks",
    "rotary",
    "rotate",
]

_ROPE_BASE = 100.0


def rotary(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables (T, head_dim / 2) of rotary embedding (Su et al., 2021)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angle = positions.double()[:, None] / _ROPE_BASE ** exponent[None]  # (T, d / 2)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x (..., T, d) by the positions of `table`."""
    cos, sin = (t.to(x.dtype) for t in table)
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention, q (..., Q, d), k and v (..., K, d) -> (..., Q, d).

    Written out: at these sizes it trains six times as fast on a CPU as the fused kernel.
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    out: Tensor = scores.softmax(-1).to(v.dtype) @ v
    return out


def band_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """(queries, keys): the queries are the last positions; each sees the `window` newest keys."""
    q = torch.arange(keys - queries, keys, device=device)[:, None]
    k = torch.arange(keys, device=device)[None]
    visible = (k <= q) & (q - k < window)
    return torch.zeros(queries, keys, device=device).masked_fill(~visible, float("-inf"))


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def in_blocks(function: Callable[[Tensor], Tensor], x: Tensor, rows: int = 16) -> Tensor:
    """Apply a row-wise function to x (M, K) in zero-padded blocks of a fixed number of rows.

    Matrix products of different heights may take different kernels, with different roundings. Where
    heights are small and vary, one fixed shape makes a batch give the bits of its members.
    """
    padded = torch.cat((x, x.new_zeros(-len(x) % rows, x.shape[1])))
    return torch.cat([function(block) for block in torch.split(padded, rows)])[: len(x)]


class FeedForward(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, N, D) -> q, k, v, each (B, h, N, d)."""
        B, N, D = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        return qkv[0], qkv[1], qkv[2]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        out: Tensor = self.out(attend(q, k, v).transpose(1, 2).reshape(x.shape))
        return out


class SpatialBlock(nn.Module):
    """Attention among the tokens of one frame, then a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.feed_forward = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.feed_forward(self.norm2(x))
        return out


class ModulatedBlock(nn.Module):
    """A spatial block modulated by a condition (adaLN-zero; Peebles and Xie, 2023)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = SelfAttention(width, heads)
        self.feed_forward = FeedForward(width)
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x (M, N, D), condition (M, D)."""
        parts = self.modulation(condition)[:, None].chunk(6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        out: Tensor = x + gate2 * self.feed_forward(self.norm2(x) * (1 + scale2) + shift2)
        return out


class Stem(nn.Module):
    """Images (M, C, 64, 64) to feature maps at a half, a quarter and an eighth of the size."""

    widths = (48, 96)

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        fine, middle = self.widths
        self.conv1 = nn.Conv2d(channels, fine, 4, 2, 1)
        self.conv2 = nn.Conv2d(fine, middle, 3, 2, 1)
        self.conv3 = nn.Conv2d(middle, width, 3, 2, 1)
        self.norm1, self.norm2 = nn.GroupNorm(8, fine), nn.GroupNorm(8, middle)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine = F.silu(self.norm1(self.conv1(channels_last(x))))
        middle = F.silu(self.norm2(self.conv2(fine)))
        return fine, middle, self.conv3(middle)
