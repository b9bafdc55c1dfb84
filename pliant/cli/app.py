"""The command itself, and how its parts fail: one line that says what is wrong, and an exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

import pliant

app = typer.Typer(
    name="pliant",
    help="Trains only the part of a PyTorch model that is worth training now.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"pliant {pliant.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Trains only the part of a PyTorch model that is worth training now, inside the budget that a device gives."""


@contextmanager
def told(
    console: Console, *also: type[Exception], stopped: str | Callable[[KeyboardInterrupt], str] = "stopped."
) -> Iterator[None]:
    """Errors that a user can do something about end the command with one line and 1; Ctrl-C ends it with 130 and what is
    said of it."""
    kinds: tuple[type[Exception], ...] = (pliant.PliantError, ImportError, OSError, *also)
    try:
        yield
    except kinds as error:
        console.print(f"pliant: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as stop:
        console.print(stopped if isinstance(stopped, str) else stopped(stop), markup=False, highlight=False)
        raise typer.Exit(130) from stop
