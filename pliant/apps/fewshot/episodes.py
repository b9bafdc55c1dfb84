"""Tasks to practise on: some classes of a set, a few images of each to learn from, and others to be tested with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from pliant.apps.data.images import ImageError, ImageSet


@dataclass(frozen=True, eq=False)
class Episode:
    """One task: images to learn from and images to be tested with, of the same classes, numbered from 0."""

    support: ImageSet
    query: ImageSet


@dataclass(frozen=True)
class Sampling:
    """Tasks of various ways and various shots, as Meta-Dataset draws them (Triantafillou et al., 2020, arXiv 1903.03096).

    The number of classes lies in `ways`, or ends at what the set has. Every class is tested with `query` images, or with half
    of the smallest class. The support set has a random size, at most `support` images and `per_class` of one class, and is
    imbalanced: the shots of a class follow its size times a factor from ½ to 2, one at the least.
    """

    ways: tuple[int, int] = (5, 50)
    support: int = 500
    per_class: int = 100
    query: int = 10

    def __post_init__(self) -> None:
        if not 2 <= self.ways[0] <= self.ways[1] or self.support < self.ways[1] or min(self.per_class, self.query) < 1:
            raise ValueError(f"{self}: from 2 classes up, and at least one image of each to learn from and one to test with.")

    def draw(self, source: ImageSet, seed: int, number: int = 0) -> Episode:
        """Task `number` of this seed: the same for the same two."""
        rng = np.random.default_rng([seed, number])
        labels = source.labels.cpu().numpy()
        sizes = np.bincount(labels, minlength=len(source.classes))
        there = np.flatnonzero(sizes >= 2)
        if len(there) < self.ways[0]:
            raise ImageError(
                f"a task takes {self.ways[0]} classes of two images or more, and this set has {len(there)}. Give a larger set, "
                f"or Sampling(ways=…) with fewer."
            )
        ways = int(rng.integers(self.ways[0], min(self.ways[1], len(there)) + 1))
        chosen = rng.choice(there, ways, replace=False)
        tested = min(self.query, int(sizes[chosen].min()) // 2)
        learned: list[int] = []
        asked: list[int] = []
        for label, shots in zip(chosen, self._shots(sizes[chosen] - tested, sizes[chosen], rng), strict=True):
            mine = rng.permutation(np.flatnonzero(labels == label)).tolist()
            asked += mine[:tested]
            learned += mine[tested : tested + shots]
        classes = tuple(source.classes[label] for label in chosen)
        return Episode(*(_renumbered(source, index, chosen, classes) for index in (learned, asked)))

    def _shots(self, left: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> list[int]:
        """How many images of each class to learn from, of those that are left beside the tested ones."""
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
