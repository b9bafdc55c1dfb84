"""A convolution's bias and the clipping after it in one pass over a channels-last tensor on CUDA, where there is Triton.

PyTorch adds a bias to a channels-last tensor element by element, which takes as long as the norm that folding saves.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

_BLOCK = 2048


@triton.jit(do_not_specialize=["count", "channels"])  # type: ignore[untyped-decorator]
def _shift(values, bias, count, channels, low, high, CLIPS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + at % channels, mask=inside, other=0.0).to(tl.float32)
    if CLIPS:  # what is not a number stays so
        x = tl.where(x < low, low, x)
        x = tl.where(x > high, high, x)
    tl.store(values + at, x.to(values.dtype.element_ty), mask=inside)


def shift_(values: torch.Tensor, bias: torch.Tensor, clip: tuple[float, float] | None) -> torch.Tensor:
    """Add a bias per channel to a channels-last tensor without gaps, in place, and clip what comes of it."""
    count = values.numel()
    low, high = clip or (0.0, 0.0)
    grid = (triton.cdiv(count, _BLOCK),)
    _shift[grid](values, bias, count, values.shape[1], low, high, CLIPS=clip is not None, BLOCK=_BLOCK)
    return values
