"""ARM processors, on which some of PyTorch's convolutions take several times what they need; what those of ours share."""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import Any

import torch

from pliant.runtime.torch_internals import is_transformed, would_run

SLOW_HERE = platform.machine() in ("aarch64", "arm64")


def is_slow(input: Any, weight: Any) -> bool:
    """Whether a convolution of these is one that such processors are slow at, as far as that does not hang on its kind."""
    return (
        SLOW_HERE
        and input.dim() == weight.dim() == 4
        and input.device.type == "cpu"
        and input.dtype == weight.dtype == torch.float32
    )


def is_differentiated() -> bool:
    """Whether gradients are recorded as functions of ours know how: in float32, backward, and not inside of `torch.func`."""
    return not is_transformed() and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def exactly() -> AbstractContextManager[Any]:
    """Where a backward pass runs under autocast, its forward pass did not."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def is_asked(ctx: Any, which: int) -> bool:
    """Whether this backward pass wants the gradient of one of a function's inputs: PyTorch's own compute no others either."""
    if not ctx.needs_input_grad[which]:
        return False
    try:
        return would_run(ctx.next_functions[which][0])
    except (AttributeError, RuntimeError):  # an older PyTorch; or a leaf in `autograd.grad`, for which it does not say
        return True


def one(setting: Any) -> Any:
    """A setting that is the same in both dimensions, as one number; None where it is not."""
    if isinstance(setting, Integral):
        return int(setting)
    return setting[0] if not isinstance(setting, str) and len(set(setting)) == 1 else None
