"""Images small enough to train on in a moment; some with a model, as files that the command can be given by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pliant.apps.data.images import ImageSet

NET = """
import os, signal
from torch import nn

calls = 0
trouble = None  # called with the number of each forward pass


class Net(nn.Sequential):
    def forward(self, x):
        global calls
        calls += 1
        if trouble is not None:
            trouble(calls)
        elif os.path.exists(os.environ.get("TINY_KILLED_AFTER", "")):  # a step or two after this file was written
            self.since = getattr(self, "since", 0) + 1
            if self.since == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def net(classes=4):
    conv = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU()
    return Net(*conv, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, classes))


def ten():
    return net(10)


def not_a_model():
    return 3
"""
MODEL, DATA = "tiny_net:net", "shapes.npz"


def write(folder: Path) -> None:
    """`tiny_net.py`, and `shapes.npz`: 4 kinds of 8×8 drawings, 24 of each, with some noise."""
    (folder / "tiny_net.py").write_text(NET)
    random = np.random.default_rng(0)
    kinds = np.zeros((4, 8, 8), bool)
    kinds[0, :4], kinds[1, :, :4], kinds[2, ::2], kinds[3, :, ::2] = True, True, True, True
    labels = np.repeat(np.arange(4), 24)
    drawings = kinds[labels] ^ (random.random((96, 8, 8)) < 0.2)
    bits = np.packbits(drawings.reshape(96, 64), axis=1)
    np.savez(folder / DATA, bits=bits, label=labels, classes=np.array(["top", "left", "rows", "columns"]))


def bars(classes: int, each: int, size: int = 32, seed: int = 0) -> ImageSet:
    """Images whose class can be seen: a noisy bar at a place of its own."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each)
    images = torch.randint(0, 90, (len(labels), 3, size, size), generator=generator, dtype=torch.uint8)
    wide = size // classes
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, :, label * wide : (label + 1) * wide] += 140
    return ImageSet(images, labels, tuple(f"bar {label}" for label in range(classes)))


def forget() -> None:
    """The module goes with the test that wrote it."""
    sys.modules.pop("tiny_net", None)


def on_forward(then: Callable[[int], None] | None) -> None:
    """From now on every forward pass of the model is told of."""
    import tiny_net

    tiny_net.trouble = then  # type: ignore[attr-defined]
    tiny_net.calls = 0  # type: ignore[attr-defined]
