"""Batches of every shape that a loader may yield: their tensors, their size."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from pliant.runtime import batches

X, Y = torch.arange(18.0).reshape(6, 3), torch.arange(6)


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Plain:
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor


@dataclass(slots=True)
class Slots:
    x: torch.Tensor
    y: torch.Tensor


SHAPES: dict[str, Any] = {
    "tuple": (X, Y),
    "list": [X, Y],
    "named tuple": Named(X, Y),
    "dict": {"x": X, "y": Y},
    "ordered dict": OrderedDict(x=X, y=Y),
    "nested": {"in": (X, [X, None]), "out": Y, "name": "six", "k": 3},
    "dataclass": Plain(X, Y),
    "frozen dataclass": Frozen(X, Y),
    "object": SimpleNamespace(x=X, y=Y),
    "object in tuple": (SimpleNamespace(x=X), Y),
    "user dict": UserDict(x=X, y=Y),
    "return type": torch.sort(X, dim=0),
    "dataclass with slots": Slots(X, Y),
    "defaultdict": defaultdict(list, x=X, y=Y),
    "class among the values": {"x": X, "y": Y, "kind": Plain},
}
every_shape = pytest.mark.parametrize("batch", SHAPES.values(), ids=SHAPES.keys())


@every_shape
def test_size_is_what_the_leading_dimensions_agree_on(batch: Any) -> None:
    assert batches.size(batch) == 6


@every_shape
def test_mapping_changes_every_tensor_and_leaves_the_original(batch: Any) -> None:
    before = [t.clone() for t in batches.tensors(batch)]
    doubled = batches.map_tensors(batch, lambda t: t * 2)
    assert type(doubled) is type(batch)
    assert all(torch.equal(d, 2 * b) for d, b in zip(batches.tensors(doubled), before, strict=True))
    assert all(torch.equal(t, b) for t, b in zip(batches.tensors(batch), before, strict=True))


@pytest.mark.parametrize("batch", [(X, Y[:4]), torch.tensor(1.0), "text", None, {"k": 3}, []])
def test_no_common_size(batch: Any) -> None:
    assert batches.size(batch) is None
    assert batches.size(batch) is None


def test_shapes_are_plain_lists() -> None:
    assert batches.shapes({"x": X, "rest": [Y, torch.tensor(0)]}) == [[6, 3], [6], []]


def test_what_is_no_tensor_passes_unchanged() -> None:
    module, text = torch.nn.Linear(2, 2), "abc"
    out = batches.map_tensors({"m": module, "t": text, "n": None, "i": 3}, lambda t: t * 2)
    assert out["m"] is module and out["t"] is text and out["n"] is None and out["i"] == 3
