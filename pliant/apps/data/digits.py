"""Small image sets and seeded batches, without a download; and datasets whose batches say which samples they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pliant.apps.models import NORM


@dataclass(frozen=True, eq=False)
class Split:
    """Images (float NCHW, normalised) and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Digits:
    """Handwritten digits: 1000 to train on, 297 to choose by, 500 to report."""

    train: Split
    validation: Split
    test: Split
    classes: int = 10


def digits(size: int = 64, seed: int = 0) -> Digits:
    """scikit-learn's 1797 handwritten digits, enlarged from 8×8 to `size` pixels, in three splits of like proportions."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn, which is not installed. Run: pip install 'pliant[demo]'", name="sklearn"
        ) from error
    raw = load_digits()
    labels = torch.from_numpy(raw.target).long()
    order = _dealt(labels, seed)
    grey = torch.from_numpy(raw.images).float()[order, None] / 16  # the set's brightest pixel is 16
    mean, std = NORM
    large = (F.interpolate(grey, size=(size, size), mode="bilinear", align_corners=False) - mean) / std
    images = large.expand(-1, 3, -1, -1).contiguous()
    train, validation, test = (
        Split(*pair) for pair in zip(images.split([1000, 297, 500]), labels[order].split([1000, 297, 500]), strict=True)
    )
    return Digits(train, validation, test)


def batches(split: Split, size: int, *, seed: int = 0, epochs: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches of (images, labels), for so many epochs or without end; the same for the same seed.

    Every batch is full, so that every step costs the same: each epoch leaves out the few samples that are over.
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
            yield split.images[chosen], split.labels[chosen]
        epoch += 1


def _dealt(labels: Tensor, seed: int) -> Tensor:
    """A seeded order in which every stretch holds each class in proportion, as cards are dealt."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    place = torch.empty(len(labels), dtype=torch.float64)
    for label in labels.unique():
        members = shuffled[labels[shuffled] == label]
        place[members] = (torch.arange(len(members), dtype=torch.float64) + 0.5) / len(members)
    return place.argsort(stable=True)
