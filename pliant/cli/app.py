"""The command itself, and how its parts fail: one line that says what is wrong, and an exit code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich.console import Console

import pliant
from pliant.apps.tasks import TaskError

if TYPE_CHECKING:
    from torch import nn


class _Commands(typer.core.TyperGroup):
    """Ctrl-C ends every command with 130, also before it has begun to work."""

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
    """Trains only the part of a PyTorch model that is worth training now, inside the budget that a device gives."""


class Misused(pliant.PliantError, ValueError):
    """An option that cannot be meant as it was given."""


@contextmanager
def meant(option: str) -> Iterator[None]:
    """A value that is refused inside was a bad one of this option."""
    try:
        yield
    except ValueError as error:
        raise Misused(f"{option}: {error}") from error


def there(option: str, path: str | Path) -> None:
    """What is to be read must be there."""
    if not Path(path).exists():
        raise Misused(f"{option}: {os.fspath(path)!r} is not there.")


def images_of(option: str, source: str) -> None:
    """A packed set must be there; a folder that is not, and a misspelt name, are told by those who look for them."""
    if source.endswith(".npz") and not Path(source).exists():
        raise Misused(f"{option}: no file {source!r}. Give a packed set of images (.npz), a folder of images, or digits.")


def model_of(option: str, name: str, pretrained: bool = False) -> nn.Module:
    """A model by the name that an option gives."""
    from pliant.apps import models

    with meant(option):
        try:
            return models.load(name, pretrained=pretrained)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):  # the model's own module is there, and lacks another one
                raise
            raise ValueError(f"no module {error.name!r} for {name!r}: it is looked for here and where Python looks.") from error


@contextmanager
def told(
    console: Console, *also: type[Exception], stopped: str | Callable[[KeyboardInterrupt], str] = "stopped."
) -> Iterator[None]:
    """Errors that a user can do something about end the command with one line and 2 where an option was wrong, else 1; Ctrl-C
    ends it with 130 and what is said of it."""
    kinds: tuple[type[Exception], ...] = (pliant.PliantError, ImportError, OSError, *also)
    try:
        yield
    except kinds as error:
        console.print(f"pliant: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2 if isinstance(error, (Misused, TaskError)) else 1) from error
    except KeyboardInterrupt as stop:
        console.print(stopped if isinstance(stopped, str) else stopped(stop), markup=False, highlight=False)
        raise typer.Exit(130) from stop
