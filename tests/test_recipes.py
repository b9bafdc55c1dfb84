"""What single recipes promise beside the laws."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zoo import sgd

from pliant import Session, recipes


def test_bias_on_a_model_without_biases_is_refused_with_a_way_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    with (
        Session(model, sgd(model), lambda m, x: m(x).square().mean(), recipes.bias()) as session,
        pytest.raises(ValueError, match=r"this model has no bias.*recipes\.norm\(\).*recipes\.head\(\)"),
    ):
        session.step(torch.ones(3, 4))
