"""What decides which program a forward pass runs, beside the shapes of its batch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn

from pliant.engine.prefix.replay import autocast
from pliant.runtime.torch_internals import GLOBAL_FORWARD_HOOKS


def model_state(model: nn.Module) -> tuple[Hashable, bool]:
    """The state of a model that decides which program runs; and whether a module inside of it has hooks."""
    parts: list[Any] = []
    stack, seen, is_hooked = [model], {id(model)}, any(GLOBAL_FORWARD_HOOKS)
    while stack:
        inside = stack.pop()
        parts.append(inside.training)
        for param in inside._parameters.values():
            if param is not None:
                parts.append(param.requires_grad)
        if inside._forward_hooks or inside._forward_pre_hooks:
            parts.append((*inside._forward_hooks, *inside._forward_pre_hooks))
            is_hooked |= inside is not model
        if inside._backward_hooks or inside._backward_pre_hooks:
            parts.append((*inside._backward_hooks, *inside._backward_pre_hooks))
        for other in inside._modules.values():
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                stack.append(other)
    return (tuple(parts), is_hooked), is_hooked


def autocast_state() -> Hashable:
    return autocast("cpu"), autocast("cuda")
