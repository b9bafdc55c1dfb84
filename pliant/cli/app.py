"""The command itself, and how its subcommands fail: with one line that says what is wrong, and an exit code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from torch import nn

import pliant
from pliant.apps import models
from pliant.apps.tasks import TaskError


class _Commands(typer.core.TyperGroup):
    """Ctrl-C ends every command with exit code 130, even before the command does any work."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise typer.Exit(130) from stop


app = typer.Typer(
    name="pliant",
    cls=_Commands,
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
    """Trains only the part of a PyTorch model that is worth training now, inside a budget of time, memory or compute."""


class UsageError(pliant.PliantError, ValueError):
    """An option or argument with a value that cannot be used."""


@contextmanager
def naming(option: str) -> Iterator[None]:
    """A ValueError inside becomes a usage error that names this option."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def check_exists(option: str, path: str | Path) -> None:
    if not Path(path).exists():
        raise UsageError(f"{option}: {os.fspath(path)!r} is not there.")


def check_data(option: str, source: str) -> None:
    """A packed set must exist. Folders and names are checked where they are loaded."""
    if source.endswith(".npz") and not Path(source).exists():
        raise UsageError(f"{option}: no file {source!r}. Give a packed set of images (.npz), a folder of images, or digits.")


def load_model(option: str, name: str, pretrained: bool = False) -> nn.Module:
    """The model that an option names."""
    with naming(option):
        return models.load(name, pretrained=pretrained)


@contextmanager
def exit_on_errors(
    console: Console, *also: type[Exception], stopped: str | Callable[[KeyboardInterrupt], str] = "stopped."
) -> Iterator[None]:
    """An error that the user can fix ends the command with one line instead of a traceback.

    The exit code is 2 for wrong usage, else 1. Ctrl-C prints `stopped` and exits with 130.
    """
    kinds: tuple[type[Exception], ...] = (pliant.PliantError, ImportError, OSError, *also)
    try:
        yield
    except kinds as error:
        console.print(f"pliant: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2 if isinstance(error, (UsageError, TaskError)) else 1) from error
    except KeyboardInterrupt as stop:
        console.print(stopped if isinstance(stopped, str) else stopped(stop), markup=False, highlight=False)
        raise typer.Exit(130) from stop
