"""The options of a run, its status while it trains, and its result."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pliant.apps import models, run_folder
from pliant.apps.tasks import RECIPES, TaskError
from pliant.core.types import nearest
from pliant.engine import modes

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
        "efficientnet_lite0",
        "efficientnet_lite0, timm:NAME, package.module:factory, a .safetensors file of an earlier run, or factory@file.",
    )
    data: str = _option("digits", "A folder with one folder of images per class, a packed .npz set, or digits.")
    recipe: str = _option("pliant", f"What to train: {', '.join(RECIPES)}. only:GLOB,GLOB trains the layers that match.")
    time: float | str | None = _option(
        None, "Time a step may take: a share of a full step, or an amount like 12ms.", unset="0.5 for pliant"
    )
    memory: float | str | None = _option(None, "Memory a step may take beyond inference: a share, or an amount like 64MB.")
    macs: float | str | None = _option(None, "Multiply-accumulates of a step: a share, or an amount like 1.5GMAC.")
    epochs: int = _option(3, "Passes over the images.", least=1)
    batch: int = _option(16, "Images per step.", least=1)
    lr: float = _option(0.03, "Learning rate at the start; it decays to zero along a cosine.")
    size: int = _option(64, "Pixels per side.", least=8)
    validation: float = _option(0.2, "Share of each class to validate on, if the data has no validation images.")
    evaluate_every: int | None = _option(None, "Steps between evaluations.", least=1, unset="an epoch")
    scratch: bool = _option(False, "Start from random weights.")
    device: str = _option("auto", "cpu, cuda, cuda:1 …", unset="cuda if there is one", may_change=True)
    engine: str = _option("auto", "auto, plain, or a combination of lean, prefix and graphs, like lean+prefix.")
    exact: bool = _option(False, "After the costs are measured, no decision depends on the clock, even with a time budget.")
    seed: int = _option(0, "Random seed of the split, of new weights and of the order of images.")
    out: str | None = _option(None, "Folder of the run.", unset="a new one in runs/", may_change=True)
    resume: bool = _option(False, "Continue the run in --out, with its options.", may_change=True)
    delta: bool = _option(False, "Write only the weights that changed.")
    log_to: str | None = _option(None, "Also write a log for: tensorboard.", may_change=True)
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
        try:
            modes.parse(self.engine)
        except ValueError as error:
            raise TaskError(str(error)) from error
        if not 0 < self.validation < 0.5:
            raise TaskError(
                f"validation={self.validation!r}: give the share of each class to validate on, above 0 and below 0.5."
            )
        if not 0 < self.lr < math.inf:
            raise TaskError(f"lr={self.lr!r}: the learning rate must be a number above 0.")
        if self.log_to not in (None, "tensorboard"):
            raise TaskError(f"log_to={self.log_to!r}: besides its own log, a run can only write one for 'tensorboard'.")

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> Options:
        """Options by name; the error about an unknown name says `where` it was given."""
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                raise TaskError(f"{where} has no option {name!r} to set.{nearest(name, known)}")
        return cls(**given)

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

    The first of the `evaluations` is the one before training. `seconds` is wall time: it includes measuring and choosing, but
    not evaluating and saving. `seconds_per_step` is a mean by the device's clock. `rounds` hold what was asked, predicted and
    measured for each selection. `memory_bytes` is the peak of a step beyond inference, if it was measured; `joules` need an
    energy meter.
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
