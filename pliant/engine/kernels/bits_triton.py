"""Packing and unpacking bits (see `lean/bits`) on CUDA in one Triton kernel each."""

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BLOCK = 1024  # bytes per program


@triton.jit  # type: ignore[untyped-decorator]
def _within(values, packed, count, low, high, NAN: tl.constexpr, OPEN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start * 8 + tl.arange(0, BLOCK * 8)
    x = tl.load(values + at, mask=at < count, other=0.0).to(tl.float32)
    if NAN:
        outside = x <= low
        if not OPEN:
            outside = outside | (x >= high)
        bit = outside == 0
    else:
        bit = x > low
        if not OPEN:
            bit = bit & (x < high)
    bit = bit & (at < count)
    place = 7 - tl.arange(0, 8)
    byte = tl.sum(tl.reshape(bit.to(tl.int32), (BLOCK, 8)) << place[None, :], axis=1)
    to = start + tl.arange(0, BLOCK)
    tl.store(packed + to, byte.to(tl.uint8), mask=to < (count + 7) // 8)


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(packed, values, count, yes, no, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * (BLOCK * 8) + tl.arange(0, BLOCK * 8)
    byte = tl.load(packed + at // 8, mask=at < count, other=0).to(tl.int32)
    bit = (byte >> (7 - at % 8).to(tl.int32)) & 1
    tl.store(values + at, tl.where(bit != 0, yes, no).to(values.dtype.element_ty), mask=at < count)


def within(flat: torch.Tensor, low: float, high: float, nan: bool) -> torch.Tensor:
    """As in `bits`, for flat tensors of the DTYPES that are contiguous."""
    count = flat.numel()
    packed = torch.empty((count + 7) // 8, dtype=torch.uint8, device=flat.device)
    if count:
        is_open = high == math.inf
        grid = (triton.cdiv(len(packed), _BLOCK),)
        with torch.cuda.device(flat.device):  # Triton launches on the current one
            _within[grid](flat, packed, count, low, 0.0 if is_open else high, NAN=nan, OPEN=is_open, BLOCK=_BLOCK)
    return packed


def unpack(packed: torch.Tensor, count: int, dtype: torch.dtype, yes: float, no: float) -> torch.Tensor:
    """As in `bits`, for the DTYPES."""
    values = torch.empty(count, dtype=dtype, device=packed.device)
    if count:
        with torch.cuda.device(packed.device):
            _unpack[(triton.cdiv(len(packed), _BLOCK),)](packed, values, count, yes, no, BLOCK=_BLOCK)
    return values
