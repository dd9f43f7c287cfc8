"""Which of the stored features a new one is most like, and packing it as a difference to that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from worldcache.merge import Packed, pack_alone, pack_difference, signature, unlike

__all__ = ["Similar"]

Array: TypeAlias = NDArray[Any]
#: Features of one kind and group may be alike.
Group: TypeAlias = tuple[str, bytes]
_BASES = 8
_LIKE = 0.5


class Similar:
    """The newest bases of every group, by a few of their values. Its owner's lock covers it."""

    def __init__(self, provenance: bytes, max_error: float) -> None:
        self._provenance = provenance
        self._max_error = max_error
        self._groups: dict[tuple[Any, ...], dict[bytes, NDArray[np.float32]]] = {}
        self._where: dict[bytes, tuple[Any, ...]] = {}

    def pack(self, array: Array, group: Group, base: Callable[[bytes], Array | None]) -> Packed:
        """base: gives the array of a base, None where it cannot be used any more."""
        alone = pack_alone(array, self._provenance)
        known = self._groups.get(_key(array, group))
        if not known:
            return alone
        own = signature(array)
        distance, nearest = min((unlike(own, other), id) for id, other in known.items())
        origin = base(nearest) if distance < _LIKE else None
        if origin is None:
            return alone
        packed = pack_difference(
            array, origin, nearest, self._provenance, self._max_error, len(alone.payload)
        )
        return packed or alone

    def add(self, id: bytes, packed: Packed, array: Array, group: Group) -> None:
        """A feature was stored: one that stands alone may be a base for others."""
        if packed.base is not None:
            return
        key = _key(array, group)
        known = self._groups.setdefault(key, {})
        known[id] = signature(array)
        self._where[id] = key
        while len(known) > _BASES:
            self._where.pop(next(iter(known)), None)
            known.pop(next(iter(known)))

    def discard(self, id: bytes) -> None:
        """A feature is gone."""
        key = self._where.pop(id, None)
        if key is not None:
            known = self._groups[key]
            known.pop(id, None)
            if not known:
                del self._groups[key]


def _key(array: Array, group: Group) -> tuple[Any, ...]:
    return (*group, array.shape, array.dtype.str)
