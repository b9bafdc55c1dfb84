"""Batch norms at rest: on their running statistics, with a scale that is not chosen, a norm is a product."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from pliant.engine.made import Made

_SMALL_NORM = 1 << 16  # elements: up to this one more pass over them costs less than a backward function in Python does


def trains(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad


def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """A batch norm on its running statistics whose scale is not chosen; None for all others."""
    if training or running_var is None or trains(weight) or not (input.requires_grad or trains(bias)):
        return None
    dtype, small = input.dtype, input.numel() <= _SMALL_NORM and input.device.type == "cpu"
    if small and input.requires_grad and running_var.dtype == dtype and not trains(bias):
        scale = _scale(input.dim(), running_var, weight, eps)
        if scale.dtype == dtype:
            out = input * scale  # for its graph; the values are the norm's
            out.data = scale  # frees the product before there are others
            out.data = _at_rest(input.detach(), running_mean, running_var, weight, bias, eps)
            return out
    return _Scaled.apply(input, running_mean, running_var, weight, bias, eps)


def _at_rest(input: Any, mean: Any, var: Any, weight: Any, bias: Any, eps: float) -> torch.Tensor:
    return torch.batch_norm(input, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)


class _Scaled(torch.autograd.Function):
    """A batch norm on its running statistics whose scale is not chosen: backward is one product."""

    @staticmethod
    def forward(ctx: Any, input: Any, mean: Any, var: Any, weight: Any, bias: Any, eps: float) -> torch.Tensor:
        ctx.scale, ctx.bias_dtype = _scale(input.dim(), var, weight, eps), None if bias is None else bias.dtype
        return _at_rest(input, mean, var, weight, bias, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_input = d_bias = None
        if ctx.needs_input_grad[0]:
            d_input = grad * ctx.scale if grad.dtype == ctx.scale.dtype else (grad * ctx.scale).to(grad.dtype)
        if ctx.needs_input_grad[4]:
            d_bias = grad.sum([d for d in range(grad.dim()) if d != 1], dtype=ctx.bias_dtype)
        return d_input, None, None, None, d_bias, None


def _scale(dims: int, var: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """What a norm at rest multiplies with; computed again when a statistic or the weight was written to."""
    sources = [one for one in (var, weight, _COUNTERS.get(var)) if one is not None]
    how = dims, eps, weight is not None
    known = _SCALES.get(var)
    if known is None or known[0] != how or not known[1].is_of(sources) or not known[1].is_current:
        # Another one, not the old one again: a backward pass that is to come may hold that.
        known = _SCALES[var] = how, Made(partial(_product, *how), sources)
    return known[1].tensors[0]


def _product(
    dims: int, eps: float, has_weight: bool, var: torch.Tensor, *others: torch.Tensor, into: Any = None
) -> tuple[torch.Tensor]:
    scale = (var.detach() + eps).rsqrt_()
    scale = scale * others[0].detach() if has_weight else scale
    return (scale.view(1, -1, *[1] * (dims - 2)),)


_SCALES: Any = WeakTensorKeyDictionary()
_COUNTERS: Any = WeakTensorKeyDictionary()  # a norm writes to its statistics without saying so, but counts when it does


def watch_norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The norms with running statistics, whose changes are noticed from now on."""
    norms = [module for module in model.modules() if isinstance(getattr(module, "running_var", None), torch.Tensor)]
    for norm in norms:
        if isinstance(getattr(norm, "num_batches_tracked", None), torch.Tensor):
            _COUNTERS[norm.running_var] = norm.num_batches_tracked
    return norms


def scales(norms: Sequence[torch.nn.Module]) -> list[Made]:
    """What those of these norms that are at rest multiply with, as far as it was made, fit for use."""
    found = [_SCALES.get(norm.running_var) for norm in norms if not norm.training]
    made = [one[1] for one in found if one is not None]
    for one in made:
        one.refresh()
    return made
