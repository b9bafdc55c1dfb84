"""`pliant demo`: fine-tune a real network on real digits, in full and with a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pliant.apps.demo import run
from pliant.cli.app import app, exit_on_errors
from pliant.core.json_text import json_text
from pliant.runtime.files import write_aside


@app.command()
def demo(
    time: Annotated[float, typer.Option(min=0.01, max=1.0, help="Time budget: share of a plain full step.")] = 0.3,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each run.")] = 60,
    batch: Annotated[int, typer.Option(min=4, max=1000, help="Images per step.")] = 16,
    size: Annotated[int, typer.Option(min=32, help="Pixels per side.")] = 64,
    seed: Annotated[int, typer.Option(help="Random seed of the split, the new head and the order of the images.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the measurements to this JSON file.")] = None,
) -> None:
    """Fine-tune a real network on real digits, in full and with a time budget, and compare. About two minutes on a CPU.

    Example: pliant demo --time 0.4 --steps 80
    """
    console = Console()
    with exit_on_errors(stopped="stopped: nothing was written."):
        outcomes = run(console, time_share=time, steps=steps, batch=batch, size=size, seed=seed)
        if out is not None:
            write_aside(out, json_text([o.to_json() for o in outcomes], indent=2).encode())
