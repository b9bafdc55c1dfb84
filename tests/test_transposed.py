"""Linear layers whose weight is stored as inputs × outputs, such as `Conv1D` of transformers: channels of them train."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn

from pliant import Part, Profile, Session, measure, recipes, score, units
from pliant.engine.slices.slices import Sliced, Slices
from pliant.graph.backward import Graph, read


class Conv1D(nn.Module):
    """As GPT-2 has it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs, dtype=torch.float64) * 0.3)
        self.bias = nn.Parameter(torch.randn(outputs, dtype=torch.float64) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.outputs)


class Product(nn.Module):
    """Without a bias, and perhaps the other way round."""

    def __init__(self, outputs: int, inputs: int, turned: bool = False) -> None:
        super().__init__()
        self.turned = turned
        shape = (outputs, inputs) if turned else (inputs, outputs)
        self.weight = nn.Parameter(torch.randn(*shape, dtype=torch.float64) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.t() if self.turned else self.weight)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def make() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = Conv1D(6, 4), nn.Tanh(), Product(6, 6), nn.Tanh(), Product(4, 6, turned=True), nn.Linear(4, 3).double()
    return nn.Sequential(*layers), torch.randn(5, 2, 4, dtype=torch.float64)


def graph() -> Graph:
    model, x = make()
    return read(model, loss, x)


def test_what_is_stored_as_inputs_and_outputs_is_read_off_the_graph() -> None:
    assert set(graph().transposed()) == {"0.weight", "2.weight"}


@pytest.mark.parametrize("axis", ["out", "in"])
def test_channels_of_any_linear_layer_are_found(axis: Literal["out", "in"]) -> None:
    found = {unit.name: unit.parts for unit in units.channels(axis, group=4)(graph())}
    if axis == "out":
        assert found["0[out 4:6]"] == (Part("0.weight", 1, (4, 5)), Part("0.bias", 0, (4, 5)))
        assert found["2[out 0:4]"] == (Part("2.weight", 1, (0, 1, 2, 3)),)
        assert found["5[out 0:3]"] == (Part("5.weight", 0, (0, 1, 2)), Part("5.bias", 0, (0, 1, 2)))
    else:
        assert found["0[in 0:4]"] == (Part("0.weight", 0, (0, 1, 2, 3)),)
        assert found["5[in 0:4]"] == (Part("5.weight", 1, (0, 1, 2, 3)),)
    assert not any(name.startswith("4[") for name in found)  # no function of its own multiplies by the transposed weight


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("layer", ["0", "2"])
def test_the_gradient_of_a_slice_is_that_of_plain_autograd(layer: str, dim: int) -> None:
    model, x = make()
    loss(model, x).backward()
    full = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    parts = [Part(f"{layer}.weight", dim, (1, 3))]
    if layer == "0" and dim == 1:
        parts.append(Part("0.bias", 0, (1, 3)))
    slices = Slices(dict(model.named_parameters()), parts)
    with Sliced(slices):
        value = loss(model, x)
    value.backward()
    for part in parts:
        assert part.dim is not None
        expected = full[part.param].index_select(part.dim, torch.tensor((1, 3)))
        torch.testing.assert_close(slices.grads()[part.param], expected)
    for name, param in model.named_parameters():
        if name not in slices.parts:
            assert param.grad is not None
            torch.testing.assert_close(param.grad, full[name])


def test_a_slice_of_inputs_keeps_less_and_one_of_outputs_the_whole_input() -> None:
    model, x = make()
    profile = measure.counted(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, x)
    kept = {axis: _kept(profile, units.channels(axis, group=3)(graph())) for axis in ("out", "in")}
    assert kept["out"] > 0
    assert kept["in"] == pytest.approx(kept["out"] / 2)


def _kept(profile: Profile, found: Any) -> float:
    """Bytes that a slice of layer 2 alone keeps of that layer's input."""
    unit = next(unit for unit in found if unit.name.startswith("2["))
    return sum(
        float(c.cost.bytes * c.share_of(*profile._pieces(unit.parts)["2.weight"]))
        for c in profile.charges
        if c.kind.value == "kept" and c.params == ("2.weight",)
    )


def test_the_potential_of_a_channel_is_that_of_its_output() -> None:
    """The same layer as nn.Linear has the same potentials."""
    model, x = make()
    linear = nn.Linear(4, 6).double()
    linear.load_state_dict({"weight": model[0].weight.detach().t(), "bias": model[0].bias.detach()})
    values = []
    for first in (model[0], linear):
        whole = nn.Sequential(first, *model[1:])
        found = units.channels(group=2, include=["0.*"])(read(whole, loss, x))
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        values.append({u.name: v for u, v in score.probe(score.fisher(), whole, optimizer, loss, x, found).items()})
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert len(set(values[0].values())) == 3


@pytest.mark.parametrize("axis", ["out", "in"])
def test_tinytrain_trains_channels_and_nothing_else(axis: Literal["out", "in"]) -> None:
    model, x = make()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model, optimizer, loss, recipes.tinytrain(memory=None, macs=0.6, axis=axis)) as session:
        for _ in range(2):
            session.step(x)
        parts = session.selection.parts
    assert any(part.param in ("0.weight", "2.weight") for part in parts)
    for name, param in model.named_parameters():
        moved = (param.detach() - before[name]) != 0
        chosen = torch.zeros_like(moved)
        for part in parts:
            if part.param == name and part.dim is not None:
                chosen.index_fill_(part.dim, torch.tensor(part.index), True)
        assert not (moved & ~chosen).any()
        assert moved.any() == chosen.any()
