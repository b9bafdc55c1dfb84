"""What a run is told, how it stands, and what it came to."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pliant.apps import run_folder as folder
from pliant.apps.tasks import TaskError
from pliant.core.types import nearest
from pliant.engine import modes

_KINDS = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,), "None": (type(None),)}
_SAID = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "None": "nothing"}


@dataclass(frozen=True)
class Options:
    """What to train, on what, how, and where to. Every field is an option of `pliant train` of the same name.

    `time`, `memory` and `macs` are the budget of a step, a share of a full one or an amount with its unit ("12ms", "64MB").
    `exact` lets nothing hang on the clock once a step has been measured, so that a run with a time budget too ends bit for bit
    alike, stopped and resumed or not, on a CPU.
    """

    model: str = "efficientnet_lite0"
    data: str = "digits"
    recipe: str = "pliant"
    time: float | str | None = None
    memory: float | str | None = None
    macs: float | str | None = None
    epochs: int = 3
    batch: int = 16
    lr: float = 0.03
    size: int = 64
    validation: float = 0.2
    evaluate_every: int | None = None
    scratch: bool = False
    device: str = "auto"
    engine: str = "auto"
    exact: bool = False
    seed: int = 0
    out: str | None = None
    resume: bool = False
    delta: bool = False
    log_to: str | None = None
    keep_anyway: bool = False
    measure_memory: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):  # a file of options may hold anything
            given, allowed = getattr(self, field.name), str(field.type).split(" | ")
            if not any(type(given) in _KINDS[kind] for kind in allowed):
                raise TaskError(f"{field.name}={given!r} should be {' or '.join(_SAID[kind] for kind in allowed)}.")
        for name, least in (("epochs", 1), ("batch", 1), ("size", 8), ("evaluate_every", 1)):
            given = getattr(self, name)
            if given is not None and given < least:
                raise TaskError(f"{name}={given!r}: give {least} or more.")
        try:
            modes.parse(self.engine)
        except ValueError as error:
            raise TaskError(str(error)) from error
        if not 0 < self.validation < 0.5:
            raise TaskError(f"validation={self.validation!r}: the share of each class to validate with, above 0 and below 0.5.")
        if not 0 < self.lr < math.inf:
            raise TaskError(f"lr={self.lr!r}: the learning rate is a number above 0.")
        if self.log_to not in (None, "tensorboard"):
            raise TaskError(f"log_to={self.log_to!r}: beside its own log, a run can write for 'tensorboard' only.")

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> Options:
        """Options by name, of a file or a run; a name that is none is an error that says `where`."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise TaskError(f"{where} has no option {name!r} to set.{nearest(name, known)}")
        return cls(**given)

    @classmethod
    def of_run(cls, out: str | os.PathLike[str]) -> Options:
        """Those that the run in this folder was begun with, to go on with it."""
        return cls.of({**folder.options_of(out), "out": os.fspath(out), "resume": True}, f"the run in {os.fspath(out)!r}")


@dataclass(frozen=True)
class Evaluation:
    """How good a model was on the validation split, and how long it had trained, evaluating and saving not counted."""

    step: int
    accuracy: float
    loss: float
    seconds: float


@dataclass(frozen=True)
class Result:
    """What a run came to.

    `evaluations` begin with that of the start. Seconds are by the clock on the wall, measuring and choosing included,
    evaluating and saving not; a step's are a mean by the device's clock. `rounds` hold asked, predicted and measured of
    each selection. `memory_bytes` is the peak of a step beyond inference, if measured; `joules` are a meter's, if there is one.
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
        """In plain types; a loss that is no number is null, as JSON has none."""
        out = asdict(self)
        for one in (*out["evaluations"], out["best"]):
            one["loss"] = one["loss"] if math.isfinite(one["loss"]) else None
        return {"format": "pliant.result/1", **out}


@dataclass(frozen=True)
class Moment:
    """How a run stands: what a display needs. `trained` has an entry for each unit, input to output; `news` is worth a line."""

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


Watch = Callable[[Moment], None]
