"""Stage 0: one frame to tokens, and what can be read from a single frame."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldserve.models.layers import SpatialBlock, Stem

__all__ = ["FrameEmbedder"]

_PATCH_PX = 8
_KEYPOINTS = 64


class FrameEmbedder(nn.Module):
    """Convolutional stem and spatial soft-argmax keypoints; 64 patch tokens and one of keypoints.

    Soft-argmax (Levine et al., 2016) turns "where" into numbers, which is what makes the gripper
    readable to a centimetre from so small a network.
    """

    def __init__(self, width: int, heads: int, blocks: int, readout: int, frame_px: int) -> None:
        super().__init__()
        self.frame_px = frame_px
        self.grid = frame_px // _PATCH_PX
        self.tokens = self.grid**2 + 1
        self.stem = Stem(width, 3)
        self.keypoints = nn.Conv2d(Stem.widths[1], _KEYPOINTS, 1)
        self.from_keypoints = nn.Linear(2 * _KEYPOINTS, width)
        self.position = nn.Parameter(torch.randn(self.tokens, width) * 0.02)
        self.blocks = nn.ModuleList(SpatialBlock(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.squeeze = nn.Linear(width, 24)
        self.readout = nn.Sequential(
            nn.Linear(24 * self.tokens, 384), nn.SiLU(), nn.Linear(384, readout)
        )
        self.to_pixels = nn.Linear(width, 3 * _PATCH_PX**2)

    def forward(self, images: Tensor) -> Tensor:
        """images (M, 3, px, px) in [-1, 1] -> tokens (M, N, D), layer-normed."""
        _, middle, coarse = self.stem(images)
        M, _, height, width = middle.shape
        heat = self.keypoints(middle).flatten(2).float().softmax(-1).view(M, -1, height, width)
        axis = torch.linspace(-1, 1, width, device=images.device)
        x = (heat.sum(2) * axis).sum(-1)  # (M, keypoints)
        y = (heat.sum(3) * axis).sum(-1)
        where = self.from_keypoints(2 * torch.cat((x, y), -1))
        patches = coarse.flatten(2).transpose(1, 2)  # (M, grid * grid, D)
        tokens = torch.cat((patches, where[:, None].to(patches.dtype)), 1) + self.position
        for block in self.blocks:
            tokens = block(tokens)
        out: Tensor = self.norm(tokens)
        return out

    def summary(self, tokens: Tensor) -> Tensor:
        """tokens (..., N, D) -> (..., 24 * N)."""
        out: Tensor = self.squeeze(tokens).flatten(-2)
        return out

    def read(self, tokens: Tensor) -> Tensor:
        """What one frame tells: tokens (M, N, D) -> (M, readout)."""
        out: Tensor = self.readout(self.summary(tokens)).float()
        return out

    def reconstruct(self, tokens: Tensor) -> Tensor:
        """Pixels read linearly: tokens (M, N, D) -> (M, 3, px, px); keeps tokens informative."""
        patches = self.to_pixels(tokens[:, :-1])  # (M, grid * grid, 3 * 64)
        image = patches.reshape(-1, self.grid, self.grid, patches.shape[-1]).permute(0, 3, 1, 2)
        return F.pixel_shuffle(image.float(), _PATCH_PX)
