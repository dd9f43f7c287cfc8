"""Whether a record can be stored, and what an error means to whoever has to mend it."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np

from ctrlcache.errors import InvalidInput
from ctrlcache.tiers import segments
from ctrlcache.tiers.base import Record

__all__ = ["cause_of", "checked"]


def checked(record: Record) -> Record:
    """The record; InvalidInput where no tier could store it."""
    entry = record.entry
    if len(entry.id) != 16 or len(entry.space) != 16:
        raise InvalidInput(
            f"id and space must be 16 bytes each, got {len(entry.id)} and {len(entry.space)}"
        )
    if len(record.payload) > segments.MAX_PAYLOAD_BYTES:
        raise InvalidInput(
            f"payload of {len(record.payload)} bytes, at most {segments.MAX_PAYLOAD_BYTES} fit"
        )
    if entry.control is not None:
        control = np.asarray(entry.control)
        if control.ndim != 1 or not 0 < len(control) <= 100 or not np.isfinite(control).all():
            raise InvalidInput(f"control must be 1 to 100 finite numbers, got {control!r}")
    return record


def cause_of(error: Exception, directory: Path) -> str:
    """The error in the words of someone who has to mend it."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOSPC:
        return f"the disk of {directory} is full: free some space"
    if number == errno.EDQUOT:
        return f"the quota of {directory} is used up: raise it or free some space"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{directory} cannot be written ({error}): check its mount and permissions"
    if number == errno.ENOENT:
        return f"{directory} is gone ({error}): bring it back, or make an empty one"
    return str(error)
