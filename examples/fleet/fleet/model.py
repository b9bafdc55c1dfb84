"""A small convolutional network with an exit after every block, and what a client trains it with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from fleet.data import Data, loss
from pliant import models
from pliant.integrations.flower import Local

WIDTHS = (16, 16, 24, 24, 32, 32)
HALVED = (2, 4)  # blocks that halve the image
STARTS = (0, 3, 6, 10, 13, 16)  # of the six blocks, among the seventeen of MobileNetV2
CLIP = 1.0


class Block(nn.Module):
    """Convolution, norm, ReLU. Group norm: statistics of a batch differ too much between clients."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm = nn.GroupNorm(4, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Exit(nn.Module):
    """The mean over the image, then one linear layer."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mean((2, 3)))


class Net(nn.Module):
    """Six blocks. `exits[i]` classifies after block i; the last of them is the head."""

    def __init__(self, blocks: Iterable[nn.Module], widths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.exits = nn.ModuleList(Exit(width, classes) for width in widths)

    def forward(self, x: torch.Tensor, block: int | None = None) -> torch.Tensor:
        last = len(self.blocks) - 1 if block is None else block
        for each in self.blocks[: last + 1]:
            x = each(x)
        return self.exits[last](x)


def net(data: Data, seed: int) -> Net:
    """A small network with random weights, or MobileNetV2-0.35 with those of a file. New exits are random in both."""
    torch.manual_seed(seed)
    if not data.weights:
        pairs = zip((data.inputs.shape[1], *WIDTHS[:-1]), WIDTHS, strict=True)
        return Net((Block(a, b, 2 if i in HALVED else 1) for i, (a, b) in enumerate(pairs)), WIDTHS, data.classes)
    base = models.load_folded(data.weights)
    ends = (*STARTS[1:], len(base.blocks))
    blocks = [nn.Sequential(*base.blocks[a:b]) for a, b in zip(STARTS, ends, strict=True)]
    blocks[0] = nn.Sequential(base.stem, nn.ReLU6(inplace=True), *blocks[0])
    with torch.no_grad():
        widths, x = [], data.inputs[:1]
        for block in blocks:
            x = block(x)
            widths.append(x.shape[1])
    return Net(blocks, widths, data.classes)


def local(
    model: Net, data: Data, mine: np.ndarray, *, rate: float, batch: int, steps: int, slowdown: float = 1.0, decay: float = 1e-4
) -> Local:
    """What the client that holds these samples trains with."""
    last = len(model.blocks) - 1
    return Local(
        model,
        torch.optim.SGD(model.parameters(), lr=rate, weight_decay=decay),
        loss,
        partial(batches, data, mine, batch),
        len(mine),
        steps,
        blocks=tuple((f"blocks.{i}.*", *([f"exits.{i}.*"] if i == last else [])) for i in range(last + 1)),
        exits=tuple((f"exits.{i}.*",) for i in range(last + 1)),
        loss_at=lambda block: partial(loss, block=block),
        clip=CLIP,
        slowdown=slowdown,
    )


def batches(data: Data, mine: np.ndarray, size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random batches without end, all of one size: a client with fewer samples sees some of them twice."""
    rng = np.random.default_rng(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < size:
            waiting.extend(rng.permutation(mine).tolist())
        index = torch.tensor(waiting[:size])
        del waiting[:size]
        yield data.inputs[index], data.labels[index]
