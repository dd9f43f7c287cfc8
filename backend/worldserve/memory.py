"""Give memory back that this process has freed, and its C library keeps."""

from __future__ import annotations

import ctypes

__all__ = ["give_back"]


def give_back() -> None:
    """Return free pages of the heap to the system: tens of milliseconds, in which other threads may
    wait for memory. Does nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
