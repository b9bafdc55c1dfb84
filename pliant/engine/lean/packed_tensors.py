"""What stands for a tensor that autograd keeps for backward: the tensor itself, its shape, or a bit for each element."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch

from pliant.engine.lean import bits
from pliant.engine.slices.sliced_gradients import nothing
from pliant.graph.forward_trace import SMALL

Packed = tuple[Any, ...] | list[Any]  # how to give a tensor back, what is kept for it (None: nothing), and what else it takes
Pack = Callable[[torch.Tensor], Packed]
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]  # how others pack and unpack

_is_differentiated = torch.is_grad_enabled


def give_back(packed: Packed) -> torch.Tensor:
    return cast("torch.Tensor", packed[0](*packed[1:]))


def hooks_reader() -> Callable[[bool], Hooks | None]:
    """What tells, given False, the hooks on saved tensors that are in force; None where PyTorch does not tell, or there are
    none."""
    return getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def inside(around: Hooks, pack: Pack, tensor: torch.Tensor) -> Packed:
    """Hooks of others pack what we keep."""
    how, kept, *more = pack(tensor)
    if kept is None:
        return how, kept, *more
    return _from_inside, around[1], around[0](kept), how, more


def _from_inside(unpack: Any, packed: Any, how: Any, more: list[Any]) -> torch.Tensor:
    kept = unpack(packed)
    return cast("torch.Tensor", kept if how is unchanged else how(kept, *more))


def _refuse() -> None:
    raise RuntimeError("the lean engine keeps too little to differentiate twice (create_graph=True): use engine='plain'.")


# ---------------------------------------------------------------- itself


def whole(tensor: torch.Tensor) -> Packed:
    """The tensor itself."""
    version = tensor._version
    return unchanged, tensor if tensor.grad_fn is None else tensor.detach(), version  # kept by its own node: a cycle


def unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    if tensor._version != version:  # autograd notices this where it keeps tensors itself
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
            f"shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}."
        )
    return tensor


def below(tensor: torch.Tensor, version: int, bound: float) -> torch.Tensor:
    """For a ReLU to go back by: no gradient passes where the bound above was reached either."""
    return cast("torch.Tensor", _between(unchanged(tensor, version), tensor, 0.0, bound))


_between = torch.ops.aten.hardtanh_backward.default  # its first argument where the second lies between, else 0: in one kernel


# ---------------------------------------------------------------- its shape


def shape(tensor: torch.Tensor) -> Packed:
    """Nothing but the shape: for backward kernels that do not read the values."""
    size, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    if len(stride) in (4, 5) and stride[1] <= stride[-1]:  # channels last: kernels follow the layout of their input
        return _of_layout, None, size, stride, dtype, device
    return _of_shape, None, nothing(size, dtype, device)


def _of_shape(_: None, empty: torch.Tensor) -> torch.Tensor:
    if _is_differentiated():
        _refuse()
    return empty


def _of_layout(_: None, size: torch.Size, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if _is_differentiated():
        _refuse()
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


# ---------------------------------------------------------------- bits


@cache
def mask(low: float, high: float, nan: bool, yes: float = 1.0, no: float = 0.0) -> Pack:
    """Keep whether each element lies between two values; backward sees `yes` where it does and `no` where it does not."""

    def pack(tensor: torch.Tensor) -> Packed:
        dtype = tensor.dtype
        if tensor.numel() < SMALL or not holds(dtype, low, high, yes, no):
            return whole(tensor)
        there = in_memory(tensor)
        if there is None:
            return whole(tensor)
        return of_bits, bits.within(there[0], low, high, nan), tensor.shape, there[1], dtype, yes, no

    return pack


def noise(p: float) -> Pack:
    """Keep which elements dropout lets pass."""

    def pack(tensor: torch.Tensor) -> Packed:
        there = None if tensor.numel() < SMALL or p in (0.0, 1.0) else in_memory(tensor)
        if there is None:
            return whole(tensor)
        values, stride = there
        if tensor.dtype == torch.bool:
            return of_bits, bits.pack(values.view(-1)), tensor.shape, stride, tensor.dtype, 1.0, 0.0
        if not tensor.is_floating_point():
            return whole(tensor)
        scale = torch.ones((), dtype=tensor.dtype, device=tensor.device).div_(1 - p)
        return _of_noise, bits.within(values, 0.0, math.inf, nan=False), tensor.shape, stride, tensor.dtype, scale

    return pack


def of_bits(kept: torch.Tensor, size: torch.Size, stride: Any, dtype: torch.dtype, yes: float, no: float) -> torch.Tensor:
    """One of two values for each bit."""
    if _is_differentiated():
        _refuse()
    if stride is None:
        return bits.unpack(kept, size, dtype, yes, no)
    return bits.unpack(kept, torch.Size((size.numel(),)), dtype, yes, no).as_strided(size, stride)


def _of_noise(kept: torch.Tensor, size: torch.Size, stride: Any, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    """What dropout multiplies with on the CPU: 0, or 1 over the share that stays."""
    return of_bits(kept, size, stride, dtype, 1.0, 0.0).mul_(scale)


def in_memory(tensor: torch.Tensor) -> tuple[torch.Tensor, Any] | None:
    """A tensor's elements in the order in which they lie in memory, if without a gap, and their strides, if not as usual."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_contiguous():
        return tensor, None
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.as_strided((tensor.numel(),), (1,)), tensor.stride()
    return None


def becomes_bits(tensor: torch.Tensor) -> bool:
    """Whether bits can stand for a tensor of this size and layout."""
    if tensor.numel() < SMALL:
        return False
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


@cache
def holds(dtype: torch.dtype, low: float, high: float, yes: float, no: float) -> bool:
    """Whether a dtype has these very values: rounded ones would compare otherwise than in the kernels."""
    values = [low, high, yes, no, yes - no]
    return dtype.is_floating_point and torch.tensor(values, dtype=torch.float64).to(dtype).tolist() == values


# ---------------------------------------------------------------- places


def places(most: int) -> Pack:
    """Keep which of so many elements was the largest, in as few bytes as it takes; of what is no place, the shape."""
    small = torch.uint8 if most <= 1 << 8 else torch.int16 if most <= 1 << 15 else torch.int32
    return lambda tensor: shape(tensor) if tensor.is_floating_point() else (_of_places, tensor.detach().to(small))


def _of_places(kept: torch.Tensor) -> torch.Tensor:
    return kept.to(torch.int64)
