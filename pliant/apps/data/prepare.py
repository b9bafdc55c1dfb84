"""From a name to numbers: reads images, texts, sounds or arrays, and says what a network sees of them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pliant.apps.data import audio, images, samples
from pliant.apps.data.digits import means_digits
from pliant.apps.data.errors import DataError, Skipped
from pliant.apps.data.folders import TRAIN
from pliant.apps.data.images import completed
from pliant.apps.data.inputs import ArrayInputs, AudioInputs, ImageInputs, Inputs, TextInputs, read_all
from pliant.apps.data.samples import Samples

LONGEST_SECONDS = 10.0  # of a sound, unless asked for


@dataclass(frozen=True)
class Reading:
    """How data are read; every field is an option of `pliant train`."""

    size: int = 64
    length: int = 128
    features: str = "log-mel"
    rate: int | None = None
    seconds: float | None = None
    input_column: str | None = None
    label_column: str | None = None
    skip_unreadable: bool = False


@dataclass(frozen=True, eq=False)
class Prepared:
    """Samples as `inputs.batch` takes them, their labels, and their splits where the data define them."""

    samples: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    split: Tensor | None
    inputs: Inputs
    skipped: tuple[Skipped, ...] = ()

    def with_inputs(self, inputs: Inputs) -> Prepared:
        return replace(self, inputs=inputs)

    def split_numbers(self, validation: float, seed: int) -> Tensor:
        """The split of every sample; without validation samples, a share of each class becomes one."""
        return completed(self.labels, len(self.classes), self.split, validation, seed, test=False)


def kind_of(source: str, reading: Reading | None = None) -> str:
    """What a name holds: "images", "text", "audio" or "arrays". Nothing is decoded for it."""
    if means_digits(source):
        return "images"
    if source.endswith(".npz"):
        return "arrays" if {"x", "y"} <= _names(source) else "images"
    how = reading or Reading()
    return samples.find(source, how.input_column, how.label_column).kind


def prepare(source: str, reading: Reading, text: Callable[[], TextInputs] = TextInputs, channels: int = 1) -> Prepared:
    """Read everything. `text` gives the tokenizer, which a model may have of its own; `channels` are those of a spectrogram."""
    if source.endswith(".npz"):
        return _arrays(source) if {"x", "y"} <= _names(source) else _packed(source, reading.size)
    found = samples.find(source, reading.input_column, reading.label_column)
    return encoded(found, reading, text, channels)


def encoded(found: Samples, reading: Reading, text: Callable[[], TextInputs] = TextInputs, channels: int = 1) -> Prepared:
    """Samples that were found, read; what a network should see of texts and sounds follows from the data."""
    skip = reading.skip_unreadable
    if found.kind == "audio":
        sounds, places, skipped = read_all(found.sources, found.names, audio.read_wav, skip)
        inputs: Inputs = (heard := _fitting(sounds, [found.names[i] for i in places], reading, channels))
        read = [heard.of_samples(*sound) for sound in sounds]
    elif found.kind == "text":
        inputs = _long_enough(text(), found, reading.length)
        read, places, skipped = read_all(found.sources, found.names, inputs.read, skip)
    else:
        inputs = ImageInputs(reading.size)
        read, places, skipped = read_all(found.sources, found.names, inputs.read, skip)
    if not read:
        raise DataError(f"none of the {len(found)} samples can be read: {skipped[0].why}" if skipped else "there is no sample.")
    kept = [(found.labels or [])[i] for i in places]
    classes = sorted_names(kept)
    number = {name: label for label, name in enumerate(classes)}
    split = None if found.split is None else torch.tensor([found.split[i] for i in places], dtype=torch.uint8)
    labels = torch.tensor([number[name] for name in kept])
    return Prepared(torch.stack(read), labels, classes, split, inputs, tuple(skipped))


def with_statistics(prepared: Prepared, split: Tensor) -> Prepared:
    """Of sounds, mean and standard deviation over the training samples."""
    inputs = prepared.inputs
    if not isinstance(inputs, AudioInputs) or inputs.features == "wave":
        return prepared
    mine = prepared.samples[split == TRAIN]
    std = float(mine.std(correction=0)) if len(mine) else 1.0
    return prepared.with_inputs(replace(inputs, mean=float(mine.mean()) if len(mine) else 0.0, std=max(std, 1e-5)))


def sorted_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Class names in order; whole numbers by their value.

    >>> sorted_names(["10", "9", "10"]), sorted_names(["b", "a", "10"])
    (('9', '10'), ('10', 'a', 'b'))
    """
    names = set(labels)
    return tuple(sorted(names, key=(lambda name: (int(name), name)) if all(map(str.isdecimal, names)) else None))


def _fitting(sounds: Sequence[tuple[Tensor, int]], names: Sequence[str], reading: Reading, channels: int) -> AudioInputs:
    """One rate and one length for all sounds."""
    rates = [rate for _, rate in sounds]
    if reading.rate is None and len(set(rates)) > 1:
        other = next(i for i, rate in enumerate(rates) if rate != rates[0])
        raise DataError(
            f"sampling rates are mixed: {names[0]} has {rates[0]} Hz, {names[other]} {rates[other]} Hz. Give the rate to "
            f"resample all of them to: --rate {min(rates)}."
        )
    rate = reading.rate or (rates[0] if rates else 16000)
    longest = max((len(sound) / own for sound, own in sounds), default=1.0)
    seconds = reading.seconds if reading.seconds is not None else min(longest, LONGEST_SECONDS)
    return AudioInputs(rate, seconds, reading.features, channels=1 if reading.features == "wave" else channels)


def _long_enough(inputs: TextInputs, found: Samples, most: int) -> TextInputs:
    """Room for the longest text, a multiple of 8 tokens, but no more than `most`."""
    lengths = [len(ids) for ids in inputs.ids([str(one) for one in found.sources], most)]
    return replace(inputs, length=min(-(-max(lengths, default=8) // 8) * 8, most) or most)


# ---------------------------------------------------------------- .npz


def _names(source: str) -> set[str]:
    """The arrays of a .npz file; none if it cannot be read, which is told where it is read."""
    try:
        with zipfile.ZipFile(source) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile):
        return set()


def _packed(source: str, size: int) -> Prepared:
    held = images.packed(source, size)
    return Prepared(held.images, held.labels, held.classes, held.split, ImageInputs(size))


def _arrays(source: str) -> Prepared:
    """`x` (samples × anything) and `y` (labels), maybe `classes` and `split` (0 training, 1 validation, 2 test)."""
    try:
        with np.load(Path(source)) as archive:
            held = {name: archive[name] for name in ("x", "y", "classes", "split") if name in archive}
        x = torch.from_numpy(np.asarray(held["x"], np.float32))
        labels = [str(one) for one in np.asarray(held["y"]).tolist()]
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, MemoryError, SyntaxError) as error:
        raise DataError(f"{source!r} is not a whole .npz file of numbers: {error}. Copy it again.") from error
    if x.dim() < 2 or len(x) != len(labels) or held["y"].ndim != 1:
        raise DataError(f"{source!r}: x has shape {tuple(x.shape)} and y {held['y'].shape}. Give one label per sample.")
    if not len(x):
        raise DataError(f"{source!r} holds no sample. Give at least one.")
    if not bool(x.isfinite().all()):
        raise DataError(f"{source!r}: x holds numbers that are not finite. Replace them, or remove those samples.")
    classes = sorted_names(labels)
    number = {name: label for label, name in enumerate(classes)}
    numbers = torch.tensor([number[one] for one in labels])
    if "classes" in held:
        given = images.class_names(held["classes"], source)
        if not all(name.isdecimal() and int(name) < len(given) for name in classes):
            raise DataError(f"{source!r}: with classes, a label in y is the position of its class, from 0 to {len(given) - 1}.")
        classes, numbers = given, torch.tensor([int(one) for one in labels])
    split = images.split_of(held["split"], len(x), source) if "split" in held else None
    return Prepared(x, numbers, classes, split, ArrayInputs(tuple(x.shape[1:])))
