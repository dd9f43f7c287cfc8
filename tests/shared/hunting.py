"""How hard property tests look: the same examples every time, or a hunt for new ones.

Without anything said, hypothesis derives its examples from the test alone: a run passes or fails
the same way every time, on every machine. `CTRLCACHE_HUNT=20` (`make fuzz`) draws new ones, twenty
times as many; what it finds is printed as a line to reproduce it with, and kept in `.hypothesis`.
"""

from __future__ import annotations

import os

from hypothesis import settings

__all__ = ["examples", "load_profile"]

_FACTOR = int(os.environ.get("CTRLCACHE_HUNT", "0"))


def examples(count: int) -> int:
    """`count`, or as many times more as the hunt is to be harder: for `settings(max_examples=)`."""
    return count * max(1, _FACTOR)


def load_profile() -> None:
    """For the whole run; machines are slow at times, so no example has a deadline."""
    hunt = _FACTOR > 0
    settings.register_profile(
        "hunt" if hunt else "fixed",
        derandomize=not hunt,
        deadline=None,
        print_blob=True,
        max_examples=examples(100),
    )
    settings.load_profile("hunt" if hunt else "fixed")
