"""`pliant profile`: what every layer of a model costs on this device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from pliant import units
from pliant.apps import tasks
from pliant.apps.layer_report import layer_report
from pliant.cli.app import UsageError, app, exit_on_errors, load_model
from pliant.cli.progress import working
from pliant.core import text
from pliant.core.json_text import json_text
from pliant.cost import kept_profiles, roofline
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
    cached: Annotated[bool, typer.Option("--cached", help="List the profiles that earlier runs have kept, and stop.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Remove the profiles that earlier runs have kept, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a model on this device: the cost and the arithmetic intensity of every layer, and its place under the roofline.

    Training keeps what it measures in a cache, so that a second run need not measure. --cached and --clear show and empty it.

    Example: pliant profile efficientnet_lite0 --batch 4 --size 96 --svg roof.svg

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped.
    """
    console = Console()
    if cached or clear:
        with exit_on_errors():
            _show_kept(console, kept_profiles.kept() if cached else None, kept_profiles.clear() if clear else None, as_json)
        return
    torch.set_num_threads(threads)
    with exit_on_errors(ValueError, RuntimeError):
        if shape and not all(n.isdecimal() for n in shape.split("x")):
            raise UsageError(f"--shape: {shape!r} is not a shape. Write whole numbers with an x between them, like 3x128x128.")
        where = tasks.device_of(device)
        net = load_model("MODEL", model).to(where)
        inputs = tuple(int(n) for n in shape.split("x")) if shape else (3, size, size)
        x = torch.randint(ids, (batch, *inputs), device=where) if ids else torch.randn(batch, *inputs, device=where)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        which = units.tensors() if tensors else None
        with working(Console(stderr=True)):
            found = layer_report(net, optimizer, lambda m, b: m(b).float().square().mean(), x, which)
        if svg is not None:
            write_aside(svg, roofline.svg_plot(found.rows, found.peaks, model).encode())
    if as_json:
        typer.echo(json_text(found.to_json(), indent=2))
        return
    console.print(found.table())
    console.print()
    console.print(
        roofline.text_plot(found.rows, found.peaks, width=max(min(console.width, 100), 40)), markup=False, highlight=False
    )


def _show_kept(console: Console, found: list[kept_profiles.Kept] | None, removed: int | None, as_json: bool) -> None:
    """The profiles that were found, and how many were removed."""
    if as_json:
        listed = {} if found is None else {"profiles": [one.to_json() for one in found]}
        typer.echo(json_text({**listed, **({} if removed is None else {"removed": removed})}, indent=2))
        return
    for one in found or ():
        console.print(_line(one), markup=False, highlight=False, soft_wrap=True)
    if found is not None:
        where = kept_profiles.folder()
        total = text.size(sum(one.bytes for one in found))
        console.print(f"{len(found)} profiles, {total}, in {where}", markup=False, highlight=False, soft_wrap=True)
    if removed is not None:
        console.print(f"{removed} profiles removed", highlight=False)


def _line(one: kept_profiles.Kept) -> str:
    if one.profile is None:
        return f"{one.path.name}: not usable: {one.why_not}"
    at = one.profile.origin
    about = f"{at.get('name')}, batch {at.get('batch')}, {at.get('dtype')}, {at.get('device')}, {at.get('threads')} threads"
    return f"{at.get('taken')}  {about}, torch {at.get('torch')}: a full step takes {text.seconds(one.profile.full.seconds)}"
