"""`pliant train`: a model, a set of images, a budget; weights at the end."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pliant.apps.tasks import RECIPES
from pliant.apps.train import Options, Result, Stopped
from pliant.cli.app import Misused, app, images_of, told

_DEFAULT = {field.name: str(field.default) for field in fields(Options)}


def from_toml(path: Path) -> dict[str, Any]:
    """The options in a file; their names may be written with dashes, as on the command line."""
    try:
        toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError as error:
        raise ImportError("to read TOML, Python 3.10 needs tomli. Run: pip install 'pliant[toml]'", name="tomli") from error
    try:
        held: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Misused(f"--config: no file {str(path)!r}.") from error
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        raise Misused(f"--config: {str(path)!r} cannot be read as TOML: {error}") from error
    return {name.replace("-", "_"): value for name, value in held.items()}


def _option(option: str, help: str, least: int | None = None) -> Any:
    """An option whose default is that of `Options`, and shown as such."""
    return typer.Option(min=least, help=help, show_default=_DEFAULT[option])


# Every default is None, "not given", so that a file of options is overruled by what is: the real ones stand in `Options`.
@app.command()
def train(
    model: Annotated[
        str | None,
        _option("model", "efficientnet_lite0, timm:NAME, package.module:factory, or a .safetensors file of an earlier run."),
    ] = None,
    data: Annotated[
        str | None, _option("data", "A folder with a folder of images per class, a packed .npz set, or digits.")
    ] = None,
    recipe: Annotated[str | None, _option("recipe", f"What to train: {', '.join(RECIPES)}; only:GLOB,GLOB names it.")] = None,
    time: Annotated[
        str | None,
        typer.Option(help="Time a step may take: a share of a full one, or like 12ms.", show_default="0.5 for pliant"),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory it may take beyond inference: a share, or like 64MB.")] = None,
    macs: Annotated[str | None, typer.Option(help="Multiply-accumulates: a share, or like 1.5GMAC.")] = None,
    epochs: Annotated[int | None, _option("epochs", "Times through the images.", least=1)] = None,
    batch: Annotated[int | None, _option("batch", "Images per step.", least=1)] = None,
    lr: Annotated[float | None, _option("lr", "Learning rate at the start; it falls to nothing along a cosine.")] = None,
    size: Annotated[int | None, _option("size", "Pixels per side.", least=8)] = None,
    validation: Annotated[
        float | None, _option("validation", "Share of each class to validate with, if the data names none.")
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between evaluations.", show_default="an epoch")
    ] = None,
    scratch: Annotated[bool | None, typer.Option("--scratch", help="Begin with random weights.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …", show_default="cuda if there is one")] = None,
    engine: Annotated[
        str | None, _option("engine", "auto, plain, or of lean, prefix and graphs some, like lean+prefix.")
    ] = None,
    exact: Annotated[
        bool | None, typer.Option("--exact", help="With a time budget too, nothing hangs on the clock once costs are measured.")
    ] = None,
    seed: Annotated[int | None, _option("seed", "Of the split, new weights and the order of images.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder of the run.", show_default="a new one in runs/")] = None,
    resume: Annotated[bool | None, typer.Option("--resume", help="Go on with the run in --out, with its options.")] = None,
    delta: Annotated[bool | None, typer.Option("--delta", help="Write only the weights that changed.")] = None,
    log_to: Annotated[str | None, typer.Option(help="Also write for: tensorboard.")] = None,
    keep_anyway: Annotated[
        bool | None, typer.Option("--keep-anyway", help="Keep the end even if the start was better.")
    ] = None,
    measure_memory: Annotated[
        bool | None, typer.Option("--measure-memory", help="Measure the peak bytes of a step at the end.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with options; the command line wins.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Train a model on images inside a budget; writes the best and the last weights, a log, and what --resume goes on from.

    Example: pliant train --data digits --time 0.4 --epochs 2 --out runs/first

    Exit codes: 0 done, 1 told why not, 2 wrong usage, 130 stopped by Ctrl-C (after a step, with everything saved).
    """
    given = {name: value for name, value in locals().items() if value is not None and name not in ("config", "as_json")}
    from pliant.apps.train import train as run
    from pliant.cli.live import shown

    console = Console(stderr=as_json, quiet=as_json)
    with told(Console(stderr=True), ValueError, stopped=_stopped):
        asked = _asked(given, config)
        with shown(console) as watch:
            result = run(asked, None if as_json else watch)
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        _show(console, result)


def _asked(given: dict[str, Any], config: Path | None) -> Options:
    """All options together: those of the command line, then those of a file, then those of the run that is to go on."""
    options = {**(from_toml(config) if config is not None else {}), **given}
    where = str(config) if config is not None else "the command line"
    if options.get("resume") and options.get("out"):
        options = {**vars(Options.of_run(options["out"])), **options}
    asked = Options.of(options, where)
    images_of("--data", asked.data)
    return asked


def _stopped(how: KeyboardInterrupt) -> str:
    if isinstance(how, Stopped):
        return "stopped: what was trained is saved; go on with --resume."
    return "stopped at once: the run is as it was last saved, if it was."


def _show(console: Console, result: Result) -> None:
    from pliant.cli.live import duration

    ends = "rolled back to the start" if result.rolled_back else f"{result.accuracy:.1%}"
    step = f", {result.seconds_per_step * 1e3:.3g} ms a step" if result.seconds_per_step else ""
    console.print(
        f"validation accuracy {result.evaluations[0].accuracy:.1%} → {ends}; best {result.best.accuracy:.1%} at step "
        f"{result.best.step}; trained for {duration(result.seconds)}{step}",
        highlight=False,
        soft_wrap=True,
    )
    if result.memory_bytes is not None:
        console.print(f"a step takes {result.memory_bytes / 1e6:.4g} MB beyond inference", highlight=False)
    if result.joules is not None:
        console.print(f"energy: {result.joules:.4g} J", highlight=False)
    console.print(
        f"best.safetensors, last.safetensors and run.jsonl are in {result.out}", markup=False, highlight=False, soft_wrap=True
    )
