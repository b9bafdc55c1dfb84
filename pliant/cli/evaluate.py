"""`pliant evaluate`: the accuracy of a trained model on labelled data, in all and for each class."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pliant.apps import run_folder
from pliant.apps import trained as using
from pliant.apps.data.prepare import Reading
from pliant.apps.trained import Evaluated
from pliant.cli.app import app, check_exists, exit_on_errors
from pliant.cli.options import Device, Factory, InputColumn, RunArgument, SkipUnreadable, Weights
from pliant.cli.progress import working
from pliant.core.json_text import json_text
from pliant.core.text import plain
from pliant.runtime.working import note
from pliant.session import run_log

_MIXED_UP = 5  # pairs of classes that are shown


@app.command()
def evaluate(
    run: RunArgument,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA", help="As in `pliant train --data`.", show_default="the samples that the run validated on"
        ),
    ] = None,
    weights: Weights = "best",
    model: Factory = None,
    input_column: InputColumn = None,
    label_column: Annotated[
        str | None, typer.Option(help="Column of a table that holds the label.", show_default="by its name")
    ] = None,
    skip_unreadable: SkipUnreadable = False,
    device: Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a trained model on labelled data: accuracy, each class, and which classes it confuses.

    The result is added to the run's log, so that `pliant report` shows it. Data with a test split are tested on that.

    Example: pliant evaluate runs/photos photos-of-today/

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped.
    """
    with exit_on_errors(ValueError), working(Console(stderr=True)):
        check_exists("RUN", run)
        trained = using.load(run, model, weights=weights, device=device)
        reading = Reading(input_column=input_column, label_column=label_column, skip_unreadable=skip_unreadable)
        named = weights if run.is_dir() else run.stem
        found = using.evaluate(trained, data, run, reading=reading, weights=named)
        _log(run, found, int(trained.about.get("step", 0)))
    if as_json:
        typer.echo(json_text({"format": "pliant.evaluation/1", **found.to_json()}, indent=2))
    else:
        _print(Console(soft_wrap=True), found)


def _log(run: Path, found: Evaluated, step: int) -> None:
    """A line for the report. A folder that cannot be written is told, and nothing else."""
    log = run_folder.Folder(run).log
    if not run.is_dir() or not log.exists():
        return
    line = {"event": "classes", "step": step, **found.to_json()}
    line.pop("by_class")
    try:
        run_log.append(log, [line], make_folder=False)
    except OSError as error:
        note(f"the result is not in the log: {error}")


def _print(console: Console, found: Evaluated) -> None:
    where = {"validation": "the run's validation split", "test": f"the test split of {found.data}"}.get(found.split, found.data)
    right = round(found.accuracy * found.samples)
    console.print(
        f"accuracy {found.accuracy:.1%} on {where}: {right} of {found.samples} samples; loss {found.loss:.4f}; "
        f"weights: {found.weights}",
        markup=False,
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("class", "samples", "found", "right when named"):
        table.add_column(name, justify="left" if name == "class" else "right")
    for one in found.by_class():
        shares = ["–" if share is None else f"{share:.1%}" for share in (one.recall, one.precision)]
        table.add_row(Text(plain(one.name)), str(one.samples), *shares)
    console.print(table)
    wrong = sorted((pair for pair in found.confusion if pair[0] != pair[1]), key=lambda pair: -pair[2])[:_MIXED_UP]
    for true, guess, count in wrong:
        names = f"{found.classes[true]!r} taken for {found.classes[guess]!r}"
        console.print(f"{names}: {count}", markup=False, highlight=False)
