"""Predicted tokens to frames: flow matching from the last observed frame.

The flow runs from last frame + noise (t = 0) to the next frame (t = 1); the network predicts the
end point, as last frame + mask x difference. A third of the training is at t = 0, so that a
single step already gives the conditional mean; more steps sharpen.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldserve.models.layers import ModulatedBlock, Stem, channels_last

__all__ = ["NOISE", "Generator", "settle"]

#: standard deviation of the noise at t = 0, pixels in [-1, 1]
NOISE = 0.1


def settle(end: Tensor, last: Tensor, still: float) -> Tensor:
    """Damp changes that are too small to be believed; images (M, 3, px, px).

    A predicted change of size m is scaled by m² / (m² + still²): half of it is left at `still`, all
    of a large one. Measured on held-out clips (`training.finish.still_change`).
    """
    if still <= 0:
        return end
    change = end - last
    power = change.abs().mean(1, keepdim=True) ** 2
    return last + change * (power / (power + still**2))


class Generator(nn.Module):
    def __init__(self, width: int, heads: int, blocks: int, grid: int) -> None:
        super().__init__()
        fine, middle = Stem.widths
        self.grid = grid
        self.stem = Stem(width, 6)
        self.tokens_in = nn.Linear(width, width)
        self.position = nn.Parameter(torch.randn(grid * grid, width) * 0.02)
        self.time_in = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(ModulatedBlock(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.up1 = nn.Conv2d(width, 96, 3, 1, 1)
        self.up2 = nn.Conv2d(96 + middle, 64, 3, 1, 1)
        self.up3 = nn.Conv2d(64 + fine, 48, 3, 1, 1)
        self.norm2, self.norm3 = nn.GroupNorm(8, 64), nn.GroupNorm(8, 48)
        self.out = nn.Conv2d(48, 16, 3, 1, 1)
        nn.init.normal_(self.out.weight, std=0.01)
        bias = torch.zeros(16)
        bias[12:] = -2  # the mask starts nearly closed
        self.out.bias = nn.Parameter(bias)

    def forward(self, x: Tensor, t: Tensor, last: Tensor, tokens: Tensor) -> Tensor:
        """End point of the flow (M, 3, px, px) from x and last alike, t (M,), tokens (M, N, D)."""
        h, condition, skips = self.enter(x, t, last, tokens)
        for block in self.blocks:
            h = block(h, condition)
        return self.leave(h, skips, last)

    def enter(
        self, x: Tensor, t: Tensor, last: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """What the blocks take: h (M, grid * grid, D), condition (M, D); and what `leave` does."""
        frequency = torch.exp(torch.linspace(0, math.log(1000), 32, device=x.device))
        phase = t[:, None] * frequency
        condition = F.silu(self.time_in(torch.cat((phase.sin(), phase.cos()), -1)))
        fine, middle, coarse = self.stem(torch.cat((x, last), 1))
        h = coarse.flatten(2).transpose(1, 2) + self.position  # (M, grid * grid, D)
        return h + self.tokens_in(tokens[:, : self.grid**2]), condition, (fine, middle)

    def leave(self, h: Tensor, skips: tuple[Tensor, Tensor], last: Tensor) -> Tensor:
        """From what the blocks have made to the end point of the flow."""
        fine, middle = skips
        M, _, D = h.shape
        h = channels_last(self.norm(h).transpose(1, 2).reshape(M, D, self.grid, self.grid))
        h = F.interpolate(F.silu(self.up1(h)), scale_factor=2.0)
        h = F.interpolate(F.silu(self.norm2(self.up2(torch.cat((h, middle), 1)))), scale_factor=2.0)
        h = F.silu(self.norm3(self.up3(torch.cat((h, fine), 1))))
        out = F.pixel_shuffle(self.out(h).float(), 2)  # (M, 4, px, px)
        return last + 2 * out[:, 3:].sigmoid() * out[:, :3]

    def sample(
        self,
        last: Tensor,
        tokens: Tensor,
        noise: Tensor,
        steps: int,
        checkpoint: Callable[[], None] | None = None,
    ) -> Tensor:
        """Integrate the flow in `steps` Euler steps; noise (M, 3, px, px) of unit variance."""
        x = last + NOISE * noise
        for i in range(steps):
            t = i / steps
            end = self(x, torch.full((len(x),), t), last, tokens)
            x = x + (end - x) / ((1 - t) * steps)
            if checkpoint is not None:
                checkpoint()
        return x
