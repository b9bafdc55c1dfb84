"""Batches of every shape that a loader may yield: their tensors, their size, their halves."""

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


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "user dict"])
def test_halves_have_the_same_structure_and_different_samples(name: str) -> None:
    batch = SHAPES[name]
    first, second = batches.halves(batch) or pytest.fail("not cut")
    assert type(first) is type(second) is type(batch)
    whole, a, b = (list(batches.tensors(part)) for part in (batch, first, second))
    assert all(torch.equal(torch.cat([p, q]), w) for p, q, w in zip(a, b, whole, strict=True))


@pytest.mark.parametrize("samples", range(12))
def test_halves_are_equal_and_never_smaller_than_two(samples: int) -> None:
    pair = batches.halves((torch.arange(samples), torch.zeros(samples, 2), torch.tensor(7)))
    if samples < 4:
        assert pair is None
    else:
        (first, _, scalar), (second, _, _) = pair or pytest.fail("not cut")
        assert first.tolist() == list(range(samples // 2))
        assert second.tolist() == list(range(samples // 2, 2 * (samples // 2)))
        assert scalar == 7


@pytest.mark.parametrize("samples", [4, 7, 8])
def test_halves_of_the_shape_of_a_batch_hold_the_same_samples_twice(samples: int) -> None:
    images = torch.randn(samples, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    batch = {"images": images, "labels": torch.arange(samples), "temperature": torch.tensor(2.0)}
    halves = batches.halves(batch), batches.halves(batch, as_whole=True)
    for half, whole in zip(*(pair or pytest.fail("not cut") for pair in halves), strict=True):
        assert batches.size(whole) == samples
        assert whole["images"].is_contiguous(memory_format=torch.channels_last)
        order = [i % (samples // 2) for i in range(samples)]
        assert torch.equal(whole["images"], half["images"][order]) and torch.equal(whole["labels"], half["labels"][order])
        assert torch.equal(whole["temperature"], batch["temperature"])


@pytest.mark.parametrize("batch", [(X, Y[:4]), torch.tensor(1.0), "text", None, {"k": 3}, []])
def test_no_common_size_no_halves(batch: Any) -> None:
    assert batches.size(batch) is None
    assert batches.halves(batch) is None


def test_shapes_are_plain_lists() -> None:
    assert batches.shapes({"x": X, "rest": [Y, torch.tensor(0)]}) == [[6, 3], [6], []]


def test_what_is_no_tensor_passes_unchanged() -> None:
    module, text = torch.nn.Linear(2, 2), "abc"
    out = batches.map_tensors({"m": module, "t": text, "n": None, "i": 3}, lambda t: t * 2)
    assert out["m"] is module and out["t"] is text and out["n"] is None and out["i"] == 3
