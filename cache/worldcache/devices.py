"""Where the first level keeps its arrays: on the device that computes, or in this process."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Device", "HostDevice", "TorchDevice", "device_share"]

#: Of a device's memory, for feature maps.
RESERVED = 0.15


class Device(Protocol):
    """Takes arrays and gives them back, bit for bit."""

    def upload(self, array: NDArray[Any]) -> Any: ...
    def download(self, value: Any) -> NDArray[Any]: ...


class HostDevice:
    """The memory of this process; arrays are kept as they are, and read-only."""

    def upload(self, array: NDArray[Any]) -> NDArray[Any]:
        # A view would keep alive all that it is a view of, which nobody would count.
        own = array.copy() if array.base is not None else array.view()
        own.flags.writeable = False
        return own

    def download(self, value: NDArray[Any]) -> NDArray[Any]:
        return value


class TorchDevice:
    """A torch device such as `cuda:0`: values are tensors there."""

    def __init__(self, name: str) -> None:
        import torch

        self._torch = torch
        self.device = torch.device(name)

    def upload(self, array: NDArray[Any]) -> Any:
        return self._torch.from_numpy(np.array(array)).to(self.device)

    def download(self, value: Any) -> NDArray[Any]:
        array: NDArray[Any] = value.cpu().numpy()
        return array


def device_share(share: float = RESERVED) -> int | None:
    """That share of the first CUDA device's memory in bytes; None where there is no such device."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    return int(share * torch.cuda.get_device_properties(0).total_memory)
