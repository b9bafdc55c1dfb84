"""Gradients of depthwise convolutions on ARM processors, where PyTorch's own kernels for them take several times the forward's.

The input's gradient is the convolution of the output's with the kernel turned round, which is a forward pass; the weight's is
one product and one sum for each place of the kernel.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F

from pliant.engine.kernels.arm import processor as arm
from pliant.engine.kernels.arm.processor import exactly, is_asked, is_differentiated, one

_SMALL, _TINY = 256, 16  # positions: what is faster here for maps of up to so many


def serves(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:
    """Whether a call of `torch.conv2d` is better made here: one that is slow, and trains as a whole (not a slice of it)."""
    trains = weight.requires_grad and (bias is None or bias.requires_grad)
    return trains and is_differentiated() and is_slow(input, weight, stride, padding, dilation, groups)


def passes_on(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:
    """Whether a call of which nothing trains is better made here: gradients go through it, and take no more MACs than elsewhere
    (with a stride they are faster for small maps, but take more)."""
    is_on_the_way = input.requires_grad and not weight.requires_grad and (bias is None or not bias.requires_grad)
    return (
        is_on_the_way and is_differentiated() and one(stride) == 1 and is_slow(input, weight, stride, padding, dilation, groups)
    )


def is_slow(input: Any, weight: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> bool:
    """Whether PyTorch's gradients are slow here: a depthwise convolution in float32 on an ARM processor."""
    return (
        arm.is_slow(input, weight)
        and groups > 1
        and groups == weight.shape[0] == input.shape[1]
        and one(stride) is not None
        and one(padding) is not None
        and one(dilation) == 1
        and weight.shape[2] == weight.shape[3] > one(padding)
    )


def convolve(
    input: torch.Tensor, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> torch.Tensor:
    return _Depthwise.apply(input, weight, bias, one(stride), one(padding))


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: Any, stride: int, padding: int) -> torch.Tensor:
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.settings = stride, padding, weight.shape[-1], input.shape
        return torch.conv2d(input, weight, bias, stride, padding, 1, weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        stride, padding, size, shape = ctx.settings
        d_input = d_weight = d_bias = None
        with exactly():
            if is_asked(ctx, 0):
                d_input = of_input(grad, weight, stride, padding, shape)
            if is_asked(ctx, 1):
                d_weight = _of_weight(grad, input, stride, padding, size)
            if is_asked(ctx, 2):
                d_bias = grad.sum((0, 2, 3))
        return d_input, d_weight, d_bias, None, None


def of_input(grad: torch.Tensor, weight: torch.Tensor, stride: Any, padding: Any, shape: torch.Size) -> torch.Tensor:
    """The gradient of an input of this shape."""
    groups, size, stride, padding = weight.shape[0], weight.shape[-1], one(stride), one(padding)
    if stride > 1 and shape[2:].numel() > _SMALL:
        like = grad.new_zeros(()).expand(shape)  # its values are not read
        at = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups
        return torch.ops.aten.convolution_backward(grad, like, weight, None, *at, [True, False, False])[0]
    if stride > 1:  # as if it had been 1: where there was no output, it has no gradient
        spread = grad.new_zeros(*grad.shape[:2], *[n + 2 * padding - size + 1 for n in shape[2:]])
        spread[:, :, ::stride, ::stride] = grad
        grad = spread
    return torch.conv2d(grad, weight.flip(2, 3), None, 1, size - 1 - padding, 1, groups)


def _of_weight(grad: torch.Tensor, input: torch.Tensor, stride: int, padding: int, size: int) -> torch.Tensor:
    high, wide = ((n - 1) * stride + 1 for n in grad.shape[2:])
    if grad.shape[2:].numel() <= _TINY:  # rows are too short to sum along them: let channels lie side by side
        input, grad = input.permute(2, 3, 0, 1).contiguous(), grad.permute(2, 3, 0, 1).contiguous()
        input = F.pad(input, (0, 0, 0, 0, *[padding] * 4))
    else:
        input, grad = F.pad(input, [padding] * 4).permute(2, 3, 0, 1), grad.permute(2, 3, 0, 1)
    places = [
        (grad * input[i : i + high : stride, j : j + wide : stride]).sum((0, 1, 2))
        for i, j in itertools.product(range(size), repeat=2)
    ]
    return torch.stack(places, 1).view(-1, 1, size, size)
