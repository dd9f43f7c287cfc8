"""`ctrlcache calibrate device`, `ctrlcache calibrate model` and `ctrlcache calibrate reuse`.

Calibrating a model needs a model, of which this package knows nothing: whoever provides models
registers commands as `calibrate.model` and `calibrate.reuse` in the entry-point group
`ctrlcache.commands`; they are loaded when they are called.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ctrlcache.devices import DeviceCalibration, as_samples, device_directory
from ctrlcache.errors import InvalidInput

__all__ = ["app", "read_samples"]

_GROUP = "ctrlcache.commands"

app = typer.Typer(help="Calibrate control devices, and the trust in approximate answers.")


@app.command()
def device(
    name: Annotated[str, typer.Argument(help="Name that requests give as `device`.")],
    rest: Annotated[
        Path, typer.Option(help="Raw samples with the device untouched: CSV or .npy, - for stdin.")
    ],
    sweep: Annotated[Path, typer.Option(help="Raw samples with every axis moved from end to end.")],
    directory: Annotated[
        Path | None, typer.Option(help="Where to keep it [default: $CTRLCACHE_DEVICES].")
    ] = None,
) -> None:
    """Find the zero point and range of a device and save them under a name.

    A sample file holds one row per sample and one column per axis, in raw device units.
    """
    try:
        made = DeviceCalibration.fit(name, read_samples(rest), read_samples(sweep))
        path = made.save(directory or device_directory())
    except (InvalidInput, OSError) as error:
        raise _failure(str(error)) from None
    table = Table("axis", "zero", "full deflection", title=f"device {name}", title_justify="left")
    for axis, (zero, scale) in enumerate(zip(made.zero, made.scale, strict=True)):
        table.add_row(str(axis), f"{zero:.6g}", f"± {scale:.6g}")
    console = Console()
    console.print(table)
    console.print(f"written to {path}; epoch {made.epoch}", soft_wrap=True)


_FOREIGN = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(add_help_option=False, context_settings=_FOREIGN)
def model(context: typer.Context) -> None:
    """Calibrate how far a model's cached answers can be trusted (writes trust.json)."""
    _foreign("model", context)


@app.command(add_help_option=False, context_settings=_FOREIGN)
def reuse(context: typer.Context) -> None:
    """Calibrate which quality reuse between generator steps keeps (writes reuse.json)."""
    _foreign("reuse", context)


def _foreign(name: str, context: typer.Context) -> None:
    """Run what another package provides as `calibrate.<name>`."""
    wanted = f"calibrate.{name}"
    found = [entry for entry in entry_points(group=_GROUP) if entry.name == wanted]
    if not found:
        raise _failure(
            f"nothing provides models: no entry point {wanted!r} in group {_GROUP!r}; "
            "install the package with `pip install 'ctrlcache[serve]'`"
        )
    inner = typer.Typer(add_completion=False)
    inner.command()(found[0].load())
    typer.main.get_command(inner).main(args=context.args, prog_name=f"ctrlcache calibrate {name}")


def _failure(text: str) -> typer.Exit:
    Console(stderr=True).print(f"error: {text}", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(1)


def read_samples(path: Path) -> NDArray[np.float64]:
    """Samples (K, C) from CSV (commas or blanks, # comments), .npy, or - for CSV on stdin.

    InvalidInput names the file and what is wrong with it.
    """
    try:
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False)
        else:
            text = sys.stdin.read() if str(path) == "-" else path.read_text()
            rows = text.replace(",", " ").splitlines()
            values = np.loadtxt(rows, ndmin=2)
    except FileNotFoundError:
        raise InvalidInput(f"{path} is not there") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} is no table of numbers: {error}") from None
    return as_samples(values, None, str(path))
