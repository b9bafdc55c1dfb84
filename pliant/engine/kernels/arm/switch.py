"""Replaces convolutions that are slow in PyTorch on this processor by custom kernels, trained and frozen ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pliant.engine.kernels.arm import depthwise, pointwise
from pliant.engine.kernels.arm import processor as arm
from pliant.runtime.torch_internals import saved_tensor_hooks, without_function_modes


def is_slow_here(model: nn.Module) -> bool:
    """Whether a model has convolutions that may be replaced."""
    return arm.SLOW_HERE and has_small_convolutions(model)


def has_small_convolutions(model: nn.Module) -> bool:
    """Whether a model has pointwise or grouped convolutions, which take PyTorch longer than their arithmetic."""
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    return any(one.kernel_size == (1, 1) or one.groups > 1 for one in convolutions)


class Swapped(TorchFunctionMode):
    """A context for one forward pass; backward may come later, outside of it.

    >>> import torch
    >>> conv = torch.nn.Conv2d(4, 4, 3, groups=4)
    >>> images = torch.randn(2, 4, 8, 8)
    >>> with Swapped():
    ...     swapped = conv(images)
    >>> torch.equal(swapped, conv(images))
    True
    """

    def __enter__(self) -> Swapped:
        self._outer_hooks = saved_tensor_hooks()
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = self._kernel(args) if func is torch.conv2d and not kwargs else None
        return func(*args, **(kwargs or {})) if kernel is None else kernel(*args)

    def _kernel(self, args: Any) -> Callable[..., torch.Tensor] | None:
        """The custom kernel for a convolution. None inside of a checkpoint or other hooks on saved tensors: what runs there may
        be computed again outside of this context."""
        with without_function_modes():
            if saved_tensor_hooks() != self._outer_hooks:
                return None
            if pointwise.serves(*args):
                return pointwise.convolve
            return depthwise.convolve if depthwise.serves(*args) or depthwise.passes_on(*args) else None
