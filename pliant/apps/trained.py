"""A trained model with all that it takes to use it: `pliant.load`, and what `pliant predict` and `pliant evaluate` do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.apps import data, models, run_folder, tasks
from pliant.apps.data import inputs as kinds
from pliant.apps.data import samples
from pliant.apps.data.digits import means_digits
from pliant.apps.data.errors import DataError, Skipped, in_short
from pliant.apps.data.folders import TEST, VALIDATION
from pliant.apps.data.images import completed
from pliant.apps.data.inputs import Inputs, read_all
from pliant.apps.data.prepare import Reading, prepare
from pliant.apps.data.samples import Samples
from pliant.apps.tasks import TaskError
from pliant.apps.train.options import Options
from pliant.apps.train.outcome import confusion
from pliant.core.errors import PliantError
from pliant.runtime.working import note, told

_BATCH = 64


class TrainedError(PliantError, ValueError):
    """A run or a weight file that cannot be used."""


@dataclass(frozen=True, eq=False)
class Trained:
    """A model in evaluation mode, with its preprocessing (`inputs`) and its classes. `about` are the metadata of its file."""

    model: nn.Module
    inputs: Inputs
    classes: tuple[str, ...]
    about: Mapping[str, str]

    def logits(self, batch: Tensor) -> Tensor:
        """What the model returns for `inputs(...)`: samples × classes. Plain `model(batch)`, but for models of transformers."""
        return models.logits(self.model, batch)

    def predict(self, sources: Sequence[str | os.PathLike[str]], top: int = 1) -> list[list[tuple[str, float]]]:
        """The most probable classes of each file or text, with their probabilities."""
        found = samples.Samples(self.inputs.kind, [_source(one) for one in sources], [str(one) for one in sources])
        return [list(one.classes) for one in predictions(self, found, top)]


def _source(one: str | os.PathLike[str]) -> kinds.Source:
    return one if isinstance(one, str) else Path(one)


def load(
    run: str | os.PathLike[str], model: str | nn.Module | None = None, *, weights: str = "best", device: str = "cpu"
) -> Trained:
    """A trained model from the folder of a run or from one of its weight files, with its preprocessing.

    `weights` is "best" or "last", if `run` is a folder. If your own function made the model, give it as `model`: by name
    ("package.module:factory"), or as the module itself, which then gets the weights. No file chooses the code that runs.

        trained = pliant.load("runs/photos")
        batch = trained.inputs(["new/a.jpg", "new/b.jpg"])
        with torch.no_grad():
            logits = trained.model(batch)
        print([trained.classes[i] for i in logits.argmax(1)])
    """
    path = _weights_of(run, weights)
    where = os.fspath(path)
    try:
        held, about = models.read_weights(path)
    except ValueError as error:
        raise TrainedError(str(error)) from error
    if about.get("format") == "pliant.delta/1":
        raise TrainedError(f"{where!r} holds only the weights that changed (--delta), so it is not a whole model.")
    try:
        inputs, classes = kinds.from_json(json.loads(about["inputs"])), tuple(map(str, json.loads(about["names"])))
    except KeyError as error:
        raise TrainedError(
            f"{where!r} does not say how its inputs are read ({error} is missing), as files of `pliant adapt` and `pliant "
            f"meta-train` do not. Give the folder of a run, or begin with it: pliant adapt --backbone, pliant train --model."
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise TrainedError(f"{where!r} cannot be used: {error}.") from error
    net = _filled(model, held, about, where)
    return Trained(net.to(tasks.device_of(device)).eval(), inputs, classes, about)


def _weights_of(run: str | os.PathLike[str], weights: str) -> Path:
    path = Path(run)
    if weights not in ("best", "last"):
        raise TaskError(f"weights={weights!r}: give 'best' or 'last'.")
    if not path.exists():
        raise TaskError(f"{os.fspath(run)!r} is not there. Give the folder of a run, or a weight file (.safetensors).")
    if not path.is_dir():
        return path
    folder = run_folder.Folder(path)
    file = folder.best if weights == "best" else folder.last
    if not file.exists():
        raise TaskError(f"{os.fspath(run)!r} holds no {file.name}. Give the folder of a run that has evaluated once.")
    return file


def _filled(model: str | nn.Module | None, held: Mapping[str, Tensor], about: Mapping[str, str], where: str) -> nn.Module:
    if isinstance(model, nn.Module):
        try:
            model.load_state_dict(dict(held))
        except RuntimeError as error:
            first = " ".join(str(error).split())
            raise TrainedError(f"{where!r} does not fit the model that was given: {first}") from error
        return model
    named = about.get("model", "")
    if model is None and models.is_code(named):
        raise TaskError(
            f"{where!r} is of the model {named!r}, and a file may not choose the code that runs. If you trust that code, give "
            f"it yourself: --model {named} (model={named!r} in Python)."
        )
    try:
        return models.load(where if model is None else f"{model}@{where}")
    except ValueError as error:
        raise TrainedError(str(error)) from error


# ---------------------------------------------------------------- predicting


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of a sample with their probabilities, the best first."""

    name: str
    classes: tuple[tuple[str, float], ...]


def predictions(
    trained: Trained, found: Samples, top: int = 1, skip: bool = False, skipped: list[Skipped] | None = None
) -> Iterator[Prediction]:
    """The predictions for samples, in their order. Those that cannot be read are an error, or are added to `skipped`."""
    device = next((param.device for param in trained.model.parameters()), torch.device("cpu"))
    starts = range(0, len(found), _BATCH)
    for start in told("predicting", starts):
        part = slice(start, start + _BATCH)
        names = found.names[part]
        read, places, failed = read_all(found.sources[part], _said(names, found.kind), trained.inputs.read, skip)
        if skipped is not None:
            skipped += failed
        if not read:
            continue
        batch = trained.inputs.batch(torch.stack(read)).to(device)
        likely = tasks.outputs(trained.model, batch).float().softmax(1).topk(min(top, len(trained.classes)))
        for place, values, labels in zip(places, likely.values.tolist(), likely.indices.tolist(), strict=True):
            yield Prediction(names[place], tuple((trained.classes[i], v) for i, v in zip(labels, values, strict=True)))


def _said(names: Sequence[str], kind: str) -> list[str]:
    return [f"the text {name!r}" if kind == "text" else f"the file {name!r}" for name in names]


# ---------------------------------------------------------------- evaluating


@dataclass(frozen=True)
class ClassResult:
    """A class: its samples, how many of them were found, and how many samples were taken for it."""

    name: str
    samples: int
    right: int
    predicted: int

    @property
    def recall(self) -> float | None:
        return self.right / self.samples if self.samples else None

    @property
    def precision(self) -> float | None:
        return self.right / self.predicted if self.predicted else None


@dataclass(frozen=True)
class Evaluated:
    """How a model does on labelled data. `confusion` holds [class, predicted class, samples] for each pair that occurs."""

    data: str
    split: str
    weights: str
    samples: int
    accuracy: float
    loss: float
    classes: tuple[str, ...]
    confusion: tuple[tuple[int, int, int], ...]

    def by_class(self) -> list[ClassResult]:
        out = []
        for label, name in enumerate(self.classes):
            mine = [count for true, _, count in self.confusion if true == label]
            right = sum(count for true, guess, count in self.confusion if true == guess == label)
            out.append(ClassResult(name, sum(mine), right, sum(count for _, guess, count in self.confusion if guess == label)))
        return out

    def to_json(self) -> dict[str, Any]:
        by_class = {one.name: {**asdict(one), "recall": one.recall, "precision": one.precision} for one in self.by_class()}
        return {**asdict(self), "by_class": by_class}


def evaluate(
    trained: Trained,
    source: str | None,
    run: str | os.PathLike[str] | None = None,
    *,
    reading: Reading | None = None,
    weights: str = "best",
) -> Evaluated:
    """Accuracy on labelled data, in all and for each class; without data, on the validation split of the run itself."""
    split, name = _own_validation(trained, run) if source is None else _labelled(trained, source, reading or Reading())
    device = next((param.device for param in trained.model.parameters()), torch.device("cpu"))
    labels = split.labels.to(device)
    found = tasks.outputs(trained.model, split.inputs.to(device))
    guesses = found.argmax(1)
    return Evaluated(
        data=source or "",
        split=name,
        weights=weights,
        samples=len(split),
        accuracy=int((guesses == labels).sum()) / len(split),
        loss=float(F.cross_entropy(found.float(), labels)),
        classes=trained.classes,
        confusion=tuple((a, b, c) for a, b, c in confusion(labels.tolist(), guesses.tolist())),
    )


def _own_validation(trained: Trained, run: str | os.PathLike[str] | None) -> tuple[data.Split, str]:
    """The split that the run validated on: the same samples, since the seed decides."""
    folder = Path(run) if run is not None else None
    if folder is None or not folder.is_dir():
        raise TaskError("a weight file alone does not say what to evaluate on. Give the data, or the folder of the run.")
    options = Options.of(run_folder.options_of(folder), f"the run in {os.fspath(folder)!r}")
    if options.data == "digits":
        return data.digits(options.size, options.seed).validation, "validation"
    if not os.path.exists(options.data):
        raise TaskError(f"the data of the run, {options.data!r}, are not here. Give data to evaluate on.")
    inputs, labels, given = _read(trained, options.data, options.reading)
    chosen = completed(labels, len(trained.classes), given, options.validation, options.seed, test=False) == VALIDATION
    split = data.Split(trained.inputs.batch(inputs[chosen]), labels[chosen])
    if run_folder.data_of(folder).get("validation") not in (None, tasks.fingerprint(split)):
        raise TaskError(
            f"the data in {options.data!r} have changed since the run, so its validation split is lost: samples of it may have "
            f"been trained on. Put them back as they were, or give other data to evaluate on."
        )
    return split, "validation"


def _labelled(trained: Trained, source: str, reading: Reading) -> tuple[data.Split, str]:
    """The test split of the data if they have one, else all of them."""
    if means_digits(source):
        size = getattr(trained.inputs, "size", 64)
        return data.digits(size, 0).test, "test"
    if not os.path.exists(source):
        raise TaskError(
            f"no data {source!r}: give a folder with one folder per class, a table, a saved dataset or a .npz file."
        )
    inputs, labels, given = _read(trained, source, reading)
    chosen = given == TEST if given is not None and bool((given == TEST).any()) else torch.ones(len(labels), dtype=torch.bool)
    return data.Split(trained.inputs.batch(inputs[chosen]), labels[chosen]), "all" if bool(chosen.all()) else "test"


def _read(trained: Trained, source: str, reading: Reading) -> tuple[Tensor, Tensor, Tensor | None]:
    """Samples as the model's own inputs read them, with labels as the model counts its classes."""
    if source.endswith(".npz"):
        packed = prepare(source, replace(reading, size=getattr(trained.inputs, "size", reading.size)))
        if packed.inputs.kind != trained.inputs.kind:
            raise DataError(f"{source!r} holds {packed.inputs.kind}, but this model was trained on {trained.inputs.kind}.")
        names = [packed.classes[i] for i in packed.labels.tolist()]
        return packed.samples, _numbers(trained, names, source), packed.split
    with tasks.columns_are_options():
        found = samples.find(source, reading.input_column, reading.label_column)
    if found.kind != trained.inputs.kind:
        raise DataError(f"{source!r} holds {found.kind}, but this model was trained on {trained.inputs.kind}.")
    read, places, skipped = read_all(found.sources, found.names, trained.inputs.read, reading.skip_unreadable)
    if skipped:
        note(in_short(skipped))
    if not read:
        raise DataError(f"{source!r} holds no sample that can be read.")
    names = [(found.labels or [])[place] for place in places]
    split = None if found.split is None else torch.tensor([found.split[place] for place in places], dtype=torch.uint8)
    return torch.stack(read), _numbers(trained, names, source), split


def _numbers(trained: Trained, names: Iterable[str], source: str) -> Tensor:
    known = {name: label for label, name in enumerate(trained.classes)}
    labels = list(names)
    for name in labels:
        if name not in known:
            some = ", ".join(map(repr, trained.classes[:6])) + (" …" if len(known) > 6 else "")
            raise DataError(
                f"{source!r} has the label {name!r}, which the model does not know: it has {some}. Rename or remove it."
            )
    return torch.tensor([known[name] for name in labels])
