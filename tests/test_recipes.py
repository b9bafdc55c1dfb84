"""What single recipes promise beside the laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from zoo import sgd

from pliant import BudgetError, Session, measure, recipes


def test_bias_on_a_model_without_biases_is_refused_with_a_way_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    with (
        Session(model, sgd(model), lambda m, x: m(x).square().mean(), recipes.bias()) as session,
        pytest.raises(ValueError, match=r"this model has no bias.*recipes\.norm\(\).*recipes\.head\(\)"),
    ):
        session.step(torch.ones(3, 4))


class Int8(nn.Module):
    """A frozen layer whose weight is unpacked in the forward pass: the most memory of a step, with or without gradients."""

    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.arange(64 * 64).remainder(15).sub(7).reshape(64, 64).to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.float() / 64).t()


def test_a_memory_limit_on_a_model_with_int8_weights() -> None:
    model = nn.Sequential(Int8(), nn.ReLU(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2))
    how = model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).square().mean()
    half = Session(*how, replace(recipes.pliant(memory=0.5), cost=measure.counted))
    with half, pytest.raises(BudgetError, match="takes no more memory than inference here"):
        half.step(torch.ones(4, 64))
    with Session(*how, replace(recipes.pliant(memory="8kB", head_first=0), cost=measure.counted)) as session:
        session.step(torch.ones(4, 64))
        assert [unit.name for unit in session.selection.units] == ["4", "2"]
