"""What Triton 2.51 is spared, since it would end by it before any Python of ours sees the request.

Known faults of its own, described in docs/faults.md. With a Triton that refuses them, remove this.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["spare", "spared"]


def spared(shape: list[int]) -> list[int]:
    """The shape, or one like it where it would end the stub: one that no array has, and whose
    product, which overflows, is a number of bytes all the same."""
    product = math.prod(shape)
    impossible = product >= 2**63 or any(size < 0 for size in shape)
    if impossible and any(product * each % 2**64 < 2**20 for each in (1, 2, 4, 8)):
        return [min(max(size, 0), 9) for size in shape]
    return shape


def spare(item: dict[str, Any]) -> None:
    """Cut the shape of an HTTP input that has its data in the JSON: room is made for as many
    elements as the shape says, before the data is looked at, and all of the server ends where there
    is none."""
    shape, parameters = item.get("shape"), item.get("parameters")
    binary = isinstance(parameters, dict) and "binary_data_size" in parameters
    if isinstance(shape, list) and all(type(size) is int for size in shape) and not binary:
        item["shape"] = [min(size, 9) for size in shape]
