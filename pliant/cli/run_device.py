"""`pliant run-device`: train an exported program on this machine as a device would, and measure its memory from outside."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pliant.apps.device import TEST, TRAIN
from pliant.cli.app import UsageError, app, check_exists, exit_on_errors
from pliant.cli.progress import working
from pliant.core.json_text import json_text
from pliant.export.device.facts import INDEX, PROGRAM
from pliant.export.device.process import Job, run_device


@app.command("run-device")
def run(
    folder: Annotated[
        Path, typer.Argument(metavar="PROGRAM", help="What `pliant export --to executorch` wrote.", show_default=False)
    ],
    data: Annotated[
        Path | None, typer.Option(help="Samples (.npz): one array for each input of the program.", show_default=TRAIN)
    ] = None,
    test: Annotated[Path | None, typer.Option(help="Samples to evaluate on (.npz).", show_default=TEST)] = None,
    steps: Annotated[int, typer.Option(min=0, help="Steps to take.")] = 40,
    lr: Annotated[float | None, typer.Option(min=0, help="Learning rate.", show_default="that of the export")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of the samples.")] = 0,
    start: Annotated[Path | None, typer.Option(help="A delta to go on from.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="The delta to write.", show_default="delta.safetensors beside it")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train an exported program as an app on a device does: load, forward and backward, SGD, evaluate, save what changed.

    It runs in a process of its own, whose memory is measured from outside, beyond that of the loaded and idle program. The
    delta goes back into the PyTorch model with `pliant.export.apply_delta_`.

    Example: pliant run-device runs/photos/device --steps 100

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped.
    """
    with exit_on_errors(ValueError), working(Console(stderr=True)):
        check_exists("PROGRAM", folder)
        if lr is not None and not math.isfinite(lr):
            raise UsageError(f"--lr {lr}: the learning rate must be a finite number.")
        if not (folder / PROGRAM).exists():
            index = folder / INDEX
            names = sorted(json.loads(index.read_text())["programs"]) if index.exists() else []
            hint = f" It is a bundle: give one of {', '.join(str(folder / name) for name in names)}." if names else ""
            raise UsageError(f"PROGRAM: {str(folder)!r} holds no {PROGRAM}.{hint}")
        given = data or next((at / TRAIN for at in (folder, folder.parent) if (at / TRAIN).exists()), folder / TRAIN)
        check_exists("--data", given)
        held_out = test or next((at / TEST for at in (folder, folder.parent) if (at / TEST).exists()), None)
        delta = out or folder / "delta.safetensors"
        also = {"test": held_out, "start": start}
        given_paths = {name: str(path) for name, path in also.items() if path is not None}
        job = Job(str(folder), str(given), steps=steps, lr=lr, seed=seed, out=str(delta), **given_paths)  # type: ignore[arg-type]
        done = run_device(job)
    if as_json:
        typer.echo(json_text({**asdict(done), "delta": str(delta)}, indent=1))
        return
    if done.losses:
        typer.echo(
            f"{len(done.losses)} steps, {1e3 * done.seconds:.0f} ms each; loss {done.losses[0]:.4f} → {done.losses[-1]:.4f}"
        )
    if done.before is not None and done.after is not None:
        typer.echo(f"accuracy {done.before:.1%} → {done.after:.1%}")
    measured = f", measured {done.anonymous:,}" if done.anonymous is not None else ", not measured on this system"
    typer.echo(f"memory: planned {done.planned:,} bytes{measured}")
    typer.echo(f"wrote {delta}")
