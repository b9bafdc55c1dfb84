"""What is trained on what, and how, by name: what the options of the command say, as the objects that they mean."""

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
from pliant.session.session import Session

RECIPES: dict[str, Callable[..., Policy]] = {
    name: recipe
    for name, recipe in vars(recipes).items()
    if inspect.isfunction(recipe) and recipe.__module__ == recipes.__name__ and not name.startswith("_")
}
_BUDGETS = ("time", "memory", "macs")
_SHARE = 0.5  # of a full step's time, where the default recipe is given no budget
_AT_A_TIME = 64  # images, while evaluating
_CLIP = 1.0  # the norm that gradients are bounded to: with norms on running statistics, steps of a useful size need it


class TaskError(PliantError, ValueError):
    """A model, a set of images or a recipe that cannot be had as it was named."""


@dataclass(frozen=True, eq=False)
class Task:
    """A model on its device, the images that it learns and those that it is judged by, and the names of their classes."""

    model: nn.Module
    train: data.Split
    validation: data.Split
    classes: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        return self.train.images.device

    def batches(self, size: int, seed: int, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of one epoch: the same for the same seed and epoch, whatever was read before."""
        return data.batches(self.train, size, seed=seed * 1_000_003 + epoch, epochs=1)


def load(model: str, source: str, *, size: int, seed: int, device: str, scratch: bool = False, validation: float = 0.2) -> Task:
    """A model and its images, ready to train: with the right number of outputs, and tried on two images.

    `source` is "digits", a folder of images or a packed set (.npz). `scratch` begins with random weights.
    """
    where = device_of(device)
    torch.manual_seed(seed)  # the weights of a new last layer
    if source == "digits":
        digits = data.digits(size, seed)
        train, judged, classes = digits.train, digits.validation, tuple(map(str, range(digits.classes)))
        net = _model(model, len(classes), scratch)
    else:
        found = _images(source, size)
        if len(found.classes) < 2:
            raise TaskError(f"{source!r} has one class, {found.classes[0]!r}: there is nothing to tell apart. Add another.")
        net = _model(model, len(found.classes), scratch)
        splits = found.normalised(_norm(net)).splits(validation, seed, test=False)
        train, judged, classes = splits.train, splits.validation, found.classes
    for what, split in (("to train on", train), ("to validate with", judged)):
        if not len(split):
            raise TaskError(f"{source!r} leaves no image {what}. Add images, or change validation={validation:g}.")
    net.to(where)
    on_device = [data.Split(split.images.to(where), split.labels.to(where)) for split in (train, judged)]
    _try(net, on_device[0], model, len(classes))
    return Task(net, on_device[0], on_device[1], classes)


def device_of(asked: str) -> torch.device:
    """The device of this name; "auto": a GPU where there is one."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TaskError(f"device={asked!r} is no device: give cpu, cuda, cuda:1 or auto.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TaskError(f"device={asked!r}: torch sees no CUDA device here. `pliant doctor` says what it sees.")
    return device


def _images(source: str, size: int) -> images.ImageSet:
    if Path(source).suffix == ".npz":
        return images.packed(source, size)
    if not Path(source).exists():
        raise TaskError(
            f"no data {source!r}: give 'digits', a folder with one folder of images for each class, or a packed set (.npz)."
            f"{nearest(source, ['digits'])}"
        )
    return images.folder(source, size)


def _model(name: str, classes: int, scratch: bool) -> nn.Module:
    try:
        model = models.load(name, classes, pretrained=not scratch)
    except ModuleNotFoundError as error:
        if not name.startswith(str(error.name)):
            raise
        raise TaskError(
            f"no module {error.name!r} for the model {name!r}: it is looked for here and where Python looks."
        ) from error
    except ValueError as error:
        raise TaskError(str(error)) from error
    if not any(param.requires_grad for param in model.parameters()):
        raise TaskError(f"the model {name!r} has nothing that can be trained.")
    if isinstance(model, models.EfficientNetLite0):
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.1  # the 0.01 of ImageNet training would need hundreds of steps to follow
    return model


def _norm(model: nn.Module) -> images.Norm:
    """Mean and standard deviation of the pixels that a model was trained on: built-in models and timm's tell theirs."""
    own, told = getattr(model, "norm", None), getattr(model, "pretrained_cfg", None)
    if isinstance(told, dict) and "mean" in told and "std" in told:
        return told["mean"], told["std"]
    return own if isinstance(own, tuple) else models.NORM


def _try(model: nn.Module, split: data.Split, name: str, classes: int) -> None:
    """One forward pass, so that a model that does not fit its data is told of in a line."""
    some = split.images[:2]
    with _evaluating(model):
        try:
            out = model(some)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            first = str(error).strip().partition("\n")[0]
            raise TaskError(
                f"the model {name!r} cannot take images of {'×'.join(map(str, some.shape[1:]))}: {first}"
            ) from error
    if not isinstance(out, torch.Tensor) or out.shape != (len(some), classes):
        given = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise TaskError(
            f"the model {name!r} gives {given} for {len(some)} images, but {classes} classes need {(len(some), classes)}. "
            f"Let its factory take `classes`, or give it so many outputs."
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's own mode is put back."""
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
    """The share of a split that a model names rightly, and its mean loss there. Leaves no trace."""
    hits, total = 0, 0.0
    with _evaluating(model):
        for some, labels in zip(split.images.split(_AT_A_TIME), split.labels.split(_AT_A_TIME), strict=True):
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
    """A session as `pliant train` opens it: SGD with momentum, bounded gradients. Norms of random weights keep their modes:
    their running statistics mean nothing yet."""
    if batch > len(task.train):
        raise TaskError(f"batch={batch} is more than the {len(task.train)} images that there are to train on.")
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
    """A budget as the command line gives it: a share where it is a bare number, else an amount with its unit.

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
    """A recipe by its name, with budgets; `only:GLOB,GLOB` trains what matches. `pliant` without a budget gets half the time.

    >>> policy("last", time="0.4").budget.time
    0.4
    """
    name, globs = _known(recipe), recipe.partition(":")[2]
    budget = {kind: amount(given) for kind, given in zip(_BUDGETS, (time, memory, macs), strict=True) if given is not None}
    if name == "pliant" and not budget:
        budget = {"time": _SHARE}
    takes = budgets(name)
    for kind in budget:
        if kind not in takes:
            instead = f"it takes {' and '.join(takes)}" if takes else "it takes none"
            raise TaskError(f"the recipe {name!r} keeps no {kind} budget: {instead}. `pliant` takes time, memory and macs.")
    if (name == "only") != bool(globs):
        raise TaskError(f"recipe={recipe!r}: only `only` takes names, and it needs some, like 'only:classifier.*,*.bias'.")
    seeded = {"seed": seed} if "seed" in inspect.signature(RECIPES[name]).parameters else {}
    try:
        return RECIPES[name](*filter(None, globs.split(",")), **budget, **seeded)
    except ValueError as error:
        raise TaskError(str(error)) from error


def _known(recipe: str) -> str:
    """The name of a recipe, without what it is to train; one that is none is an error."""
    name = recipe.partition(":")[0]
    if name not in RECIPES:
        raise TaskError(f"no recipe {name!r}.{nearest(name, RECIPES)} There are {', '.join(RECIPES)}.")
    return name


def check_names(recipe: str, model: nn.Module) -> None:
    """Names to train (`only:GLOB,GLOB`) that are none of the model's are told before anything is measured."""
    name, _, globs = recipe.partition(":")
    if name == "only":
        try:
            match(list(trainable(model)), filter(None, globs.split(",")))
        except ValueError as error:
            raise TaskError(f"recipe={recipe!r}: {error}") from error


def budgets(recipe: str) -> tuple[str, ...]:
    """The budgets that a recipe keeps.

    >>> budgets("last"), budgets("full")
    (('time',), ())
    """
    takes = inspect.signature(RECIPES[_known(recipe)]).parameters
    return tuple(kind for kind in _BUDGETS if kind in takes)


def rate(start: float, step: int, steps: int) -> float:
    """The learning rate of a step: half a cosine from `start` to nothing. Of the step alone, so that resuming repeats it."""
    return start * (1 + math.cos(math.pi * step / steps)) / 2
