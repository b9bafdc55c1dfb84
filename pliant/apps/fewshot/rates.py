"""The learning rate of a task: as it was given, or by how alike its classes look."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pliant.apps.fewshot.prototypes import class_means

_RATES = 0.001, 0.016  # where features tell the classes apart already, and where they hardly do
_ALIKE = 0.2, 0.3  # mean cosine of images of different classes: up to here the one, from there on the other


def as_rate(given: float | str) -> float | Literal["auto"]:
    """A learning rate as a number, in words, or "auto"; anything else is an error.

    >>> as_rate("0.004"), as_rate("auto")
    (0.004, 'auto')
    """
    if given == "auto":
        return "auto"
    try:
        rate = float(given)
    except (TypeError, ValueError):
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise ValueError(f"{given!r} is no learning rate: give a number like 0.004, or auto.")
    return rate


def rate_for(batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> float:
    """The learning rate for a task, by how alike its classes look before anything is trained: from (features, labels).

    0.001 where images of different classes have a cosine of 0.2 or less in the mean, 0.016 from 0.3 on, and between the two by
    the logarithm. It does not hang on how many images a class has. Where the numbers come from: docs/methods/tinytrain.md.

    >>> labels = torch.arange(3)
    >>> rate_for([(torch.eye(3), labels)], 3), rate_for([(torch.ones(3, 8), labels)], 3)
    (0.001, 0.016)
    """
    labels: list[Tensor] = []

    def directions() -> Iterator[tuple[Tensor, Tensor]]:
        for features, of in batches:
            labels.append(of)
            yield F.normalize(features.float(), dim=1), of

    means = class_means(directions(), classes)
    counts = torch.bincount(torch.cat(labels), minlength=classes)
    sums = means * counts[:, None]
    pairs = int(counts.sum()) ** 2 - int(counts.square().sum())
    if not pairs:
        raise ValueError("a rate for a task needs images of two classes or more.")
    alike = float(sums.sum(0).square().sum() - sums.square().sum()) / pairs
    if not math.isfinite(alike):
        raise ValueError("the backbone's features are not all numbers: there is no rate for that.")
    (low, high), (small, large) = _ALIKE, _RATES
    return float(small * (large / small) ** min(max((alike - low) / (high - low), 0.0), 1.0))
