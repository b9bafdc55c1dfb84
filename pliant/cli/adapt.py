"""`pliant adapt`: a few labelled images, a network, a budget; a network that knows them at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import pliant
from pliant.cli.app import app, meant, model_of, there, told
from pliant.cli.progress import bar

if TYPE_CHECKING:
    from torch import Tensor

    from pliant.apps.data.images import ImageSet
    from pliant.apps.fewshot import Adapted

DEFAULT = "efficientnet_lite0"


class TaskError(pliant.PliantError, ValueError):
    """Images that make no task."""


@app.command()
def adapt(
    support: Annotated[
        Path, typer.Option(help="Images to learn from: a folder with a folder for each class, or a packed .npz.")
    ],
    query: Annotated[
        Path | None, typer.Option(help="Images to classify: folders named after the classes, or just images.")
    ] = None,
    backbone: Annotated[
        str, typer.Option(help="efficientnet_lite0 with its ImageNet weights, a .safetensors file, or package.module:factory.")
    ] = DEFAULT,
    memory: Annotated[str, typer.Option(help="Memory a step may take beyond inference, like 1MB; or none.")] = "1MB",
    macs: Annotated[
        str, typer.Option(help="MACs of its backward pass: a share of a full one, or like 5MMAC; or none.")
    ] = "0.15",
    steps: Annotated[int, typer.Option(min=0, help="Updates; 0 trains nothing.")] = 40,
    lr: Annotated[
        str, typer.Option(help="Learning rate; auto: by how well the classes are told apart to begin with.")
    ] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Images at a time; gradients of all gather for an update.")] = 1,
    size: Annotated[int, typer.Option(min=32, help="Pixels per side that images are resized to.")] = 128,
    flip: Annotated[bool, typer.Option("--flip", help="Mirrored images are of the same class (animals; not letters).")] = False,
    exact: Annotated[
        bool, typer.Option("--exact/--greedy", help="The best channels under true prices, or the paper's greedy choice.")
    ] = True,
    views: Annotated[
        int | None, typer.Option(min=1, help="So many changed copies of each image, in turn, instead of ever new ones.")
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="Memory, beside that of a step, for what frozen layers make of images, like 64MB.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the changed copies of images.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the adapted weights to this .safetensors file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit a network to a few labelled images inside a budget, and name others by them.

    Example: pliant adapt --support birds/few --query birds/new --memory 1MB --macs 0.15 --out birds.safetensors
    """
    from pliant.apps import fewshot, models
    from pliant.apps import tasks as task
    from pliant.apps.data import images
    from pliant.planning import recipes

    console = Console(stderr=as_json)
    with told(console, ValueError, RuntimeError, stopped="stopped: nothing was written."):
        with meant("--memory, --macs"):
            policy = recipes.tinytrain(*(_limit(given) for given in (memory, macs)), exact=exact, seed=seed)
        with meant("--lr"):
            rate = fewshot.as_rate(lr)
        where = task.device_of(device)
        there("--support", support)
        net = model_of("--backbone", backbone, pretrained=backbone in models.BUILT_IN).to(where)
        learned = images.load(support, size)
        _check(learned)
        asked, truth, names = _asked(query, size, learned) if query is not None else (None, None, [])
        scale = fewshot.scale_of(backbone) if backbone.endswith(".safetensors") else fewshot.SCALE
        with bar(console, "adapting", steps, "choosing") as show:
            done = fewshot.adapt(
                net,
                learned,
                policy=policy,
                steps=steps,
                lr=rate,
                batch=batch,
                augment=fewshot.Augment(flip=flip),
                views=views,
                cache=cache,
                query=asked,
                norm=fewshot.norm_of(net) or models.NORM,
                scale=scale,
                in_place=True,
                seed=seed,
                on_step=lambda step, loss: show(step + 1, f"loss {loss:.3f}"),
            )
        if out is not None:
            pliant.runtime.files.write_aside(out, models.weights_of(net, {"scale": repr(float(done.model.scale))}))
        found = _found(done, truth, names)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _show(console, found)


def _limit(given: str) -> float | str | None:
    """A share, an amount with its unit, or nothing."""
    if given == "none":
        return None
    try:
        return float(given)
    except ValueError:
        return given


def _check(support: ImageSet) -> None:
    """Prototypes need company: one image says nothing of how its class varies."""
    single = [name for label, name in enumerate(support.classes) if int((support.labels == label).sum()) == 1]
    if single:
        more = f" (and {len(single) - 1} more classes)" if len(single) > 1 else ""
        raise TaskError(
            f"the class {single[0]!r}{more} has one image: it takes two or more to learn from. Add some, or leave it out."
        )


def _asked(path: Path, size: int, support: ImageSet) -> tuple[ImageSet, Tensor | None, list[str]]:
    """Images to classify; their classes where folders say them, their names where they do not."""
    import torch

    from pliant.apps.data import images

    there("--query", path)
    bare, names = images.loose(path, size)
    if names:
        return images.ImageSet(bare, torch.zeros(len(bare), dtype=torch.int64), support.classes), None, names
    if path.is_dir() and not any(entry.is_dir() for entry in path.iterdir()):
        raise TaskError(
            f"--query: {str(path)!r} holds no image, nor folders of images. Give the images to name, or a folder of them for "
            f"each class."
        )
    found = images.load(path, size)
    unknown, known = sorted(set(found.classes) - set(support.classes)), _some(support.classes)
    if len(unknown) == len(found.classes):
        raise TaskError(
            f"--query: {str(path)!r} has images of {_some(unknown)}, which the support set does not know, and none of {known}. "
            f"Name the folders like those of --support; or put the images into one folder, without classes, to have them named."
        )
    if unknown:
        raise TaskError(
            f"--query: {str(path)!r} has images of {_some(unknown)}, which the support set does not know: it has {known}. Add "
            f"the class there, or leave it out here."
        )
    place = torch.tensor([support.classes.index(name) for name in found.classes])
    truth = place[found.labels]
    return images.ImageSet(found.images, truth, support.classes), truth, []


def _some(names: Sequence[str]) -> str:
    """The first few of them."""
    return ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _found(done: Adapted, truth: Tensor | None, names: list[str]) -> dict[str, Any]:
    """What there is to tell, in plain types."""
    out: dict[str, Any] = {"losses": list(done.losses), "lr": done.lr, "memory_bytes": done.memory_bytes}
    if done.selection is not None:
        layers = Counter(unit.name.partition("[")[0].removeprefix("backbone.") for unit in done.selection.units)
        out["chosen"] = dict(layers)
        out["macs_share"] = done.selection.share("macs")
        out["predicted_bytes"] = done.selection.cost.bytes
    if done.predictions is not None:
        named = [done.classes[label] for label in done.predictions.tolist()]
        if truth is None:
            out["predictions"] = dict(zip(names, named, strict=True))
        else:
            hits = done.predictions == truth
            out["accuracy"] = float(hits.float().mean())
            out["accuracy_by_class"] = {
                name: float(hits[truth == label].float().mean())
                for label, name in enumerate(done.classes)
                if bool((truth == label).any())
            }
    return out


def _show(console: Console, found: dict[str, Any]) -> None:
    if "chosen" in found:
        groups = ", ".join(f"{layer} ({count})" for layer, count in found["chosen"].items())
        console.print(f"trained groups of channels: {groups}", highlight=False)
        measured = f"{found['memory_bytes'] / 1e6:.2f} MB measured" if found["memory_bytes"] is not None else "not limited"
        console.print(
            f"memory beyond inference: {measured}; backward MACs: {found['macs_share']:.3f} of a full pass", highlight=False
        )
        console.print(f"learning rate: {found['lr']:.2g}", highlight=False)
    rows = found.get("predictions") or {name: f"{share:.1%}" for name, share in found.get("accuracy_by_class", {}).items()}
    if rows:
        table = Table("image" if "predictions" in found else "class", "named" if "predictions" in found else "right")
        for name, said in rows.items():
            table.add_row(name, said)
        console.print(table)
    if "accuracy" in found:
        console.print(f"accuracy: {found['accuracy']:.1%}", highlight=False)
