"""1×1 convolutions on ARM processors, as matrix products.

PyTorch runs the samples of a small batch one by one, which is slow for small feature maps. For larger batches, and with several
threads, it calls kernels whose gradients take up to twenty times as long as a matrix product.
"""

from __future__ import annotations

from typing import Any

import torch

from pliant.engine.kernels.arm.processor import is_slow
from pliant.engine.kernels.functions import is_differentiated, is_needed, uniform, without_autocast

_TINY = 16  # positions up to which one product for the whole batch is worth a transposed copy
_FEW = 64  # the same, compared with one product for each sample
_MANY = 256  # positions from which PyTorch's weight gradient is as fast
_LARGE = 16  # samples from which PyTorch calls other kernels
_SOME = 4  # samples from which the Python overhead is worth it


def serves(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:
    """Whether to replace a call of `torch.conv2d`: gradients flow through it, and it is slow in PyTorch."""
    return (
        is_slow(input, weight)
        and groups == weight.shape[2] == weight.shape[3] == 1 == uniform(stride)
        and uniform(padding) == 0
        and (bias is None or (bias.dtype == torch.float32 and bias.shape == weight.shape[:1]))
        and (input.requires_grad or weight.requires_grad)
        and is_differentiated()
        and input.is_contiguous()
        and _is_worth_it(len(input), input.shape[2:].numel())
    )


def _is_worth_it(samples: int, positions: int) -> bool:
    if samples >= _LARGE or torch.get_num_threads() > 1:
        return True
    return samples >= _SOME and positions <= _TINY


def convolve(
    input: torch.Tensor, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> torch.Tensor:
    return _Pointwise.apply(input, weight, bias)


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        out = _product(weight[:, :, 0, 0], input)
        return out if bias is None else out.add_(bias.view(-1, 1, 1))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        d_input = d_weight = d_bias = None
        with without_autocast():
            if is_needed(ctx, 0):
                d_input = _product(weight[:, :, 0, 0].t(), grad)
            if is_needed(ctx, 1):
                d_weight = _of_weight(grad, input)
            if is_needed(ctx, 2):
                d_bias = grad.sum((0, 2, 3))
        return d_input, d_weight, d_bias


def _product(matrix: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """A matrix times the channels of each position."""
    samples, channels, high, wide = images.shape
    if high * wide < _FEW:
        out = (matrix @ _by_channel(images)).view(len(matrix), samples, high, wide)
        return out.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    out = torch.matmul(matrix, images.reshape(samples, channels, high * wide))
    # Not a view, so that it may be changed in place.
    return torch.ops.aten._unsafe_view(out, (samples, len(matrix), high, wide))


def _of_weight(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    if grad.shape[2:].numel() > _MANY:
        like = grad.new_zeros(()).expand(grad.shape[1], input.shape[1], 1, 1)  # its values are not read
        at = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        return torch.ops.aten.convolution_backward(grad, input, like, None, *at, [False, True, False])[1]
    return (_by_channel(grad) @ _by_channel(input).t())[:, :, None, None]


def _by_channel(images: torch.Tensor) -> torch.Tensor:
    return images.transpose(0, 1).reshape(images.shape[1], -1)
