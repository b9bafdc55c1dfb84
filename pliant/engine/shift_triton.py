"""A convolution's bias and the clipping after it in one pass over a channels-last tensor on CUDA, where there is Triton.

PyTorch adds a bias to a channels-last tensor element by element, which takes as long as the norm that folding saves.
"""

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

_ROWS, _CHANNELS = 128, 32  # of one program
_EIGHT = 8  # values of half precision are read at once


@triton.jit(do_not_specialize=["rows", "eights"])  # type: ignore[untyped-decorator]
def _shift(values, bias, rows, eights, low, high, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    channels = eights * 8  # so that the compiler knows how rows are aligned
    across = tl.cdiv(channels, CHANNELS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(0) % across * CHANNELS + tl.arange(0, CHANNELS)
    at = row.to(tl.int64)[:, None] * channels + channel[None, :]
    inside = (row < rows)[:, None] & (channel < channels)[None, :]
    x = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    x = tl.where(x < low, low, x)  # what is not a number stays so
    x = tl.where(x > high, high, x)
    tl.store(values + at, x.to(values.dtype.element_ty), mask=inside)


def shift_(values: torch.Tensor, bias: torch.Tensor, clip: tuple[float, float] | None) -> torch.Tensor:
    """Add a bias per channel to a channels-last tensor without gaps, in place, and clip what comes of it."""
    low, high = clip or (-math.inf, math.inf)
    channels = values.shape[1]
    if channels % _EIGHT:
        return values.add_(bias.view(1, -1, 1, 1)).clamp_(low, high)
    rows = values.numel() // channels
    grid = (triton.cdiv(rows, _ROWS) * triton.cdiv(channels, _CHANNELS),)
    _shift[grid](values, bias, rows, channels // _EIGHT, low, high, ROWS=_ROWS, CHANNELS=_CHANNELS)
    return values
