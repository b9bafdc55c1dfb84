"""The gradient of some channels of a convolution or a linear layer, computed without the other channels.

A slice of outputs is a smaller layer. So is a slice of inputs, which saves only those channels of the activation.
"""

from __future__ import annotations

import itertools
import math
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from pliant.engine.kernels.arm import depthwise
from pliant.runtime.torch_internals import is_any_autocast_enabled


class Index:
    """Sorted positions along a dimension. Contiguous positions are read without a copy."""

    def __init__(self, at: Iterable[int]) -> None:
        self.at = tuple(at)
        self.is_run = bool(self.at) and self.at[-1] - self.at[0] == len(self.at) - 1
        self._on: dict[torch.device, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.at)

    def take(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The elements at these positions."""
        if self.is_run:
            return tensor.narrow(dim, self.at[0], len(self.at))
        return tensor.index_select(dim, self._tensor(tensor.device))

    def put_(self, tensor: torch.Tensor, dim: int, values: torch.Tensor) -> None:
        """Write to these positions."""
        if self.is_run:
            tensor.narrow(dim, self.at[0], len(self.at)).copy_(values)
        elif self.at:
            tensor.index_copy_(dim, self._tensor(tensor.device), values)

    def _tensor(self, device: torch.device) -> torch.Tensor:
        if device not in self._on:
            self._on[device] = torch.tensor(self.at, dtype=torch.int64, device=device)
        return self._on[device]


@dataclass(frozen=True)
class SlicePlan:
    """How the gradient of a weight's slice is computed: a layer of `groups`, from some inputs to some outputs.

    None means all of them. `pick` selects the chosen rows of the result; None: all of them.
    """

    inputs: Index | None
    outputs: Index | None
    groups: int
    shape: tuple[int, ...]
    pick: Index | None = None

    def keep(self, input: torch.Tensor, dim: int) -> torch.Tensor:
        """What to save of the input: a copy of some channels, so that the others can be freed."""
        if self.inputs is None:
            return input
        some = self.inputs.take(input, dim)
        last = torch.channels_last if _is_channels_last(input) else torch.contiguous_format
        return some.clone(memory_format=last) if self.inputs.is_run else some.contiguous(memory_format=last)

    def select(self, grad: torch.Tensor, dim: int) -> torch.Tensor:
        """The gradient of the chosen outputs."""
        return grad if self.outputs is None else self.outputs.take(grad, dim)


@dataclass(frozen=True)
class Settings:
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int


def _save(
    ctx: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_leaf: torch.Tensor | None,
    bias_leaf: torch.Tensor | None,
    plan: SlicePlan | None,
    of_bias: Index | None,
    channels: int,
) -> None:
    """Save for backward what the needed gradients read; `channels` is the channel dimension of the input."""
    ctx.plan, ctx.of_bias = plan, of_bias
    ctx.dtype, ctx.bias_dtype = (None if leaf is None else leaf.dtype for leaf in (weight_leaf, bias_leaf))
    kept = input if ctx.needs_input_grad[1] else None if plan is None else plan.keep(input, channels)
    ctx.save_for_backward(kept, weight if ctx.needs_input_grad[0] else None)


class Convolution(torch.autograd.Function):
    """A convolution whose weight or bias is sliced; the other may be whole."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        weight_leaf: torch.Tensor | None,
        bias_leaf: torch.Tensor | None,
        plan: SlicePlan | None,
        of_bias: Index | None,
        func: Callable[..., torch.Tensor],
        at: Settings,
    ) -> torch.Tensor:
        _save(ctx, input, weight, weight_leaf, bias_leaf, plan, of_bias, 1)
        ctx.at, ctx.input_shape, ctx.weight_shape = at, input.shape, weight.shape
        return func(input, weight, bias, at.stride, at.padding, at.dilation, at.groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        d_input = d_weight = d_bias = d_weight_leaf = d_bias_leaf = None
        wants, at = tuple(ctx.needs_input_grad[:3]), ctx.at
        slow = wants[0] and depthwise.is_slow(grad, weight, at.stride, at.padding, at.dilation, at.groups)
        if slow and max(at.stride) == 1:  # else it would take more MACs than the budget counts
            d_input = depthwise.of_input(grad, weight, at.stride, at.padding, ctx.input_shape)
            wants = False, *wants[1:]
        if any(wants):
            data = kept if wants[1] else placeholder(ctx.input_shape, grad.dtype, grad.device)
            kernel = _in_layout_of(grad, weight) if wants[0] else placeholder(ctx.weight_shape, grad.dtype, grad.device)
            others = _backward(grad, data, kernel, at, at.groups, wants)
            d_input, d_weight, d_bias = d_input if d_input is not None else others[0], *others[1:]
        if ctx.plan is not None:
            plan: SlicePlan = ctx.plan
            d_weight_leaf = _of_weight(plan.select(grad, 1), kept, plan, ctx.at)
            if plan.pick is not None:
                d_weight_leaf = plan.pick.take(d_weight_leaf, 0)
            d_weight_leaf = d_weight_leaf.to(ctx.dtype)
        if ctx.of_bias is not None:
            axes = [dim for dim in range(grad.dim()) if dim != 1]
            d_bias_leaf = ctx.of_bias.take(grad, 1).sum(axes).to(ctx.bias_dtype)
        return d_input, d_weight, d_bias, d_weight_leaf, d_bias_leaf, None, None, None, None


def _backward(
    grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, at: Settings, groups: int, wants: tuple[bool, ...]
) -> tuple[torch.Tensor, ...]:
    sizes = [weight.shape[0]] if wants[2] else None
    none = [0] * len(at.stride)
    return torch.ops.aten.convolution_backward(
        grad, input, weight, sizes, at.stride, at.padding, at.dilation, False, none, groups, wants
    )


# On ARM processors the kernels for the weight's gradient are slower for few outputs than for many.
_WIDE_KERNELS_BY_PRODUCTS = platform.machine() in ("aarch64", "arm64")


def _of_weight(grad: torch.Tensor, input: torch.Tensor, plan: SlicePlan, at: Settings) -> torch.Tensor:
    """The gradient of the planned slice of a weight, computed in the faster way on this device."""
    exact = grad.device.type == "cpu" and grad.dtype in (torch.float32, torch.float64)
    wide = _WIDE_KERNELS_BY_PRODUCTS and plan.outputs is not None and math.prod(plan.shape[2:]) > 1
    if exact and plan.groups == 1 and (wide or _is_small(grad, plan)):
        return _by_products(grad, input, plan.shape, at)
    return _backward(grad, input, placeholder(plan.shape, grad.dtype, grad.device), at, plan.groups, (False, True, False))[1]


_LARGE, _FEW = 512, 24  # positions of a feature map; channels


def _is_small(grad: torch.Tensor, plan: SlicePlan) -> bool:
    """Whether matrix products are faster than convolution kernels: 1×1 kernels with small feature maps or few channels."""
    if math.prod(plan.shape[2:]) != 1:
        return False
    return _is_channels_last(grad) or math.prod(grad.shape[2:]) < _LARGE or min(plan.shape[:2]) < _FEW


def _by_products(grad: torch.Tensor, input: torch.Tensor, shape: tuple[int, ...], at: Settings) -> torch.Tensor:
    """The same by one matrix product for each position of the kernel."""
    out = grad.new_zeros(shape)
    positions = out.movedim((0, 1), (-2, -1))
    is_last = _is_channels_last(input)
    for position in itertools.product(*map(range, shape[2:])):
        here, there = [slice(None)] * 2, [slice(None)] * 2
        for spot, (i, stride, padding, dilation) in enumerate(
            zip(position, at.stride, at.padding, at.dilation, strict=True), 2
        ):
            first = i * dilation - padding  # the input position of the first output
            low = max(0, -(first // stride))
            high = max(low, min(grad.shape[spot], (input.shape[spot] - 1 - first) // stride + 1))
            here.append(slice(low, high))
            there.append(slice(first + low * stride, max(first + (high - 1) * stride + 1, 0), stride))
        some, data = grad[tuple(here)], input[tuple(there)]
        if not some.numel():  # padding only
            continue
        if is_last:
            rows, values = (tensor.movedim(1, -1).reshape(-1, tensor.shape[1]) for tensor in (some, data))
            positions[position] = rows.t() @ values
        else:
            positions[position] = _product(some, data)
    return out


def _product(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """For each pair of channels, the sum of products over all positions and samples."""
    grad, input = grad.flatten(2), input.flatten(2)
    few, many = (grad, input) if grad.shape[1] < input.shape[1] else (input, grad)
    if grad.shape[2] >= _LARGE and few.shape[1] < _FEW:
        out = torch.bmm(few, many.transpose(1, 2)).sum(0)
        return out if few is grad else out.t()
    out = grad.new_zeros(many.shape[1], few.shape[1])
    # A contiguous copy of the smaller one is worth its time.
    for some, data in zip(many, few.transpose(1, 2).contiguous(), strict=True):
        out.addmm_(some, data)
    return out.t() if few is grad else out


class Linear(torch.autograd.Function):
    """A linear layer whose weight or bias is sliced; the other may be whole."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        weight_leaf: torch.Tensor | None,
        bias_leaf: torch.Tensor | None,
        plan: SlicePlan | None,
        of_bias: Index | None,
    ) -> torch.Tensor:
        _save(ctx, input, weight, weight_leaf, bias_leaf, plan, of_bias, -1)
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        d_input = d_weight = d_bias = d_weight_leaf = d_bias_leaf = None
        rows = grad.reshape(-1, grad.shape[-1])
        data: Any = None if kept is None else kept.reshape(-1, kept.shape[-1])
        if ctx.needs_input_grad[0]:
            d_input = (rows @ weight).view(*grad.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            d_weight = rows.t() @ data
        if ctx.needs_input_grad[2]:
            d_bias = rows.sum(0)
        if ctx.plan is not None:
            d_weight_leaf = (ctx.plan.select(rows, 1).t() @ data).to(ctx.dtype)
        if ctx.of_bias is not None:
            d_bias_leaf = ctx.of_bias.take(rows, 1).sum(0).to(ctx.bias_dtype)
        return d_input, d_weight, d_bias, d_weight_leaf, d_bias_leaf, None, None


def as_autocast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors in the dtype that autocast would give them."""
    dtype = _autocast_type(next(tensor.device.type for tensor in tensors if tensor is not None))
    return tensors if dtype is None else tuple(t if t is None or not _can_be_cast(t) else t.to(dtype) for t in tensors)


def is_cast(tensor: torch.Tensor) -> bool:
    """Whether autocast would change the dtype of a tensor."""
    dtype = _autocast_type(tensor.device.type)
    return dtype is not None and _can_be_cast(tensor) and tensor.dtype != dtype


def _can_be_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _autocast_type(device: str) -> torch.dtype | None:
    """The dtype of autocast on such a device, if it is on."""
    if not is_any_autocast_enabled() or not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


@lru_cache(maxsize=1024)
def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without memory of its own, for kernels that do not read its values."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _in_layout_of(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The weight in the memory format of the gradient: kernels follow it where the input is a placeholder."""
    if not _is_channels_last(grad) or _is_channels_last(weight):
        return weight
    return torch.empty_like(weight, memory_format=torch.channels_last).copy_(weight)


def spread(value: Any, count: int) -> list[int]:
    """A setting for each spatial dimension."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values
