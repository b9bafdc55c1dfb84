"""Convolutions that PyTorch is slow at on this processor run in ours, whether they train or only stand in the way."""

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
    """Whether a model has convolutions that may be swapped."""
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    return arm.SLOW_HERE and any(one.kernel_size == (1, 1) or one.groups > 1 for one in convolutions)


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
        ours = self._ours(args) if func is torch.conv2d and not kwargs else None
        return func(*args, **(kwargs or {})) if ours is None else ours(*args)

    def _ours(self, args: Any) -> Callable[..., torch.Tensor] | None:
        """What runs a convolution in place of PyTorch's. Not inside of a checkpoint, or of other hooks on what is kept: it may
        be computed again there, outside of this."""
        with without_function_modes():
            if saved_tensor_hooks() != self._outer_hooks:
                return None
            if pointwise.serves(*args):
                return pointwise.convolve
            return depthwise.convolve if depthwise.serves(*args) or depthwise.passes_on(*args) else None
