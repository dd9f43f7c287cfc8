"""One level in memory: things by id, their bytes, and who leaves first. No locks: its owner's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from worldcache.eviction import Standing, Usual, Weights, score

__all__ = ["Held", "Shelf"]

T = TypeVar("T")
_LOOK_AT = 64


@dataclass(slots=True)
class Held(Generic[T]):
    """value, and what eviction knows; kind and group: as it was stored. base: id of what the value
    is only a difference to. known: the importance was given, and is not learnt."""

    value: T
    standing: Standing
    kind: str
    group: bytes
    base: bytes | None = None
    known: bool = False


class Shelf(Generic[T]):
    """At most `limit_bytes` of things. The owner makes room before adding."""

    def __init__(self, limit_bytes: int, weights: Weights) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._weights = weights
        self._held: dict[bytes, Held[T]] = {}
        self._order: list[bytes] = []
        self._place: dict[bytes, int] = {}
        self._random = random.Random(0)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, id: bytes) -> bool:
        return id in self._held

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._held))

    def get(self, id: bytes) -> Held[T] | None:
        return self._held.get(id)

    def add(self, id: bytes, held: Held[T]) -> None:
        """ValueError where there is no room: the limit holds whatever happens."""
        size = held.standing.size_bytes
        if self.size_bytes + size > self.limit_bytes or id in self._held:
            raise ValueError(f"no room for {size} bytes, or there already")
        self._held[id] = held
        self._place[id] = len(self._order)
        self._order.append(id)
        self.size_bytes += size

    def pop(self, id: bytes) -> Held[T] | None:
        held = self._held.pop(id, None)
        if held is None:
            return None
        self.size_bytes -= held.standing.size_bytes
        place, last = self._place.pop(id), self._order.pop()
        if last != id:
            self._order[place] = last
            self._place[last] = place
        return held

    def least(self, now_s: float, usual: Usual, but: bytes | None = None) -> bytes | None:
        """Who should leave: the lowest score among a sample. What others depend on stays as long as
        they do."""
        count = len(self._order)
        if count <= _LOOK_AT:
            sample = self._order
        else:
            sample = [self._order[self._random.randrange(count)] for _ in range(_LOOK_AT)]
        worst = self._worst(sample, now_s, usual, but)
        if worst is None and count > _LOOK_AT:
            worst = self._worst(self._order, now_s, usual, but)
        return worst

    def _worst(
        self, ids: list[bytes], now_s: float, usual: Usual, but: bytes | None
    ) -> bytes | None:
        free = (id for id in ids if id != but and not self._held[id].standing.dependents)
        return min(
            free,
            key=lambda id: score(self._held[id].standing, now_s, usual, self._weights),
            default=None,
        )
