"""`pliant adapt`: fit a network to a few labelled images inside a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pliant.apps import fewshot, models, tasks
from pliant.apps.data import images
from pliant.apps.data.folders import TEST
from pliant.apps.data.images import ImageError, ImageSet
from pliant.apps.fewshot import Adapted
from pliant.cli.app import UsageError, app, check_exists, exit_on_errors, load_model, naming
from pliant.cli.progress import bar, working
from pliant.core.json_text import json_text
from pliant.planning import recipes
from pliant.runtime.files import write_aside


@app.command()
def adapt(
    support: Annotated[Path, typer.Option(help="Images to learn from: a folder with one folder per class, or a packed .npz.")],
    query: Annotated[
        Path | None, typer.Option(help="Images to classify: folders named after the classes, or images without classes.")
    ] = None,
    backbone: Annotated[
        str, typer.Option(help="efficientnet_lite0 with its ImageNet weights, a .safetensors file, or package.module:factory.")
    ] = "efficientnet_lite0",
    memory: Annotated[str, typer.Option(help="Memory a step may take beyond inference, like 1MB; or none.")] = "1MB",
    macs: Annotated[
        str, typer.Option(help="MACs of its backward pass: a share of a full one, an amount like 5MMAC, or none.")
    ] = "0.15",
    steps: Annotated[int, typer.Option(min=0, help="Optimizer steps; 0 trains nothing.")] = 40,
    lr: Annotated[str, typer.Option(help="Learning rate; auto: lower if the features already separate the classes.")] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Images at a time; gradients accumulate over all images of a step.")] = 1,
    size: Annotated[int, typer.Option(min=32, help="Pixels per side that images are resized to.")] = 128,
    flip: Annotated[
        bool, typer.Option("--flip", help="Also train on mirrored images (right for animals, wrong for letters).")
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact/--greedy", help="Choose channels with the exact solver, or greedily as in the paper.")
    ] = True,
    views: Annotated[
        int | None,
        typer.Option(min=1, help="Reuse this many augmented copies of each image instead of new ones in every step."),
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="Extra memory to cache the outputs of the frozen layers, like 64MB.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the augmentation.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the adapted weights to this .safetensors file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit a network to a few labelled images inside a budget, and classify other images with it.

    Example: pliant adapt --support birds/few --query birds/new --memory 1MB --macs 0.15 --out birds.safetensors
    """
    console = Console(stderr=as_json)
    with exit_on_errors(ValueError, RuntimeError, stopped="stopped: nothing was written."):
        if out is not None and out.suffix != ".safetensors":
            raise UsageError(f"--out {out}: give a name that ends with .safetensors, so that it can be read again.")
        with naming("--memory, --macs"):
            limits = (None if given == "none" else tasks.amount(given) for given in (memory, macs))
            policy = recipes.tinytrain(*limits, exact=exact, seed=seed)
        with naming("--lr"):
            rate = fewshot.as_rate(lr)
        where = tasks.device_of(device)
        check_exists("--support", support)
        net = load_model("--backbone", backbone, pretrained=backbone in models.BUILT_IN).to(where)
        with working(Console(stderr=True)):
            learned = _outside_test(images.load(support, size), support)
            _check(learned)
            unknown, truth, names = _query(query, size, learned) if query is not None else (None, None, [])
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
                query=unknown,
                pixel_stats=fewshot.pixel_stats_of(net) or models.PIXEL_STATS,
                scale=scale,
                in_place=True,
                seed=seed,
                on_step=lambda step, loss: show(step + 1, f"loss {loss:.3f}"),
            )
        if out is not None:
            write_aside(out, models.weights_of(net, {"scale": repr(float(done.model.scale))}))
        found = _to_json(done, truth, names)
    if as_json:
        typer.echo(json_text(found, indent=2))
    else:
        _print(console, found)
        if out is not None:
            console.print(f"wrote {out}", markup=False, highlight=False, soft_wrap=True)


def _outside_test(support: ImageSet, path: Path) -> ImageSet:
    """The images to learn from: those of a test split are none of them."""
    if support.split is None:
        return support
    kept = support.select(support.split != TEST)
    if not len(kept):
        raise ImageError(f"--support: {str(path)!r} has test images only. Give images to learn from.")
    return kept


def _test_part(query: ImageSet) -> ImageSet:
    """The images of the test split, or all of them where there is none."""
    if query.split is None or not bool((query.split == TEST).any()):
        return query
    return query.select(query.split == TEST)


def _check(support: ImageSet) -> None:
    """Every class needs two images: one alone does not show how its class varies."""
    single = [name for label, name in enumerate(support.classes) if int((support.labels == label).sum()) == 1]
    if single:
        more = f" (and {len(single) - 1} more classes)" if len(single) > 1 else ""
        raise ImageError(
            f"the class {single[0]!r}{more} has one image, but two or more are needed to learn from. Add some, or leave it out."
        )


def _query(path: Path, size: int, support: ImageSet) -> tuple[ImageSet, Tensor | None, list[str]]:
    """Images to classify: with their classes if folders name them, else with the names of their files."""
    check_exists("--query", path)
    bare, names = images.loose(path, size)
    if names:
        return images.ImageSet(bare, torch.zeros(len(bare), dtype=torch.int64), support.classes), None, names
    if path.is_dir() and not any(entry.is_dir() for entry in path.iterdir()):
        raise ImageError(
            f"--query: {str(path)!r} holds no image, nor folders of images. Give images to classify, or a folder of images "
            f"for each class."
        )
    found = _test_part(images.load(path, size))
    unknown, known = sorted(set(found.classes) - set(support.classes)), _some(support.classes)
    if len(unknown) == len(found.classes):
        raise ImageError(
            f"--query: {str(path)!r} has images of {_some(unknown)}, which the support set does not know, and none of {known}. "
            f"Name the folders like those of --support, or put all images into one folder to have them classified."
        )
    if unknown:
        raise ImageError(
            f"--query: {str(path)!r} has images of {_some(unknown)}, which the support set does not know: it has {known}. Add "
            f"the class there, or leave it out here."
        )
    place = torch.tensor([support.classes.index(name) for name in found.classes])
    truth = place[found.labels]
    return images.ImageSet(found.images, truth, support.classes), truth, []


def _some(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _to_json(done: Adapted, truth: Tensor | None, names: list[str]) -> dict[str, Any]:
    """The results as plain types."""
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


def _print(console: Console, found: dict[str, Any]) -> None:
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
        table = Table(*(("image", "class") if "predictions" in found else ("class", "accuracy")))
        for name, value in rows.items():
            table.add_row(name, value)
        console.print(table)
    if "accuracy" in found:
        console.print(f"accuracy: {found['accuracy']:.1%}", highlight=False)
