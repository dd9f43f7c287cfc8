"""`ctrlcache backup` and `ctrlcache restore`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ctrlcache import backup as backups
from ctrlcache.commands.common import WarmDirectory, failing_clearly

__all__ = ["backup", "restore"]


def backup(
    warm: WarmDirectory,
    target: Annotated[Path, typer.Argument(help="A new directory, best on the same file system.")],
) -> None:
    """Back up a warm directory, in use or not."""
    with failing_clearly():
        made = backups.backup(warm, target)
    Console().print(
        f"{target}: {made.linked} segments shared, {made.copied} copied, "
        f"{made.size_bytes / 1e6:.1f} MB",
        highlight=False,
        soft_wrap=True,
    )


def restore(
    source: Annotated[Path, typer.Argument(help="A backup.")],
    warm: WarmDirectory,
) -> None:
    """Roll a warm directory back to an earlier backup, in use or not."""
    with failing_clearly():
        found = backups.restore(source, warm)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.created_s))
    Console().print(
        f"{warm} is as it was on {when}; what was there is beside it, as {warm.name}.before-*",
        highlight=False,
        soft_wrap=True,
    )
