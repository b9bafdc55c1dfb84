"""Gradients of depthwise convolutions on ARM processors, where PyTorch's kernels are far slower than its forward pass.

The gradient of the input is a convolution of the output's gradient with the flipped kernel. That of the weight is one product
and one sum for each position of the kernel.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F

from pliant.engine.kernels.arm import processor as arm
from pliant.engine.kernels.functions import is_differentiated, is_needed, uniform, without_autocast

_SMALL, _TINY = 256, 16  # positions of a feature map up to which another way is faster


def serves(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:
    """Whether to replace a call of `torch.conv2d`: it is slow in PyTorch, and trained as a whole (not a slice of it)."""
    trains = weight.requires_grad and (bias is None or bias.requires_grad)
    return trains and is_differentiated() and is_slow(input, weight, stride, padding, dilation, groups)


def passes_on(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:
    """Whether to replace a frozen convolution that gradients flow through. Only without a stride: with one, the gradient of the
    input would be faster for small feature maps, but take more MACs."""
    is_passed_through = input.requires_grad and not weight.requires_grad and (bias is None or not bias.requires_grad)
    return (
        is_passed_through
        and is_differentiated()
        and uniform(stride) == 1
        and is_slow(input, weight, stride, padding, dilation, groups)
    )


def is_slow(input: Any, weight: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> bool:
    """Whether PyTorch's gradients are slow: a depthwise convolution in float32 on an ARM processor."""
    return (
        arm.is_slow(input, weight)
        and groups > 1
        and groups == weight.shape[0] == input.shape[1]
        and uniform(stride) is not None
        and uniform(padding) is not None
        and uniform(dilation) == 1
        and weight.shape[2] == weight.shape[3] > uniform(padding)
    )


def convolve(
    input: torch.Tensor, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> torch.Tensor:
    return _Depthwise.apply(input, weight, bias, uniform(stride), uniform(padding))


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
        with without_autocast():
            if is_needed(ctx, 0):
                d_input = of_input(grad, weight, stride, padding, shape)
            if is_needed(ctx, 1):
                d_weight = _of_weight(grad, input, stride, padding, size)
            if is_needed(ctx, 2):
                d_bias = grad.sum((0, 2, 3))
        return d_input, d_weight, d_bias, None, None


def of_input(grad: torch.Tensor, weight: torch.Tensor, stride: Any, padding: Any, shape: torch.Size) -> torch.Tensor:
    """The gradient of an input of this shape."""
    groups, size, stride, padding = weight.shape[0], weight.shape[-1], uniform(stride), uniform(padding)
    if stride > 1 and shape[2:].numel() > _SMALL:
        like = grad.new_zeros(()).expand(shape)  # its values are not read
        at = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups
        return torch.ops.aten.convolution_backward(grad, like, weight, None, *at, [True, False, False])[0]
    if stride > 1:  # as with stride 1, and zeros where there was no output
        spread = grad.new_zeros(*grad.shape[:2], *[n + 2 * padding - size + 1 for n in shape[2:]])
        spread[:, :, ::stride, ::stride] = grad
        grad = spread
    return torch.conv2d(grad, weight.flip(2, 3), None, 1, size - 1 - padding, 1, groups)


def _of_weight(grad: torch.Tensor, input: torch.Tensor, stride: int, padding: int, size: int) -> torch.Tensor:
    high, wide = ((n - 1) * stride + 1 for n in grad.shape[2:])
    places = list(itertools.product(range(size), repeat=2))
    if grad.shape[2:].numel() > _TINY:
        input, grad = F.pad(input, [padding] * 4).permute(2, 3, 0, 1), grad.permute(2, 3, 0, 1)
        sums = [(grad * input[i : i + high : stride, j : j + wide : stride]).sum((0, 1, 2)) for i, j in places]
        return torch.stack(sums, 1).view(-1, 1, size, size)
    # Short rows: make channels contiguous, and let a product of matrices add up the positions.
    input, grad = input.permute(2, 3, 0, 1).contiguous(), grad.permute(2, 3, 0, 1).contiguous()
    input = F.pad(input, (0, 0, 0, 0, *[padding] * 4))
    rows, channels = grad.shape[:3].numel(), grad.shape[3]
    ones = grad.new_ones(rows)
    products = (grad * input[i : i + high : stride, j : j + wide : stride] for i, j in places)
    return torch.stack([ones @ product.view(rows, channels) for product in products], 1).view(-1, 1, size, size)
