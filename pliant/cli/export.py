"""`pliant export`: a trained model as a file for another runtime. A new target is a row of the table."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console

from pliant.apps import device, models
from pliant.apps import trained as using
from pliant.apps.trained import Trained
from pliant.cli.app import UsageError, app, check_exists, exit_on_errors
from pliant.cli.options import Factory, RunArgument, Weights
from pliant.cli.progress import working
from pliant.core.types import nearest
from pliant.export.checked import Exported
from pliant.export.device.export import RATE

_SAMPLES = 4  # that the exported model is checked with


class Target(NamedTuple):
    """A runtime: how its files end, and what writes one."""

    suffix: str
    write: Callable[[Trained, Path], Exported]


def _by(module: str) -> Callable[[Trained, Path], Exported]:
    """A module of `pliant.export` with a function `export(model, example, path, about, forward)`."""

    def write(trained: Trained, path: Path) -> Exported:
        export: Callable[..., Exported] = importlib.import_module(f"pliant.export.{module}").export
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            example = trained.inputs.example(_SAMPLES)
        return export(trained.model, example, path, about(trained), models.logits)

    return write


TARGETS = {"torch": Target(".pt2", _by("program")), "onnx": Target(".onnx", _by("onnx"))}
_TRAINS = "executorch"  # a target that trains: a folder with programs, which take a recipe and a budget


def about(trained: Trained) -> dict[str, str]:
    """What an exported file says of itself: how its input is made, and what its outputs mean."""
    held = {name: trained.about[name] for name in ("model", "versions", "step") if name in trained.about}
    return {**held, "inputs": json.dumps(trained.inputs.to_json()), "classes": json.dumps(trained.classes)}


@app.command()
def export(
    run: RunArgument,
    to: Annotated[str, typer.Option(help=f"What to write: {', '.join(TARGETS)}, or {_TRAINS} to train on a device.")] = "torch",
    out: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="model.pt2 or model.onnx in the folder of the run")
    ] = None,
    weights: Weights = "best",
    model: Factory = None,
    recipe: Annotated[str, typer.Option(help="What a device trains, as in `pliant train`.")] = "tinytrain",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Planned memory of a program for a device, like 1MB. 500kB,1MB: a bundle of two.", show_default=False
        ),
    ] = None,
    macs: Annotated[
        str | None, typer.Option(help="MACs of a step on the device: a share, or an amount.", show_default=False)
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a step on the device.")] = 1,
    lr: Annotated[float, typer.Option(help="Learning rate on the device.")] = RATE,
    int8: Annotated[bool, typer.Option("--int8", help="Store weights that are frozen on the device in 8 bits.")] = False,
) -> None:
    """Write a trained model for another runtime: a program of torch.export, or ONNX. It is checked against PyTorch first.

    The file takes what `pliant.load(RUN).inputs(...)` gives, and returns logits. Its metadata say how the input is made.

    `executorch` writes a folder with a program that goes on training on a device, inside `--memory`: see docs/device.md.

    Example: pliant export runs/photos --to onnx

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped.
    """
    with exit_on_errors(ValueError), working(Console(stderr=True)):
        check_exists("RUN", run)
        known = (*TARGETS, _TRAINS)
        if to not in known:
            raise UsageError(f"--to: {to!r} is not known. Give one of {', '.join(known)}.{nearest(to, known)}")
        trained = using.load(run, model, weights=weights)
        if to == _TRAINS:
            place = out or (run if run.is_dir() else run.parent) / "device"
            how = {"recipe": recipe, "memory": memory, "macs": macs, "batch": batch, "lr": lr, "int8": int8}
            programs = device.export_run(run, trained, place, **how)  # type: ignore[arg-type]
            for name, facts in programs.items():
                typer.echo(
                    f"wrote {place / name}: trains {len(facts.trains)} tensors; differs from PyTorch by {facts.difference:.1e}"
                )
                typer.echo("\n".join(facts.lines()))
            return
        target = TARGETS[to]
        path = out or (run if run.is_dir() else run.parent) / f"model{target.suffix}"
        done = target.write(trained, path)
        shape = "×".join(map(str, trained.inputs.example(1).shape[1:]))
    typer.echo(f"wrote {done.path}: batches of {shape}; differs from PyTorch by {done.difference:.1e} of the largest value")
