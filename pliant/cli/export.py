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

from pliant.apps import models
from pliant.apps import trained as using
from pliant.apps.trained import Trained
from pliant.cli.app import UsageError, app, check_exists, exit_on_errors
from pliant.cli.progress import working
from pliant.core.types import nearest
from pliant.export.checked import Exported

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


def about(trained: Trained) -> dict[str, str]:
    """What an exported file says of itself: how its input is made, and what its outputs mean."""
    held = {name: trained.about[name] for name in ("model", "versions", "step") if name in trained.about}
    return {**held, "inputs": json.dumps(trained.inputs.to_json()), "classes": json.dumps(trained.classes)}


@app.command()
def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or a weight file of it (.safetensors).", show_default=False)
    ],
    to: Annotated[str, typer.Option(help=f"What to write: {', '.join(TARGETS)}.")] = "torch",
    out: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="model.pt2 or model.onnx in the folder of the run")
    ] = None,
    weights: Annotated[str, typer.Option(help="Those of the best evaluation, or the last: best or last.")] = "best",
    model: Annotated[
        str | None, typer.Option(help="package.module:factory, if the model was made by one.", show_default=False)
    ] = None,
) -> None:
    """Write a trained model for another runtime: a program of torch.export, or ONNX. It is checked against PyTorch first.

    The file takes what `pliant.load(RUN).inputs(...)` gives, and returns logits. Its metadata say how the input is made.

    Example: pliant export runs/photos --to onnx

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped.
    """
    with exit_on_errors(ValueError), working(Console(stderr=True)):
        check_exists("RUN", run)
        if to not in TARGETS:
            raise UsageError(f"--to: {to!r} is not known. Give one of {', '.join(TARGETS)}.{nearest(to, TARGETS)}")
        trained = using.load(run, model, weights=weights)
        target = TARGETS[to]
        path = out or (run if run.is_dir() else run.parent) / f"model{target.suffix}"
        done = target.write(trained, path)
        shape = "×".join(map(str, trained.inputs.example(1).shape[1:]))
    typer.echo(f"wrote {done.path}: batches of {shape}; differs from PyTorch by {done.difference:.1e} of the largest value")
