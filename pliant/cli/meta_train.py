"""`pliant meta-train`: a backbone practises tasks of few images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pliant.cli.app import Misused, app, model_of, there, told
from pliant.cli.progress import bar

_WAYS = 5  # classes of a task, at least


@app.command("meta-train")
def meta_train(
    source: Annotated[
        Path, typer.Argument(help="Images to practise on: a folder with a folder for each class, or a packed .npz.")
    ],
    out: Annotated[Path, typer.Option(help="The .safetensors file that the weights go to.")],
    backbone: Annotated[
        str, typer.Option(help="efficientnet_lite0 with its ImageNet weights, a .safetensors file, or package.module:factory.")
    ] = "efficientnet_lite0",
    scratch: Annotated[bool, typer.Option("--scratch", help="Begin with random weights of a built-in network.")] = False,
    episodes: Annotated[int, typer.Option(min=1, help="Tasks to practise.")] = 1000,
    support: Annotated[int, typer.Option(min=10, help="Images to learn a task from, at most: what memory holds.")] = 500,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate at the start; it falls to nothing along a cosine.")] = 0.001,
    held_out: Annotated[
        float,
        typer.Option(min=0.0, max=0.5, help="Share of the classes that is not practised, but tells which weights are best."),
    ] = 0.2,
    size: Annotated[int, typer.Option(min=32, help="Pixels per side that images are resized to.")] = 128,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the tasks.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run with the same --out was stopped.")] = False,
) -> None:
    """Prepare a backbone for learning from few images: it practises tasks drawn from a set of many classes.

    Example: pliant meta-train flowers/ --backbone mcunet.safetensors --episodes 2000 --out practised.safetensors
    """
    import torch

    from pliant.apps import fewshot, models
    from pliant.apps import tasks as task
    from pliant.apps.data import images

    console, state = Console(), Path(f"{out}.state")

    def stopped(_: KeyboardInterrupt) -> str:
        return "stopped: go on with --resume." if state.exists() else "stopped: nothing was practised yet."

    with told(console, ValueError, RuntimeError, stopped=stopped):
        if out.exists() or (state.exists() and not resume):
            file, what = (out, "choose another --out") if out.exists() else (state, "go on with --resume")
            raise ValueError(f"{str(file)!r} is there already, from another run: {what}, or remove it.")
        where = task.device_of(device)
        there("SOURCE", source)
        torch.manual_seed(seed)  # random weights
        net = model_of("--backbone", backbone, pretrained=backbone in models.BUILT_IN and not scratch).to(where)
        found = images.load(source, size)
        sampling = fewshot.Sampling(ways=(_WAYS, min(50, support)), support=support)
        if resume and state.exists():
            _check_support(state, support)
        enough = int((found.labels.bincount(minlength=len(found.classes)) >= 2).sum())
        if enough < _WAYS:
            raise images.ImageError(
                f"SOURCE: a task takes {_WAYS} classes of two images or more, and {str(source)!r} has {enough}. Give a larger "
                f"set."
            )
        with bar(console, "practising", episodes) as show:
            recent: list[float] = []

            def tell(number: int, loss: float, hits: float) -> None:
                recent[:] = (
                    [0.95 * old + 0.05 * new for old, new in zip(recent, (loss, hits), strict=True)] if recent else [loss, hits]
                )
                show(number + 1, f"loss {recent[0]:.3f}, accuracy {recent[1]:.1%}")

            done = fewshot.meta_train(
                net,
                found,
                episodes=episodes,
                sampling=sampling,
                lr=lr,
                held_out=held_out,
                norm=fewshot.norm_of(net) or models.NORM,
                out=out,
                resume=resume,
                seed=seed,
                on_episode=tell,
            )
        last = done.accuracies[-max(1, episodes // 10) :]
        console.print(
            f"{out}: accuracy {sum(last) / len(last):.1%} on the last {len(last)} tasks, scale {done.scale:.2f}.",
            highlight=False,
        )
        if done.remains is not None:
            (_, before), (at, best) = done.held_out[0], done.held_out[done.remains]
            console.print(
                f"On classes that were not practised: {before:.1%} before, {best:.1%} after {at} tasks, whose weights remain.",
                highlight=False,
            )


def _check_support(state: Path, support: int) -> None:
    """A run goes on with as many images to a task as it began with. What else is wrong with a state, its reader tells."""
    import torch

    try:
        was = torch.load(state, map_location="cpu", weights_only=True, mmap=True)["told"]["sampling"]["support"]
    except Exception:
        return
    if was != support:
        raise Misused(f"--support: {str(state)!r} is of a run with {was}, and {support} was given. Go on with --support {was}.")
