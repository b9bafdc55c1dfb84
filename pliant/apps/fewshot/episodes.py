"""Training tasks (episodes): some classes of a set, with a few images of each to learn from and others to test on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from pliant.apps.data.images import ImageError, ImageSet


@dataclass(frozen=True, eq=False)
class Episode:
    """One task: support images to learn from and query images to test on, of the same classes, numbered from 0."""

    support: ImageSet
    query: ImageSet


@dataclass(frozen=True)
class Sampling:
    """Tasks with a random number of classes and shots, as in Meta-Dataset (Triantafillou et al., 2020, arXiv 1903.03096).

    The number of classes lies in `ways`, limited by the set. Every class has `query` query images, limited to half of the
    smallest class. The support set has a random size: at most `support` images, and `per_class` of one class. It is imbalanced:
    the shots of a class are proportional to its size times a random factor from ½ to 2, and at least one.
    """

    ways: tuple[int, int] = (5, 50)
    support: int = 500
    per_class: int = 100
    query: int = 10

    def __post_init__(self) -> None:
        if not 2 <= self.ways[0] <= self.ways[1] or self.support < self.ways[1] or min(self.per_class, self.query) < 1:
            raise ValueError(f"{self}: give 2 classes or more, and at least one support image and one query image of each.")

    def draw(self, source: ImageSet, seed: int, number: int = 0) -> Episode:
        """Task `number` of this seed; the same arguments give the same task."""
        rng = np.random.default_rng([seed, number])
        labels = source.labels.cpu().numpy()
        sizes = np.bincount(labels, minlength=len(source.classes))
        usable = np.flatnonzero(sizes >= 2)
        if len(usable) < self.ways[0]:
            raise ImageError(
                f"a task needs {self.ways[0]} classes with two images or more, and this set has {len(usable)}. Give a larger "
                f"set, or Sampling(ways=…) with fewer."
            )
        ways = int(rng.integers(self.ways[0], min(self.ways[1], len(usable)) + 1))
        chosen = rng.choice(usable, ways, replace=False)
        tested = min(self.query, int(sizes[chosen].min()) // 2)
        support: list[int] = []
        query: list[int] = []
        for label, shots in zip(chosen, self._shots(sizes[chosen] - tested, sizes[chosen], rng), strict=True):
            mine = rng.permutation(np.flatnonzero(labels == label)).tolist()
            query += mine[:tested]
            support += mine[tested : tested + shots]
        classes = tuple(source.classes[label] for label in chosen)
        return Episode(*(_renumbered(source, index, chosen, classes) for index in (support, query)))

    def _shots(self, left: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> list[int]:
        """The number of support images of each class; `left` counts the images that are not query images."""
        share = 1 - rng.random()  # in (0, 1]
        total = min(self.support, sum(math.ceil(share * min(self.per_class, n)) for n in left))
        weight = np.exp(rng.uniform(math.log(0.5), math.log(2), len(sizes))) * sizes
        shots = np.floor(weight / weight.sum() * (total - len(sizes))).astype(int) + 1
        return np.minimum(shots, np.minimum(left, self.per_class)).tolist()


def _renumbered(source: ImageSet, index: list[int], chosen: np.ndarray, classes: tuple[str, ...]) -> ImageSet:
    place = torch.full((len(source.classes),), -1)
    place[torch.from_numpy(chosen)] = torch.arange(len(chosen))
    some = source.select(torch.tensor(index, device=source.labels.device))
    return replace(some, labels=place.to(some.labels.device)[some.labels], classes=classes, split=None)
