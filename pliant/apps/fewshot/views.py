"""Images as a step sees them: normalised a few at a time, and slightly changed copies that stand in for images to come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.apps.data.images import ImageError, ImageSet, Norm


@dataclass(frozen=True)
class Augment:
    """Random changes that leave an image what it is: moved by up to a `shift` of its side, brighter or darker and of more or
    less contrast by up to `light`, and with `flip` mirrored half of the time.

    Mirrored digits, letters and traffic signs are other ones, so `flip` is for the caller to ask for.
    """

    shift: float = 0.1
    light: float = 0.2
    flip: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.shift < 0.5 and 0 <= self.light < 1):
            raise ValueError(f"{self}: shift lies from 0 to below 0.5 of the side, light from 0 to below 1.")

    def __call__(self, images: Tensor, numbers: np.ndarray) -> Tensor:
        """Images in 0…1, each changed by its own `RANDOM` numbers from 0 to 1."""
        height, width = images.shape[-2:]
        most = round(self.shift * width)
        top, left = np.floor(numbers[:, :2].T * (2 * most + 1)).astype(int)
        wide = F.pad(images, (most,) * 4, mode="reflect") if most else images  # what is uncovered shows its mirror image
        out = torch.stack([one[:, y : y + height, x : x + width] for one, y, x in zip(wide, top, left, strict=True)])
        light = 1 + self.light * (2 * numbers[:, 2:4, None, None, None] - 1)
        contrast, brightness = torch.from_numpy(light).to(out).unbind(1)
        middle = out.mean((1, 2, 3), keepdim=True)
        out.sub_(middle).mul_(contrast).add_(middle * brightness).clamp_(0, 1)
        if self.flip:
            mirrored = torch.from_numpy(numbers[:, 4, None, None, None] < 0.5).to(out.device)
            out = torch.where(mirrored, out.flip(-1), out)
        return out


RANDOM = 5  # numbers that one change takes: down, right, contrast, brightness, mirrored


def norm_of(backbone: nn.Module) -> Norm | None:
    """What a backbone says that its input is normalised with: an attribute `norm` that is a mean and a standard deviation."""
    told: Any = getattr(backbone, "norm", None)
    return told if isinstance(told, tuple) and len(told) == 2 else None


def needed_norm(backbone: nn.Module, given: Norm | None) -> Norm:
    """What was given, or what the backbone says; an error where nobody says."""
    norm = given or norm_of(backbone)
    if norm is None:
        raise ImageError("nobody says what the backbone's input is normalised with: give norm=(mean, standard deviation).")
    return norm


@dataclass(frozen=True, eq=False)
class Views:
    """A set of images in pieces of at most `batch`: (images, labels, share), normalised when they are asked for.

    With `augment`, each image is changed at random; the same `view` of the same `seed` is the same every time. A piece's share
    is its number of images over the mean, so that the mean over pieces of share · (mean loss of the piece) is that of the set.
    """

    images: ImageSet
    batch: int
    norm: Norm
    augment: Augment | None = None
    view: int = 0
    seed: int = 0
    device: torch.device | None = None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch={self.batch}: at least one image at a time.")
        if self.images.images.is_floating_point():
            raise ImageError("images are normalised here: give them as bytes, 0…255, and the backbone's norm.")

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for index in self.places():
            yield self.piece(index)

    def places(self) -> list[range]:
        """The positions of the images in each piece."""
        return [range(start, min(start + self.batch, len(self.images))) for start in range(0, len(self.images), self.batch)]

    def piece(self, index: range) -> tuple[Tensor, Tensor, Tensor]:
        """The images at these positions."""
        some = slice(index.start, index.stop)
        images = self.images.images[some].to(self.device).float().div_(255)
        if self.augment is not None:
            numbers = np.random.default_rng([self.seed, self.view]).random((len(self.images), RANDOM))
            images = self.augment(images, numbers[some])
        mean, std = (torch.as_tensor(part, dtype=torch.float32, device=self.device).reshape(-1, 1, 1) for part in self.norm)
        share = torch.tensor(len(index) * len(self) / len(self.images), device=self.device)
        return images.sub_(mean).div_(std), self.images.labels[some].to(self.device), share
