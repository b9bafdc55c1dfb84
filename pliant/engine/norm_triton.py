"""A batch norm at rest and the clipping after it in one pass over a channels-last tensor on CUDA, where there is Triton.

It computes in float32 and rounds once, as PyTorch's own norm does: it gives what the model gives without it, up to ties.
"""

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

_ROWS, _CHANNELS = 128, 32  # of one program
_EIGHT = 8  # values side by side are read at once


@triton.jit(do_not_specialize=["rows", "eights"])  # type: ignore[untyped-decorator]
def _normed(values, scale, shift, rows, eights, low, high, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    channels = eights * 8  # so that the compiler knows how rows are aligned
    across = tl.cdiv(channels, CHANNELS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(0) % across * CHANNELS + tl.arange(0, CHANNELS)
    at = row.to(tl.int64)[:, None] * channels + channel[None, :]
    inside = (row < rows)[:, None] & (channel < channels)[None, :]
    x = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    x *= tl.load(scale + channel, mask=channel < channels, other=0.0)[None, :]
    x += tl.load(shift + channel, mask=channel < channels, other=0.0)[None, :]
    x = tl.where(x < low, low, x)  # what is not a number stays so
    x = tl.where(x > high, high, x)
    tl.store(values + at, x.to(values.dtype.element_ty), mask=inside)


def serves(values: torch.Tensor) -> bool:
    if values.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    return values.shape[1] % _EIGHT == 0 and values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last)


def norm_(
    values: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, clip: tuple[float, float] | None = None
) -> torch.Tensor:
    """Multiply each channel with a number and add another, in place, and clip what comes of it."""
    low, high = clip or (-math.inf, math.inf)
    rows, channels = values.numel() // values.shape[1], values.shape[1]
    grid = (triton.cdiv(rows, _ROWS) * triton.cdiv(channels, _CHANNELS),)
    with torch.cuda.device(values.device):  # Triton launches on the current one
        _normed[grid](values, scale, shift, rows, channels // _EIGHT, low, high, ROWS=_ROWS, CHANNELS=_CHANNELS)
    return values


def works() -> bool:
    """Whether it compiles and runs here, and gives what it should."""
    plain = torch.arange(2 * 24 * 81, device="cuda").view(2, 24, 9, 9).sub(2000).div(500).bfloat16()
    scale, shift = torch.arange(24, device="cuda").div(10), torch.arange(24, device="cuda").sub(10).div(5)
    ours = norm_(plain.clone(memory_format=torch.channels_last), scale, shift, (0.0, 6.0))
    want = (plain.float() * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)).clamp(0.0, 6.0)
    return torch.allclose(ours.float(), want, rtol=0.01, atol=0.01)
