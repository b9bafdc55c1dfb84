"""`pliant plan`: what a budget would choose, and why, without training."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from pliant.apps import tasks
from pliant.apps.explain import explained
from pliant.apps.train import Options, load_task, open_session
from pliant.cli.app import app, check_data, exit_on_errors
from pliant.cli.options import Given, train_options
from pliant.cli.progress import working
from pliant.core.json_text import json_text


@app.command()
@train_options("time", "memory", "macs", "recipe", "data", "batch", "size", "lr", "scratch", "device", "engine", "seed")
def plan(
    *,
    model: Annotated[str, typer.Argument(help="As in `pliant train --model`.")] = Options.model,
    given: Given,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads. With one, CPU time is measured.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a budget would choose at the first step, and why: the value and the cost of each unit, and of all chosen units.

    Example: pliant plan efficientnet_lite0 --time 0.4 --memory 30MB

    Exit codes: 0 done, 1 failed (a budget below the floor says where the floor is), 2 wrong usage, 130 stopped.
    """
    console = Console()
    torch.set_num_threads(threads)
    with exit_on_errors(ValueError):
        options = Options(model=model, **given)
        check_data("--data", options.data)
        options = options.resolved()
        policy = tasks.policy(options.recipe, options.time, options.memory, options.macs, options.seed)
        policy = replace(policy, head_first=0.0)  # what a run chooses once its head has trained, as far as one batch tells
        with working(Console(stderr=True)):
            task = load_task(options)
            tasks.check_names(options.recipe, task.model)
            with open_session(options, task, policy) as session:
                session.before_step(next(task.batches(options.batch, options.seed, 0)))
                found = explained(session)
    if as_json:
        typer.echo(json_text(found, indent=2))
        return
    console.print(heading(found), markup=False, highlight=False, soft_wrap=True)
    console.print(table(found))
    console.print(
        "value: share of the value of all units; alone: a step with this unit alone; cumulative: a step with this unit and all "
        "chosen units above it; no room: the cost of a step with it. Costs are shares of a plain full step. The unit nearest "
        "the loss comes first.",
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
        if asked and found["limit"][name] < found["asked"][name]:
            asked += f"planned with {found['limit'][name]:.3f} (measuring is paid back), "
        forward = f", the forward pass alone {found['forward'][name]:.3f}" if name in found["forward"] else ""
        lines.append(f"{word}: {asked}chosen {share:.3f}{forward}; a full step takes {found['full'][name] / size:.4g} {unit}")
    return "\n".join(lines)


def table(found: dict[str, Any]) -> Table:
    """One line per unit, with the costs that the budget limits, or the first known cost."""
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
