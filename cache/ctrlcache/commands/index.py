"""`ctrlcache index rebuild` and `ctrlcache index verify`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ctrlcache.commands import verify
from ctrlcache.commands.common import WarmDirectory, failing_clearly, progress_bar
from ctrlcache.errors import InvalidInput, TierUnavailable
from ctrlcache.tiers.warm import WarmTier

__all__ = ["app"]

_ANY_LIMIT = 1 << 62
_WAIT_S = 600.0

app = typer.Typer(help="Rebuild or verify what is known of the stored couplets.")
app.command("verify")(verify.command)


@app.command()
def rebuild(
    warm: WarmDirectory,
    index: Annotated[
        Path, typer.Option(help="The server's index directory (`warm_index_directory`).")
    ] = Path("/dev/shm/ctrlcache/warm-index"),
    index_bytes: Annotated[int, typer.Option(help="The most the index may grow to.")] = 4 << 30,
) -> None:
    """Make the index of a server anew from its segments, running or not."""
    with failing_clearly():
        if not warm.is_dir():
            raise InvalidInput(f"{warm} is no directory")
        tier = WarmTier(
            warm,
            index,
            limit_bytes=_ANY_LIMIT,
            index_bytes=index_bytes,
            follow_s=None,
            read_only=True,
        )
        try:
            if tier.trouble is not None:
                raise TierUnavailable(tier.trouble)
            count = _rebuilt(tier)
        finally:
            tier.close()
    Console().print(f"{count} records in the index {index}", highlight=False, soft_wrap=True)


def _rebuilt(tier: WarmTier) -> int:
    with progress_bar("rebuilding the index") as progress:
        try:
            return tier.rebuild(progress)
        except TierUnavailable:
            tier.request_rebuild()  # a running server keeps this index: it does it itself
        deadline = time.monotonic() + _WAIT_S
        while tier.rebuild_pending:
            if time.monotonic() > deadline:
                raise TierUnavailable("the server that keeps this index does not answer")
            time.sleep(0.1)
        return tier.stats().entries
