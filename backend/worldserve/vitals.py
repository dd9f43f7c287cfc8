"""How full everything is, told every few seconds whether anything happens or not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ctrlcache.events import BackgroundLost, FreeSpace, SessionCount, Sink, TierSize
from ctrlcache.tiered import CoupletCache
from worldserve.background import Background
from worldserve.session_store import SessionStore

__all__ = ["Vitals"]


class Vitals:
    """places: directories by name (`shm`, `warm`), whose file systems are looked at."""

    def __init__(
        self,
        cache: CoupletCache,
        sessions: SessionStore,
        background: Background,
        places: Mapping[str, Path],
        sink: Sink,
    ) -> None:
        self._cache = cache
        self._background = background
        self._lost = {"dropped": 0, "refused": 0}
        self._sessions = sessions
        self._places = dict(places)
        self._sink = sink

    def report(self) -> None:
        """Send one event for each tier, for the sessions, for each place and for background work
        that was lost since; TierUnavailable where shared memory cannot be read."""
        for reason, before in self._lost.items():
            self._lost[reason] = int(getattr(self._background, reason))
            if self._lost[reason] > before:
                self._sink(BackgroundLost(reason, self._lost[reason] - before))
        self._sink(SessionCount(self._sessions.count(), self._sessions.limits.most))
        for tier, stats in self._cache.stats().items():
            self._sink(TierSize(tier, stats.entries, stats.size_bytes, stats.limit_bytes))
        for name, path in self._places.items():
            try:
                found = os.statvfs(path)
            except OSError:
                continue  # a directory that was taken away is the tier's trouble, and told there
            self._sink(
                FreeSpace(name, found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
            )
