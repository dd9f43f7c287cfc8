"""What thinking time is about to find out: nothing is asked twice, and the stale comes last."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from worldserve.models.protocol import Float

__all__ = ["Agenda", "Work"]


class Work(Protocol):
    """A piece of work that was submitted (`background.Handle`, `siblings.Errand`)."""

    @property
    def alive(self) -> bool:
        """Whether it waits or is being done."""
        ...

    def postpone(self) -> None:
        """Nothing hurries any more."""
        ...


@dataclass(frozen=True, eq=False)
class _Item:
    session: bytes
    space: bytes
    control: Float
    handle: Work


class Agenda:
    """Work around one control each. near: control distance within which the outcome of one piece of
    work is likely to answer for another. Safe in several threads."""

    def __init__(self, near: float) -> None:
        self._near = near
        self._items: list[_Item] = []
        self._lock = threading.Lock()

    def covers(self, space: bytes, control: Float) -> bool:
        """Whether work near this control waits or is being done."""
        with self._lock:
            self._prune()
            return any(
                item.space == space and np.linalg.norm(item.control - control) <= self._near
                for item in self._items
            )

    def add(self, session: bytes, space: bytes, control: Float, handle: Work) -> None:
        with self._lock:
            self._prune()
            self._items.append(_Item(session, space, control, handle))

    def left(self, session: bytes, space: bytes) -> None:
        """The session is in `space` now: what waits for it elsewhere comes after all else."""
        with self._lock:
            self._prune()
            for item in self._items:
                if item.session == session and item.space != space:
                    item.handle.postpone()

    def _prune(self) -> None:
        self._items = [item for item in self._items if item.handle.alive]
