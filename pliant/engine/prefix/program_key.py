"""What decides which program a forward pass runs, beside the shapes of its batch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn

from pliant.engine.prefix.replay import autocast
from pliant.runtime.torch_internals import GLOBAL_FORWARD_HOOKS


def model_state(model: nn.Module) -> Hashable:
    """The state of a model that decides which program runs."""
    parts: list[Any] = [any(GLOBAL_FORWARD_HOOKS)]
    stack, seen = [model], {id(model)}
    while stack:
        inside = stack.pop()
        parts.append(inside.training)
        for param in inside._parameters.values():
            if param is not None:
                parts.append(param.requires_grad)
        if inside._forward_hooks or inside._forward_pre_hooks:
            parts.append((*inside._forward_hooks, *inside._forward_pre_hooks))
        if inside._backward_hooks or inside._backward_pre_hooks:
            parts.append((*inside._backward_hooks, *inside._backward_pre_hooks))
        for other in inside._modules.values():
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                stack.append(other)
    return tuple(parts)


def has_hooks_inside(model: nn.Module) -> bool:
    """Whether modules inside of a model have forward hooks."""
    inside = (module for module in model.modules() if module is not model)
    return any(GLOBAL_FORWARD_HOOKS) or any(module._forward_hooks or module._forward_pre_hooks for module in inside)


def autocast_state() -> Hashable:
    return autocast("cpu"), autocast("cuda")
