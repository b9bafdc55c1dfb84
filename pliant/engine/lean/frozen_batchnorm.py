"""Frozen batch norms: with running statistics and a frozen scale, backward is a product with one number per channel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any
from weakref import ref

import torch

from pliant.engine.derived_weights import Derived

_SMALL_NORM = 1 << 16  # elements: up to here one more pass over them costs less than a backward function in Python


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
    """A batch norm that uses running statistics and whose scale is not trained; None for all others."""
    if training or running_var is None or trains(weight) or not (input.requires_grad or trains(bias)):
        return None
    dtype, small = input.dtype, input.numel() <= _SMALL_NORM and input.device.type == "cpu"
    if small and input.requires_grad and running_var.dtype == dtype and not trains(bias):
        scale = _scale(input.dim(), running_var, weight, eps)
        if scale.dtype == dtype:
            out = input * scale  # for the graph alone: the values come below
            out.data = scale  # frees the product first
            out.data = _with_running_statistics(input.detach(), running_mean, running_var, weight, bias, eps)
            return out
    return _Scaled.apply(input, running_mean, running_var, weight, bias, eps)


def _with_running_statistics(input: Any, mean: Any, var: Any, weight: Any, bias: Any, eps: float) -> torch.Tensor:
    return torch.batch_norm(input, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)


class _Scaled(torch.autograd.Function):
    """A frozen batch norm as an autograd function: backward is one product."""

    @staticmethod
    def forward(ctx: Any, input: Any, mean: Any, var: Any, weight: Any, bias: Any, eps: float) -> torch.Tensor:
        ctx.scale, ctx.bias_dtype = _scale(input.dim(), var, weight, eps), None if bias is None else bias.dtype
        return _with_running_statistics(input, mean, var, weight, bias, eps)

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
    """The kernels that compute a norm and the clipping after it in one pass on such a device: on CUDA, if Triton works.

    Call it before a step is captured.
    """
    if kind != "cuda":
        return None
    try:
        from pliant.engine.kernels import norm_triton

        return norm_triton if norm_triton.works() else None
    except Exception:  # no compiler, no permission to write, …: use PyTorch's operations
        return None


def fused_norm(
    kernels: Any, values: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, clip: tuple[float, float] | None
) -> torch.Tensor:
    """A frozen norm (its scale and shift for each channel) and the clipping after it: one kernel forward and one backward.

    Scale and shift get no gradient.
    """
    out: torch.Tensor = _Fused.apply(kernels, values, scale, shift, clip)  # type: ignore[no-untyped-call]
    return out


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Any, values: Any, scale: Any, shift: Any, clip: tuple[float, float] | None) -> torch.Tensor:
        ctx.kernels, ctx.line, ctx.clip = kernels, (scale, shift), clip
        if clip is not None:
            ctx.save_for_backward(values)  # not the output, which may be changed in place
        out: torch.Tensor = kernels.norm(values, scale, shift, clip)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values = ctx.saved_tensors[0].detach() if ctx.clip is not None else grad
        if not torch.is_grad_enabled():
            return None, ctx.kernels.back(grad, values, *ctx.line, ctx.clip), None, None, None
        scale, shift = (one.view(-1, 1, 1) for one in ctx.line)  # differentiated again
        back = (grad * scale).to(grad.dtype)  # the scale has single precision at least
        if ctx.clip is not None:
            (low, high), normed = ctx.clip, (values * scale + shift).to(values.dtype).to(scale.dtype)
            back = back.masked_fill((normed <= low) | (normed >= high), 0.0)
        return None, back, None, None, None


class _Norm:
    """What is known of the norm with these running variances: its counter of batches, and its scale."""

    __slots__ = ("counter", "derived", "how", "var")

    def __init__(self, var: torch.Tensor) -> None:
        self.var = ref(var, partial(_forget, id(var)))
        self.counter: torch.Tensor | None = None  # a norm updates statistics without a version change, but counts
        self.how: tuple[int, float, bool] | None = None
        self.derived: Derived | None = None


_NORMS: dict[int, _Norm] = {}  # by the id of the variances: weak dictionaries are slow


def _forget(key: int, _: Any) -> None:
    _NORMS.pop(key, None)


def _norm_of(var: torch.Tensor) -> _Norm:
    known = _NORMS.get(id(var))
    if known is None or known.var() is not var:
        known = _NORMS[id(var)] = _Norm(var)
    return known


def _scale(dims: int, var: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The scale of a frozen norm; computed again if a statistic or the weight was written to."""
    known, how = _norm_of(var), (dims, eps, weight is not None)
    sources = [one for one in (var, weight, known.counter) if one is not None]
    derived = known.derived
    if derived is None or known.how != how or not derived.is_from(sources) or not derived.is_current:
        # A new one instead of a refresh: a pending backward pass may hold the old one.
        known.how, derived = how, Derived(partial(_compute_scale, *how), sources)
        known.derived = derived
    return derived.tensors[0]  # type: ignore[return-value]


def _compute_scale(
    dims: int, eps: float, has_weight: bool, var: torch.Tensor, *others: torch.Tensor, into: Any = None
) -> tuple[torch.Tensor]:
    scale = (var.detach() + eps).rsqrt_()
    scale = scale * others[0].detach() if has_weight else scale
    return (scale.view(1, -1, *[1] * (dims - 2)),)


def watch_batch_norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The norms with running statistics; from now on their changes are noticed."""
    norms = [module for module in model.modules() if _variances(module) is not None]
    for norm in norms:
        var, counter = _variances(norm), getattr(norm, "num_batches_tracked", None)
        if var is not None and isinstance(counter, torch.Tensor):
            _norm_of(var).counter = counter
    return norms


def frozen_scales(norms: Sequence[torch.nn.Module]) -> list[Derived]:
    """The scales of those of these norms that use running statistics, as far as they were computed, up to date."""
    frozen = [_variances(norm) for norm in norms if not norm.training]
    found = [_norm_of(var).derived for var in frozen if var is not None]
    derived = [one for one in found if one is not None]
    for one in derived:
        one.refresh()
    return derived


def _variances(norm: torch.nn.Module) -> torch.Tensor | None:
    var = getattr(norm, "running_var", None)
    return var if isinstance(var, torch.Tensor) else None
