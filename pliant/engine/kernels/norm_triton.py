"""A frozen batch norm and the clipping after it in one Triton kernel for channels-last tensors on CUDA; one more for backward.

It computes in float32 and rounds once, as PyTorch's norm does, so results are equal up to ties. PyTorch's backward of a frozen
norm copies a channels-last gradient twice.
"""

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from pliant.runtime.batchnorm import in_eights

_ROWS, _CHANNELS = 128, 32  # per program
_EIGHT = 8  # adjacent values are read at once
_EVERYTHING = -math.inf, math.inf

Clip = tuple[float, float] | None


@triton.jit(do_not_specialize=["rows", "eights"])  # type: ignore[untyped-decorator]
def _normed(values, to, scale, shift, rows, eights, low, high, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    channels = eights * 8  # so that the compiler knows how rows are aligned
    across = tl.cdiv(channels, CHANNELS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(0) % across * CHANNELS + tl.arange(0, CHANNELS)
    at = row.to(tl.int64)[:, None] * channels + channel[None, :]
    inside = (row < rows)[:, None] & (channel < channels)[None, :]
    x = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    x *= tl.load(scale + channel, mask=channel < channels, other=0.0)[None, :]
    x += tl.load(shift + channel, mask=channel < channels, other=0.0)[None, :]
    x = tl.where(x < low, low, x)  # NaN stays NaN
    x = tl.where(x > high, high, x)
    tl.store(to + at, x.to(to.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "eights"])  # type: ignore[untyped-decorator]
def _back(  # type: ignore[no-untyped-def]
    grad, values, to, scale, shift, rows, eights, low, high, CLIPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    channels = eights * 8
    across = tl.cdiv(channels, CHANNELS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(0) % across * CHANNELS + tl.arange(0, CHANNELS)
    at = row.to(tl.int64)[:, None] * channels + channel[None, :]
    inside = (row < rows)[:, None] & (channel < channels)[None, :]
    factor = tl.load(scale + channel, mask=channel < channels, other=0.0)[None, :]
    x = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factor
    if CLIPS:
        y = tl.load(values + at, mask=inside, other=0.0).to(tl.float32) * factor
        y += tl.load(shift + channel, mask=channel < channels, other=0.0)[None, :]
        y = y.to(values.dtype.element_ty).to(tl.float32)  # the value before clipping
        x = tl.where((y <= low) | (y >= high), 0.0, x)
    tl.store(to + at, x.to(to.dtype.element_ty), mask=inside)


def serves(values: torch.Tensor) -> bool:
    return values.dtype in (torch.float32, torch.float16, torch.bfloat16) and in_eights(values)


def norm_(values: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, clip: Clip = None) -> torch.Tensor:
    """Scale and shift each channel in place, and clip the result."""
    return _norm(values, values, scale, shift, clip)


def norm(values: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, clip: Clip = None) -> torch.Tensor:
    """The same, into a new tensor."""
    return _norm(values, torch.empty_like(values), scale, shift, clip)


def back(grad: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, clip: Clip = None) -> torch.Tensor:
    """The gradient of `values`; without clipping they are not read."""
    if not serves(grad):
        grad = grad.contiguous(memory_format=torch.channels_last)
    out, (low, high) = torch.empty_like(grad), clip or _EVERYTHING
    grid, rows, eights = _grid(grad)
    with torch.cuda.device(grad.device):  # Triton launches on the current one
        _back[grid](
            grad, values, out, scale, shift, rows, eights, low, high, CLIPS=clip is not None, ROWS=_ROWS, CHANNELS=_CHANNELS
        )
    return out


def _norm(values: torch.Tensor, to: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, clip: Clip) -> torch.Tensor:
    low, high = clip or _EVERYTHING
    grid, rows, eights = _grid(values)
    with torch.cuda.device(values.device):
        _normed[grid](values, to, scale, shift, rows, eights, low, high, ROWS=_ROWS, CHANNELS=_CHANNELS)
    return to


def _grid(values: torch.Tensor) -> tuple[tuple[int], int, int]:
    """The number of programs, of rows, and of groups of eight channels."""
    rows, channels = values.numel() // values.shape[1], values.shape[1]
    return (triton.cdiv(rows, _ROWS) * triton.cdiv(channels, _CHANNELS),), rows, channels // _EIGHT


def works() -> bool:
    """Whether the kernels compile and run here, and give the right results, forward and backward."""
    plain = torch.arange(2 * 24 * 81, device="cuda").view(2, 24, 9, 9).sub(2000).div(500).bfloat16()
    plain = plain.contiguous(memory_format=torch.channels_last).requires_grad_()
    scale, shift = torch.arange(24, device="cuda").div(10), torch.arange(24, device="cuda").sub(10).div(5)
    grad = torch.linspace(-1, 1, plain.numel(), device="cuda").view_as(plain).bfloat16()
    for clip in (None, (0.0, 6.0), (-0.5, 0.5)):
        want = (plain.float() * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)).bfloat16().clamp(*clip or _EVERYTHING)
        wanted = torch.autograd.grad(want, plain, grad)[0].float()
        given = plain.detach(), scale, shift, clip
        ours, in_place = norm(*given), norm_(plain.detach().clone(), scale, shift, clip)
        if not all(torch.allclose(a.float(), want.float(), rtol=0.01, atol=0.01) for a in (ours, in_place)):
            return False
        off = (back(grad, *given).float() - wanted).abs() > 0.01 + 0.01 * wanted.abs()
        if off.float().mean() > 0.01:  # ties may round differently
            return False
    return True
