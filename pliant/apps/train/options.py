"""The options of a run, its status while it trains, and its result."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from pliant.apps import models, run_folder
from pliant.apps.augment import CHOICES
from pliant.apps.data.inputs import FEATURES
from pliant.apps.data.prepare import Reading, kind_of
from pliant.apps.tasks import OPTIMIZERS, RECIPES, TaskError, columns_are_options
from pliant.apps.train.outcome import Outcome
from pliant.core.types import nearest
from pliant.engine import modes

_ADAMW_RATES = {"text_small": 1e-2}  # word vectors that few batches reach need large steps: docs/notebook.md
LOGGERS = ("tensorboard", "wandb")
_CHOICES = {"optimizer": ("auto", *OPTIMIZERS), "features": FEATURES, "augment": CHOICES}
_TYPES = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,), "None": (type(None),)}
_TYPE_NAMES = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "None": "nothing"}


def _option(default: Any, help: str, *, least: int | None = None, unset: str = "", may_change: bool = False) -> Any:
    """A field that is also an option of the command line.

    `least`: the smallest value. `unset`: what the help says of a default that is None or "auto". `may_change`: a resumed run
    accepts another value than the one it began with.
    """
    return field(default=default, metadata={"help": help, "least": least, "unset": unset, "may_change": may_change})


def check_no_code(model: Any, where: str) -> None:
    """Refuse a model that a file names and that is made by code."""
    if isinstance(model, str) and models.is_code(model):
        raise TaskError(
            f"{where} names the model {model!r}, and a file may not choose the code that runs. If you trust that code, give it "
            f"yourself: --model {model}"
        )


@dataclass(frozen=True)
class Options:
    """What to train, on which data, how, and where the results go. This is the one list of options.

    Every field is an option of `pliant train` with the same name; `pliant compare` and `pliant plan` share some of them.
    `time`, `memory` and `macs` are the budget of a step: a share of a full step, or an amount with its unit ("12ms", "64MB").
    With `exact`, no decision depends on the clock after the costs are measured. On a CPU such a run gives the same weights bit
    for bit, whether it was interrupted or not.
    """

    model: str = _option(
        "auto",
        "A built-in name, timm:NAME, torchvision:NAME, hf:NAME-OR-FOLDER, package.module:factory, a .safetensors file of an "
        "earlier run, or factory@file.",
        unset="efficientnet_lite0 for images, text_small for text, audio_small for sound",
    )
    data: str = _option(
        "digits",
        "A folder with one folder of images or WAV files per class, a table (.csv, .tsv) of files or texts with labels, a "
        "Hugging Face dataset saved to disk, a .npz file, or digits.",
    )
    input_column: str | None = _option(None, "Column of a table that holds the file or the text.", unset="by its name")
    label_column: str | None = _option(None, "Column of a table that holds the label.", unset="by its name")
    recipe: str = _option(
        "auto",
        f"What to train: {', '.join(RECIPES)}. only:GLOB,GLOB trains the parameters that match.",
        unset="pliant; full for text_small and audio_small without a budget",
    )
    time: float | str | None = _option(
        None, "Time a step may take: a share of a full step, or an amount like 12ms.", unset="0.5 for pliant"
    )
    memory: float | str | None = _option(None, "Memory a step may take beyond inference: a share, or an amount like 64MB.")
    macs: float | str | None = _option(None, "Multiply-accumulates of a step: a share, or an amount like 1.5GMAC.")
    epochs: int = _option(3, "Passes over the data.", least=1)
    batch: int = _option(16, "Samples per step.", least=1)
    optimizer: str = _option("auto", "sgd or adamw.", unset="adamw for hf: models, text_small and audio_small, else sgd")
    lr: float | None = _option(
        None,
        "Learning rate at the start; it decays to zero along a cosine. With adamw the default is 0.001, for "
        "hf: models 0.0003, for text_small 0.01.",
        unset="0.03",
    )
    size: int = _option(64, "Pixels per side of an image.", least=8)
    length: int = _option(128, "Most tokens of a text; longer ones are cut.", least=1)
    features: str = _option("log-mel", "What a network sees of a sound: log-mel, mfcc or wave.")
    rate: int | None = _option(None, "Resample sounds to this many Hz.", least=100, unset="the rate that all files have")
    seconds: float | None = _option(None, "Cut or pad sounds to this length.", unset="the longest, at most 10")
    augment: str = _option("none", "Change samples at random: none, light, or flip, which also mirrors images.")
    class_weights: bool = _option(False, "Rare classes count as much as frequent ones.")
    skip_unreadable: bool = _option(False, "Leave out files that cannot be read, and list them.")
    validation: float = _option(0.2, "Share of each class to validate on, if the data has no validation split.")
    evaluate_every: int | None = _option(None, "Steps between evaluations.", least=1, unset="an epoch")
    patience: int | None = _option(
        None, "Stop after this many evaluations without a better accuracy or loss.", least=1, unset="never", may_change=True
    )
    scratch: bool = _option(False, "Start from random weights.")
    device: str = _option("auto", "cpu, cuda, cuda:1 …", unset="cuda if there is one", may_change=True)
    engine: str = _option("auto", "auto, plain, or a combination of lean, prefix and graphs, like lean+prefix.")
    exact: bool = _option(False, "After the costs are measured, no decision depends on the clock, even with a time budget.")
    seed: int = _option(0, "Random seed of the split, of new weights, of the order of samples and of their changes.", least=0)
    out: str | None = _option(None, "Folder of the run.", unset="a new one in runs/", may_change=True)
    resume: bool = _option(False, "Continue the run in --out, with its options.", may_change=True)
    delta: bool = _option(False, "Write only the weights that changed.")
    log_to: str | None = _option(None, "Also write a log for: tensorboard, wandb, or both with a comma.", may_change=True)
    keep_anyway: bool = _option(False, "Keep the last weights even if the start was better.", may_change=True)
    measure_memory: bool = _option(False, "Measure the peak memory of a step at the end.", may_change=True)

    def __post_init__(self) -> None:
        for each in fields(self):  # a file of options may hold anything
            given, allowed = getattr(self, each.name), str(each.type).split(" | ")
            if not any(type(given) in _TYPES[name] for name in allowed):
                raise TaskError(f"{each.name}={given!r} should be {' or '.join(_TYPE_NAMES[name] for name in allowed)}.")
            least = each.metadata["least"]
            if least is not None and given is not None and given < least:
                raise TaskError(f"{each.name}={given!r}: give {least} or more.")
        if self.seed >= 2**63:
            raise TaskError(f"seed={self.seed}: give a number below 2**63, as torch takes.")
        try:
            modes.parse(self.engine)
        except ValueError as error:
            raise TaskError(str(error)) from error
        if not 0 < self.validation < 0.5:
            raise TaskError(
                f"validation={self.validation!r}: give the share of each class to validate on, above 0 and below 0.5."
            )
        for name in ("lr", "seconds"):
            amount = getattr(self, name)
            if amount is not None and not 0 < amount < math.inf:
                what = "the learning rate" if name == "lr" else "the length of a sound"
                raise TaskError(f"{name}={amount!r}: {what} must be a number above 0.")
        for name, choices in _CHOICES.items():
            word = getattr(self, name)
            if word not in choices:
                raise TaskError(f"{name}={word!r}: give one of {', '.join(choices)}.{nearest(word, choices)}")
        for logger in self.log_to.split(",") if self.log_to is not None else ():
            if logger not in LOGGERS:
                raise TaskError(
                    f"log_to={self.log_to!r}: besides its own log, a run can write one for {' or '.join(map(repr, LOGGERS))}."
                )

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> Options:
        """Options by name; the error about an unknown name says `where` it was given."""
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                raise TaskError(f"{where} has no option {name!r} to set.{nearest(name, known)}")
        return cls(**given)

    @property
    def reading(self) -> Reading:
        """How the data are read."""
        return Reading(**{each.name: getattr(self, each.name) for each in fields(Reading)})

    def resolved(self) -> Options:
        """The same options with a value in place of every "auto": which one depends on the data and the model."""
        model, recipe, optimizer = self.model, self.recipe, self.optimizer
        if model == "auto":
            with columns_are_options():
                kind = kind_of(self.data, self.reading) if self.data == "digits" or os.path.exists(self.data) else "images"
            if kind == "arrays":
                raise TaskError(
                    f"no network is built in for arrays such as {self.data!r}. Name one: --model package.module:factory"
                )
            model = {"text": "text_small", "audio": "audio_small"}.get(kind, "efficientnet_lite0")
        fresh = model in models.SMALL
        if recipe == "auto":
            budget = self.time is not None or self.memory is not None or self.macs is not None
            recipe = "full" if fresh and not budget else "pliant"
        if optimizer == "auto":
            optimizer = "adamw" if fresh or model.startswith("hf:") else "sgd"
        lr = self.lr
        if lr is None:
            lr = 0.03 if optimizer == "sgd" else 3e-4 if model.startswith("hf:") else _ADAMW_RATES.get(model, 1e-3)
        return replace(self, model=model, recipe=recipe, optimizer=optimizer, lr=lr)

    @property
    def from_scratch(self) -> bool:
        """Whether training starts from random weights."""
        return self.scratch or self.model in models.SMALL

    def to_json(self) -> dict[str, Any]:
        """Those that a run begins with, as `of_run` reads them."""
        return {name: value for name, value in asdict(self).items() if name not in ("out", "resume")}

    @classmethod
    def of_run(cls, out: str | os.PathLike[str], given: Mapping[str, Any] | None = None) -> Options:
        """The options that the run in this folder began with, to resume it, and others that are `given` now.

        A file may not choose the code that runs: where the model is made by a factory, it must be given again.
        """
        where, began = os.fspath(out), run_folder.options_of(out)
        if not (given and "model" in given):
            check_no_code(began.get("model"), f"the run in {where!r}")
        return cls.of({**began, "out": where, "resume": True, **(given or {})}, f"the run in {where!r}")


@dataclass(frozen=True)
class Evaluation:
    """Accuracy and loss on the validation split after `seconds` of training, without the time to evaluate and save."""

    step: int
    accuracy: float
    loss: float
    seconds: float


@dataclass(frozen=True)
class Result:
    """The result of a run.

    The first of the `evaluations` is the one before training. `seconds` includes measuring and choosing, but not evaluating
    and saving; `seconds_per_step` is a mean. Both are by the device's clock: CPU time where one thread computes. `rounds` hold
    what was asked, predicted and measured for each selection. `memory_bytes` is the peak of a step beyond inference, if it was
    measured; `joules` need an energy meter. `outcome` says whether the run paid.
    """

    out: str
    options: Options
    evaluations: tuple[Evaluation, ...]
    best: Evaluation
    accuracy: float
    rolled_back: bool
    seconds: float
    seconds_per_step: float | None
    full_seconds_per_step: float | None
    rounds: tuple[dict[str, Any], ...]
    memory_bytes: int | None
    joules: float | None
    engine: str
    outcome: Outcome
    stopped_early: bool = False

    def to_json(self) -> dict[str, Any]:
        """As plain types. A loss that is not finite becomes null, because JSON has no such number."""
        out = asdict(self)
        for one in (*out["evaluations"], out["best"]):
            one["loss"] = one["loss"] if math.isfinite(one["loss"]) else None
        return {"format": "pliant.result/1", **out}


@dataclass(frozen=True)
class Status:
    """What a display needs to show a run. `trained` has one entry per unit, input to output; `news` deserves its own line."""

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float | None
    accuracy: float
    best: float
    share: float | None
    budget: str
    trained: tuple[bool, ...]
    seconds_left: float | None
    evaluated: bool = False
    news: str = ""


OnStatus = Callable[[Status], None]
