"""One bit per element: whether a value lies within an interval, packed eight to a byte, and back.

On the CPU numpy packs, in pieces that fit into the cache. On CUDA a Triton kernel packs. Without Triton, PyTorch operations do.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch

from pliant.engine.slices.sliced_gradients import placeholder

_PIECE = 1 << 18  # elements
_NUMPY_DTYPES = frozenset((torch.float32, torch.float64))
_CPU = torch.device("cpu")


def within(tensor: torch.Tensor, low: float, high: float, nan: bool) -> torch.Tensor:
    """For each element of a contiguous tensor one bit: low < x < high. `nan` is the answer for NaN.

    If `high` is infinite there is no upper bound: infinity lies within.
    """
    if not tensor.is_cpu or tensor.dtype not in _NUMPY_DTYPES:
        return _within(tensor, low, high, nan)
    values = tensor.numpy()
    if values.size <= _PIECE:
        packed = torch.from_numpy(np.packbits(_outside(values, low, high) if nan else _inside(values, low, high)))
        return packed.bitwise_not() if nan else packed.clone()  # in memory that PyTorch allocates and counts
    values = values.reshape(-1)
    out = torch.empty((len(values) + 7) // 8, dtype=torch.uint8)
    out_bytes = out.numpy()
    for start in range(0, len(values), _PIECE):
        piece, to = values[start : start + _PIECE], out_bytes[start // 8 : (start + _PIECE + 7) // 8]
        if nan:
            np.invert(np.packbits(_outside(piece, low, high)), out=to)
        else:
            to[:] = np.packbits(_inside(piece, low, high))
    return out


def _within(tensor: torch.Tensor, low: float, high: float, nan: bool) -> torch.Tensor:
    """The same for tensors that numpy cannot read."""
    fused, flat = _fused(tensor, tensor.dtype), tensor.view(-1)
    if fused is not None:
        return fused.within(flat, low, high, nan)
    if high == math.inf:
        return pack((flat <= low).logical_not_() if nan else flat > low)
    return pack(((flat <= low) | (flat >= high)).logical_not_() if nan else (flat > low) & (flat < high))


def _inside(values: Any, low: float, high: float) -> Any:
    return values > low if high == math.inf else (values > low) & (values < high)


def _outside(values: Any, low: float, high: float) -> Any:
    mask = values <= low
    if high != math.inf:
        mask |= values >= high
    return mask


def pack(mask: torch.Tensor) -> torch.Tensor:
    """A flat boolean tensor as bytes, eight elements in each."""
    if mask.is_cpu:
        out = torch.empty((mask.numel() + 7) // 8, dtype=torch.uint8)
        out.numpy()[:] = np.packbits(mask.numpy())
        return out
    short = -mask.numel() % 8
    if short:
        mask = torch.cat([mask, mask.new_zeros(short)])
    return (mask.view(-1, 8) * _bit_values(mask.device)).sum(dim=1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, shape: torch.Size, dtype: torch.dtype, yes: float = 1.0, no: float = 0.0) -> torch.Tensor:
    """A contiguous tensor of this shape: `yes` for a bit that is set, `no` for one that is not."""
    if not packed.is_cpu:
        return _unpack(packed, shape.numel(), dtype, yes, no).view(shape)
    table, as_numbers = _table(dtype, yes, no)
    bytes_, count = packed.numpy(), shape.numel()
    if count % 8 == 0:  # the fastest way in Python
        out = torch.empty_like(placeholder(shape, dtype, _CPU), memory_format=torch.contiguous_format)
    else:
        out = torch.empty(8 * len(bytes_), dtype=dtype)
    numbers = (out if as_numbers is None else out.view(as_numbers)).numpy().reshape(-1, 8)
    if count <= _PIECE:
        table.take(bytes_, 0, numbers, "clip")  # "clip" needs no buffer
    else:
        for start in range(0, len(bytes_), _PIECE // 8):
            table.take(bytes_[start : start + _PIECE // 8], 0, numbers[start : start + _PIECE // 8], "clip")
    return out if count % 8 == 0 else out[:count].view(shape)


def _unpack(packed: torch.Tensor, count: int, dtype: torch.dtype, yes: float, no: float) -> torch.Tensor:
    """The same for other devices, flat."""
    fused = _fused(packed, dtype)
    if fused is not None:
        return fused.unpack(packed, count, dtype, yes, no)
    out = (packed[:, None] & _bit_values(packed.device)).ne(0).view(-1)[:count].to(dtype)
    return out if (yes, no) == (1.0, 0.0) else out.mul_(yes - no).add_(no)


@cache
def _table(dtype: torch.dtype, yes: float, no: float) -> tuple[Any, torch.dtype | None]:
    """For every byte its eight values, and the integer dtype that stands for a dtype that numpy lacks."""
    as_numbers = torch.int16 if dtype == torch.bfloat16 else None
    values = torch.tensor([no, yes], dtype=dtype)
    pair = (values if as_numbers is None else values.view(as_numbers)).numpy()
    return pair[np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)], as_numbers


def _fused(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    """The kernels for such a tensor, or None."""
    fused = _triton() if tensor.is_cuda else None
    return fused if fused is not None and dtype in fused.DTYPES and tensor.is_contiguous() else None


@cache
def _triton() -> Any:
    """The Triton kernels, or None if Triton is missing or does not run."""
    try:
        from pliant.engine.kernels import bits_triton

        packed = bits_triton.within(torch.ones(9, device="cuda"), 0.0, math.inf, nan=True)
        works = bits_triton.unpack(packed, 9, torch.float32, 1.0, 0.0).sum().item() == 9
    except Exception:  # a compiler or a driver may be missing
        return None
    return bits_triton if works else None


def _bit_values(device: torch.device) -> torch.Tensor:
    """The value of each bit of a byte, the first element in the highest bit, as numpy does."""
    if device not in _BIT_VALUES:
        _BIT_VALUES[device] = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=device)
    return _BIT_VALUES[device]


_BIT_VALUES: dict[torch.device, torch.Tensor] = {}
