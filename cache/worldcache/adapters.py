"""What WorldCache must know of a diffusion transformer that it did not build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = ["COSMOS", "WAN", "Adapter", "adapter_for"]


def _norm_only(block: nn.Module, hidden: Tensor, rest: tuple[Any, ...]) -> Tensor:
    return hidden


def _wan_modulated(block: nn.Module, hidden: Tensor, rest: tuple[Any, ...]) -> Tensor:
    """What Wan's first self-attention sees: rest is (text, time projection (B, 6, D), rotary)."""
    shift, scale, *_ = (block.scale_shift_table + rest[1].float()).chunk(6, dim=-2)
    modulated: Tensor = block.norm1(hidden.float()) * (1 + scale) + shift  # type: ignore[operator]
    return modulated.flatten(1)


@dataclass(frozen=True)
class Adapter:
    """blocks: name of the attribute that holds the transformer blocks, in order; each takes the
    hidden states first and returns them alone. latents: name of `forward`'s argument that holds the
    noisy input (B, ...). writes: what a forward pass writes beside its output. modulated: what the
    first block makes of its input before it attends, for the policy `teacache`.
    """

    blocks: str = "transformer_blocks"
    latents: str = "hidden_states"
    writes: frozenset[str] = frozenset()
    modulated: Callable[[nn.Module, Tensor, tuple[Any, ...]], Tensor] = _norm_only


WAN = Adapter(blocks="blocks", modulated=_wan_modulated)
COSMOS = Adapter()
_KNOWN = {"WanTransformer3DModel": WAN, "CosmosTransformer3DModel": COSMOS}


def adapter_for(model: nn.Module) -> Adapter:
    """The adapter of a model class that is known here; ValueError says how to write one."""
    found = _KNOWN.get(type(model).__name__)
    if found is None:
        raise ValueError(
            f"no adapter for {type(model).__name__}; known: {', '.join(_KNOWN)}. "
            "Say where its blocks are: Adapter(blocks='...')"
        )
    return found
