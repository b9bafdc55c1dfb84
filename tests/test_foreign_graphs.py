"""Backward graphs as other people's models make them: views of strided tensors, random layers, losses that differentiate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from oracle import on_steady_device
from torch import nn

from pliant import Policy, Session, measure, recipes
from pliant.runtime.rng import rng_states, set_rng_states

Loss = Callable[[nn.Module, Any], torch.Tensor]
ENGINES = ["plain", "lean", "prefix", "lean+prefix"]


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def train(model: nn.Module, loss: Loss, batches: Sequence[Any], policy: Policy, engine: str = "plain") -> Session:
    """Steps of a session, each held against plain autograd on the same weights, parameters and random numbers."""
    session = Session(model, sgd(model), policy=policy, loss=loss, engine=engine)
    for batch in batches:
        twin, start = copy.deepcopy(model).requires_grad_(True), rng_states()
        value = session.step(batch)
        after = rng_states()
        set_rng_states(start)
        wanted = loss(twin, batch)
        wanted.backward()
        assert torch.equal(torch.get_rng_state(), after["cpu"])
        torch.testing.assert_close(value, wanted.detach())
        theirs = dict(twin.named_parameters())
        for name, param in model.named_parameters():
            mine = param.grad if name in session.selection.params else None
            assert param.grad is mine, f"{name} is not chosen"
            if mine is not None:
                torch.testing.assert_close(mine, theirs[name].grad)
    return session


class Views(nn.Module):
    """Reshapes a strided tensor. Autograd names that otherwise while a graph is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)[..., :16].reshape(-1, 16).reshape(4, 6, 16).mean(1))


class Words(nn.Module):
    """PyTorch's encoder, with its default dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))


@pytest.mark.parametrize("make", [Views, Words])
def test_names_of_views_do_not_count(make: Callable[[], nn.Module]) -> None:
    """PyTorch's own encoder, GPT-2, T5, Swin and others could not be timed."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 6, 8)
    profile = measure.timed(model, sgd(model), mean_square, x, repeats=1)
    assert profile.full.seconds > profile.base.seconds > 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [Views, Words])
def test_engines_agree_on_views(make: Callable[[], nn.Module], engine: str) -> None:
    torch.manual_seed(0)
    model = make().double()
    batches = [torch.randn(4, 6, 8, dtype=torch.float64) for _ in range(3)]
    train(model, mean_square, batches, on_steady_device(recipes.pliant(time=0.7)), engine)
