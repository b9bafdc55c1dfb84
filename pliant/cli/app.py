"""The command itself, and how its subcommands fail: with one line that says what is wrong, and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
import typer.main

import pliant
from pliant.core.errors import PliantError
from pliant.core.text import plain

if TYPE_CHECKING:  # torch takes seconds to import, and help needs none of it
    from torch import nn

# The subcommands in the order of the help, with its short texts. The file of `meta-train` is `pliant/cli/meta_train.py`.
COMMANDS = {
    "train": "Train a model on images, text or sound inside a budget.",
    "predict": "Classify new images, texts or sounds with a trained model.",
    "evaluate": "Measure a trained model on labelled data, in all and for each class.",
    "export": "Write a trained model for another runtime: a program of torch.export, ONNX, or ExecuTorch.",
    "run-device": "Train a program for ExecuTorch here as a device would, and measure its memory.",
    "compare": "Train with several recipes, budgets and seeds, and compare the results.",
    "plan": "Show what a budget would choose at the first step, and why.",
    "profile": "Measure what every layer of a model costs on this device.",
    "doctor": "Show what this machine can run and measure, and what to install for the rest.",
    "report": "Show what a run chose, what it cost and what it learned; several runs are compared.",
    "watch": "Serve the report of a run while it trains, to this machine only.",
    "adapt": "Fit a network to a few labelled images inside a budget, and classify other images with it.",
    "meta-train": "Prepare a backbone for learning from few images.",
    "demo": "Fine-tune a real network on real digits, in full and with a time budget. About two minutes on a CPU.",
}


class _Commands(typer.core.TyperGroup):
    """Imports a subcommand when it is called. Errors are one line on the standard error; Ctrl-C ends with exit code 130."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        known = dict(self.commands)
        self.commands.clear()
        for name, help in COMMANDS.items():
            self.commands[name] = known.get(name) or typer.core.TyperCommand(name=name, help=help)
        for command in self.commands.values():
            command.short_help = COMMANDS[command.name or ""]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            importlib.import_module(f"pliant.cli.{args[0].replace('-', '_')}")
            self.commands[args[0]] = self._registered(args[0])
        return super().resolve_command(ctx, args)

    def _registered(self, name: str) -> Any:
        found = next(each for each in app.registered_commands if name in (each.name, getattr(each.callback, "__name__", None)))
        return typer.main.get_command_from_info(found, pretty_exceptions_short=False, rich_markup_mode=app.rich_markup_mode)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise typer.Exit(130) from stop
        except Exception as error:
            if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
                raise
            _fail(error, ctx)

    def make_context(self, *args: Any, **given: Any) -> Any:
        try:
            return super().make_context(*args, **given)
        except Exception as error:
            if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
                raise
            _fail(error, None)


def _fail(error: Any, ctx: Any) -> None:
    """A wrong option or argument, as one line."""
    at = getattr(error, "ctx", None) or ctx
    command = at.command_path if at is not None else "pliant"
    said = error.format_message().strip()
    say_error(f"{said}{'' if said[-1:] in '.?!' else '.'} Options: {command} --help")
    raise typer.Exit(error.exit_code) from error


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


class UsageError(PliantError, ValueError):
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
        raise UsageError(f"{option}: {os.fspath(path)!r} is not there. Check the path.")


def check_data(option: str, source: str) -> None:
    """A packed set must exist. Folders and names are checked where they are loaded."""
    if source.endswith(".npz") and not Path(source).exists():
        raise UsageError(f"{option}: no file {source!r}. Give a packed set of images (.npz), a folder of images, or digits.")


def load_model(option: str, name: str, pretrained: bool = False) -> nn.Module:
    """The model that an option names."""
    from pliant.apps import models

    with naming(option):
        return models.load(name, pretrained=pretrained)


def say_error(message: object) -> None:
    """One line on the standard error, however long: a pipe is not a screen, and a terminal wraps by itself."""
    line = f"pliant: {' '.join(plain(message).split())}"
    typer.echo(typer.style(line, fg="red") if sys.stderr.isatty() and "NO_COLOR" not in os.environ else line, err=True)


@contextmanager
def exit_on_errors(*also: type[Exception], stopped: str | Callable[[KeyboardInterrupt], str] = "stopped.") -> Iterator[None]:
    """An error that the user can fix ends the command with one line on the standard error instead of a traceback.

    The exit code is 2 for wrong usage, else 1. Ctrl-C prints `stopped` and exits with 130.
    """
    from pliant.apps.tasks import TaskError

    kinds: tuple[type[Exception], ...] = (PliantError, ImportError, OSError, *also)
    try:
        yield
    except kinds as error:
        say_error(error)
        raise typer.Exit(2 if isinstance(error, (UsageError, TaskError)) else 1) from error
    except KeyboardInterrupt as stop:
        typer.echo(stopped if isinstance(stopped, str) else stopped(stop), err=True)
        raise typer.Exit(130) from stop
