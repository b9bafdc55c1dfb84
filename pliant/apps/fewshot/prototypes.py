"""A classifier without weights: each class is the mean of its features, and an image gets the class of the nearest mean."""

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

    The features come from the backbone's `embed`, or from its `forward` if it has no `embed`. Prototypes are not parameters:
    `fit_` computes them without a gradient. The scale (an inverse temperature) is learned in meta-training. It is stored as its
    logarithm, so that it stays positive. Snell et al., 2017; Gidaris and Komodakis, 2018.

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
            raise ValueError(f"scale={scale}: give a scale above 0.")
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
        """Images → logits of the fitted classes."""
        return self.logits(self.embed(images), self.prototypes)

    def logits(self, features: Tensor, prototypes: Tensor) -> Tensor:
        return self.scale * (F.normalize(features, dim=1) @ F.normalize(prototypes, dim=1).T)

    @torch.no_grad()
    def fit_(self, batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> None:
        """Compute the prototypes from batches of (images, labels); only their sums are kept in memory."""
        self.fit_features_(((self.embed(images), labels) for images, labels in batches), classes)

    @torch.no_grad()
    def fit_features_(self, batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> None:
        """Compute the prototypes from batches of (features, labels)."""
        means = class_means(batches, classes)
        if self.prototypes.shape == means.shape:
            self.prototypes.copy_(means)  # in place, so that memory measurements still see the same tensor
        else:
            self.prototypes = means


def class_means(batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> Tensor:
    """The mean feature of each class. A class without images gets zeros, whose cosine with any image is 0."""
    sums: Tensor | None = None
    for features, labels in batches:
        if sums is None:
            sums = features.new_zeros(classes, features.shape[1])
            counts = features.new_zeros(classes, 1)
        sums = sums.index_add(0, labels, features)
        counts = counts.index_add(0, labels, torch.ones_like(features[:, :1]))
    if sums is None:
        raise ValueError("there are no images to compute prototypes from.")
    return sums / counts.clamp(min=1)


def scale_of(path: str | os.PathLike[str]) -> float:
    """The scale in the metadata of a weight file, or the default one."""
    return float(read_weights(path)[1].get("scale", SCALE))
