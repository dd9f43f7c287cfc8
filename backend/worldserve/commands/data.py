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
    ] = list(SUITES),  # noqa: B006 - typer copies it
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
def source(
    clip: Annotated[str, typer.Argument(help="Name of a test clip, such as dial-turn-0.")],
    suite: ONE = "inspection",
    target: Annotated[Path, typer.Option(help="Directory of the JPEG images.")] = Path("source"),
    source_px: Annotated[str, typer.Option(help="WIDTHxHEIGHT; the suite's own where empty.")] = "",
    frames: Annotated[int, typer.Option(min=1, help="How many, from the first.")] = 32,
) -> None:
    """Render what the camera of a test clip sends, at its own size (3840x2160 in inspection)."""
    from worldserve.data.source import source_frames

    size = None
    if source_px:
        try:
            width, height = (int(side) for side in source_px.split("x"))
        except ValueError:
            raise typer.BadParameter(f"--source-px: WIDTHxHEIGHT, got {source_px!r}") from None
        size = (height, width)
    directory = target / suite / clip
    directory.mkdir(parents=True, exist_ok=True)
    total = 0
    try:
        for number, image in enumerate(source_frames(get_suite(suite), clip, size, frames)):
            (directory / f"{number:03d}.jpg").write_bytes(image)
            total += len(image)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(f"{number + 1} images in {directory}, {total / (number + 1) / 1e3:.0f} kB each")


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
