"""`pliant compare`: recipes, budgets and seeds side by side."""

from __future__ import annotations

import os
from time import monotonic
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from pliant.apps import compare as comparing
from pliant.apps.compare import CellResult, Comparison, SummaryLine
from pliant.apps.train import Options
from pliant.cli.app import app, check_data, exit_on_errors
from pliant.cli.options import Given, train_options
from pliant.cli.progress import duration
from pliant.core.json_text import json_text
from pliant.runtime import energy


@app.command()
@train_options("model", "data", "batch", "scratch", "device", "engine", "exact", epochs=1, lr=0.1, size=32, evaluate_every=15)
def compare(
    *,
    recipe: Annotated[list[str] | None, typer.Option(help="A recipe; can be repeated.")] = None,
    time: Annotated[list[str] | None, typer.Option(help="A time budget of a step; can be repeated.")] = None,
    memory: Annotated[list[str] | None, typer.Option(help="A memory budget; can be repeated.")] = None,
    macs: Annotated[list[str] | None, typer.Option(help="A budget of multiply-accumulates; can be repeated.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds for each recipe and budget: 0, 1, …")] = 2,
    given: Given,
    reference: Annotated[
        float | None,
        typer.Option(help="Also show the time until this accuracy is reached.", show_default="the accuracy of full"),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at the same time.", show_default="1 on CUDA, else 2 if there are enough cores"),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each run. With one, steps are measured in CPU time.")] = 1,
    out: Annotated[
        str, typer.Option(help="Folder; the same command continues a comparison that was stopped.")
    ] = "runs/compare",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Train with several recipes, budgets and seeds, each in its own process, and compare the results.

    Without options: full, last, elastic_layers and pliant with time budgets of 0.5 and 0.7, two seeds each.

    Example: pliant compare --recipe full --recipe last --recipe pliant --time 0.5 --seeds 3 --jobs 2

    Exit codes: 0 done (failed runs are rows too), 1 failed, 2 wrong usage, 130 stopped; run it again to continue.
    """
    budgets = [(kind, amount) for kind, some in (("time", time), ("memory", memory), ("macs", macs)) for amount in some or ()]
    console = Console(quiet=as_json)

    began, seen = monotonic(), 0

    def show(row: CellResult, done: int, total: int) -> None:
        nonlocal seen
        seen += 1
        end = f"accuracy {row.result['evaluations'][-1]['accuracy']:.1%}" if row.result is not None else f"failed: {row.error}"
        left = f", {duration((monotonic() - began) / seen * (total - done))} left" if done < total else ""
        console.print(f"{done}/{total} {row.cell.name}: {end}{left}", markup=False, highlight=False, soft_wrap=True)

    with exit_on_errors(stopped="stopped: the same command continues from here."):
        base = Options(**given)
        check_data("--data", base.data)
        recipes = recipe or ["full", "last", "elastic_layers", "pliant"]
        cells = comparing.cells(recipes, budgets or [("time", "0.5"), ("time", "0.7")], range(seeds))
        on_cuda = base.device.startswith("cuda") or torch.cuda.is_available()
        spare = not on_cuda and (os.cpu_count() or 1) >= 2 * threads
        found = comparing.compare(
            base, cells, out, jobs=jobs or (2 if spare else 1), threads=threads, reference=reference, on_row=show
        )
    if as_json:
        typer.echo(json_text(found.to_json()))
    else:
        _print(console, found, base.device)


def _print(console: Console, found: Comparison, device: str) -> None:
    console.print(table(found))
    for line in found.lines:
        if line.failed:
            what = f"{line.recipe} {line.budget}".strip()
            console.print(
                f"{what}: {line.failed} of {line.seeds} failed: {line.error}", markup=False, highlight=False, soft_wrap=True
            )
    console.print(
        "★ no other line is as accurate in less time. Accuracy: validation split, end of training, mean ± half the range over "
        "seeds. Total: includes measuring and choosing, not evaluating. Memory: of a step, beyond inference.",
        highlight=False,
        soft_wrap=True,
    )
    if not any(line.joules for line in found.lines):
        where = "cuda" if device.startswith("cuda") else "cpu"
        console.print(f"energy: not measured. {energy.missing(where)}", markup=False, highlight=False, soft_wrap=True)


def table(found: Comparison) -> Table:
    """One line per recipe and budget."""
    to = f"to {found.reference:.1%}" if found.reference is not None else ""
    columns = ["", "recipe", "budget", "accuracy", "step", "total", *([to] if to else []), "memory"]
    with_energy = any(line.joules is not None for line in found.lines)
    out = Table(box=None, padding=(0, 2, 0, 0))
    for column in [*columns, *(["energy"] if with_energy else [])]:
        out.add_column(column, justify="left" if column in ("", "recipe", "budget") else "right", no_wrap=True)
    for line in found.lines:
        cells = ["★" if line.front else "", line.recipe, line.budget, _accuracy(line), _ms(line.seconds_per_step)]
        cells.append("–" if line.seconds is None else f"{line.seconds:.1f} s")
        if to:
            some = f" {line.reached}/{line.seeds}" if 0 < line.reached < line.seeds else ""
            cells.append("–" if line.to_reference is None else f"{line.to_reference:.1f} s{some}")
        cells.append("–" if line.memory_bytes is None else f"{line.memory_bytes / 1e6:.3g} MB")
        if with_energy:
            cells.append("–" if line.joules is None else f"{line.joules:.3g} J")
        out.add_row(*cells)
    return out


def _accuracy(line: SummaryLine) -> str:
    if line.accuracy is None:
        return "failed"
    half = (max(line.accuracies) - min(line.accuracies)) / 2
    return f"{line.accuracy * 100:.1f}" + (f" ±{half * 100:.1f}" if len(line.accuracies) > 1 else "")


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3g} ms"
