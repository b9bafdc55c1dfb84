"""`pliant profile`: what every layer of a model costs on this device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from pliant import units
from pliant.apps import tasks
from pliant.apps.layer_report import layer_report
from pliant.cli.app import UsageError, app, exit_on_errors, load_model
from pliant.cost import roofline
from pliant.runtime.files import write_aside


@app.command()
def profile(
    model: Annotated[str, typer.Argument(help="As in `pliant train --model`.")] = "efficientnet_lite0",
    batch: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 8,
    size: Annotated[int, typer.Option(min=8, help="Pixels per side of the images.")] = 64,
    shape: Annotated[str, typer.Option(help="Shape of one input instead, like 3x128x128; with --ids, like 64.")] = "",
    ids: Annotated[int, typer.Option(min=0, help="The inputs are token ids below this number.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads. With one, CPU time is measured, which other processes disturb less.")
    ] = 1,
    tensors: Annotated[bool, typer.Option("--tensors", help="One line per tensor instead of per layer.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also draw the roofline into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a model on this device: the cost and the arithmetic intensity of every layer, and its place under the roofline.

    Example: pliant profile efficientnet_lite0 --batch 4 --size 96 --svg roof.svg

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped.
    """
    console = Console()
    torch.set_num_threads(threads)
    with exit_on_errors(console, ValueError, RuntimeError):
        if shape and not all(n.isdecimal() for n in shape.split("x")):
            raise UsageError(f"--shape: {shape!r} is not a shape. Write whole numbers with an x between them, like 3x128x128.")
        where = tasks.device_of(device)
        net = load_model("MODEL", model).to(where)
        inputs = tuple(int(n) for n in shape.split("x")) if shape else (3, size, size)
        x = torch.randint(ids, (batch, *inputs), device=where) if ids else torch.randn(batch, *inputs, device=where)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        found = layer_report(net, optimizer, lambda m, b: m(b).float().square().mean(), x, units.tensors() if tensors else None)
        if svg is not None:
            write_aside(svg, roofline.svg_plot(found.rows, found.peaks, model).encode())
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    console.print(found.table())
    console.print()
    console.print(
        roofline.text_plot(found.rows, found.peaks, width=max(min(console.width, 100), 40)), markup=False, highlight=False
    )
