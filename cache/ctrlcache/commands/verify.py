"""`ctrlcache verify`, also as `ctrlcache index verify`."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.table import Table

from ctrlcache.commands.common import Json, WarmDirectory, failing_clearly, progress_bar
from ctrlcache.verify import verify

__all__ = ["command"]


def command(warm: WarmDirectory, as_json: Json = False) -> None:
    """Read and check every stored record; status 1 where one is damaged."""
    with failing_clearly(), progress_bar("verifying") as progress:
        report = verify(warm, progress)
    if as_json:
        typer.echo(json.dumps(asdict(report)))
    else:
        console = Console()
        console.print(
            f"{report.records} records intact in {report.segments} segments "
            f"({report.sealed} sealed, {report.size_bytes / 1e6:.1f} MB), "
            f"{report.tombstones} deletions, {report.unfinished} unfinished writes",
            highlight=False,
        )
        if report.damage:
            table = Table("segment", "offset", "bytes", "damage", title="damaged")
            for item in report.damage:
                size = str(item.end - item.offset)
                table.add_row(str(item.segment), str(item.offset), size, item.reason)
            console.print(table)
            console.print("These are misses, and go when their segments are compacted.")
    if report.damage:
        raise typer.Exit(1)
