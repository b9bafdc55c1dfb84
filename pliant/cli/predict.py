"""`pliant predict`: what a trained model makes of new images, texts or sounds."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pliant.apps import trained as using
from pliant.apps.data import samples
from pliant.apps.data.errors import Skipped, in_short
from pliant.apps.tasks import columns_are_options
from pliant.apps.trained import Prediction
from pliant.cli.app import UsageError, app, check_exists, exit_on_errors
from pliant.cli.options import Device, Factory, InputColumn, RunArgument, SkipUnreadable, Weights
from pliant.cli.progress import working
from pliant.core.json_text import json_text
from pliant.core.text import plain
from pliant.runtime.files import write_aside
from pliant.runtime.working import note

_LONGEST = 80  # characters of a name in a table


class Form(str, Enum):
    table = "table"
    csv = "csv"
    json = "json"


@app.command()
def predict(
    run: RunArgument,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH…",
            help="Images or WAV files, folders of them, or tables (.csv, .tsv); for text also files with one text per line.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="A text to classify; may be given several times.")] = None,
    top: Annotated[int, typer.Option(min=1, help="The most probable classes to show.")] = 1,
    form: Annotated[Form, typer.Option("--format", help="A table for people, CSV or JSON.")] = Form.table,
    out: Annotated[Path | None, typer.Option(help="Write to this file.", show_default="printed")] = None,
    weights: Weights = "best",
    model: Factory = None,
    input_column: InputColumn = None,
    skip_unreadable: SkipUnreadable = False,
    device: Device = "cpu",
) -> None:
    """Classify new images, texts or sounds with a trained model.

    Example: pliant predict runs/photos new/ --top 3

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped.
    """
    with exit_on_errors(ValueError), working(Console(stderr=True)):
        check_exists("RUN", run)
        for path in paths or ():
            check_exists("PATH", path)
        if not paths and not text:
            raise UsageError("nothing to classify: give files, folders or tables after the run, or --text.")
        trained = using.load(run, model, weights=weights, device=device)
        kind = trained.inputs.kind
        if text and kind != "text":
            raise UsageError(f"--text: this model was trained on {kind}. Give files.")
        with columns_are_options():
            found = samples.unlabelled(paths or (), kind, input_column)
        sources = [*found.sources, *(text or ())]
        found = samples.Samples(kind, sources, [*found.names, *(text or ())])
        skipped: list[Skipped] = []
        rows = list(using.predictions(trained, found, top, skip_unreadable, skipped))
        if skipped:
            note(in_short(skipped))
        content = {Form.csv: _csv, Form.json: _json}.get(form, _plain)(rows, skipped)
        if out is not None:
            write_aside(out, content.encode(errors="surrogateescape"))  # names of files are any bytes
    if out is not None:
        typer.echo(f"wrote {out}: {len(rows)} predictions")
    elif form is Form.table and Console().is_terminal:
        Console().print(_table(rows))
    else:
        typer.echo(content, nl=False)


def _flat(row: Prediction) -> list[str]:
    return [row.name, *(cell for name, share in row.classes for cell in (name, f"{share:.4f}"))]


def _header(rows: Sequence[Prediction]) -> list[str]:
    most = max((len(row.classes) for row in rows), default=1)
    return ["input", "class", "probability", *(f"{name}_{i}" for i in range(2, most + 1) for name in ("class", "probability"))]


def _csv(rows: Sequence[Prediction], skipped: Sequence[Skipped]) -> str:
    content = io.StringIO()
    csv.writer(content, lineterminator="\n").writerows([_header(rows), *map(_flat, rows)])
    return content.getvalue()


def _json(rows: Sequence[Prediction], skipped: Sequence[Skipped]) -> str:
    listed = [
        {"input": row.name, "classes": [{"class": name, "probability": share} for name, share in row.classes]} for row in rows
    ]
    held = {"format": "pliant.predictions/1", "predictions": listed, "skipped": [each._asdict() for each in skipped]}
    return json_text(held, indent=2) + "\n"


def _plain(rows: Sequence[Prediction], skipped: Sequence[Skipped]) -> str:
    """Columns for a pipe or a file: never wrapped, never cut."""
    lines = [[plain(cell) for cell in _flat(row)] for row in rows]
    wide = [max((len(line[i]) for line in lines if i < len(line)), default=0) for i in range(max(map(len, lines), default=0))]
    return "".join(
        "  ".join(cell.ljust(size) for cell, size in zip(line, wide, strict=False)).rstrip() + "\n" for line in lines
    )


def _table(rows: Sequence[Prediction]) -> Table:
    from rich.text import Text

    out = Table(box=None, padding=(0, 2, 0, 0))
    for name in _header(rows):
        numeric = name.startswith("probability")
        out.add_column(name.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        name = plain(row.name)
        shown = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
        out.add_row(*(Text(cell) for cell in [shown, *(c for n, p in row.classes for c in (plain(n), f"{p:.1%}"))]))
    return out
