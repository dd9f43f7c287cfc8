"""What the commands on stored couplets share: options, a warm tier to look at, progress bars."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ctrlcache.errors import CtrlCacheError, InvalidInput
from ctrlcache.tiers.warm import WarmTier

__all__ = ["Json", "WarmDirectory", "failing_clearly", "looking_at", "progress_bar"]

WarmDirectory = Annotated[Path, typer.Argument(help="The warm directory (`warm_dir`).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
_ANY_LIMIT = 1 << 62


@contextlib.contextmanager
def failing_clearly() -> Iterator[None]:
    """Errors that were raised on purpose become a line on stderr and status 1."""
    try:
        yield
    except (CtrlCacheError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def progress_bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, driven by (done, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def looking_at(directory: Path) -> Iterator[WarmTier]:
    """A warm directory to read, with an index of our own: in use by a server or not, all the same.

    InvalidInput where it is none.
    """
    if not directory.is_dir():
        raise InvalidInput(f"{directory} is no directory")
    index = Path("/dev/shm") / f"ctrlcache-tool-{os.getpid()}"
    try:
        with progress_bar("reading the segments") as progress:
            tier = WarmTier(
                directory,
                index,
                limit_bytes=_ANY_LIMIT,
                follow_s=None,
                read_only=True,
                progress=progress,
            )
        try:
            if tier.trouble is not None:
                raise InvalidInput(tier.trouble)
            yield tier
        finally:
            tier.close()
    finally:
        shutil.rmtree(index, ignore_errors=True)
