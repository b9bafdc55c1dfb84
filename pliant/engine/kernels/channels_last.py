"""Convolutions of mobile networks on x86-64 processors, channels-last.

A pointwise convolution is then one product of matrices, without a copy; PyTorch takes up to four times as long. Depthwise ones
are faster in this layout too, save for one gradient: oneDNN is slow for the weights of small feature maps and wide kernels.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pliant.engine.kernels.functions import is_differentiated, is_needed, uniform, without_autocast

PAYS_HERE = platform.machine().lower() in ("x86_64", "amd64") and torch.backends.mkldnn.is_available()
Settings = tuple[Any, Any, Any, int]  # stride, padding, dilation and groups of a convolution
_LAST = torch.channels_last
_NARROW = 3  # the width of a kernel up to which oneDNN has a fast gradient of the weight
_PADDED = 4  # and the side of a feature map from which it uses that, unless the map is padded before
_FEW = 16  # positions up to which products and sums are faster, for wider kernels


def pays(model: nn.Module) -> bool:
    """Whether a model's convolutions are faster this way: they are pointwise or depthwise, save those that read images.

    Dense kernels are slower channels-last, unless their weights have that layout as well. The weights of pointwise and
    depthwise ones lie in memory in the same order either way, so nobody's weights change.
    """
    layers = list(model.modules())
    convolutions = [one for one in layers if isinstance(one, nn.Conv2d)]
    dense = [one for one in convolutions if not _is_any_layout(one.weight) and one.in_channels > _NARROW]
    others = (nn.GroupNorm, nn.modules.conv._ConvTransposeNd, nn.Conv1d, nn.Conv3d)
    small = [one for one in convolutions if _is_any_layout(one.weight)]
    return PAYS_HERE and bool(small) and not dense and not any(isinstance(one, others) for one in layers)


def _is_any_layout(weight: Any) -> bool:
    return bool(weight.shape[1] == 1 or weight.shape[2] == weight.shape[3] == 1)


def serves(input: Any, weight: Any, *_: Any) -> bool:
    """Whether a convolution of these tensors may run here."""
    return (
        PAYS_HERE
        and input.dim() == weight.dim() == 4
        and input.device.type == "cpu"
        and input.dtype == weight.dtype == torch.float32
        and input.layout == torch.strided
        and (is_differentiated() or not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")))
    )


def convolve(
    input: torch.Tensor, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> torch.Tensor:
    """`torch.conv2d` with a result that is channels-last."""
    settings = stride, padding, dilation, groups
    if (bias is None or bias.dtype == torch.float32) and (_is_pointwise(weight, settings) or _is_slow(input, weight, settings)):
        return _Convolution.apply(input, weight, bias, settings)
    return torch.conv2d(input.contiguous(memory_format=_LAST), weight, bias, *settings)


def is_mean(input: Any, size: Any) -> bool:
    """Whether an adaptive pooling to this size is the mean of each map."""
    return input.dim() == 4 and size in (1, (1, 1), [1, 1])


def mean(input: torch.Tensor, size: Any) -> torch.Tensor:
    """`F.adaptive_avg_pool2d` to one value per map, with the backward graph of the default layout. Channels-last, PyTorch's has
    one more node."""
    return input.mean((-1, -2), keepdim=True)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: Any, settings: Settings) -> torch.Tensor:
        input = input.contiguous(memory_format=_LAST)
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight)
        ctx.shape, ctx.settings = input.shape, settings
        return forward(input, weight, bias, settings)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        wants = is_needed(ctx, 0), is_needed(ctx, 1), is_needed(ctx, 2)
        with without_autocast():
            if torch.is_grad_enabled():  # differentiated again: only by what autograd knows
                return *_by_torch(grad, input, weight, ctx.shape, ctx.settings, wants), None
            return *gradients(grad.contiguous(memory_format=_LAST), input, weight, ctx.shape, ctx.settings, wants), None


def forward(input: torch.Tensor, weight: torch.Tensor, bias: Any, settings: Settings) -> torch.Tensor:
    """A convolution of a channels-last input, without a graph."""
    if _is_pointwise(weight, settings):
        return _product(_rows(input), weight[:, :, 0, 0].t(), input.shape, bias)
    return torch.conv2d(input, weight, bias, *settings)


def gradients(
    grad: torch.Tensor, input: Any, weight: torch.Tensor, shape: torch.Size, settings: Settings, wants: tuple[bool, bool, bool]
) -> tuple[Any, Any, Any]:
    """The gradients of the input (of this shape), the weight and the bias, as far as they are wanted, from a channels-last
    gradient of the result. The input itself is needed for the weight's alone."""
    if not _is_pointwise(weight, settings):
        slow = wants[1] and _is_slow(input, weight, settings)
        d_input, d_weight, d_bias = _by_torch(grad, input, weight, shape, settings, (wants[0], wants[1] and not slow, wants[2]))
        return d_input, _of_depthwise(grad, input, weight, settings) if slow else d_weight, d_bias
    rows = _rows(grad)
    return (
        _product(rows, weight[:, :, 0, 0], grad.shape) if wants[0] else None,
        (rows.t() @ _rows(input))[:, :, None, None] if wants[1] else None,
        rows.sum(0) if wants[2] else None,
    )


def _by_torch(
    grad: torch.Tensor, input: Any, weight: torch.Tensor, shape: torch.Size, settings: Settings, wants: Sequence[bool]
) -> tuple[Any, Any, Any]:
    if not any(wants):
        return None, None, None
    stride, padding, dilation, groups = ([*_pair(one)] for one in (*settings[:3], settings[3]))
    if input is None:  # its values are not read
        input = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=_LAST)
    sizes = [len(weight)] if wants[2] else None
    at = stride, padding, dilation, False, [0, 0], groups[0]
    found: tuple[Any, Any, Any] = torch.ops.aten.convolution_backward(grad, input, weight, sizes, *at, list(wants))
    return found


def _pair(setting: Any) -> tuple[int, int]:
    return (setting, setting) if isinstance(setting, int) else tuple(setting)


# ---------------------------------------------------------------- pointwise


def _is_pointwise(weight: Any, settings: Settings) -> bool:
    stride, padding, _, groups = settings
    return bool(groups == weight.shape[2] == weight.shape[3] == 1 == uniform(stride) and uniform(padding) == 0)


def _rows(images: torch.Tensor) -> torch.Tensor:
    """The channels of each position as a row."""
    return images.permute(0, 2, 3, 1).reshape(-1, images.shape[1])


def _product(rows: torch.Tensor, matrix: torch.Tensor, shape: torch.Size, bias: torch.Tensor | None = None) -> torch.Tensor:
    """rows · matrix as images, which are no view, so that they may be changed in place."""
    out = torch.empty((shape[0], matrix.shape[1], *shape[2:]), dtype=rows.dtype, device=rows.device, memory_format=_LAST)
    into = out.permute(0, 2, 3, 1).view(-1, matrix.shape[1])
    if bias is None:
        torch.mm(rows, matrix, out=into)
    else:
        torch.addmm(bias, rows, matrix, out=into)
    return out


# ---------------------------------------------------------------- depthwise


def _is_slow(input: Any, weight: Any, settings: Settings) -> bool:
    """Whether the weight is trained and depthwise, and PyTorch's gradient of it is slow."""
    size, (step, edge, spread) = weight.shape[-1], map(uniform, settings[:3])
    is_depthwise = settings[3] == weight.shape[0] == input.shape[1] > 1 and weight.shape[2] == size > 1
    if not (weight.requires_grad and is_depthwise and spread == 1) or step is None or edge is None or edge >= size:
        return False
    if size <= _NARROW:
        return bool(min(input.shape[2:]) < _PADDED)
    high, wide = ((n + 2 * edge - size) // step + 1 for n in input.shape[2:])
    return bool(high * wide <= _FEW)


def _of_depthwise(grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, settings: Settings) -> torch.Tensor:
    """The gradient of a depthwise weight for which PyTorch is slow."""
    size, stride, padding = weight.shape[-1], uniform(settings[0]), uniform(settings[1])
    padded = F.pad(input.permute(0, 2, 3, 1), (0, 0, *[padding] * 4))  # samples, rows, columns, channels
    if size <= _NARROW:  # oneDNN is fast where it need not pad
        images = padded.permute(0, 3, 1, 2)
        found: torch.Tensor = _by_torch(grad, images, weight, images.shape, (stride, 0, 1, settings[3]), (False, True, False))[
            1
        ]
        return found
    grad = grad.permute(0, 2, 3, 1)
    high, wide = ((n - 1) * stride + 1 for n in grad.shape[1:3])
    ones = grad.new_ones(1, grad.shape[:3].numel())
    positions = [
        ones @ (grad * padded[:, i : i + high : stride, j : j + wide : stride]).view(-1, grad.shape[3])
        for i, j in itertools.product(range(size), repeat=2)
    ]
    return torch.cat(positions).t().reshape(-1, 1, size, size)
