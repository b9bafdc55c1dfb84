"""`pliant compare`: recipes, budgets and seeds side by side."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pliant.apps.compare import Comparison, Line, Row
from pliant.cli.app import app, images_of, told


@app.command()
def compare(
    recipe: Annotated[list[str] | None, typer.Option(help="A recipe; may be given several times.")] = None,
    time: Annotated[list[str] | None, typer.Option(help="A time budget of a step; may be given several times.")] = None,
    memory: Annotated[list[str] | None, typer.Option(help="A memory budget; may be given several times.")] = None,
    macs: Annotated[
        list[str] | None, typer.Option(help="A budget of multiply-accumulates; may be given several times.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each recipe and budget: 0, 1, …")] = 2,
    model: Annotated[str, typer.Option(help="As in `pliant train`.")] = "efficientnet_lite0",
    data: Annotated[str, typer.Option(help="As in `pliant train`.")] = "digits",
    epochs: Annotated[int, typer.Option(min=1, help="Times through the images.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Images per step.")] = 16,
    lr: Annotated[float, typer.Option(help="Learning rate at the start.")] = 0.1,
    size: Annotated[int, typer.Option(min=8, help="Pixels per side.")] = 32,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between evaluations.")] = 15,
    scratch: Annotated[bool, typer.Option("--scratch", help="Begin with random weights.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    engine: Annotated[str, typer.Option(help="As in `pliant train`.")] = "auto",
    exact: Annotated[bool, typer.Option("--exact", help="As in `pliant train`.")] = False,
    reference: Annotated[
        float | None, typer.Option(help="Accuracy that times are told to.", show_default="what full comes to")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Cells at a time.", show_default="1 on CUDA, else 2 where there are cores for it")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each. With one, steps are told in CPU time.")] = 1,
    out: Annotated[str, typer.Option(help="Folder; the same command goes on where it was stopped.")] = "runs/compare",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Train with several recipes, budgets and seeds, each in a process of its own, and compare what they come to.

    Without options: full, last, elastic_layers and pliant at 0.5 and 0.7 of a full step's time, two seeds each.

    Example: pliant compare --recipe full --recipe last --recipe pliant --time 0.5 --seeds 3 --jobs 2

    Exit codes: 0 done (cells that failed are rows too), 1 told why not, 2 wrong usage, 130 stopped; run it again to go on.
    """
    import torch

    from pliant.apps import compare as work
    from pliant.apps.train import Options

    given = [(kind, amount) for kind, some in (("time", time), ("memory", memory), ("macs", macs)) for amount in some or ()]
    console = Console(quiet=as_json)

    def tell(row: Row, done: int, of: int) -> None:
        end = f"accuracy {row.result['evaluations'][-1]['accuracy']:.1%}" if row.result is not None else f"failed: {row.error}"
        console.print(f"{done}/{of} {row.cell.name}: {end}", markup=False, highlight=False, soft_wrap=True)

    with told(Console(stderr=True), stopped="stopped: the same command goes on from here."):
        base = Options(
            model=model,
            data=data,
            epochs=epochs,
            batch=batch,
            lr=lr,
            size=size,
            evaluate_every=evaluate_every,
            scratch=scratch,
            device=device,
            engine=engine,
            exact=exact,
        )
        images_of("--data", data)
        recipes = recipe or ["full", "last", "elastic_layers", "pliant"]
        run = work.cells(recipes, given or [("time", "0.5"), ("time", "0.7")], range(seeds))
        spare = not device.startswith("cuda") and not torch.cuda.is_available() and (os.cpu_count() or 1) >= 2 * threads
        found = work.compare(base, run, out, jobs=jobs or (2 if spare else 1), threads=threads, reference=reference, watch=tell)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
        return
    console.print(table(found))
    for line in found.lines:
        if line.failed:
            what = f"{line.recipe} {line.budget}".strip()
            console.print(
                f"{what}: {line.failed} of {line.seeds} failed: {line.error}", markup=False, highlight=False, soft_wrap=True
            )
    console.print(
        "★ no other line is as accurate in less time. Accuracy: validation split, end of training, mean ± half the range over "
        "seeds. Total: measuring and choosing included, evaluating not. Memory: of a step, beyond inference.",
        highlight=False,
        soft_wrap=True,
    )
    if not any(line.joules for line in found.lines):
        import pliant

        where = "cuda" if device.startswith("cuda") else "cpu"
        console.print(f"energy: {pliant.runtime.energy.missing(where)}", markup=False, highlight=False, soft_wrap=True)


def table(found: Comparison) -> Table:
    """A line for each recipe and budget."""
    to = f"to {found.reference:.1%}" if found.reference is not None else ""
    columns = ["", "recipe", "budget", "accuracy", "a step", "total", *([to] if to else []), "memory"]
    energy = any(line.joules is not None for line in found.lines)
    out = Table(box=None, padding=(0, 2, 0, 0))
    for column in [*columns, *(["energy"] if energy else [])]:
        out.add_column(column, justify="left" if column in ("", "recipe", "budget") else "right", no_wrap=True)
    for line in found.lines:
        cells = ["★" if line.front else "", line.recipe, line.budget, _accuracy(line), _ms(line.seconds_per_step)]
        cells.append("–" if line.seconds is None else f"{line.seconds:.1f} s")
        if to:
            some = f" {line.reached}/{line.seeds}" if 0 < line.reached < line.seeds else ""
            cells.append("–" if line.to_reference is None else f"{line.to_reference:.1f} s{some}")
        cells.append("–" if line.memory_bytes is None else f"{line.memory_bytes / 1e6:.3g} MB")
        if energy:
            cells.append("–" if line.joules is None else f"{line.joules:.3g} J")
        out.add_row(*cells)
    return out


def _accuracy(line: Line) -> str:
    if line.accuracy is None:
        return "failed"
    half = (max(line.accuracies) - min(line.accuracies)) / 2
    return f"{line.accuracy * 100:.1f}" + (f" ±{half * 100:.1f}" if len(line.accuracies) > 1 else "")


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3g} ms"
