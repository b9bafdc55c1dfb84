"""A classifier without weights of its own: a class is the mean of its images' features, and an image belongs to the nearest."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.apps.models import read_weights

SCALE = 10.0


class Prototypes(nn.Module):
    """A prototypical network with a cosine classifier: logits = scale · cos(features, prototype of each class).

    The features are the backbone's `embed`, or its forward where it has none. Prototypes are no parameters: `fit_` computes
    them without a gradient. The scale (an inverse temperature) is learned in meta-training; it is kept as its logarithm, so
    that it stays above zero. Snell et al., 2017; Gidaris and Komodakis, 2018.

    >>> model = Prototypes(nn.Flatten())
    >>> images = torch.eye(2).reshape(2, 1, 1, 2)
    >>> model.fit_([(images, torch.tensor([1, 0]))], classes=2)
    >>> model(images).argmax(1)
    tensor([1, 0])
    """

    prototypes: Tensor

    def __init__(self, backbone: nn.Module, scale: float = SCALE) -> None:
        super().__init__()
        if not scale > 0:
            raise ValueError(f"scale={scale}: cosines are multiplied with more than 0.")
        self.backbone = backbone
        like = next((tensor for tensor in backbone.parameters()), torch.zeros(()))
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale), device=like.device))
        self.register_buffer("prototypes", torch.zeros(0, 0, device=like.device), persistent=False)

    @property
    def scale(self) -> Tensor:
        return self.log_scale.exp()

    def embed(self, images: Tensor) -> Tensor:
        """Images → one vector of features each."""
        features: Any = self.backbone.embed if hasattr(self.backbone, "embed") else self.backbone
        return features(images).flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        """Images → logits of the classes that were fitted."""
        return self.logits(self.embed(images), self.prototypes)

    def logits(self, features: Tensor, prototypes: Tensor) -> Tensor:
        return self.scale * (F.normalize(features, dim=1) @ F.normalize(prototypes, dim=1).T)

    @torch.no_grad()
    def fit_(self, batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> None:
        """Prototypes of all classes from (images, labels), batch after batch: nothing is kept but their sums."""
        self.take_(((self.embed(images), labels) for images, labels in batches), classes)

    @torch.no_grad()
    def take_(self, batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> None:
        """The same from (features, labels) that were computed elsewhere."""
        means = class_means(batches, classes)
        if self.prototypes.shape == means.shape:
            self.prototypes.copy_(means)  # in place: whoever follows the model's memory goes on
        else:
            self.prototypes = means


def class_means(batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> Tensor:
    """The mean of each class over (features, labels). A class without any is all zeros, near to nothing."""
    sums: Tensor | None = None
    for features, labels in batches:
        if sums is None:
            sums = features.new_zeros(classes, features.shape[1])
            counts = features.new_zeros(classes, 1)
        sums = sums.index_add(0, labels, features)
        counts = counts.index_add(0, labels, torch.ones_like(features[:, :1]))
    if sums is None:
        raise ValueError("there are no images to make prototypes of.")
    return sums / counts.clamp(min=1)


def scale_of(path: str | os.PathLike[str]) -> float:
    """The scale that was learned with the weights of this file, or the usual one where it tells of none."""
    return float(read_weights(path)[1].get("scale", SCALE))
