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
    kinds, known = _kinds(optimizer, params), dict[Any, tuple[int, int]]()
    for name, kind in kinds.items():
        if kind not in known:
            like, copies = _with_state(optimizer, [params[name]])
            known[kind] = _state_bytes(like, copies), _step_peak(like)
    state, scratch_bytes = ({name: known[kind][i] for name, kind in kinds.items()} for i in (0, 1))
    together = _takes_all_at_once(optimizer, params, scratch_bytes)
    return {"state": state, "scratch": scratch_bytes, "together": together}


@keeps_rng_states()
def state_sizes(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Bytes of optimizer state per parameter, from a step of one parameter of each kind (shape, dtype, group).

    Large ones have a shape and no memory, unless the optimizer cannot take such a step. In Python, that takes far longer than a
    real step of a small one. The state of an optimizer that needs a closure does not count.
    """
    if needs_closure(optimizer):
        return {}
    kinds, known = _kinds(optimizer, params), dict[Any, int]()
    for name, kind in kinds.items():
        if kind not in known:
            param = params[name]
            try:
                values = None if param.numel() <= _SMALL else [torch.empty_like(param, device="meta")]
                known[kind] = _state_bytes(*_with_state(optimizer, [param], values))
            except (RuntimeError, ValueError):  # fused, or written for one kind of device
                known[kind] = _state_bytes(*_with_state(optimizer, [param]))
    return {name: known[kind] for name, kind in kinds.items()}


def _kinds(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Shape, dtype and group of the parameters that the optimizer holds: of those that are alike one is tried."""
    group_of = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return {name: (p.shape, p.dtype, group_of[id(p)]) for name, p in params.items() if id(p) in group_of}


def _state_bytes(like: torch.optim.Optimizer, copies: Sequence[nn.Parameter]) -> int:
    tensors = (t for t in like.state[copies[0]].values() if isinstance(t, torch.Tensor))
    return sum(t.numel() * t.element_size() for t in tensors)


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
    few = sorted(alone, key=lambda name: -alone[name])[:4]
    if len(few) < 2 or not alone[few[0]]:
        return False
    like, _ = _with_state(optimizer, [params[name] for name in few])
    return _step_peak(like) > (alone[few[0]] + sum(alone[name] for name in few)) / 2
