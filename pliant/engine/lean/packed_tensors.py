"""What is saved for backward in place of a tensor: the tensor itself, its shape, one bit for each element, or small indices.

Something packed is a tuple: the function that gives the tensor back, what is saved for it (None: nothing), and the other
arguments of that function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch

from pliant.engine.lean import bits
from pliant.engine.slices.sliced_gradients import placeholder
from pliant.graph.saved_tensors import MIN_MASK_ELEMENTS
from pliant.runtime.torch_internals import SavedTensorHooks

Packed = tuple[Any, ...] | list[Any]
Pack = Callable[[torch.Tensor], Packed]

_is_differentiated_again = torch.is_grad_enabled


def unpack(packed: Packed) -> torch.Tensor:
    return cast("torch.Tensor", packed[0](*packed[1:]))


def pack_inside(outer: SavedTensorHooks, pack: Pack, tensor: torch.Tensor) -> Packed:
    """Pack a tensor, and let the outer hooks pack what is left of it."""
    how, saved, *more = pack(tensor)
    if saved is None:
        return how, saved, *more
    return _unpack_inside, outer[1], outer[0](saved), how, more


def _unpack_inside(outer_unpack: Any, packed: Any, how: Any, more: list[Any]) -> torch.Tensor:
    saved = outer_unpack(packed)
    return cast("torch.Tensor", saved if how is unchanged else how(saved, *more))


def _refuse_second_derivative() -> None:
    raise RuntimeError("the lean engine keeps too little to differentiate twice (create_graph=True): use engine='plain'.")


# ---------------------------------------------------------------- the tensor itself


def whole(tensor: torch.Tensor) -> Packed:
    """The tensor itself, detached: saved by its own node, it would be a reference cycle."""
    version = tensor._version
    return unchanged, tensor if tensor.grad_fn is None else tensor.detach(), version


def unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    if tensor._version != version:  # autograd checks this for the tensors that it saves itself
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
            f"shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}."
        )
    return tensor


def below(tensor: torch.Tensor, version: int, bound: float) -> torch.Tensor:
    """The output of a ReLU with an upper bound, as the ReLU's backward needs it: 0 also where the bound was reached."""
    return cast("torch.Tensor", _zero_outside(unchanged(tensor, version), tensor, 0.0, bound))


_zero_outside = torch.ops.aten.hardtanh_backward.default  # its first argument where the second is between the bounds, else 0


# ---------------------------------------------------------------- its shape


def shape(tensor: torch.Tensor) -> Packed:
    """The shape alone: for backward kernels that do not read the values."""
    size, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    if len(stride) in (4, 5) and stride[1] <= stride[-1]:  # channels last: kernels follow the layout of their input
        return _with_layout, None, size, stride, dtype, device
    return _with_shape, None, placeholder(size, dtype, device)


def _with_shape(_: None, empty: torch.Tensor) -> torch.Tensor:
    if _is_differentiated_again():
        _refuse_second_derivative()
    return empty


def _with_layout(_: None, size: torch.Size, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if _is_differentiated_again():
        _refuse_second_derivative()
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


# ---------------------------------------------------------------- bits


@cache
def mask(low: float, high: float, nan: bool, yes: float = 1.0, no: float = 0.0) -> Pack:
    """Save whether each element lies between two values; backward reads `yes` where it does and `no` where it does not."""

    def pack(tensor: torch.Tensor) -> Packed:
        dtype = tensor.dtype
        if tensor.numel() < MIN_MASK_ELEMENTS or not holds(dtype, low, high, yes, no):
            return whole(tensor)
        found = in_memory_order(tensor)
        if found is None:
            return whole(tensor)
        return from_bits, bits.within(found[0], low, high, nan), tensor.shape, found[1], dtype, yes, no

    return pack


def dropout_mask(p: float) -> Pack:
    """Save which elements dropout lets pass."""

    def pack(tensor: torch.Tensor) -> Packed:
        found = None if tensor.numel() < MIN_MASK_ELEMENTS or p in (0.0, 1.0) else in_memory_order(tensor)
        if found is None:
            return whole(tensor)
        values, stride = found
        if tensor.dtype == torch.bool:
            return from_bits, bits.pack(values.view(-1)), tensor.shape, stride, tensor.dtype, 1.0, 0.0
        if not tensor.is_floating_point():
            return whole(tensor)
        scale = torch.ones((), dtype=tensor.dtype, device=tensor.device).div_(1 - p)
        return _scaled_from_bits, bits.within(values, 0.0, math.inf, nan=False), tensor.shape, stride, tensor.dtype, scale

    return pack


def from_bits(packed: torch.Tensor, size: torch.Size, stride: Any, dtype: torch.dtype, yes: float, no: float) -> torch.Tensor:
    """One of two values for each bit."""
    if _is_differentiated_again():
        _refuse_second_derivative()
    if stride is None:
        return bits.unpack(packed, size, dtype, yes, no)
    return bits.unpack(packed, torch.Size((size.numel(),)), dtype, yes, no).as_strided(size, stride)


def _scaled_from_bits(
    packed: torch.Tensor, size: torch.Size, stride: Any, dtype: torch.dtype, scale: torch.Tensor
) -> torch.Tensor:
    """What dropout multiplies with on the CPU: 0, or 1 / (1 - p)."""
    return from_bits(packed, size, stride, dtype, 1.0, 0.0).mul_(scale)


def in_memory_order(tensor: torch.Tensor) -> tuple[torch.Tensor, Any] | None:
    """The elements of a dense tensor in the order of memory, and its strides unless it is contiguous; None: not dense."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_contiguous():
        return tensor, None
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.as_strided((tensor.numel(),), (1,)), tensor.stride()
    return None


def becomes_bits(tensor: torch.Tensor) -> bool:
    """Whether bits can stand for a tensor of this size and layout."""
    if tensor.numel() < MIN_MASK_ELEMENTS:
        return False
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


@cache
def holds(dtype: torch.dtype, low: float, high: float, yes: float, no: float) -> bool:
    """Whether a dtype has exactly these values: rounded bounds would compare differently from those of the kernels."""
    values = [low, high, yes, no, yes - no]
    return dtype.is_floating_point and torch.tensor(values, dtype=torch.float64).to(dtype).tolist() == values


# ---------------------------------------------------------------- indices


def indices(count: int) -> Pack:
    """Save indices below `count` in as few bytes as possible; of any other tensor, its shape."""
    small = torch.uint8 if count <= 1 << 8 else torch.int16 if count <= 1 << 15 else torch.int32
    return lambda tensor: shape(tensor) if tensor.is_floating_point() else (_from_indices, tensor.detach().to(small))


def _from_indices(saved: torch.Tensor) -> torch.Tensor:
    return saved.to(torch.int64)
