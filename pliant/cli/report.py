"""`pliant report`: run logs as one page, Markdown or text."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pliant.apps import report as reports
from pliant.cli.app import app, exit_on_errors, naming
from pliant.runtime.files import write_aside


class Format(str, Enum):
    html = "html"
    md = "md"
    text = "text"


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs, or their logs.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Write to this file. For html: report.html beside the first log.", show_default=False)
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="A web page, Markdown, or plain text.")] = Format.html,
) -> None:
    """Show what a run chose, what it cost and what it learned; several runs are compared.

    The page is one file that needs no network and no server. Markdown and text are printed unless --out is given.

    Example: pliant report runs/a runs/b --out compare.html
    """
    console = Console()
    with exit_on_errors(OSError):
        with naming("RUN"):
            for run in runs:
                reports.log_of(run)
        loaded = reports.named(reports.load(run) for run in runs)
        write = {Format.html: reports.page, Format.md: reports.markdown, Format.text: reports.text}[form]
        content = write(loaded)
        if out is None and form is Format.html:
            out = reports.log_of(runs[0]).with_name("report.html")
        if out is None:
            typer.echo(content, nl=False)
            return
        write_aside(out, content.encode(errors="replace"))
        console.print(f"wrote {out}", markup=False, highlight=False, soft_wrap=True)
