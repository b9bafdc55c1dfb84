"""The learning rate of a task: as given, or from how similar its classes look."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pliant.apps.fewshot.prototypes import class_means

_RATES = 0.001, 0.016  # if the features already separate the classes, and if they hardly do
_SIMILARITY = 0.2, 0.3  # mean cosine of images of different classes: the first rate up to 0.2, the second from 0.3 on


def as_rate(given: float | str) -> float | Literal["auto"]:
    """A learning rate as a number or text, or "auto"; anything else is an error.

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
        raise ValueError(f"{given!r} is not a learning rate: give a number like 0.004, or auto.")
    return rate


def rate_for(batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> float:
    """The learning rate of a task from its (features, labels) before training.

    It grows with the mean cosine of images of different classes: the lower rate up to the lower similarity, the higher rate
    from the higher similarity on, and logarithmic in between. It does not depend on the number of images per class. See
    docs/methods/tinytrain.md for the source of the constants.

    >>> labels = torch.arange(3)
    >>> rate_for([(torch.eye(3), labels)], 3), rate_for([(torch.ones(3, 8), labels)], 3)
    (0.001, 0.016)
    """
    labels: list[Tensor] = []

    def directions() -> Iterator[tuple[Tensor, Tensor]]:
        for features, some in batches:
            labels.append(some)
            yield F.normalize(features.float(), dim=1), some

    means = class_means(directions(), classes)
    counts = torch.bincount(torch.cat(labels), minlength=classes)
    sums = means * counts[:, None]
    pairs = int(counts.sum()) ** 2 - int(counts.square().sum())
    if not pairs:
        raise ValueError("the learning rate of a task needs images of two classes or more.")
    similarity = float(sums.sum(0).square().sum() - sums.square().sum()) / pairs
    if not math.isfinite(similarity):
        raise ValueError(
            "the backbone's features are not all finite, so there is no learning rate for them. Check its weights."
        )
    (low, high), (small, large) = _SIMILARITY, _RATES
    return float(small * (large / small) ** min(max((similarity - low) / (high - low), 0.0), 1.0))
