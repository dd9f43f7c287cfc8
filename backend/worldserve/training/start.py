"""Go on from the weights of an earlier, narrower training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from worldserve.models.network import WorldNetwork

__all__ = ["start_from"]


@torch.no_grad()
def start_from(
    network: WorldNetwork, directory: Path
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Take over every tensor of the same shape; returns mean and std (7,) of the physics.

    A view that is new starts as the first one; operations keep their slots, so the earlier ones
    must come first. ValueError where they do not.
    """
    raw = json.loads((directory / "config.json").read_text())
    before = raw["network"]["operations"]
    if list(network.config.operations[: len(before)]) != before:
        raise ValueError(f"the operations of {directory} are not the first of {network.config}")
    known: dict[str, Tensor] = {
        name: tensor.float()
        for name, tensor in load_file(directory / "weights.safetensors").items()
    }
    state = network.state_dict()
    for name, tensor in state.items():
        old = known.get(name)
        if old is None:
            continue
        if old.shape == tensor.shape:
            tensor.copy_(old)
        elif name == "views.weight":
            tensor.copy_(old[:1].expand_as(tensor) + 0.1 * tensor)
            tensor[: len(old)] = old
    statistics = raw["statistics"]
    return (
        np.array(statistics["physics_mean"], np.float32),
        np.array(statistics["physics_std"], np.float32),
    )
