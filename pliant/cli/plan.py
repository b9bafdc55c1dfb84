"""`pliant plan`: what a budget would choose, and why, without training."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pliant.cli.app import app, images_of, told


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="As in `pliant train --model`.")] = "efficientnet_lite0",
    time: Annotated[str | None, typer.Option(help="Time a step may take: a share of a full one, or like 12ms.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory it may take beyond inference: a share, or like 64MB.")] = None,
    macs: Annotated[str | None, typer.Option(help="Multiply-accumulates: a share, or like 1.5GMAC.")] = None,
    recipe: Annotated[str, typer.Option(help="As in `pliant train`.")] = "pliant",
    data: Annotated[str, typer.Option(help="As in `pliant train`: what its first batch says each unit is worth.")] = "digits",
    batch: Annotated[int, typer.Option(min=1, help="Images per step.")] = 16,
    size: Annotated[int, typer.Option(min=8, help="Pixels per side.")] = 64,
    lr: Annotated[float, typer.Option(help="Learning rate: what an update would change.")] = 0.03,
    scratch: Annotated[bool, typer.Option("--scratch", help="Random weights.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    engine: Annotated[str, typer.Option(help="As in `pliant train`.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads. With one, CPU time is measured.")] = 1,
    seed: Annotated[int, typer.Option(help="Of new weights and the batch.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a budget would choose at the first step, and why: what each unit is worth, costs, and what all together cost.

    Example: pliant plan efficientnet_lite0 --time 0.4 --memory 30MB

    Exit codes: 0 done, 1 told why not (a budget below the floor names it), 2 wrong usage, 130 stopped.
    """
    import torch

    from pliant.apps import tasks as task
    from pliant.apps.explain import explained
    from pliant.apps.train import Options

    console = Console()
    torch.set_num_threads(threads)
    with told(Console(stderr=True), ValueError):
        Options(engine=engine, lr=lr)  # says what is wrong with them
        images_of("--data", data)
        policy = task.policy(recipe, time, memory, macs, seed)
        loaded = task.load(model, data, size=size, seed=seed, device=device, scratch=scratch)
        task.check_names(recipe, loaded.model)
        with task.session(loaded, policy, batch=batch, lr=lr, scratch=scratch, engine=engine) as session:
            session.before_step(next(loaded.batches(batch, seed, 0)))
            found = explained(session)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    console.print(heading(found), markup=False, highlight=False, soft_wrap=True)
    console.print(table(found))
    console.print(
        "value: share of what all units are worth; alone: a step with this unit alone; cumulative: a step with it and every "
        "chosen one above it; no room: what a step with it would take. Shares of a plain full step; loss first.",
        highlight=False,
        soft_wrap=True,
    )


_SAID = {
    "seconds": ("time", 1e-3, "ms"),
    "bytes": ("memory", 1e6, "MB"),
    "macs": ("macs", 1e6, "MMAC"),
    "joules": ("energy", 1.0, "J"),
}


def heading(found: dict[str, Any]) -> str:
    picked, value = sum(unit["chosen"] for unit in found["units"]), found["value"]
    worth = f" with {value:.0%} of the value" if value is not None else ""
    lines = [f"{found['recipe']} chooses {picked} of {len(found['units'])} units{worth}"]
    for name, share in found["cost"].items():
        word, size, unit = _SAID[name]
        asked = f"asked {found['asked'][name]:.3f}, " if name in found["asked"] else ""
        forward = f", the forward pass alone {found['forward'][name]:.3f}" if name in found["forward"] else ""
        lines.append(f"{word}: {asked}chosen {share:.3f}{forward}; a full step takes {found['full'][name] / size:.4g} {unit}")
    return "\n".join(lines)


def table(found: dict[str, Any]) -> Table:
    kinds = [name for name in found["cost"] if name in found["asked"]] or [next(iter(found["cost"]))]
    out = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "unit", "value"):
        out.add_column(column, justify="right" if column == "value" else "left", no_wrap=True)
    for name in kinds:
        of = f"{_SAID[name][0]} " if len(kinds) > 1 else ""
        for column in (f"{of}alone", f"{of}cumulative"):
            out.add_column(column, justify="right")
    out.add_column("why")
    for unit in found["units"]:
        cells = ["█" if unit["chosen"] else "·", unit["name"]]
        cells.append("–" if unit["share_of_value"] is None else f"{unit['share_of_value']:.1%}")
        for name in kinds:
            cells += [f"{unit['alone'][name]:.3f}", f"{unit['cumulative'][name]:.3f}" if unit["chosen"] else ""]
        out.add_row(*cells, unit["why"])
    return out
