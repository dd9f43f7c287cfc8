"""Keep the warm directory as it was before another model is served from it.

A new model is another provenance: it starts with a space of its own and never sees what the old one
computed, which ages out as the new one fills the directory. So the first start of another model
keeps the directory as it is, by hard links; `ctrlcache restore` brings it back in seconds.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from pathlib import Path

from ctrlcache.backup import MANIFEST_NAME, backup
from ctrlcache.errors import CtrlCacheError

__all__ = ["keep_before_upgrade", "kept_before_upgrade"]

_log = logging.getLogger(__name__)
_KEPT = ".before-upgrade-"


def keep_before_upgrade(warm: Path, provenance: str, keep: int) -> Path | None:
    """Called before the warm tier is opened; the directory that was made, or None.

    provenance: hex digest of the model about to be served. keep: how many such directories stay, 0
    for none. What goes wrong is logged: the server starts all the same.
    """
    if keep < 1:
        return None
    marker = warm.with_name(f"{warm.name}.served.json")
    try:
        warm.parent.mkdir(parents=True, exist_ok=True)
        # Held while the copy is made: of two instances that start at once, one makes it.
        with open(os.open(marker, os.O_RDWR | os.O_CREAT, 0o644), "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            before = _served(file.read(10_000))
            if before == provenance:
                return None
            made = _keep(warm) if before else None
            file.seek(0)
            file.truncate()
            file.write(json.dumps({"provenance": provenance}) + "\n")
            for old in kept_before_upgrade(warm)[keep:]:
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, CtrlCacheError) as error:
        _log.warning("the warm directory before the upgrade cannot be kept: %s", error)
        return None
    if made is not None:
        _log.info("another model than before: the cache until now is kept in %s", made)
    return made


def kept_before_upgrade(warm: Path) -> list[Path]:
    """The directories that were kept, the newest first."""
    found = warm.parent.glob(f"{warm.name}{_KEPT}*")
    return sorted((path for path in found if (path / MANIFEST_NAME).exists()), reverse=True)


def _keep(warm: Path) -> Path | None:
    if not warm.is_dir() or not any(warm.iterdir()):
        return None
    target = warm.with_name(f"{warm.name}{_KEPT}{time.strftime('%Y%m%d-%H%M%S')}")
    backup(warm, target)
    return target


def _served(text: str) -> str:
    try:
        return str(json.loads(text)["provenance"])
    except (ValueError, KeyError, TypeError):
        return ""
