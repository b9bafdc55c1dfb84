"""Modules whose forward calls one torch function and does nothing else: how they run under `lean` without a watcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Lean = Any  # the engine itself, which calls what is here

Direct = Callable[[Any, Any, Any], Any]  # (engine, module, input) → result

INNER = "_conv_forward"  # what the forward of a convolution calls, for others to override


def of_class(module: nn.Module) -> tuple[Any, Any]:
    """What decides how a module runs: the forward of its class, and what that calls if it is a convolution."""
    kind = type(module)
    return kind.forward, getattr(kind, INNER, None)


def direct_forward(module: nn.Module) -> Direct | None:
    """What runs a module that does nothing but call one function; None where it may do something else."""
    forward, inner = of_class(module)
    if "forward" in module.__dict__ or INNER in module.__dict__:
        return None
    if inner is not None and (inner not in _PLAIN_CONVOLUTIONS or getattr(module, "padding_mode", "zeros") != "zeros"):
        return None
    return _FORWARD.get(forward)


def _of_convolution(func: Any, lean: Lean, module: Any, input: Any) -> Any:
    layer = module.stride, module.padding, module.dilation, module.groups
    return lean.call(func, (input, module.weight, module.bias, *layer), {})


def _of_norm(lean: Lean, module: Any, input: Any) -> Any:
    if module.training or module.running_var is None:
        return type(module).forward(module, input)
    module._check_input_dim(input)
    own = module.running_mean, module.running_var, module.weight, module.bias
    return lean.call(F.batch_norm, (input, *own, False, 0.0, module.eps), {})


def _of_relu(lean: Lean, module: Any, input: Any) -> Any:
    return lean.call(F.relu, (input, module.inplace), {})


def _of_clip(lean: Lean, module: Any, input: Any) -> Any:
    return lean.call(F.hardtanh, (input, module.min_val, module.max_val, module.inplace), {})


_PLAIN_CONVOLUTIONS = frozenset((nn.Conv1d._conv_forward, nn.Conv2d._conv_forward))
_FORWARD: dict[Any, Direct] = {
    nn.Conv1d.forward: partial(_of_convolution, torch.conv1d),
    nn.Conv2d.forward: partial(_of_convolution, torch.conv2d),
    _BatchNorm.forward: _of_norm,
    nn.ReLU.forward: _of_relu,
    nn.Hardtanh.forward: _of_clip,  # ReLU6 too
}
