"""A command line whose commands are imported only when they are called.

`--help` shows one line per command from a table; importing what stands behind the lines (torch, an
object store's client) would cost seconds each time.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import typer

__all__ = ["Command", "run"]


@dataclass(frozen=True)
class Command:
    """One word of a program. target: "module:attribute", a function or a `typer.Typer`.

    Where it is None, or cannot be found, an entry point of the program's group with this name
    provides the command.
    """

    name: str
    help: str
    target: str | None = None


def run(
    name: str,
    help: str,
    commands: Sequence[Command],
    group: str | None = None,
    arguments: Sequence[str] | None = None,
) -> None:
    """Run the program `name` with sys.argv, or with `arguments` as if they were it."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    words = [word for word in arguments if not word.startswith("-")]
    chosen = words[0] if words else None
    app = typer.Typer(name=name, help=help, no_args_is_help=True, add_completion=False)
    # A single command would otherwise become the program itself.
    app.callback()(lambda: None)
    for command in _with_entry_points(commands, group):
        if command.name == chosen:
            _mount(app, command, group)
        else:
            app.command(command.name, help=command.help)(_never_called)
    app(args=arguments, prog_name=name)


def _with_entry_points(commands: Sequence[Command], group: str | None) -> Iterator[Command]:
    """The table, then what other packages add to the group under names of their own."""
    yield from commands
    known = {command.name for command in commands}
    for entry in entry_points(group=group) if group else ():
        # A dotted name is a sub-command, and the affair of the command before the dot.
        if entry.name not in known and "." not in entry.name:
            yield Command(entry.name, f"(from {entry.value.partition(':')[0]})")


def _mount(app: typer.Typer, command: Command, group: str | None) -> None:
    try:
        target = _load(command, group)
    except ImportError as error:
        typer.echo(f"{command.name} cannot run here: {error}", err=True)
        raise SystemExit(1) from None
    if isinstance(target, typer.Typer):
        app.add_typer(target, name=command.name, help=command.help)
    else:
        app.command(command.name, help=None if target.__doc__ else command.help)(target)


def _load(command: Command, group: str | None) -> Any:
    entries = entry_points(group=group, name=command.name) if group else ()
    for entry in entries:
        return entry.load()
    if command.target is None:
        raise ImportError(
            f"no installed package provides it (entry point {command.name!r} in {group!r}); "
            "try `pip install 'ctrlcache[serve]'`"
        )
    module, attribute = command.target.split(":")
    return getattr(importlib.import_module(module), attribute)


def _never_called() -> None:
    """Stands for a command that was not chosen; only its line of help is ever used."""
