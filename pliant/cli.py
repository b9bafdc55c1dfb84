"""argv → the functions of the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import pliant

app = typer.Typer(
    name="pliant",
    help="Trains only the part of a PyTorch model that is worth training now.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"pliant {pliant.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Trains only the part of a PyTorch model that is worth training now, inside the budget that a device gives."""


@app.command()
def demo(
    time: Annotated[float, typer.Option(min=0.01, max=1.0, help="Budget: share of a plain full step's time.")] = 0.5,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each run.")] = 60,
    batch: Annotated[int, typer.Option(min=4, max=1000, help="Images per step.")] = 16,
    size: Annotated[int, typer.Option(min=32, help="Pixels per side.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the split, the new head and the order of the images.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write what was measured to this JSON file.")] = None,
) -> None:
    """Fine-tune a real network on real digits, plainly and elastically, and compare. About two minutes on a CPU.

    Example: pliant demo --time 0.4 --steps 80
    """
    from pliant.demo import run

    console = Console()
    try:
        outcomes = run(console, time_share=time, steps=steps, batch=batch, size=size, seed=seed)
    except (pliant.PliantError, ImportError) as error:
        console.print(f"pliant: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as stop:
        console.print("stopped: nothing was written.")
        raise typer.Exit(130) from stop
    if out is not None:
        pliant.types.write_aside(out, json.dumps([o.to_json() for o in outcomes], indent=2).encode())


@app.command()
def profile(
    model: Annotated[str, typer.Argument(help="efficientnet_lite0, or package.module:factory.")] = "efficientnet_lite0",
    batch: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 8,
    size: Annotated[int, typer.Option(min=8, help="Pixels per side of the images.")] = 64,
    shape: Annotated[str, typer.Option(help="Shape of one input instead, like 3x128x128; with --ids, like 64.")] = "",
    ids: Annotated[int, typer.Option(min=0, help="The inputs are token ids below this number.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads. With one, CPU time is measured, which others disturb less")
    ] = 1,
    tensors: Annotated[bool, typer.Option("--tensors", help="A line for each tensor, not for each layer.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also draw the roofline into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a model on this device: every layer's cost, arithmetic intensity and place under the roof.

    Example: pliant profile efficientnet_lite0 --batch 4 --size 96 --svg roof.svg
    """
    import torch

    from pliant import roofline, units
    from pliant.models import load
    from pliant.survey import survey

    console = Console()
    torch.set_num_threads(threads)
    try:
        net = load(model).to(device)
        inputs = tuple(int(n) for n in shape.split("x")) if shape else (3, size, size)
        x = torch.randint(ids, (batch, *inputs), device=device) if ids else torch.randn(batch, *inputs, device=device)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        found = survey(net, optimizer, lambda m, b: m(b).float().square().mean(), x, units.tensors() if tensors else None)
    except (pliant.PliantError, ImportError, ValueError, RuntimeError) as error:
        console.print(f"pliant: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    if svg is not None:
        pliant.types.write_aside(svg, roofline.svg_plot(found.rows, found.peaks, model).encode())
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    console.print(found.table())
    console.print()
    console.print(
        roofline.text_plot(found.rows, found.peaks, width=max(min(console.width, 100), 40)), markup=False, highlight=False
    )


def main() -> None:
    """The `pliant` command."""
    app()
