"""`pliant train`: train a model on images, text or sound inside a budget."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pliant.apps import train as training
from pliant.apps.train import Options, Result, Stopped
from pliant.apps.train.options import check_no_code
from pliant.cli.app import UsageError, app, check_data, exit_on_errors
from pliant.cli.live import shown
from pliant.cli.options import Given, train_options
from pliant.core import text
from pliant.core.json_text import json_text


@app.command()
@train_options()
def train(
    *,
    given: Given,
    config: Annotated[Path | None, typer.Option(help="TOML file with options; the command line overrides it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Train a model inside a budget; writes the best and the last weights, a log, and the state for --resume.

    Example: pliant train --data digits --time 0.4 --epochs 2 --out runs/first

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C (after a step, with everything saved).
    """
    console = Console(stderr=as_json, quiet=as_json)
    with exit_on_errors(ValueError, stopped=_stopped):
        options = _all_options(given, config)
        with shown(console) as show:
            result = training.train(options, None if as_json else show)
    if as_json:
        typer.echo(json_text(result.to_json()))
    else:
        _print(console, result)


def _all_options(given: Given, config: Path | None) -> Options:
    """The options of the command line, then those of the file, then those of the run to resume."""
    held = _from_toml(config) if config is not None else {}
    if "model" not in given:
        check_no_code(held.get("model"), f"the file {str(config)!r}")
    options = {**held, **given}
    where = str(config) if config is not None else "the command line"
    if options.get("resume") and options.get("out"):
        Options.of(options, where)  # what is wrong here is said of here
        out = Options.of_run(options["out"], options)
    else:
        out = Options.of(options, where)
    check_data("--data", out.data)
    return out


def _from_toml(path: Path) -> dict[str, Any]:
    """The options in a file; their names may have dashes, as on the command line."""
    try:
        toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError as error:
        raise ImportError("to read TOML, Python 3.10 needs tomli. Run: pip install 'pliant[toml]'", name="tomli") from error
    try:
        held: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"--config: no file {str(path)!r}.") from error
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        raise UsageError(f"--config: {str(path)!r} cannot be read as TOML: {error}") from error
    return {name.replace("-", "_"): value for name, value in held.items()}


def _stopped(how: KeyboardInterrupt) -> str:
    if isinstance(how, Stopped):
        return "stopped: everything up to this step is saved; continue with --resume."
    return "stopped at once: nothing was saved since the last checkpoint, if there is one."


def _print(console: Console, result: Result) -> None:
    end = "rolled back to the start" if result.rolled_back else f"{result.accuracy:.1%}"
    step = f"; {text.seconds(result.seconds_per_step)} per step" if result.seconds_per_step else ""
    lines = [
        f"validation accuracy {result.evaluations[0].accuracy:.1%} → {end}; best {result.best.accuracy:.1%} at step "
        f"{result.best.step}{step}",
        *result.outcome.lines(),
        *([f"energy: {text.joules(result.joules)}"] if result.joules is not None else []),
        f"best.safetensors, last.safetensors and run.jsonl are in {result.out}; README.md there says how to use them",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
