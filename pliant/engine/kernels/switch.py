"""Replaces convolutions that are slow in PyTorch on this processor by custom kernels, trained and frozen ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from pliant.core.errors import first_line
from pliant.engine.kernels import channels_last
from pliant.engine.kernels.arm import depthwise, pointwise
from pliant.engine.kernels.arm import processor as arm
from pliant.graph.backward import compute_loss, receivers, trainable
from pliant.runtime import batches
from pliant.runtime.batches import Loss
from pliant.runtime.sandbox import sandbox
from pliant.runtime.torch_internals import NormBase, saved_tensor_hooks, without_function_modes

_NEAR = 1e-3  # of the loss, and at least so much: what rounding may change
_REPLACED = torch.conv2d, F.adaptive_avg_pool2d
_FEW = 2  # samples, on which kernels are tried


def is_slow_here(model: nn.Module) -> bool:
    """Whether a model has convolutions that may be replaced."""
    return has_small_convolutions(model) if arm.SLOW_HERE else channels_last.pays(model)


def has_small_convolutions(model: nn.Module) -> bool:
    """Whether a model has pointwise or grouped convolutions, which take PyTorch longer than their arithmetic."""
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    return any(one.kernel_size == (1, 1) or one.groups > 1 for one in convolutions)


class CustomKernels:
    """Whether custom kernels run the convolutions of a model, and why not."""

    def __init__(self, model: nn.Module) -> None:
        on_cpu = next(model.parameters()).device.type == "cpu"
        self._exist = on_cpu and is_slow_here(model)
        self.is_off = False  # where everything trains and nothing is limited: such steps are PyTorch's, bit for bit
        self.reasons: dict[str, str] = {}
        self._is_checked = arm.SLOW_HERE  # those keep the layout of every tensor

    @property
    def serve(self) -> bool:
        return self._exist and not self.is_off

    def are_right(self, model: nn.Module, loss: Loss, batch: Any) -> bool:
        """Try them once, without a trace: code that relies on the layout of tensors may fail channels-last, or differ."""
        if self._is_checked:
            return self.serve
        self._is_checked = True
        few = batches.part(batch, _FEW) if (batches.size(batch) or 0) > _FEW else batch
        with torch.enable_grad():
            try:
                value, graph = _passed(model, loss, few)
            except Exception:  # the user's loss may need the whole batch
                few = batch
                value, graph = _passed(model, loss, few)
            try:
                with Swapped():
                    ours, its_graph = _passed(model, loss, few)
            except Exception as error:
                text = f"{type(error).__name__}: {first_line(error)}"
                return self._fail(f"the forward pass fails with channels-last tensors: {text}")
        if not torch.allclose(ours, value, rtol=_NEAR, atol=_NEAR, equal_nan=True):
            return self._fail("the loss differs with channels-last tensors")
        if its_graph != graph:  # seconds of its nodes would say nothing
            return self._fail("the backward graph differs with channels-last tensors")
        return self.serve

    def _fail(self, why: str) -> bool:
        self._exist, self.reasons["kernels"] = False, why
        return False


def _passed(model: nn.Module, loss: Loss, batch: Any) -> tuple[torch.Tensor, list[list[str | int]]]:
    """The loss of a forward pass that leaves no trace, and what receives the gradients of each node behind it.

    Norms use their running statistics: over few values, batch statistics make much of rounding.
    """
    with sandbox(model):
        for module in model.modules():
            if isinstance(module, NormBase):
                module.eval()
        value = compute_loss(model, loss, batch)
        return value.detach(), receivers(value, trainable(model))


class Swapped(TorchFunctionMode):
    """A context for one forward pass; backward may come later, outside of it.

    >>> import torch
    >>> conv = torch.nn.Conv2d(4, 4, 3, groups=4)
    >>> images = torch.randn(2, 4, 8, 8)
    >>> with Swapped():
    ...     swapped = conv(images)
    >>> torch.allclose(swapped, conv(images), atol=1e-6)
    True
    """

    def __enter__(self) -> Swapped:
        self._outer_hooks = saved_tensor_hooks()
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = self._kernel(func, args) if func in _REPLACED and not kwargs else None
        return func(*args, **(kwargs or {})) if kernel is None else kernel(*args)

    def _kernel(self, func: Any, args: Any) -> Callable[..., torch.Tensor] | None:
        """The custom kernel for a convolution or a mean of maps. None inside of a checkpoint or other hooks on saved tensors:
        what runs there may be computed again outside of this context."""
        with without_function_modes():
            if saved_tensor_hooks() != self._outer_hooks:
                return None
            if func is not torch.conv2d:
                return channels_last.mean if not arm.SLOW_HERE and channels_last.is_mean(*args) else None
            if not arm.SLOW_HERE:
                return channels_last.convolve if channels_last.serves(*args) else None
            if pointwise.serves(*args):
                return pointwise.convolve
            return depthwise.convolve if depthwise.serves(*args) or depthwise.passes_on(*args) else None
