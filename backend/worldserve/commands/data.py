"""`worldserve data`: episodes in simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TaskID

from worldserve.data.suites import SUITES, get_suite

app = typer.Typer(help="Generate episodes in simulation.", no_args_is_help=True)

Root = Annotated[Path, typer.Option(help="Directory that holds the suites.")]
ONE = Annotated[str, typer.Option(help=f"One of: {', '.join(SUITES)}.")]


@app.command()
def generate(
    suite: Annotated[
        list[str], typer.Option(help=f"Several times for several; of: {', '.join(SUITES)}.")
    ] = ["kitchen"],  # noqa: B006 - typer copies it
    root: Root = Path("data"),
) -> None:
    """Make what is missing of a suite's episodes; a stopped run goes on where it was."""
    from worldserve.data.generate import generate_suite

    for name in suite:
        made = generate_suite(get_suite(name), root)
        typer.echo(
            f"{name}: " + ", ".join(f"{count} frames {split}" for split, count in made.items())
        )


@app.command()
def clips(
    suite: Annotated[list[str], typer.Option(help="Several times for several.")] = list(SUITES),  # noqa: B006 - typer copies it
    target: Annotated[Path, typer.Option(help="Where the packs go.")] = Path("benchmarks/clips"),
) -> None:
    """Record the test clips that the benchmarks replay, and pack them."""
    from worldserve.data.clips import pack_suite_clips

    for name in suite:
        definition = get_suite(name)
        with Progress() as progress:
            bar = progress.add_task(f"{name} clips", total=definition.clips)

            def step(progress: Progress = progress, bar: TaskID = bar) -> None:
                progress.advance(bar)

            path = pack_suite_clips(definition, target, step)
        typer.echo(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


@app.command()
def export(
    suite: ONE = "kitchen",
    root: Root = Path("data"),
    target: Annotated[Path, typer.Option(help="Where the clips go.")] = Path(
        "client_examples/clips"
    ),
) -> None:
    """Cut the shipped clips out of the test split."""
    from worldserve.data.export import export_clips

    for path in export_clips(root, get_suite(suite), target):
        typer.echo(f"{path}  {path.stat().st_size / 1e3:.0f} kB")
