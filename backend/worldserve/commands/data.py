"""`worldserve data`: episodes in simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
