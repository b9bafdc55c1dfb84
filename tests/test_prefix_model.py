"""The prefix on an inference runtime, without one: how it steps aside, and that what it computes is used."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pliant import Session, recipes
from pliant.engine.kernels.arm import processor as arm
from pliant.engine.prefix import runtimes
from pliant.engine.prefix.int8 import SAMPLES, Int8, distance
from pliant.engine.prefix.prefix import Prefix
from pliant.engine.prefix.prefix_model import Export, InferenceRuntime, runtime_for
from pliant.engine.prefix.prefix_plan import PrefixPlan
from pliant.engine.prefix.runtimes import Loaded, OnOnnxRuntime, OnOpenVino


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    model[:2].requires_grad_(False)
    return model


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


class StandIn(InferenceRuntime):
    """Gives what the writing pass computed, for its batch alone."""

    def __init__(self) -> None:
        super().__init__([OnOnnxRuntime])
        self.runs = 0

    def build(self, plan: PrefixPlan, export: Export, batch: list[torch.Tensor]) -> Any:
        assert export.refusal is None
        runtime, rows, weights = self, export.rows(), plan.signature()

        class Model:
            def fits(self, plan: PrefixPlan) -> bool:
                return plan.signature() == weights

            def run(self, plan: PrefixPlan, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
                assert all(a is b for a, b in zip(given, batch, strict=True))
                runtime.runs += 1
                return tuple(row.clone() for row in rows)

        return Model()


def test_what_the_runtime_computes_is_used() -> None:
    model, batch, runtime = net(), torch.randn(4, 3, 5, 5), StandIn()
    prefix = Prefix(model, runtime=runtime)
    plain = torch.autograd.grad(loss(model, batch), model[3].parameters())
    for runs in (0, 0, 1, 2):
        ours = torch.autograd.grad(prefix.run(lambda: loss(model, batch), batch), model[3].parameters())
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True)) and runtime.runs == runs
    assert prefix.reasons == {}


def test_calls_of_the_prefix_do_not_run_again() -> None:
    model, batch, ran = net(), torch.randn(4, 3, 5, 5), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    prefix = Prefix(model, runtime=StandIn())
    for _ in range(3):
        ran.clear()
        with Watch():
            prefix.run(lambda: loss(model, batch), batch)
    assert ran.count("convolution") == 1 and "relu" not in ran


def test_new_statistics_are_seen() -> None:
    model, batch, runtime = net(), torch.randn(4, 3, 5, 5), StandIn()
    prefix = Prefix(model, runtime=runtime)
    for _ in range(3):
        prefix.run(lambda: loss(model, batch), batch)
    model[1].running_mean.add_(1.0)
    for runs in (1, 1, 2):  # the present way, another model, that model
        torch.testing.assert_close(prefix.run(lambda: loss(model, batch), batch), loss(model, batch))
        assert runtime.runs == runs


def test_values_that_somebody_keeps_are_computed() -> None:
    """A model that stores a frozen value would store a placeholder."""
    model, batch, kept = net(), torch.randn(4, 3, 5, 5), {}
    prefix = Prefix(model, runtime=StandIn())

    def forward() -> torch.Tensor:
        kept["value"] = model[0](batch)
        return loss(model[1:], kept["value"])

    for _ in range(4):
        prefix.run(forward, batch)
        assert torch.allclose(kept["value"], model[0](batch))
    assert prefix.reasons["runtime"] == "values of the prefix are still alive after the forward pass"


def test_without_a_package_sessions_run_as_before() -> None:
    model = net().requires_grad_(True)
    assert runtime_for(model) is None
    with Session(model, torch.optim.SGD(model.parameters(), 0.1), loss, recipes.only("3.*")) as session:
        session.step(torch.randn(4, 3, 5, 5))
        assert "runtime" not in session.why_not


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_a_package_that_does_not_import_is_told(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", ModuleType("onnx"))
    monkeypatch.setitem(sys.modules, missing, None)
    model, batch = net(), torch.randn(4, 3, 5, 5)
    prefix = Prefix(model, runtime=InferenceRuntime([OnOnnxRuntime]))
    for _ in range(3):
        torch.testing.assert_close(prefix.run(lambda: loss(model, batch), batch), loss(model, batch))
    assert prefix.reasons["runtime"].startswith("ONNX Runtime cannot run it: ModuleNotFoundError: ")


def images(count: int, size: int = 12) -> list[torch.Tensor]:
    return list(torch.randn(count, size, 3, 5, 5, generator=torch.Generator().manual_seed(0)))


def test_calibration_keeps_the_first_samples_and_ends_with_the_next_batch() -> None:
    seen, data = Int8(), images(5)
    for number, batch in enumerate(data):
        for _ in range(3):  # as in steps that are only measured
            seen.see([batch, batch])
        assert seen.calibration([batch]).is_complete == (number >= 3)
    first = torch.cat(data)[:SAMPLES]
    for size, count in ((12, 2), (5, 6), (32, 1), (40, 1)):  # of 32 samples
        kept = [one for (one,) in seen.calibration([data[0]]).batches(size)]
        assert len(kept) == count and all(len(one) == size for one in kept)
        assert torch.equal(torch.cat(kept), torch.cat([first, first])[: size * count])


def test_samples_that_cannot_be_told_apart_are_kept_in_their_batches() -> None:
    seen, data = Int8(), [[batch, torch.ones(3)] for batch in images(5)]
    for batch in data:
        seen.see(batch)
    assert seen.calibration(data[0]).is_complete
    for kept, batch in zip(seen.calibration(data[0]).batches(5), data, strict=False):
        assert all(map(torch.equal, kept, batch)) and all(a is not b for a, b in zip(kept, batch, strict=True))


def test_a_value_that_is_not_a_number_is_far_from_any() -> None:
    one, bad = torch.ones(2), torch.tensor([1.0, float("nan")])
    assert distance([one, bad], [2 * one, one]) != distance([one, bad], [2 * one, one]), "NaN"
    assert distance([one], [2 * one]) == 0.5


def test_batches_of_other_shapes_are_calibrated_apart_but_not_those_of_other_sizes() -> None:
    seen = Int8()
    first = seen.calibration(images(1))
    assert seen.calibration(images(1, size=3)) is first
    others = [seen.calibration([torch.zeros(2, 3, side, side)]) for side in range(6, 12)]
    assert len({one.number for one in [first, *others]}) == 7 and seen.calibration(images(1)) is first
    seen.calibration([torch.zeros(2)])
    seen.calibration([torch.zeros(2, dtype=torch.long)])  # one more than are kept
    assert seen.calibration(images(1)).number != first.number


def test_where_it_asks_for_int8_it_serves_other_models_too_but_not_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "_has", lambda name: True)
    for model, serves in ((nn.Conv2d(4, 4, 1), True), (nn.Linear(4, 4), False)):
        runtime = runtime_for(model, in_int8=True)
        assert runtime is not None and runtime.in_float32 == serves
        assert runtime.serves({}) and runtime.serves({"int8": "why"}) == serves and not runtime.serves({"runtime": "why"})


def test_profiles_of_sessions_in_int8_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told apart by the name of what makes a step ready."""
    monkeypatch.setattr(runtimes, "_has", lambda name: True)
    names = []
    for prefix in (None, "int8"):
        model = net().requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Session(model, optimizer, loss, recipes.only("3.*"), engine="prefix", prefix=prefix) as session:
            ready = session._engine.ready
            assert ready is not None
            names.append(ready.__qualname__)
    assert len(set(names)) == 2


@pytest.mark.parametrize("on_arm", [False, True])
@pytest.mark.parametrize(
    ("model", "serves"),
    [
        (nn.Conv2d(4, 4, 1), True),
        (nn.Conv2d(4, 4, 3, groups=4), True),
        (nn.Conv2d(4, 4, 3), False),
        (nn.Linear(4, 4), False),
    ],
)
def test_it_serves_the_models_that_it_was_measured_on(
    model: nn.Module, serves: bool, on_arm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "_has", lambda name: True)
    monkeypatch.setattr(arm, "SLOW_HERE", on_arm)
    assert (runtime_for(model) is not None) == serves


@pytest.mark.parametrize(
    ("installed", "kinds", "int8"),
    [
        ({"openvino", "onnxruntime", "onnx"}, (OnOpenVino, OnOnnxRuntime), True),
        ({"onnxruntime", "onnx"}, (OnOnnxRuntime,), True),
        ({"openvino", "onnx"}, (OnOpenVino,), False),
        ({"openvino", "onnxruntime"}, (), False),
        ({"onnx"}, (), False),
    ],
)
def test_those_that_are_installed_are_taken_the_faster_one_first(
    installed: set[str], kinds: tuple[type[Loaded], ...], int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "_has", installed.__contains__)
    assert runtimes.installed() == kinds and runtimes.has_int8() == int8
