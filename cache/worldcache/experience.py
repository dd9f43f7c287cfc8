"""What a store has learnt from its uses: what is usual, what returns, and who was here before.

Features that have left are remembered for a while, without their values: one that is stored again
was asked for again, and counts as used as often as it really was. So what is popular stays although
it had to leave once, and a scan, which nobody repeats, does not gain by being new.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from worldcache.eviction import Importance, Scale, Standing, Usual
from worldcache.shelf import Held

__all__ = ["Experience"]

_MOST_REMEMBERED = 16_384


class Experience:
    """Not thread-safe: its store's lock covers it."""

    def __init__(self, most_remembered: int = _MOST_REMEMBERED) -> None:
        self._scale = Scale()
        self._importance = Importance()
        self._most = most_remembered
        #: By id; of those that are here, the very standing that is looked at.
        self._known: OrderedDict[bytes, Standing] = OrderedDict()

    @property
    def usual(self) -> Usual:
        return self._scale()

    def arrived(
        self,
        id: bytes,
        kind: str,
        size_bytes: int,
        cost_ms: float,
        now_s: float,
        importance: float | None = None,
        asked: bool = True,
    ) -> Standing:
        """The standing of a feature that is about to be stored, and was not there. importance: of
        its content, where it is given. asked: whether somebody has asked for it."""
        before = self._known.pop(id, None) if asked else None
        uses = 0
        if before is None:
            self._importance.stored(kind)
        else:
            self._scale.used(now_s - before.last_used_s)
            self._importance.used(kind, before.uses)
            uses = before.uses + 1
        worth = self._importance(kind, uses) if importance is None else importance
        standing = Standing(size_bytes, cost_ms, worth, now_s, uses)
        self._scale.stored(standing)
        self.remember(id, standing)
        return standing

    def returned(self, id: bytes, size_bytes: int, cost_ms: float, now_s: float) -> Standing:
        """The standing of a feature that was asked for and found where no standings are kept."""
        before = self._known.get(id)
        uses, importance = (0, 0.5) if before is None else (before.uses, before.importance)
        standing = Standing(size_bytes, cost_ms, importance, now_s, uses + 1)
        self.remember(id, standing)
        return standing

    def used(self, held: Held[Any], now_s: float) -> None:
        """It was asked for: what that says of it, and of others like it."""
        standing = held.standing
        self._scale.used(now_s - standing.last_used_s)
        self._importance.used(held.kind, standing.uses)
        standing.last_used_s = max(now_s, standing.last_used_s)
        standing.uses += 1
        if not held.known:
            standing.importance = self._importance(held.kind, standing.uses)

    def remember(self, id: bytes, standing: Standing) -> None:
        """This is its standing from now on, here or gone."""
        self._known[id] = standing
        self._known.move_to_end(id)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
