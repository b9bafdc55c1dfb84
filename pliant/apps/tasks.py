"""From names to objects: the model, the data, the recipe and the session that the options of the command describe."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from pliant.apps import data, models
from pliant.apps.data import images
from pliant.core.budget import Amount
from pliant.core.errors import PliantError
from pliant.core.types import match, nearest
from pliant.graph.backward import trainable
from pliant.planning import recipes
from pliant.planning.policy import Policy
from pliant.runtime.working import told
from pliant.session.session import Session

RECIPES: dict[str, Callable[..., Policy]] = {
    name: recipe
    for name, recipe in vars(recipes).items()
    if inspect.isfunction(recipe) and recipe.__module__ == recipes.__name__ and not name.startswith("_")
}
_BUDGETS = ("time", "memory", "macs")
_DEFAULT_TIME = 0.5  # share of a full step, if the default recipe gets no budget
_EVALUATION_BATCH = 64
_CLIP = 1.0  # gradient norm: with batch norms on running statistics, useful learning rates need clipping


class TaskError(PliantError, ValueError):
    """A model, data, recipe or option that does not exist or cannot be used."""


@dataclass(frozen=True, eq=False)
class Task:
    """A model on its device, the images to train and to validate on, and the names of their classes."""

    model: nn.Module
    train: data.Split
    validation: data.Split
    classes: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        return self.train.images.device

    def batches(self, size: int, seed: int, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of one epoch. They depend on the seed and the epoch alone."""
        return data.batches(self.train, size, seed=seed * 1_000_003 + epoch, epochs=1)


def load(model: str, source: str, *, size: int, seed: int, device: str, scratch: bool = False, validation: float = 0.2) -> Task:
    """A model and its data, ready to train. The model has one output per class and was tested on two images.

    `source` is "digits", a folder of images or a packed set (.npz). `scratch` starts from random weights.
    """
    where = device_of(device)
    torch.manual_seed(seed)  # of the weights of a new last layer
    if source == "digits":
        digits = data.digits(size, seed)
        train, validated, classes = digits.train, digits.validation, tuple(map(str, range(digits.classes)))
        net = _model(model, len(classes), scratch)
    else:
        found = _images(source, size)
        if len(found.classes) < 2:
            raise TaskError(
                f"{source!r} has one class, {found.classes[0]!r}, so there is nothing to learn. Add images of another class."
            )
        net = _model(model, len(found.classes), scratch)
        splits = found.normalised(_pixel_stats(net)).splits(validation, seed, test=False)
        train, validated, classes = splits.train, splits.validation, found.classes
    for what, split in (("to train on", train), ("to validate with", validated)):
        if not len(split):
            raise TaskError(f"{source!r} leaves no image {what}. Add images, or change validation={validation:g}.")
    net.to(where)
    on_device = [data.Split(split.images.to(where), split.labels.to(where)) for split in (train, validated)]
    _check_output(net, on_device[0], model, len(classes))
    return Task(net, on_device[0], on_device[1], classes)


def device_of(asked: str) -> torch.device:
    """The device with this name; "auto" is a GPU if there is one."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TaskError(f"device={asked!r} is not a device: give cpu, cuda, cuda:1 or auto.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TaskError(f"device={asked!r}: torch finds no CUDA device here. Run `pliant doctor` to see what it finds.")
    return device


def _images(source: str, size: int) -> images.ImageSet:
    if Path(source).suffix == ".npz":
        return images.packed(source, size)
    if not Path(source).exists():
        raise TaskError(
            f"no data {source!r}: give 'digits', a folder with one folder of images per class, or a packed set (.npz)."
            f"{nearest(source, ['digits'])}"
        )
    return images.folder(source, size)


def _model(name: str, classes: int, scratch: bool) -> nn.Module:
    try:
        model = models.load(name, classes, pretrained=not scratch)
    except ValueError as error:
        raise TaskError(str(error)) from error
    if not any(param.requires_grad for param in model.parameters()):
        raise TaskError(f"the model {name!r} has no trainable parameter: all have requires_grad=False, or there are none.")
    if isinstance(model, models.EfficientNetLite0):
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = (
                    0.1  # with the 0.01 of ImageNet training, running statistics would need hundreds of steps to adapt
                )
    return model


def _pixel_stats(model: nn.Module) -> images.PixelStats:
    """Mean and standard deviation of the pixels that a model was trained on, if it is a built-in model or one of timm."""
    own, config = getattr(model, "pixel_stats", None), getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and "mean" in config and "std" in config:
        return config["mean"], config["std"]
    return own if isinstance(own, tuple) else models.PIXEL_STATS


def _check_output(model: nn.Module, split: data.Split, name: str, classes: int) -> None:
    """One forward pass, so that a model that does not fit its data gives a clear error."""
    some = split.images[:2]
    with _evaluating(model):
        try:
            out = model(some)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            first = str(error).strip().partition("\n")[0]
            raise TaskError(
                f"the model {name!r} fails on images of shape {'×'.join(map(str, some.shape[1:]))}: {first}"
            ) from error
    if not isinstance(out, torch.Tensor) or out.shape != (len(some), classes):
        given = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise TaskError(
            f"the model {name!r} returns {given} for {len(some)} images, but {classes} classes need {(len(some), classes)}. "
            f"Give its factory an argument `classes`, or that many outputs."
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of (images, labels)."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def judge(model: nn.Module, split: data.Split) -> tuple[float, float]:
    """Accuracy and mean loss of a model on a split. Leaves no trace."""
    hits, total = 0, 0.0
    with _evaluating(model):
        batches = zip(split.images.split(_EVALUATION_BATCH), split.labels.split(_EVALUATION_BATCH), strict=True)
        for some, labels in told("evaluating", list(batches)):
            logits = model(some)
            hits += int((logits.argmax(1) == labels).sum())
            total += float(F.cross_entropy(logits.float(), labels, reduction="sum"))
    return hits / len(split), total / len(split)


def session(
    task: Task,
    policy: Policy,
    *,
    batch: int,
    lr: float,
    epochs: int = 1,
    scratch: bool = False,
    engine: str = "auto",
    exact: bool = False,
    log: str | os.PathLike[str] | None = None,
) -> Session:
    """A session as `pliant train` opens it: SGD with momentum and gradient clipping.

    With `scratch`, batch norms keep their modes, because the running statistics of random weights mean nothing.
    """
    if batch > len(task.train):
        raise TaskError(
            f"batch={batch} is larger than the training split, which has {len(task.train)} images. Use a smaller batch."
        )
    steps = len(task.train) // batch
    return Session(
        task.model,
        torch.optim.SGD(task.model.parameters(), lr=lr, momentum=0.9),
        loss,
        policy,
        engine=engine,
        norm="as-is" if scratch else "auto",
        clip=_CLIP,
        steps_per_epoch=steps,
        total_steps=epochs * steps,
        log=log,
        correct=not exact,
    )


# ---------------------------------------------------------------- recipes


def amount(given: str | float | None) -> Amount | None:
    """A budget as the command line gives it: a number is a share, anything else an amount with its unit.

    >>> amount("0.4"), amount("64MB"), amount(None)
    (0.4, '64MB', None)
    """
    try:
        return None if given is None else float(given)
    except ValueError:
        return given


def policy(
    recipe: str,
    time: str | float | None = None,
    memory: str | float | None = None,
    macs: str | float | None = None,
    seed: int = 0,
) -> Policy:
    """A recipe by name, with budgets. `only:GLOB,GLOB` trains what matches. `pliant` without a budget gets half of the time.

    >>> policy("last", time="0.4").budget.time
    0.4
    """
    name, globs = _recipe_name(recipe), recipe.partition(":")[2]
    budget = {kind: amount(given) for kind, given in zip(_BUDGETS, (time, memory, macs), strict=True) if given is not None}
    if name == "pliant" and not budget:
        budget = {"time": _DEFAULT_TIME}
    takes = budgets(name)
    for kind in budget:
        if kind not in takes:
            instead = f"it takes {' and '.join(takes)}" if takes else "it takes none"
            raise TaskError(
                f"the recipe {name!r} has no {kind} budget: {instead}. The recipe `pliant` takes time, memory and macs."
            )
    if (name == "only") != bool(globs):
        raise TaskError(
            f"recipe={recipe!r}: the recipe `only` needs names, and no other takes any. Write 'only:classifier.*,*.bias'."
        )
    seeded = {"seed": seed} if "seed" in inspect.signature(RECIPES[name]).parameters else {}
    try:
        return RECIPES[name](*filter(None, globs.split(",")), **budget, **seeded)
    except ValueError as error:
        raise TaskError(str(error)) from error


def _recipe_name(recipe: str) -> str:
    """The name of a recipe without its globs; an unknown name is an error."""
    name = recipe.partition(":")[0]
    if name not in RECIPES:
        raise TaskError(f"no recipe {name!r}.{nearest(name, RECIPES)} Recipes: {', '.join(RECIPES)}.")
    return name


def check_names(recipe: str, model: nn.Module) -> None:
    """Check that the names of `only:GLOB,GLOB` match parameters of the model, before anything is measured."""
    name, _, globs = recipe.partition(":")
    if name == "only":
        try:
            match(list(trainable(model)), filter(None, globs.split(",")))
        except ValueError as error:
            raise TaskError(f"recipe={recipe!r}: {error}") from error


def budgets(recipe: str) -> tuple[str, ...]:
    """The kinds of budget that a recipe takes.

    >>> budgets("last"), budgets("full")
    (('time',), ())
    """
    takes = inspect.signature(RECIPES[_recipe_name(recipe)]).parameters
    return tuple(kind for kind in _BUDGETS if kind in takes)


def rate(start: float, step: int, steps: int) -> float:
    """The learning rate of a step: half a cosine from `start` to zero. It depends on the step alone, so resuming repeats it."""
    return start * (1 + math.cos(math.pi * step / steps)) / 2
