"""Convolutions with their norms and clippings, one after the other, as one autograd function on x86-64 processors.

With small batches, Python and autograd take longer than the arithmetic of a mobile network. A chain runs its layers without
them, channels-last (`channels_last`). A frozen norm after a frozen convolution is folded into its weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from pliant.engine.derived_weights import Derived
from pliant.engine.kernels import channels_last
from pliant.engine.kernels.functions import is_needed, uniform, without_autocast

_LAST = torch.channels_last
_through_norm = torch.ops.aten.native_batch_norm_backward.default
_through_hardtanh = torch.ops.aten.hardtanh_backward.grad_input
_through_relu = torch.ops.aten.threshold_backward.grad_input


@dataclass(eq=False)
class Link:
    """A convolution, and the norm and the clipping after it, if there are any. It is made for one program: for these tensors,
    settings, modes and trainable flags."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d | None = None
    clip: tuple[float, float] | None = None
    derived: Derived | None = None  # weight and bias with a frozen norm folded in, or the norm's scale and shift

    @cached_property
    def settings(self) -> channels_last.Settings:
        conv: Any = self.conv
        return conv.stride, conv.padding, conv.dilation, conv.groups

    @cached_property
    def params(self) -> tuple[Any, Any, Any, Any]:
        """Weight and bias of the convolution, scale and shift of the norm."""
        conv, norm = self.conv._parameters, self.norm._parameters if self.norm is not None else {}
        return conv["weight"], conv["bias"], norm.get("weight"), norm.get("bias")

    @cached_property
    def statistics(self) -> tuple[Any, Any]:
        held = self.norm._buffers if self.norm is not None else {}
        return held.get("running_mean"), held.get("running_var")

    @cached_property
    def norm_is_frozen(self) -> bool:
        """Whether the norm is a product and a sum that do not change."""
        if self.norm is None or self.norm.training:
            return False
        return not any(param is not None and param.requires_grad for param in self.params[2:])

    def line(self, is_folded: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and bias of the convolution with its frozen norm folded in, or else the norm's scale and shift."""
        if self.norm is None:
            raise ValueError("there is no norm.")
        every = *self.statistics, self.norm._buffers["num_batches_tracked"], *self.params[2:], *self.params[: 2 * is_folded]
        sources = [one for one in every if one is not None]
        if self.derived is None or not self.derived.is_from(sources) or not self.derived.is_current:
            has = [one is not None for one in every]
            self.derived = Derived(partial(_folded if is_folded else _line, self.norm.eps, has), sources)
        return self.derived.tensors  # type: ignore[return-value]


def _line(eps: float, has: list[bool], *given: torch.Tensor, into: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and shift of a norm."""
    ones = iter(given)
    mean, var, _, gamma, beta, *_ = (next(ones).detach() if one else None for one in has)
    if mean is None or var is None:
        raise ValueError("a norm without statistics cannot be folded.")
    scale = (var + eps).rsqrt_()
    scale = scale if gamma is None else scale.mul_(gamma)
    shift = torch.addcmul(torch.zeros_like(mean) if beta is None else beta, mean, scale, value=-1)
    return scale.view(1, -1, 1, 1), shift.view(1, -1, 1, 1)


def _folded(eps: float, has: list[bool], *given: torch.Tensor, into: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and bias of a convolution with the norm folded in."""
    scale, shift = (one.flatten() for one in _line(eps, has, *given))
    weight, bias = given[sum(has[:5])].detach(), given[-1].detach() if has[6] else None
    return weight * scale.view(-1, 1, 1, 1), shift if bias is None else torch.addcmul(shift, bias, scale)


def chain_of(module: nn.Module) -> tuple[Link, ...] | None:
    """The links of a module that is nothing but a chain; None for any other."""
    links: list[Link] = []
    for layer in _layers(module):
        if type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and _is_known(layer):
            links.append(Link(layer))
        elif not links or links[-1].clip is not None:
            return None
        elif type(layer) is nn.BatchNorm2d and links[-1].norm is None and _has_statistics(layer):
            links[-1].norm = layer
        elif type(layer) in (nn.ReLU, nn.ReLU6) or (type(layer) is nn.Hardtanh and layer.min_val < layer.max_val):
            links[-1].clip = (0.0, math.inf) if type(layer) is nn.ReLU else (layer.min_val, layer.max_val)  # type: ignore[assignment]
        else:
            return None
    return tuple(links) or None


def _layers(module: nn.Module) -> list[nn.Module]:
    if type(module).forward is nn.Sequential.forward:
        return [layer for child in module._modules.values() if child is not None for layer in _layers(child)]
    return [module]


def _is_known(conv: nn.Conv2d) -> bool:
    settings = uniform(conv.stride), uniform(conv.padding), uniform(conv.dilation)
    return None not in settings and not isinstance(conv.padding, str) and conv.weight.dtype == torch.float32


def _has_statistics(norm: nn.BatchNorm2d) -> bool:
    known = norm.running_mean is not None and norm.momentum is not None and norm.track_running_stats
    return bool(known and norm.running_mean.dtype == torch.float32 and (norm.weight is None) == (norm.bias is None))  # type: ignore[union-attr]


def serves(links: Sequence[Link], input: Any) -> bool:
    """Whether a chain may run on this input as one function."""
    if not isinstance(input, torch.Tensor) or not channels_last.serves(input, links[0].conv.weight):
        return False
    batch_statistics = any(link.norm is not None and link.norm.training for link in links)
    return torch.is_grad_enabled() and (len(input) > 1 or not batch_statistics)  # of one value, PyTorch has an error to tell


def run(links: Sequence[Link], input: torch.Tensor) -> torch.Tensor:
    """What the modules of a chain would compute; norms update their statistics."""
    out: torch.Tensor = _Chain.apply(links, input, *[param for link in links for param in link.params])  # type: ignore[no-untyped-call]
    return out


_KEPT = 7  # tensors for each link


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, links: Sequence[Link], input: torch.Tensor, *params: Any) -> torch.Tensor:
        trains = ctx.needs_input_grad[2:]
        flows = ctx.needs_input_grad[1]  # whether a gradient flows to what the link is given
        x, kept, shapes = input.contiguous(memory_format=_LAST), list[Any](), []
        for i, link in enumerate(links):
            weight, bias, gamma, beta = params[4 * i : 4 * i + 4]
            given, scale, normed, mean, deviation, clipped = x, None, None, None, None, None
            if link.norm_is_frozen and not any(trains[4 * i : 4 * i + 2]):
                weight, bias = link.line(is_folded=True)
                x = channels_last.forward(x, weight, bias, link.settings)
            else:
                x = channels_last.forward(x, weight, bias, link.settings)
                if link.norm_is_frozen:
                    scale, shift = link.line(is_folded=False)
                    x = torch.addcmul(shift, x, scale, out=x)
                elif link.norm is not None:
                    normed = x
                    x, mean, deviation = _normed(link.norm, x, gamma, beta)
            flows = flows or any(trains[4 * i : 4 * i + 4])
            if link.clip is not None:
                clipped = x if flows else None
                x = x.clamp_(*link.clip) if i + 1 < len(links) else x.clamp(*link.clip)  # the caller may change the result
            kept += [given if trains[4 * i] else None, weight, scale, normed if flows else None, mean, deviation, clipped]
            shapes.append(given.shape)
        state = [one for link in links for one in (link.params[2], *link.statistics)]
        ctx.links, ctx.shapes, ctx.training = links, shapes, [link.norm is not None and link.norm.training for link in links]
        ctx.places = [0, *itertools.accumulate(param is not None for param in params)]  # among the tensors
        ctx.save_for_backward(*kept, *state)
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        links, saved = ctx.links, ctx.saved_tensors
        needed = [is_needed(ctx, n, place) for n, place in enumerate(ctx.places, 1)]
        found: list[Any] = [None] * len(needed)
        with without_autocast():
            grad = grad.contiguous(memory_format=_LAST)
            is_ours = False  # whether it may be changed in place, which is three times as fast as writing to other memory
            for i in range(len(links) - 1, -1, -1):
                link, at = links[i], 4 * i + 1
                given, weight, scale, normed, mean, deviation, clipped = saved[_KEPT * i : _KEPT * (i + 1)]
                flows = any(needed[:at])
                convolves = flows or needed[at] or needed[at + 1]
                if not (convolves or needed[at + 2] or needed[at + 3]):
                    break
                if clipped is not None:
                    into = grad if is_ours else torch.empty_like(grad)
                    grad, is_ours = _through_clip(grad, clipped, link.clip, into), True
                if scale is not None:
                    grad, is_ours = grad.mul_(scale) if is_ours else grad * scale, True
                elif normed is not None:
                    gamma, *statistics = saved[_KEPT * len(links) + 3 * i :][:3]
                    how = normed, gamma, *statistics, mean, deviation, ctx.training[i], link.norm.eps
                    wants = [convolves, needed[at + 2], needed[at + 3]]
                    grad, found[at + 2], found[at + 3] = _through_norm(grad, *how, wants)
                    is_ours = True
                if convolves:
                    which = flows, needed[at], needed[at + 1]
                    grad, *found[at : at + 2] = channels_last.gradients(
                        grad, given, weight, ctx.shapes[i], link.settings, which
                    )
                    is_ours = True
        found[0] = grad if needed[0] else None
        return None, *found


def _through_clip(grad: torch.Tensor, clipped: Any, clip: tuple[float, float], into: torch.Tensor) -> torch.Tensor:
    """The gradient through a clipping, into this tensor."""
    low, high = clip
    if high == math.inf:
        return _through_relu(grad, clipped, low, grad_input=into)  # type: ignore[no-any-return]
    return _through_hardtanh(grad, clipped, low, high, grad_input=into)  # type: ignore[no-any-return]


def _normed(norm: nn.BatchNorm2d, x: torch.Tensor, gamma: Any, beta: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    how = norm.running_mean, norm.running_var, norm.training, norm.momentum, norm.eps
    return torch.native_batch_norm(x, gamma, beta, *how)  # type: ignore[arg-type]
