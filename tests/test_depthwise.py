"""Gradients of depthwise convolutions are PyTorch's own, up to rounding."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from pliant import Part
from pliant.engine.kernels.arm import depthwise
from pliant.engine.kernels.arm import processor as arm
from pliant.engine.slices.slices import Sliced, Slices

KERNELS = (3, 1, 1), (3, 2, 1), (5, 1, 2), (5, 3, 0), (1, 1, 0), (2, 2, 1)  # and stride and padding
SIDES = (4, 4), (9, 12), (20, 17)
FITTING = [(side, *kernel) for side in SIDES for kernel in KERNELS if min(side) + 2 * kernel[2] >= kernel[0]]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("side", "kernel", "stride", "padding"), FITTING)
def test_gradients_are_the_same(side: tuple[int, int], kernel: int, stride: int, padding: int, bias: bool) -> None:
    torch.manual_seed(0)
    input, weight = torch.randn(3, 4, *side, dtype=torch.float64), torch.randn(4, 1, kernel, kernel, dtype=torch.float64)
    leaves = [leaf.requires_grad_() for leaf in (input, weight, torch.randn(4, dtype=torch.float64)) if bias or leaf.dim() > 1]
    settings = (stride, stride), (padding, padding), (1, 1), 4
    shift = leaves[2] if bias else None
    outs = [call(input, weight, shift, *settings) for call in (torch.conv2d, depthwise.convolve)]
    assert torch.equal(*outs)
    grad = torch.randn_like(outs[0])
    for one, other in zip(*(torch.autograd.grad(out, leaves, grad) for out in outs), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("side", [4, 5])
def test_a_batch_may_be_empty(side: int) -> None:
    input, weight = torch.randn(0, 3, side, side, requires_grad=True), torch.randn(3, 1, 3, 3, requires_grad=True)
    depthwise.convolve(input, weight, None, (1, 1), (1, 1), (1, 1), 3).sum().backward()
    assert input.grad.shape == input.shape and torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("side", [4, 5])
def test_differentiates_twice(side: int) -> None:
    torch.manual_seed(0)
    input, weight = (torch.randn(*shape).double().requires_grad_() for shape in ((2, 3, side, side), (3, 1, 3, 3)))
    seconds = []
    for call in (torch.conv2d, depthwise.convolve):
        out = call(input, weight, None, (1, 1), (1, 1), (1, 1), 3)
        (first,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), (input, weight)))
    for one, other in zip(*seconds, strict=True):
        torch.testing.assert_close(one, other)


def test_beside_slices_frozen_ones_pass_their_gradient_on_here() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 1), torch.nn.Conv2d(4, 4, 3, padding=1, groups=4), torch.nn.Conv2d(4, 2, 1)
    )
    input, ends = torch.randn(2, 2, 6, 6), []
    for slow in (False, True):
        with patch.object(arm, "SLOW_HERE", slow):
            slices = Slices(dict(model.named_parameters()), [Part("0.weight", 0, (1, 2)), Part("1.weight", 0, (0, 3))])
            model[1].bias.requires_grad_(False)
            with Sliced(slices):
                out = model(input)
            out.square().mean().backward()
            frozen = Slices(dict(model.named_parameters()), [Part("0.weight", 0, (1, 2))])
            with Sliced(frozen):
                middle = model[1](model[0](input))
            assert (type(middle.grad_fn).__name__ == "_DepthwiseBackward") == slow
            middle.square().mean().backward()
            ends.append([*slices.grads().values(), *frozen.grads().values()])
    assert len(ends[0]) == 3
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other)


def test_serves_only_what_it_knows() -> None:
    input, weight = torch.randn(2, 4, 5, 5), torch.randn(4, 1, 3, 3, requires_grad=True)

    def serves(input: Any = input, weight: Any = weight, bias: Any = None, *, padding: Any = (1, 1), groups: int = 4) -> bool:
        return depthwise.serves(input, weight, bias, (1, 1), padding, (1, 1), groups)

    with patch.object(arm, "SLOW_HERE", True):
        assert serves()
        assert not serves(weight=weight.detach())  # frozen, or a slice of it trains
        assert not serves(bias=torch.randn(4))
        assert not serves(input.double(), weight.double())
        assert not serves(padding="same") and not serves(padding=(1, 0)) and not serves(padding=(3, 3))
        assert not serves(torch.randn(2, 2, 5, 5), groups=2)
        with torch.no_grad():
            assert not serves()
        with torch.autocast("cpu", torch.bfloat16):
            assert not serves()
    with patch.object(arm, "SLOW_HERE", False):
        assert not serves()
