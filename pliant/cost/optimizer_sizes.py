"""Bytes of an optimizer: the state that it keeps of each parameter, and what it takes while it steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pliant.runtime.memory import LiveBytes
from pliant.runtime.optimizer_step import needs_closure
from pliant.runtime.rng import keeps_rng_states
from pliant.runtime.sandbox import scratch, scratch_step

_SMALL = 1 << 16  # elements


@keeps_rng_states()
def optimizer_sizes(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Bytes of optimizer state per parameter, read off the state that a fresh step makes, and of scratch memory beside it.

    One parameter of each kind (shape, dtype, group) is tried.
    """
    group_of = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
    mine = {name: param for name, param in params.items() if id(param) in group_of}
    kinds: dict[Any, tuple[int, int]] = {}
    state, scratch_bytes = {}, {}
    for name, param in mine.items():
        kind = param.shape, param.dtype, group_of[id(param)]
        if kind not in kinds:
            like, copies = _with_state(optimizer, [param])
            tensors = (t for t in like.state[copies[0]].values() if isinstance(t, torch.Tensor))
            kinds[kind] = sum(t.numel() * t.element_size() for t in tensors), _step_peak(like)
        state[name], scratch_bytes[name] = kinds[kind]
    together = _takes_all_at_once(optimizer, mine, scratch_bytes)
    return {"state": state, "scratch": scratch_bytes, "together": together}


@keeps_rng_states()
def state_sizes(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Bytes of optimizer state per parameter, from a step of one parameter of each kind (shape, dtype, group).

    Large ones have a shape and no memory, unless the optimizer cannot take such a step. In Python, that takes far longer than a
    real step of a small one. The state of an optimizer that needs a closure does not count.
    """
    if needs_closure(optimizer):
        return {}
    group_of = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
    kinds: dict[Any, int] = {}
    out = {}
    for name, param in params.items():
        if id(param) in group_of:
            kind = param.shape, param.dtype, group_of[id(param)]
            if kind not in kinds:
                try:
                    if param.numel() <= _SMALL:
                        like, copies = _with_state(optimizer, [param])
                    else:
                        like, copies = _with_state(optimizer, [param], [torch.empty_like(param, device="meta")])
                except (RuntimeError, ValueError):  # fused, or written for one kind of device
                    like, copies = _with_state(optimizer, [param])
                tensors = (t for t in like.state[copies[0]].values() if isinstance(t, torch.Tensor))
                kinds[kind] = sum(t.numel() * t.element_size() for t in tensors)
            out[name] = kinds[kind]
    return out


def _with_state(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], values: Sequence[torch.Tensor] | None = None
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """A scratch optimizer that has taken a step."""
    like, copies = scratch(optimizer, params, values=values)
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    scratch_step(like)
    return like, copies


def _step_peak(like: torch.optim.Optimizer) -> int:
    meter = LiveBytes(like.param_groups[0]["params"][0].device)
    meter.forget()
    with meter:
        scratch_step(like)
    return meter.peak


def _takes_all_at_once(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter], alone: Mapping[str, int]) -> bool:
    """Whether a step over several parameters takes up the scratch memory of all of them together (as `foreach` does)."""
    few = sorted(params, key=lambda name: -alone[name])[:4]
    if len(few) < 2 or not alone[few[0]]:
        return False
    like, _ = _with_state(optimizer, [params[name] for name in few])
    return _step_peak(like) > (alone[few[0]] + sum(alone[name] for name in few)) / 2
