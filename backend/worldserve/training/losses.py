"""What the reference model is trained on: read-outs, token prediction, pixels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worldserve.models.generator import NOISE
from worldserve.models.layers import channels_last
from worldserve.models.network import WorldNetwork

__all__ = ["Targets", "flow_loss", "frame_loss", "state_loss", "thumbnail"]


@dataclass(frozen=True)
class Targets:
    """Of frames (..., ): physical (..., 7) standardised, flags (..., 2), operation (...,) index,
    images (..., 3, px, px) in [-1, 1], previous images of the same shape."""

    physical: Tensor
    flags: Tensor
    operation: Tensor
    images: Tensor
    previous: Tensor

    def flat(self) -> Targets:
        """Leading dimensions merged into one."""
        lead = self.flags.dim() - 1
        return Targets(*(getattr(self, n).flatten(0, lead - 1) for n in self.__dataclass_fields__))


def thumbnail(images: Tensor) -> Tensor:
    """Block means on an 8 x 8 grid: (M, 3, px, px) -> (M, 192)."""
    return F.adaptive_avg_pool2d(images, 8).flatten(1)


def _motion(images: Tensor, previous: Tensor) -> Tensor:
    """How much each cell of a 4 x 4 grid changes: (M, 16)."""
    change = (images - previous).abs().mean(1, keepdim=True)
    return 4 * F.adaptive_avg_pool2d(change, 4).flatten(1)


def frame_loss(readout: Tensor, target: Targets, operations: int) -> Tensor:
    """What a single frame tells: readout (M, 48)."""
    physical = F.smooth_l1_loss(readout[:, :7], target.physical, beta=0.1)
    flags = F.binary_cross_entropy_with_logits(readout[:, 7:9], target.flags)
    operation = F.cross_entropy(readout[:, 9 : 9 + operations], target.operation)
    return 3 * physical + 0.6 * flags + 0.15 * operation


def state_loss(network: WorldNetwork, states: Tensor, target: Targets) -> Tensor:
    """States (M, S) of predicted frames against what those frames hold."""
    layout = network.config.state
    loss = frame_loss(states, target, len(network.config.operations))
    first, last = layout.thumbnail
    loss = loss + F.smooth_l1_loss(states[:, first:last], thumbnail(target.images), beta=0.1)
    first, last = layout.motion
    motion = _motion(target.images, target.previous)
    return loss + 0.5 * F.smooth_l1_loss(states[:, first:last], motion, beta=0.1)


def flow_loss(
    network: WorldNetwork,
    images: Tensor,
    last: Tensor,
    tokens: Tensor,
    draw: torch.Generator,
    at_start: float = 0.35,
    changed_weight: float = 7.0,
) -> Tensor:
    """Flow matching towards images (M, 3, px, px) from last + noise, given predicted tokens.

    at_start: share of the draws at t = 0, where the answer is the conditional mean.
    changed_weight: of pixels that differ from the last frame; the still background weighs 1.
    """
    M = len(images)
    early = torch.rand(M, generator=draw) > at_start
    t = torch.rand(M, generator=draw) * 0.98 * early
    tt = t[:, None, None, None]
    noise = torch.randn(images.shape, generator=draw)
    x = tt * images + (1 - tt) * (last + NOISE * noise)
    end = network.generator(channels_last(x), t, channels_last(last), tokens)
    weight = 1 / (1 - tt).clamp(min=0.4)
    changed = (
        1 + (changed_weight - 1) * ((images - last).abs().mean(1, keepdim=True) > 0.05).float()
    )
    error = end - images
    loss: Tensor = ((error**2 + 0.3 * error.abs()) * weight * changed).mean()
    return loss
