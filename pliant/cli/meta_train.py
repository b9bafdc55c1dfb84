"""`pliant meta-train`: prepare a backbone for learning from few images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from pliant.apps import fewshot, models, tasks
from pliant.apps.data import images
from pliant.apps.fewshot.meta import read_state
from pliant.cli.app import UsageError, app, check_exists, exit_on_errors, load_model
from pliant.cli.progress import bar, working

_WAYS = 5  # the smallest number of classes in a task


@app.command("meta-train")
def meta_train(
    source: Annotated[Path, typer.Argument(help="Images to train on: a folder with one folder per class, or a packed .npz.")],
    out: Annotated[Path, typer.Option(help="Write the weights to this .safetensors file.")],
    backbone: Annotated[
        str, typer.Option(help="efficientnet_lite0 with its ImageNet weights, a .safetensors file, or package.module:factory.")
    ] = "efficientnet_lite0",
    scratch: Annotated[bool, typer.Option("--scratch", help="Start a built-in network from random weights.")] = False,
    episodes: Annotated[int, typer.Option(min=1, help="Number of training tasks.")] = 1000,
    support: Annotated[int, typer.Option(min=10, help="Largest number of support images in a task; limited by memory.")] = 500,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate at the start; it decays to zero along a cosine.")] = 0.001,
    held_out: Annotated[
        float,
        typer.Option(min=0.0, max=0.5, help="Share of the classes that is held out to select the best weights."),
    ] = 0.2,
    size: Annotated[int, typer.Option(min=32, help="Pixels per side that images are resized to.")] = 128,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the tasks.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run with the same --out that was stopped.")] = False,
) -> None:
    """Prepare a backbone for learning from few images: train it on many small tasks drawn from a set of many classes.

    Example: pliant meta-train flowers/ --backbone mcunet.safetensors --episodes 2000 --out prepared.safetensors
    """
    console, state = Console(), Path(f"{out}.state")

    def stopped(_: KeyboardInterrupt) -> str:
        return "stopped: continue with --resume." if state.exists() else "stopped: no task was finished yet."

    with exit_on_errors(ValueError, RuntimeError, stopped=stopped):
        if out.suffix != ".safetensors":
            raise UsageError(f"--out {out}: give a name that ends with .safetensors, so that it can be read again.")
        if out.exists() or (state.exists() and not resume):
            file, what = (out, "choose another --out") if out.exists() else (state, "continue with --resume")
            raise ValueError(f"{str(file)!r} is there already, from another run: {what}, or remove it.")
        where = tasks.device_of(device)
        check_exists("SOURCE", source)
        torch.manual_seed(seed)  # of random weights
        net = load_model("--backbone", backbone, pretrained=backbone in models.BUILT_IN and not scratch).to(where)
        with working(Console(stderr=True)):
            found = images.load(source, size)
        sampling = fewshot.Sampling(ways=(_WAYS, min(50, support)), support=support)
        if resume and state.exists():
            before = read_state(state)["settings"]["sampling"]["support"]
            if before != support:
                raise UsageError(
                    f"--support: {str(state)!r} is of a run with {before}, and {support} was given. Continue with "
                    f"--support {before}."
                )
        enough = int((found.labels.bincount(minlength=len(found.classes)) >= 2).sum())
        if enough < _WAYS:
            raise images.ImageError(
                f"SOURCE: a task takes {_WAYS} classes of two images or more, and {str(source)!r} has {enough}. Give a larger "
                f"set."
            )
        with bar(console, "training", episodes) as show:
            recent: list[float] = []

            def show_task(number: int, loss: float, accuracy: float) -> None:
                means = zip(recent or (loss, accuracy), (loss, accuracy), strict=True)
                recent[:] = [0.95 * old + 0.05 * new for old, new in means]
                show(number + 1, f"loss {recent[0]:.3f}, accuracy {recent[1]:.1%}")

            done = fewshot.meta_train(
                net,
                found,
                episodes=episodes,
                sampling=sampling,
                lr=lr,
                held_out=held_out,
                pixel_stats=fewshot.pixel_stats_of(net) or models.PIXEL_STATS,
                out=out,
                resume=resume,
                seed=seed,
                on_episode=show_task,
            )
        last = done.accuracies[-max(1, episodes // 10) :]
        console.print(
            f"{out}: accuracy {sum(last) / len(last):.1%} on the last {len(last)} tasks, scale {done.scale:.2f}.",
            highlight=False,
        )
        if done.remains is not None:
            (_, start), (at, best) = done.held_out[0], done.held_out[done.remains]
            console.print(
                f"On held-out classes: {start:.1%} before, {best:.1%} after {at} tasks, whose weights were kept.",
                highlight=False,
            )
