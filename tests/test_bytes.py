"""Bytes: what is predicted of a lean step against what is measured, and a limit that measured steps correct."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import sgd

from pliant import measure
from pliant.apply import Norms, apply_
from pliant.engine import ENGINES
from pliant.graph import read, trainable
from pliant.types import Part, Unit

Batch = tuple[torch.Tensor, torch.Tensor]


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def data(size: int = 4) -> Batch:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, 32, 32, generator=draw), torch.randint(0, 5, (size,), generator=draw)


class Block(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int, clip: bool) -> None:
        super().__init__()
        widths = (inputs, outputs // 2, outputs // 2, outputs)
        sizes = (1, 3, 1)
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, k, stride if k == 3 else 1, k // 2, bias=False)
            for i, o, k in zip(widths, widths[1:], sizes, strict=False)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for o in widths[1:])
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()
        self.act: nn.Module = nn.ReLU6(inplace=True) if clip else nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = norm(conv(y))
            y = self.act(y) if norm is not self.norms[-1] else y
        return self.act(y + self.shortcut(x))


class Residual(nn.Module):
    """Stages as in a ResNet: while one runs, the caller's variable still names what the stage before it gave."""

    def __init__(self, clip: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(Block(3, 32, 1, clip), Block(32, 32, 1, clip))
        self.second = nn.Sequential(Block(32, 32, 2, clip), *(Block(32, 32, 1, clip) for _ in range(5)))
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.second(x)
        return self.head(x.mean((2, 3)))


CHOICES = {
    "head": "head",
    "the second stage": "head second",
    "within the second stage": "head second.2.convs.1 second.3.convs second.5.convs.0",
    "the first stage": "head first.0.convs",
    "norms": "head second.1.norms second.4.norms first.1.norms.0",
    "everything": "head second first",
}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_the_peak_of_a_lean_step_is_the_predicted_one(choice: str, clip: bool) -> None:
    torch.manual_seed(0)
    model, batch = Residual(clip), data()
    optimizer, among = sgd(model), trainable(model)
    profile = measure.timed(model, optimizer, classify, batch, repeats=1).on("lean")
    chosen = [name for name in among if name.startswith(tuple(CHOICES[choice].split()))]
    apply_(among, optimizer, chosen)
    Norms(model, "chosen").hold_(among, chosen)
    peak, alone = measure.peak_bytes(model, optimizer, classify, batch, around=ENGINES["lean"])
    predicted = profile.cost([Unit("*", tuple(Part(name) for name in chosen))]).bytes
    assert predicted == pytest.approx(peak - alone, rel=0.03, abs=4096), (predicted, peak - alone)


class Clipped(nn.Module):
    """Without norms, and each convolution of a wide output is followed by one of a small: nothing is as high as a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(3, 4, 3, padding=1)
        self.wide = nn.Conv2d(4, 64, 3, padding=1)
        self.small = nn.Conv2d(64, 4, 3, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.hardtanh(self.wide(self.narrow(x)), 0.0, 6.0, inplace=True)
        return self.head(self.small(x).mean((2, 3)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("choice", ["head", "head small", "head narrow", "head wide"])
def test_a_copy_that_is_made_for_backward_is_not_part_of_inference(choice: str, engine: str) -> None:
    torch.manual_seed(0)
    model, batch = Clipped(), data()
    optimizer, among = sgd(model), trainable(model)
    profile = measure.timed(model, optimizer, classify, batch, repeats=1).on(engine)
    chosen = [name for name in among if name.startswith(tuple(choice.split()))]
    apply_(among, optimizer, chosen)
    peak, alone = measure.peak_bytes(model, optimizer, classify, batch, around=ENGINES[engine])
    assert max(profile.moments) == pytest.approx(alone, rel=0.01)
    predicted = profile.cost([Unit("*", tuple(Part(name) for name in chosen))]).bytes
    assert predicted == pytest.approx(peak - alone, rel=0.03, abs=4096), (predicted, peak - alone)


def test_a_loss_that_differentiates_is_read() -> None:
    """What it wants back is kept for it."""

    def with_penalty(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + slope.square().mean()

    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.Tanh(), nn.Linear(8, 5))
    graph = read(model, with_penalty, data())
    assert {name for node in graph.nodes for name in node.params} == {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert max(graph.inference) > 0
