"""From names to objects: the model, the data and the recipe that the options of the command describe."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pliant.apps import data, models
from pliant.apps.augment import augmented
from pliant.apps.data import images
from pliant.apps.data.digits import means_digits
from pliant.apps.data.errors import DataError, Skipped
from pliant.apps.data.folders import TRAIN, VALIDATION
from pliant.apps.data.inputs import ImageInputs, Inputs, TextInputs
from pliant.apps.data.prepare import Prepared, Reading, prepare, with_statistics
from pliant.apps.data.samples import ColumnError
from pliant.apps.models import logits
from pliant.core.budget import Amount
from pliant.core.errors import PliantError, first_line
from pliant.core.types import match, nearest
from pliant.graph.backward import trainable
from pliant.planning import recipes
from pliant.planning.policy import Policy
from pliant.runtime.working import told

RECIPES: dict[str, Callable[..., Policy]] = {
    name: recipe
    for name, recipe in vars(recipes).items()
    if inspect.isfunction(recipe) and recipe.__module__ == recipes.__name__ and not name.startswith("_")
}
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr),
}
_BUDGETS = ("time", "memory", "macs")
_DEFAULT_TIME = 0.5  # share of a full step, if the default recipe gets no budget
_EVALUATION_BATCH = 64


class TaskError(PliantError, ValueError):
    """A model, data, recipe or option that does not exist or cannot be used."""


@dataclass(frozen=True, eq=False)
class Task:
    """A model on its device, the samples to train and to validate on, the names of their classes, and how they were read."""

    model: nn.Module
    train: data.Split
    validation: data.Split
    classes: tuple[str, ...]
    inputs: Inputs = field(default_factory=ImageInputs)
    augment: str = "none"
    class_weights: torch.Tensor | None = None
    skipped: tuple[Skipped, ...] = ()

    @property
    def device(self) -> torch.device:
        return self.train.inputs.device

    def fingerprints(self) -> dict[str, list[int]]:
        """What tells whether later data are the same."""
        return {"train": fingerprint(self.train), "validation": fingerprint(self.validation)}

    def batches(self, size: int, seed: int, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of one epoch. They depend on the seed and the epoch alone."""
        plain = data.batches(self.train, size, seed=(seed * 1_000_003 + epoch) % 2**64, epochs=1)
        for number, (inputs, labels) in enumerate(plain):
            yield augmented(inputs, self.inputs, self.augment, [seed, epoch, number]), labels

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Cross-entropy of (inputs, labels)."""
        return loss(model, batch, self.class_weights)


def fingerprint(split: data.Split) -> list[int]:
    """How many samples there are, and a checksum of their labels, and of inputs that are whole numbers, as those of texts.

    Images and sounds do not count: decoders and processors round them differently.
    """
    held = [split.labels] if split.inputs.is_floating_point() else [split.labels, split.inputs]
    return [len(split), zlib.crc32(b"".join(one.cpu().numpy().tobytes() for one in held))]


def load(
    model: str,
    source: str,
    *,
    size: int = 64,
    seed: int = 0,
    device: str = "auto",
    scratch: bool = False,
    validation: float = 0.2,
    reading: Reading | None = None,
    augment: str = "none",
    class_weights: bool = False,
) -> Task:
    """A model and its data, ready to train. The model has one output per class and was tested on two samples.

    `source` is "digits", a folder with one folder of images or WAV files per class, a table (.csv, .tsv), a saved dataset, or a
    .npz file. `scratch` starts from random weights. `class_weights` lets every class count alike.
    """
    where = device_of(device)
    reading = replace(reading or Reading(), size=size)
    if means_digits(source):
        digits = data.digits(size, seed)
        classes: tuple[str, ...] = tuple(map(str, range(digits.classes)))
        torch.manual_seed(seed)  # of the weights of a new last layer
        net = _model(model, len(classes), scratch)
        train, validated = digits.train, digits.validation
        inputs = ImageInputs(size, *map(_as_tuple, models.PIXEL_STATS))
        found = Prepared(torch.empty(0), torch.empty(0), classes, None, inputs)
    else:
        found = _read(model, source, reading)
        classes = found.classes
        if len(classes) < 2:
            raise TaskError(
                f"{source!r} has one class, {classes[0]!r}, so there is nothing to learn. Add samples of another class."
            )
        torch.manual_seed(seed)
        net = _model(model, len(classes), scratch)
        if isinstance(found.inputs, ImageInputs):
            found = found.with_inputs(ImageInputs(size, *map(_as_tuple, _pixel_stats(net))))
        split = found.split_numbers(validation, seed)
        found = with_statistics(found, split)
        train, validated = (
            data.Split(found.inputs.batch(found.samples[split == kind]), found.labels[split == kind])
            for kind in (TRAIN, VALIDATION)
        )
    for what, part in (("to train on", train), ("to validate with", validated)):
        if not len(part):
            raise TaskError(f"{source!r} leaves no sample {what}. Add samples, or change validation={validation:g}.")
    net.to(where)
    train, validated = (data.Split(part.inputs.to(where), part.labels.to(where)) for part in (train, validated))
    _check_output(net, train, model, len(classes), found.inputs.kind)
    weights = _class_weights(train.labels, len(classes)) if class_weights else None
    return Task(net, train, validated, classes, found.inputs, augment, weights, found.skipped)


def _read(model: str, source: str, reading: Reading) -> Prepared:
    if not Path(source).exists() and not source.endswith(".npz"):
        raise TaskError(
            f"no data {source!r}: give a folder with one folder of images or WAV files per class, a table (.csv, .tsv), a "
            f"saved dataset, a .npz file, or 'digits'.{nearest(source, ['digits'])}"
        )

    def text() -> TextInputs:
        if not model.startswith("hf:"):
            return TextInputs()
        with as_task_error():
            content, pad = models.tokenizer_of(model.removeprefix("hf:"))
        return TextInputs(tokenizer=content, pad=pad)

    # a network for pictures sees a spectrogram as one in grey
    channels = 3 if model in models.BUILT_IN or model.partition(":")[0] in ("timm", "torchvision", "hf") else 1
    with columns_are_options():
        return prepare(source, reading, text, channels)


def _as_tuple(part: float | Sequence[float]) -> tuple[float, ...]:
    return (float(part),) if isinstance(part, (int, float)) else tuple(map(float, part))


def _class_weights(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """One weight per class: the smaller the class, the larger, so that all count alike; their mean over the samples is 1."""
    counts = labels.bincount(minlength=classes)
    present = int((counts > 0).sum())
    return torch.where(counts > 0, len(labels) / (present * counts.clamp(min=1)), torch.zeros_like(counts)).float()


@contextmanager
def columns_are_options() -> Iterator[None]:
    """A column that is not there is a wrong option."""
    try:
        yield
    except ColumnError as error:
        raise TaskError(str(error)) from error


@contextmanager
def as_task_error() -> Iterator[None]:
    """A model that cannot be used is a wrong option."""
    try:
        yield
    except DataError:
        raise
    except ValueError as error:
        raise TaskError(str(error)) from error


def device_of(asked: str) -> torch.device:
    """The device with this name; "auto" is a GPU if there is one."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TaskError(f"device={asked!r} is not a device: give cpu, cuda, cuda:1 or auto.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TaskError(f"device={asked!r}: torch finds no CUDA device here. Run `pliant doctor` to see what it finds.")
    try:
        (torch.empty(1, device=device) + 1).cpu()  # torch knows names of backends that are not here, and of one without numbers
    except (RuntimeError, AssertionError, ImportError) as error:
        why = first_line(error).partition(". ")[0].rstrip(".!")
        raise TaskError(f"device={asked!r} cannot be used here: {why}. Give cpu, cuda, cuda:1 or auto.") from error
    return device


def _model(name: str, classes: int, scratch: bool) -> nn.Module:
    with as_task_error():
        model = models.load(name, classes, pretrained=not scratch)
    if not any(param.requires_grad for param in model.parameters()):
        raise TaskError(f"the model {name!r} has no trainable parameter: all have requires_grad=False, or there are none.")
    if isinstance(model, models.EfficientNetLite0):
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.1  # with the 0.01 of ImageNet, running statistics would need hundreds of steps to adapt
    return model


def _pixel_stats(model: nn.Module) -> images.PixelStats:
    """Mean and standard deviation of the pixels that a model was trained on, if it is a built-in model or one of timm."""
    own, config = getattr(model, "pixel_stats", None), getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and "mean" in config and "std" in config:
        return config["mean"], config["std"]
    return own if isinstance(own, tuple) else models.PIXEL_STATS


def _check_output(model: nn.Module, split: data.Split, name: str, classes: int, kind: str) -> None:
    """One forward pass, so that a model that does not fit its data gives a clear error."""
    some = split.inputs[:2]
    with evaluating(model):
        try:
            out = logits(model, some)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise TaskError(
                f"the model {name!r} fails on {kind} of shape {'×'.join(map(str, some.shape[1:]))}: {first_line(error)}"
            ) from error
    if not isinstance(out, torch.Tensor) or out.shape != (len(some), classes):
        given = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise TaskError(
            f"the model {name!r} returns {given} for {len(some)} {kind}, but {classes} classes need {(len(some), classes)}. "
            f"Give its factory an argument `classes`, or that many outputs."
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], class_weights: torch.Tensor | None = None) -> torch.Tensor:
    """Cross-entropy of (inputs, labels)."""
    inputs, labels = batch
    return F.cross_entropy(logits(model, inputs), labels, class_weights)


def judge(model: nn.Module, split: data.Split) -> tuple[float, float]:
    """Accuracy and mean loss of a model on a split. Leaves no trace."""
    found = outputs(model, split.inputs)
    hits = int((found.argmax(1) == split.labels).sum())
    total = float(F.cross_entropy(found.float(), split.labels, reduction="sum"))
    return hits / len(split), total / len(split)


def outputs(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The logits of a model for inputs of any number, in evaluation mode. Leaves no trace."""
    with evaluating(model):
        return torch.cat([logits(model, some) for some in told("evaluating", inputs.split(_EVALUATION_BATCH))])


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
