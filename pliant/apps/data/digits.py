"""Handwritten digits that need no download, and seeded batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pliant.apps.data.errors import DataError
from pliant.apps.models import PIXEL_STATS


def means_digits(source: str) -> bool:
    """Whether a name of data is that of these digits; an error if a file or folder here has that name too."""
    if source == "digits" and os.path.exists(source):
        raise DataError("'digits' names the built-in dataset, and something here has that name too: write ./digits for yours.")
    return source == "digits"


@dataclass(frozen=True, eq=False)
class Split:
    """What a network sees (images as normalised NCHW floats, token ids, spectrograms) and the labels."""

    inputs: Tensor
    labels: Tensor

    @property
    def images(self) -> Tensor:
        """The inputs, where they are images."""
        return self.inputs

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Digits:
    """Handwritten digits in three splits: 1000 for training, 297 for validation, 500 for testing."""

    train: Split
    validation: Split
    test: Split
    classes: int = 10


def digits(size: int = 64, seed: int = 0) -> Digits:
    """The 1797 handwritten digits of scikit-learn, enlarged to `size` pixels, in three splits with equal class proportions."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits are part of scikit-learn, which is not installed. Run: pip install 'pliant[demo]'", name="sklearn"
        ) from error
    raw = load_digits()
    labels = torch.from_numpy(raw.target).long()
    order = _stratified_order(labels, seed)
    grey = torch.from_numpy(raw.images).float()[order, None] / 16  # the set's brightest pixel is 16
    mean, std = PIXEL_STATS
    large = (F.interpolate(grey, size=(size, size), mode="bilinear", align_corners=False) - mean) / std
    images = large.expand(-1, 3, -1, -1).contiguous()
    train, validation, test = (
        Split(*pair) for pair in zip(images.split([1000, 297, 500]), labels[order].split([1000, 297, 500]), strict=True)
    )
    return Digits(train, validation, test)


def batches(split: Split, size: int, *, seed: int = 0, epochs: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches of (images, labels), for this many epochs or without end; the same seed gives the same batches.

    Every batch is full, so that every step costs the same: each epoch skips the remaining samples.
    """
    if not 1 <= size <= len(split):
        raise ValueError(f"a batch cannot hold {size} of {len(split)} samples. Use a size from 1 to {len(split)}.")
    return _shuffled(split, size, seed, epochs)


def _shuffled(split: Split, size: int, seed: int, epochs: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    epoch = 0
    while epochs is None or epoch < epochs:
        order = torch.randperm(len(split), generator=generator)
        for start in range(0, len(split) - size + 1, size):
            chosen = order[start : start + size]
            yield split.inputs[chosen], split.labels[chosen]
        epoch += 1


def _stratified_order(labels: Tensor, seed: int) -> Tensor:
    """A seeded order in which every stretch has the class proportions of the whole."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    place = torch.empty(len(labels), dtype=torch.float64)
    for label in labels.unique():
        members = shuffled[labels[shuffled] == label]
        place[members] = (torch.arange(len(members), dtype=torch.float64) + 0.5) / len(members)
    return place.argsort(stable=True)
