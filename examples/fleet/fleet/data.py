"""Images or sounds for a fleet: scikit-learn's digits, or a data set in a folder; and who holds which of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

FILES = {"signs": "gtsrb43_64.npz", "birds": "cub200_128.npz", "spoken": "fsdd_mfcc.npz"}
PIXELS = {"signs": 16, "birds": 64}
KINDS = 30  # of birds: the first ones
WEIGHTS = "weights/mbv2_w0.35_int8.safetensors"  # birds begin with a network that knows ImageNet


@dataclass(frozen=True, eq=False)
class Data:
    """Inputs and labels to learn from, and others to test on."""

    inputs: torch.Tensor
    labels: torch.Tensor
    test_inputs: torch.Tensor
    test_labels: torch.Tensor
    classes: int
    weights: str = ""  # the file of a network to begin with; without one, it is small and random


@cache
def load(name: str = "digits", folder: str = "") -> Data:
    """`digits` comes with scikit-learn; `signs`, `birds` and `spoken` are .npz files of a folder."""
    if name == "digits":
        from sklearn.datasets import load_digits

        raw = load_digits()
        inputs, labels = torch.from_numpy(raw.images).float()[:, None] / 16, torch.from_numpy(raw.target).long()
        test = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)) % 5 == 0)
    elif name not in FILES:
        raise SystemExit(f"task={name!r} is not known here: choose digits, {', '.join(FILES)}.")
    elif not folder:
        raise SystemExit(f"task={name!r} is read from a folder: give --data DIR, or data in the run's settings.")
    else:
        inputs, labels, test = _read(Path(folder) / FILES[name], PIXELS.get(name))
    weights = ""
    if name == "birds":
        some = labels < KINDS
        inputs, labels, test, weights = inputs[some] * 2 - 1, labels[some], test[some], str(Path(folder) / WEIGHTS)
    else:
        mean, std = inputs[~test].mean((0, 2, 3), keepdim=True), inputs[~test].std((0, 2, 3), keepdim=True)
        inputs = (inputs - mean) / std.clamp_min(1e-6)
    return Data(inputs[~test], labels[~test], inputs[test], labels[test], int(labels.max()) + 1, weights)


def _read(path: Path, pixels: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, labels, and which of them are for testing."""
    if pixels is None:  # an array of numbers, no images
        with np.load(path) as held:
            inputs, labels = torch.from_numpy(held["x"]).float(), torch.from_numpy(held["label"].astype(np.int64))
            return inputs, labels, torch.from_numpy(held["split"] == 2)
    from pliant import images

    found = images.packed(path, pixels)
    if found.split is None:
        raise SystemExit(f"{path} does not say which of its images are for testing.")
    return found.images.float() / 255, found.labels, found.split == 2


def split(labels: torch.Tensor, clients: int, alpha: float, seed: int, least: int = 8) -> list[np.ndarray]:
    """Indices of each client's samples: the shares of every class are drawn from a Dirichlet distribution.

    A small `alpha` gives most clients a few classes. Who has fewer than `least` samples gets some of the one with the most.
    """
    rng, values = np.random.default_rng(seed), labels.numpy()
    if len(values) < least * clients:
        raise SystemExit(f"{len(values)} samples cannot give each of {clients} clients {least}: use fewer clients.")
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(values):
        mine = rng.permutation(np.flatnonzero(values == label))
        cuts = (np.cumsum(rng.dirichlet([alpha] * clients))[:-1] * len(mine)).astype(int)
        for part, some in zip(parts, np.split(mine, cuts), strict=True):
            part.extend(some.tolist())
    for part in parts:
        while len(part) < least:
            most = max(parts, key=len)
            part.append(most.pop(int(rng.integers(len(most)))))
    return [np.array(sorted(part)) for part in parts]


def accuracy(model: torch.nn.Module, data: Data) -> float:
    """The share of test samples whose class is found."""
    was = model.training
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(piece).argmax(1) for piece in data.test_inputs.split(500)])
    model.train(was)
    return float((found == data.test_labels).float().mean())


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor], block: int | None = None) -> torch.Tensor:
    """Cross-entropy at the exit after a block, or at the head."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs, block), labels)
