"""Images as a step sees them: normalised, a few at a time, and augmented if asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.apps.data.images import ImageError, ImageSet, PixelStats


@dataclass(frozen=True)
class Augment:
    """Random augmentation: moves by up to `shift` of the side, changes brightness and contrast by up to `light`, and with
    `flip` mirrors half of the images.

    A mirrored digit, letter or traffic sign means something else, so `flip` is off by default.
    """

    shift: float = 0.1
    light: float = 0.2
    flip: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.shift < 0.5 and 0 <= self.light < 1):
            raise ValueError(f"{self}: give a shift from 0 to below 0.5 of the side, and a light from 0 to below 1.")

    def __call__(self, images: Tensor, numbers: np.ndarray) -> Tensor:
        """Augment images in 0…1, each with its own `RANDOM` numbers from 0 to 1."""
        height, width = images.shape[-2:]
        most = round(self.shift * width)
        top, left = np.floor(numbers[:, :2].T * (2 * most + 1)).astype(int)
        wide = F.pad(images, (most,) * 4, mode="reflect") if most else images  # uncovered borders show the mirror image
        out = torch.stack([one[:, y : y + height, x : x + width] for one, y, x in zip(wide, top, left, strict=True)])
        light = 1 + self.light * (2 * numbers[:, 2:4, None, None, None] - 1)
        contrast, brightness = torch.from_numpy(light).to(out).unbind(1)
        middle = out.mean((1, 2, 3), keepdim=True)
        out.sub_(middle).mul_(contrast).add_(middle * brightness).clamp_(0, 1)
        if self.flip:
            mirrored = torch.from_numpy(numbers[:, 4, None, None, None] < 0.5).to(out.device)
            out = torch.where(mirrored, out.flip(-1), out)
        return out


RANDOM = 5  # random numbers per image: down, right, contrast, brightness, mirrored


def pixel_stats_of(backbone: nn.Module) -> PixelStats | None:
    """The attribute `pixel_stats` of a backbone, if it is a mean and a standard deviation."""
    stats: Any = getattr(backbone, "pixel_stats", None)
    return stats if isinstance(stats, tuple) and len(stats) == 2 else None


def required_pixel_stats(backbone: nn.Module, given: PixelStats | None) -> PixelStats:
    """The given statistics, or those of the backbone; an error if there are none."""
    stats = given or pixel_stats_of(backbone)
    if stats is None:
        raise ImageError(
            "the backbone has no attribute pixel_stats, so its input cannot be normalised. Give pixel_stats=(mean, standard "
            "deviation) of the pixels that it was trained on."
        )
    return stats


@dataclass(frozen=True, eq=False)
class Views:
    """A set of images in batches of at most `batch`: (images, labels, share), normalised on access.

    With `augment`, each image is augmented at random, always alike for the same `view` and `seed`. The share of a batch is its
    number of images over the mean. So the mean over batches of share · (mean loss of the batch) is the mean loss of the set.
    """

    images: ImageSet
    batch: int
    pixel_stats: PixelStats
    augment: Augment | None = None
    view: int = 0
    seed: int = 0
    device: torch.device | None = None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch={self.batch}: give at least one image at a time.")
        if self.images.images.is_floating_point():
            raise ImageError("these images are normalised already. Give them as bytes, 0…255: they are normalised here.")

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for index in self.places():
            yield self.piece(index)

    def places(self) -> list[range]:
        """The positions of the images in each batch."""
        return [range(start, min(start + self.batch, len(self.images))) for start in range(0, len(self.images), self.batch)]

    def piece(self, index: range) -> tuple[Tensor, Tensor, Tensor]:
        """The images at these positions."""
        some = slice(index.start, index.stop)
        images = self.images.images[some].to(self.device).float().div_(255)
        if self.augment is not None:
            numbers = np.random.default_rng([self.seed, self.view]).random((len(self.images), RANDOM))
            images = self.augment(images, numbers[some])
        mean, std = (
            torch.as_tensor(part, dtype=torch.float32, device=self.device).reshape(-1, 1, 1) for part in self.pixel_stats
        )
        share = torch.tensor(len(index) * len(self) / len(self.images), device=self.device)
        return images.sub_(mean).div_(std), self.images.labels[some].to(self.device), share
