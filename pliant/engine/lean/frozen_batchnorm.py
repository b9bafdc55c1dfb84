"""Batch norms at rest: on their running statistics, with a scale that is not chosen, a norm is a product."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any
from weakref import ref

import torch

from pliant.engine.derived_weights import Made

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


@cache
def norm_kernels(kind: str) -> Any:
    """What computes a norm and the clipping after it in one kernel on such a device: on CUDA, where Triton works.

    To be asked before a step is captured.
    """
    if kind != "cuda":
        return None
    try:
        from pliant.engine.kernels import norm_triton

        return norm_triton if norm_triton.works() else None
    except Exception:  # no compiler, no permission to write, …: PyTorch's own operations do
        return None


def in_one_kernel(
    kernels: Any, values: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, clip: tuple[float, float] | None
) -> torch.Tensor:
    """A norm at rest (what it multiplies channels with, and what it adds) and the clipping after it, in one kernel there and
    one back. No gradient goes to the two."""
    out: torch.Tensor = _Fused.apply(kernels, values, scale, shift, clip)  # type: ignore[no-untyped-call]
    return out


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Any, values: Any, scale: Any, shift: Any, clip: tuple[float, float] | None) -> torch.Tensor:
        ctx.kernels, ctx.line, ctx.clip = kernels, (scale, shift), clip
        if clip is not None:
            ctx.save_for_backward(values)  # not what comes of it: that may be changed in place
        out: torch.Tensor = kernels.norm(values, scale, shift, clip)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values = ctx.saved_tensors[0].detach() if ctx.clip is not None else grad
        if not torch.is_grad_enabled():
            return None, ctx.kernels.back(grad, values, *ctx.line, ctx.clip), None, None, None
        scale, shift = (one.view(-1, 1, 1) for one in ctx.line)  # it is to be differentiated again
        back = (grad * scale).to(grad.dtype)  # the scale has single precision at least
        if ctx.clip is not None:
            (low, high), normed = ctx.clip, (values * scale + shift).to(values.dtype).to(scale.dtype)
            back = back.masked_fill((normed <= low) | (normed >= high), 0.0)
        return None, back, None, None, None


class _Norm:
    """What is known of the norm with some running variances: what counts their changes, and what it multiplies with."""

    __slots__ = ("counter", "how", "made", "var")

    def __init__(self, var: torch.Tensor) -> None:
        self.var = ref(var, partial(_forget, id(var)))
        self.counter: torch.Tensor | None = None  # a norm writes to its statistics without saying so, but counts when it does
        self.how: tuple[int, float, bool] | None = None
        self.made: Made | None = None


_NORMS: dict[int, _Norm] = {}  # by the id of the variances: to look into weak dictionaries takes longer than all the rest


def _forget(key: int, _: Any) -> None:
    _NORMS.pop(key, None)


def _norm_of(var: torch.Tensor) -> _Norm:
    known = _NORMS.get(id(var))
    if known is None or known.var() is not var:
        known = _NORMS[id(var)] = _Norm(var)
    return known


def _scale(dims: int, var: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """What a norm at rest multiplies with; computed again when a statistic or the weight was written to."""
    known, how = _norm_of(var), (dims, eps, weight is not None)
    sources = [one for one in (var, weight, known.counter) if one is not None]
    made = known.made
    if made is None or known.how != how or not made.is_of(sources) or not made.is_current:
        # Another one, not the old one again: a backward pass that is to come may hold that.
        known.how, made = how, Made(partial(_product, *how), sources)
        known.made = made
    return made.tensors[0]  # type: ignore[return-value]  # there always is one


def _product(
    dims: int, eps: float, has_weight: bool, var: torch.Tensor, *others: torch.Tensor, into: Any = None
) -> tuple[torch.Tensor]:
    scale = (var.detach() + eps).rsqrt_()
    scale = scale * others[0].detach() if has_weight else scale
    return (scale.view(1, -1, *[1] * (dims - 2)),)


def watch_norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The norms with running statistics, whose changes are noticed from now on."""
    norms = [module for module in model.modules() if _variances(module) is not None]
    for norm in norms:
        var, counter = _variances(norm), getattr(norm, "num_batches_tracked", None)
        if var is not None and isinstance(counter, torch.Tensor):
            _norm_of(var).counter = counter
    return norms


def scales(norms: Sequence[torch.nn.Module]) -> list[Made]:
    """What those of these norms that are at rest multiply with, as far as it was made, fit for use."""
    resting = [_variances(norm) for norm in norms if not norm.training]
    found = [_norm_of(var).made for var in resting if var is not None]
    made = [one for one in found if one is not None]
    for one in made:
        one.refresh()
    return made


def _variances(norm: torch.nn.Module) -> torch.Tensor | None:
    var = getattr(norm, "running_var", None)
    return var if isinstance(var, torch.Tensor) else None
