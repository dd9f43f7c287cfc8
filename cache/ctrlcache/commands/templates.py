"""`ctrlcache templates build` and `ctrlcache templates list`."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ctrlcache.commands.common import (
    Json,
    WarmDirectory,
    failing_clearly,
    looking_at,
    progress_bar,
)
from ctrlcache.config import CacheConfig, ColdConfig
from ctrlcache.errors import CorruptRecord
from ctrlcache.templates import build as build_templates
from ctrlcache.tiers.cold import ColdTier, list_tasks
from ctrlcache.tiers.objects import Objects
from ctrlcache.tiers.warm_files import load_uses

__all__ = ["app"]

app = typer.Typer(help="Build and list the cold templates of tasks.")

Config = Annotated[
    Path | None, typer.Option(help="TOML file whose table [cold] describes the store.")
]
Endpoint = Annotated[str | None, typer.Option(help="host:port of MinIO or S3.")]
Bucket = Annotated[str | None, typer.Option(help="Bucket of the templates.")]
Keys = Annotated[
    Path | None,
    typer.Option(help="JSON with access_key and secret_key, mode 0600 [default: environment]."),
]
Tls = Annotated[bool | None, typer.Option("--tls/--no-tls", help="Whether the store speaks TLS.")]


@app.command()
def build(
    warm: WarmDirectory,
    config: Config = None,
    endpoint: Endpoint = None,
    bucket: Bucket = None,
    credentials_file: Keys = None,
    tls: Tls = None,
    per_task: Annotated[int, typer.Option(min=1, help="At most so many templates.")] = 16,
    task: Annotated[list[str] | None, typer.Option(help="Only this task (repeatable).")] = None,
    as_json: Json = False,
) -> None:
    """Find what is typical of each task in a warm directory, and store it as templates."""
    with failing_clearly(), _store(config, endpoint, bucket, credentials_file, tls) as objects:
        objects.ensure_bucket()
        hits = {id: hits for id, hits, _ in load_uses(warm)}

        def uses(ids: Sequence[bytes]) -> list[float]:
            return [1.0 + hits.get(id, 0.0) for id in ids]

        with looking_at(warm) as tier, progress_bar("reading couplets") as progress:
            built = build_templates(
                tier, objects, per_task=per_task, uses=uses, tasks=task, progress=progress
            )
    if as_json:
        rows = [{**vars(item), "provenance": item.provenance.hex()} for item in built]
        typer.echo(json.dumps(rows))
        return
    table = Table("task", "couplets", "templates", "KB", "spread", "provenance")
    for item in built:
        table.add_row(
            item.task,
            str(item.couplets),
            str(item.templates),
            f"{item.size_bytes / 1e3:.1f}",
            f"{item.spread:.3f}",
            item.provenance.hex()[:8],
        )
    Console().print(table if built else "No task has couplets enough for templates.")


@app.command("list")
def list_templates(
    config: Config = None,
    endpoint: Endpoint = None,
    bucket: Bucket = None,
    credentials_file: Keys = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """List the templates that the store holds."""
    rows: list[dict[str, object]] = []
    with failing_clearly(), _store(config, endpoint, bucket, credentials_file, tls) as objects:
        roots = {name.split("/")[1] for name in objects.names("templates/")}
        for root in sorted(roots):
            for task in list_tasks(objects, f"templates/{root}"):
                tier = ColdTier(objects, f"templates/{root}", task)
                with contextlib.suppress(CorruptRecord):
                    tier.refresh()
                stats = tier.stats()
                rows.append(
                    {
                        "provenance": root,
                        "task": task,
                        "templates": stats.entries,
                        "size_bytes": stats.size_bytes,
                        "built_s": tier.notes.get("built_s"),
                    }
                )
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("task", "templates", "KB", "built", "provenance")
    for row in rows:
        built_s = row["built_s"]
        when = "?"
        if isinstance(built_s, int | float):
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(built_s))
        size = row["size_bytes"]
        assert isinstance(size, int)
        table.add_row(
            str(row["task"]),
            str(row["templates"]),
            f"{size / 1e3:.1f}",
            when,
            str(row["provenance"])[:8],
        )
    Console().print(table if rows else "The store holds no templates.")


@contextlib.contextmanager
def _store(
    config: Path | None,
    endpoint: str | None,
    bucket: str | None,
    credentials_file: Path | None,
    tls: bool | None,
) -> Iterator[Objects]:
    """The store of the configuration file, with what was given on the command line instead."""
    cold = ColdConfig() if config is None else CacheConfig.from_file(config).cold
    given = {
        "endpoint": endpoint,
        "bucket": bucket,
        "credentials_file": credentials_file,
        "tls": tls,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    objects = Objects.of(replace(cold, **changes))  # type: ignore[arg-type]
    try:
        yield objects
    finally:
        objects.close()
