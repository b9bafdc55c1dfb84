"""Convolutions of ours, where PyTorch's are slow: the same results, the same gradients, and only where they serve."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from pliant import Part, Session, measure, recipes, units
from pliant.cost import node_timing as passes
from pliant.cost.step_timing import StepTiming
from pliant.engine.engine import Engine
from pliant.engine.kernels.arm import depthwise, pointwise
from pliant.engine.kernels.arm import processor as arm
from pliant.engine.kernels.switch import Swapped, is_slow_here
from pliant.engine.slices.slices import Slices
from pliant.graph.backward import walk
from pliant.runtime.optimizer_step import Update
from tests.zoo import sgd


@pytest.fixture(autouse=True)
def arm_processor() -> Any:
    with patch.object(arm, "SLOW_HERE", True):
        yield


def inverted() -> nn.Module:
    """1×1, depthwise with and without a stride, 1×1, as in networks for small devices."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU6(),
        nn.Conv2d(6, 12, 1, bias=False),
        nn.BatchNorm2d(12),
        nn.Conv2d(12, 12, 3, 1, 1, groups=12),
        nn.ReLU6(),
        nn.Conv2d(12, 12, 3, 2, 1, groups=12, bias=False),
        nn.Conv2d(12, 6, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def some(samples: int = 4, side: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 3, side, side), torch.randint(0, 4, (samples,))


# ---------------------------------------------------------------- 1×1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("samples", [1, 3, 17])
@pytest.mark.parametrize("side", [(1, 1), (2, 3), (8, 9), (17, 20)])
def test_products_are_the_convolution(side: tuple[int, int], samples: int, bias: bool) -> None:
    torch.manual_seed(0)
    input, weight = torch.randn(samples, 5, *side, dtype=torch.float64), torch.randn(7, 5, 1, 1, dtype=torch.float64)
    leaves = [leaf.requires_grad_() for leaf in (input, weight, torch.randn(7, dtype=torch.float64)) if bias or leaf.dim() > 1]
    shift = leaves[2] if bias else None
    outs = [call(input, weight, shift, (1, 1), (0, 0), (1, 1), 1) for call in (torch.conv2d, pointwise.convolve)]
    torch.testing.assert_close(*outs)
    assert outs[1].is_contiguous()
    grad = torch.randn_like(outs[0])
    for one, other in zip(*(torch.autograd.grad(out, leaves, grad) for out in outs), strict=True):
        torch.testing.assert_close(one, other)
        assert one.shape == other.shape


@pytest.mark.parametrize("side", [3, 9, 17])
def test_products_differentiate_twice(side: int) -> None:
    torch.manual_seed(0)
    input, weight = (torch.randn(*shape).double().requires_grad_() for shape in ((2, 3, side, side), (4, 3, 1, 1)))
    seconds = []
    for call in (torch.conv2d, pointwise.convolve):
        (first,) = torch.autograd.grad(call(input, weight).square().sum(), weight, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().mean(), (input, weight)))
    for one, other in zip(*seconds, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("samples", [1, 17])
@pytest.mark.parametrize("outputs", [1, 5])
@pytest.mark.parametrize("side", [1, 4, 8, 17])
def test_what_a_product_gives_may_be_changed_in_place(side: int, outputs: int, samples: int) -> None:
    torch.manual_seed(0)
    input, weight = torch.randn(samples, 3, side, side).double(), torch.randn(outputs, 3, 1, 1).double().requires_grad_()
    grads = []
    for call in (torch.conv2d, pointwise.convolve):
        F.relu_(call(input, weight)).square().sum().backward()
        grads.append(weight.grad)
        weight.grad = None
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", [depthwise, pointwise])
def test_gradients_are_as_exact_as_the_forward_pass_was(kind: Any) -> None:
    input, weight = torch.randn(17, 4, 8, 8), torch.randn(4, 1 if kind is depthwise else 4, 1, 1, requires_grad=True)
    grads = []
    for autocast in (False, True):
        out = kind.convolve(input, weight, None, 1, 0, 1, 4 if kind is depthwise else 1).square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            grads += torch.autograd.grad(out, [weight])
    assert torch.equal(*grads)


def test_products_serve_only_what_they_know() -> None:
    input, weight = torch.randn(4, 6, 2, 2), torch.randn(5, 6, 1, 1, requires_grad=True)

    def serves(input: Any = input, weight: Any = weight, *more: Any) -> bool:
        return pointwise.serves(input, weight, None, *more)

    with patch.object(torch, "get_num_threads", lambda: 1):
        assert serves() and serves(input.clone().requires_grad_(), weight.detach())
        assert not serves(weight=weight.detach())  # nothing is differentiated
        assert not serves(input[:3]) and not serves(torch.randn(8, 6, 5, 4))  # PyTorch's own are as fast
        assert serves(torch.randn(16, 6, 5, 4))
        assert (
            not serves(input, weight, (2, 2))
            and not serves(input, weight, (1, 1), (1, 1))
            and not serves(input, weight, 1, "same")
        )
        assert not serves(input, torch.randn(5, 3, 1, 1, requires_grad=True), 1, 0, 1, 2)
        assert not serves(input, torch.randn(5, 6, 3, 3, requires_grad=True), 1, 0)
        assert not serves(input.double(), weight.double()) and not serves(input[0], weight)
        assert not serves(input.contiguous(memory_format=torch.channels_last))
        assert pointwise.serves(input, weight, torch.randn(5)) and serves(input, weight, np.int64(1))
        assert not pointwise.serves(input, weight, torch.randn(1)) and not pointwise.serves(
            input, weight, torch.randn(5).double()
        )
        with torch.no_grad():
            assert not serves()
        with torch.autocast("cpu", torch.bfloat16):
            assert not serves()
        with forward_ad.dual_level():
            assert not serves()
        with patch.object(arm, "SLOW_HERE", False):
            assert not serves()
    with patch.object(torch, "get_num_threads", lambda: 2):
        assert serves(torch.randn(1, 6, 5, 4))


# ---------------------------------------------------------------- what is asked


@pytest.mark.parametrize("kind", [depthwise, pointwise])
def test_a_pass_computes_only_what_it_is_asked_for(kind: Any) -> None:
    """As PyTorch's own functions do: prices are differences between such passes."""
    input, groups = torch.randn(2, 4, 5, 5, requires_grad=True), 4 if kind is depthwise else 1
    weight = torch.randn(4, 1 if kind is depthwise else 4, 1, 1, requires_grad=True)
    bias = torch.randn(4, requires_grad=True)

    def out() -> torch.Tensor:
        return kind.convolve(input * 1, weight, bias, 1, 0, 1, groups).square().sum()

    with patch.object(kind, "_of_weight", side_effect=ZeroDivisionError):
        torch.autograd.grad(out(), [input])
        out().backward(inputs=[input])
        for ask in (lambda: torch.autograd.grad(out(), [weight]), lambda: out().backward()):
            with pytest.raises(ZeroDivisionError):
                ask()
    to_input = "of_input" if kind is depthwise else "_product"
    value = out()
    with patch.object(kind, to_input, side_effect=ZeroDivisionError):
        assert torch.autograd.grad(value, [weight])[0].shape == weight.shape


# ---------------------------------------------------------------- a forward pass


@pytest.mark.parametrize("samples", [2, 4, 17])
@pytest.mark.parametrize("chosen", [("11.",), ("3.", "11."), ("0.", "5.", "8."), ("7.",), ("",)])
def test_swapped_passes_have_the_same_gradients(chosen: tuple[str, ...], samples: int) -> None:
    batch, found = some(samples), []
    for around in (nullcontext, Swapped):
        model = inverted()
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith(chosen))
        with around():
            value = loss(model, batch)
        value.backward()
        found.append({name: param.grad for name, param in model.named_parameters()})
        found[-1]["loss"] = value.detach()
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][name], rtol=1e-4, atol=1e-5, msg=name)


def names(value: torch.Tensor) -> set[str]:
    waiting, seen = [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


def test_frozen_convolutions_on_the_way_are_swapped_and_keep_no_input() -> None:
    model, batch = inverted(), some(17)
    for name, param in model.named_parameters():
        param.requires_grad_(name == "0.weight")
    assert not {"_DepthwiseBackward", "_PointwiseBackward"} & names(loss(model, batch))
    with Swapped():
        value, way = loss(model, batch), model[3](model[0](batch[0]))
    assert {"_DepthwiseBackward", "_PointwiseBackward"} <= names(value)
    node: Any = way.grad_fn
    assert [tensor if tensor is None else tensor.shape for tensor in node.saved_tensors] == [None, model[3].weight.shape]


def test_transforms_of_a_model_run_as_ever() -> None:
    model, (images, _) = inverted().eval(), some(17)
    both = torch.stack([images, images.flip(3)])
    expected = torch.func.vmap(model)(both)
    with Swapped():
        found = torch.func.vmap(model)(both)
    torch.testing.assert_close(found, expected)


def test_nothing_is_swapped_in_a_checkpoint() -> None:
    """What it keeps is computed again in backward, where nothing is swapped: the two must agree on what there is to keep."""
    model, (images, labels) = inverted(), some(17)
    for name, param in model.named_parameters():
        param.requires_grad_(name in ("0.weight", "11.weight"))
    images.requires_grad_()
    with Swapped():
        F.cross_entropy(checkpoint(model, images, use_reentrant=False), labels).backward()
    twin, again = inverted(), images.detach().requires_grad_()
    F.cross_entropy(twin(again), labels).backward()
    torch.testing.assert_close(images.grad, again.grad)


# ---------------------------------------------------------------- the engine


def test_only_models_with_such_convolutions() -> None:
    assert is_slow_here(inverted())
    assert not is_slow_here(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)))
    with patch.object(arm, "SLOW_HERE", False):
        assert not is_slow_here(inverted())


@pytest.mark.parametrize(
    ("engine", "swaps"), [("plain", False), ("lean", False), ("auto-prefix", False), ("prefix", True), ("auto", True)]
)
def test_who_swaps(engine: str, swaps: bool) -> None:
    model = inverted()
    found = Engine(model, loss, sgd(model), Update(), engine)
    assert (found.around is Swapped) == swaps
    if engine == "prefix":
        with found.forward():
            assert "_PointwiseBackward" in names(loss(inverted(), some()))


def test_a_session_trains_as_plain_pytorch_does() -> None:
    """Everything chosen, so that nothing runs as inference: the prefix engine swaps all the same."""
    ends = []
    for engine in ("plain", "prefix"):
        model = inverted()
        with (
            patch.object(pointwise, "convolve", side_effect=pointwise.convolve) as ours,
            Session(model, sgd(model), loss, recipes.full(), engine=engine, norm="as-is") as session,
        ):
            for k in range(3):
                session.step(some(16 + k))
        assert (ours.call_count > 0) == (engine == "prefix")
        ends.append(model.state_dict())
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_slice_of_a_depthwise_convolution_still_trains() -> None:
    """Its parameter as a whole does not, so that it looks like one that is only on the way."""
    grads = []
    for slow in (False, True):
        with patch.object(arm, "SLOW_HERE", slow):
            model = inverted()
            engine = Engine(model, loss, sgd(model), Update(), "prefix")
            params = dict(model.named_parameters())
            for param in params.values():
                param.requires_grad_(False)
            engine.slices = Slices(params, [Part("5.weight", 0, (1, 2)), Part("3.weight", 0, (0, 5))])
            for _ in range(2):  # the second pass follows the program of the first
                engine.zero_grad()
                engine.run(some(), last=False)
            grads.append(engine.slices.grads())
    assert len(grads[0]) == 2
    for one, other in zip(grads[0].values(), grads[1].values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert other.abs().sum() > 0


# ---------------------------------------------------------------- prices


def test_prices_are_of_swapped_passes_and_shares_of_plain_full_steps() -> None:
    """A share is one of the step that anybody would take; what kernels save goes into training more."""
    model, full, around, step = inverted(), [], [], StepTiming.step

    def kept(trial: StepTiming, *how: Any) -> Any:
        (full if trial.norms.rule == "as-is" else around).append(trial.around)  # a plain full step, or another
        return step(trial, *how)

    def walked(*what: Any) -> Any:
        ran.append({type(node).__name__ for node in walk(*what)})
        return walk(*what)

    ran: list[set[str]] = []
    with patch.object(StepTiming, "step", kept), patch.object(passes, "walk", walked):
        profiles = [measure.timed(model, sgd(model), loss, some(), norm="frozen", around=one) for one in (Swapped, nullcontext)]
    assert {*full} == {nullcontext} and list(dict.fromkeys(around)) == [Swapped, nullcontext]
    ours = ["_DepthwiseBackward" in names for names in ran]
    assert ours == sorted(ours, reverse=True) and {*ours} == {True, False}  # all passes of the first, none of the second
    charges = [[(c.name, c.kind, c.params, c.cost.macs) for c in profile.charges] for profile in profiles]
    assert charges[0] == charges[1]


def test_a_session_prices_as_it_runs() -> None:
    model, told = inverted(), {}

    def cost(*what: Any, around: Any = nullcontext, ready: Any = None, **how: Any) -> Any:
        told.update(around=around, ready=ready is not None)
        return measure.timed(*what, around=around, ready=ready, **how)

    for engine, around in (("auto", Swapped), ("plain", nullcontext)):
        policy = replace(recipes.pliant(time=1.0), cost=cost)
        with Session(model, sgd(model), loss, policy, engine=engine) as session:
            session.step(some())
        assert told == {"around": around, "ready": engine == "auto"}
    with Session(model, sgd(model), loss, replace(recipes.pliant(time=1.0), cost=cost)) as session:
        session.before_step(some())  # the caller's own passes are as ever
    assert told == {"around": nullcontext, "ready": False}
    sliced = replace(recipes.pliant(time=1.0), cost=cost, units=units.channels())
    with Session(model, sgd(model), loss, sliced, engine="prefix") as session:
        session.step(some())
    assert told == {"around": nullcontext, "ready": False}
    with Session(model, sgd(model), loss, replace(recipes.pliant(macs=0.9), cost=measure.counted)) as session:
        session.step(some())  # measures nothing
