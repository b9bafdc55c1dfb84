"""`pliant doctor`: what this machine can run and measure."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from pliant.apps.doctor import examine
from pliant.cli.app import app, exit_on_errors
from pliant.cli.progress import working
from pliant.core.json_text import json_text

_MARKS = {"there": "✓", "missing": "–", "broken": "✗"}


@app.command()
def doctor(
    peaks: Annotated[bool, typer.Option(help="Measure peak FLOP/s and bandwidth, which takes some seconds.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what this machine can run and measure, and what to install for the rest.

    Example: pliant doctor --no-peaks

    Exit codes: 0 the library runs here, even if extras are missing; 1 it does not.
    """
    console = Console()
    with exit_on_errors(), working(Console(stderr=True)):
        found = examine(peaks)
    if as_json:
        typer.echo(json_text(found.to_json(), indent=2))
        raise typer.Exit(0 if found.can_run else 1)
    topic = ""
    for one in found.findings:
        if one.topic != topic:
            topic = one.topic
            console.print(Text(topic, style="bold"))
        console.print(Text(f"  {_MARKS[one.standing]} {one.name}: {one.said}"), soft_wrap=True)
        if one.remedy:
            console.print(Text(f"      → {one.remedy}", style="dim"), soft_wrap=True)
    console.print("the library runs here" if found.can_run else "the library does NOT run here", highlight=False)
    raise typer.Exit(0 if found.can_run else 1)
