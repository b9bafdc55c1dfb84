"""What custom kernels that are autograd functions share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import Any

import torch

from pliant.runtime.torch_internals import is_transformed, would_run


def is_differentiated() -> bool:
    """Whether gradients are recorded in a way that the custom kernels support: no autocast, forward mode or `torch.func`."""
    return not is_transformed() and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def without_autocast() -> AbstractContextManager[Any]:
    """Turn autocast off for a backward pass whose forward pass ran without it."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def is_needed(ctx: Any, which: int, place: int | None = None) -> bool:
    """Whether this backward pass needs the gradient of one of a function's inputs. `place` is its place among those that are
    tensors, if it is another."""
    if not ctx.needs_input_grad[which]:
        return False
    try:
        return would_run(ctx.next_functions[which if place is None else place][0])
    except (AttributeError, RuntimeError):  # an older PyTorch; or a leaf in `autograd.grad`
        return True


def uniform(setting: Any) -> Any:
    """A setting that is equal in both dimensions, as one number; None if it differs."""
    if isinstance(setting, Integral):
        return int(setting)
    return setting[0] if not isinstance(setting, str) and len(set(setting)) == 1 else None
