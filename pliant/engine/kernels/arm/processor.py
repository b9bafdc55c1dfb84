"""What the custom kernels for ARM processors share. Some of PyTorch's convolutions are several times too slow there."""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import Any

import torch

from pliant.runtime.torch_internals import is_transformed, would_run

SLOW_HERE = platform.machine() in ("aarch64", "arm64")


def is_slow(input: Any, weight: Any) -> bool:
    """Whether PyTorch is slow for convolutions with such tensors, whatever their settings."""
    return (
        SLOW_HERE
        and input.dim() == weight.dim() == 4
        and input.device.type == "cpu"
        and input.dtype == weight.dtype == torch.float32
    )


def is_differentiated() -> bool:
    """Whether gradients are recorded in a way that the custom kernels support: no autocast, forward mode or `torch.func`."""
    return not is_transformed() and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def without_autocast() -> AbstractContextManager[Any]:
    """Turn autocast off for a backward pass whose forward pass ran without it."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def is_needed(ctx: Any, which: int) -> bool:
    """Whether this backward pass needs the gradient of one of a function's inputs."""
    if not ctx.needs_input_grad[which]:
        return False
    try:
        return would_run(ctx.next_functions[which][0])
    except (AttributeError, RuntimeError):  # an older PyTorch; or a leaf in `autograd.grad`
        return True


def uniform(setting: Any) -> Any:
    """A setting that is equal in both dimensions, as one number; None if it differs."""
    if isinstance(setting, Integral):
        return int(setting)
    return setting[0] if not isinstance(setting, str) and len(set(setting)) == 1 else None
