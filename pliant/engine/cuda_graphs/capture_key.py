"""What a captured step depends on, and what prevents a step from being captured."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

from pliant.runtime.batches import Loss
from pliant.runtime.torch_internals import GLOBAL_HOOKS

_NUMBERS = (int, float, str, bytes, type(None))
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Refused(Exception):
    """Why a step cannot be captured."""


class CaptureKey:
    """The current state of everything that the steps of one model, loss and optimizer depend on.

    A captured step fixes its key: which parameters train, the shapes of the batch, the modes of the modules, autocast, the
    settings of the optimizer. It fixes addresses too, but not learning rates: kernels read those (`OptimizerScalars`).
    """

    def __init__(self, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer) -> None:
        self._loss, self._optimizer = loss, optimizer
        self._device = next(model.parameters()).device
        self._own_hooks = {name: len(getattr(optimizer, name)) for name in _STEP_HOOKS}  # those of the session
        self._modules = list(model.modules())
        self._hooks = [getattr(module, name) for module in self._modules for name in _MODULE_HOOKS]
        self._plain = [
            (module.__dict__, name)
            for module in self._modules
            for name, value in module.__dict__.items()
            if name[0] != "_" and name != "training" and isinstance(value, _NUMBERS)
        ]
        self._held = [held for module in self._modules for held in (module._parameters, module._buffers) if held]

    def refuse(self) -> None:
        """If no step at all can be captured, raise the reason."""
        if type(self._optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            raise Refused(f"{type(self._optimizer).__name__} cannot be captured: SGD, Adam and AdamW can")
        if any(group.get("differentiable") for group in self._optimizer.param_groups):
            raise Refused("a differentiable optimizer cannot be captured")
        for name, count in self._own_hooks.items():
            if len(getattr(self._optimizer, name)) > count:
                raise Refused("the optimizer has step hooks")
        if any(GLOBAL_HOOKS):
            raise Refused("there are hooks on all modules or optimizers")
        if any(self._hooks):
            hooked = next(module for module in self._modules if any(getattr(module, name) for name in _MODULE_HOOKS))
            raise Refused(f"a {type(hooked).__name__} has hooks")
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
                    raise Refused("a parameter has hooks")

    def key(self, batch: Any, choice: Hashable, first: bool) -> Hashable:
        """Everything that a captured step fixes, except addresses."""
        settings = tuple(
            (name, value)
            for group in self._optimizer.param_groups
            for name, value in group.items()
            if name not in ("params", "lr", "initial_lr")
        )
        modes = tuple(module.training for module in self._modules)
        device = self._device.type
        cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        # Python numbers are read when a step is captured, and not again.
        numbers = tuple([held.get(name) for held, name in self._plain]), _numbers_of(self._loss)
        key = choice, first, _outline(batch), modes, cast, settings, numbers
        try:
            hash(key)
        except TypeError as error:
            raise Refused(f"settings that cannot be compared: {error}") from None
        return key

    def addresses(self, first: bool) -> tuple[int, ...]:
        """The addresses that a step reads and writes; those of gradients too, unless it is the first batch of a step."""
        state = self._optimizer.state
        out = [tensor.data_ptr() for held in self._held for tensor in held.values() if tensor is not None]
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if not param.requires_grad:
                    continue
                out += [value.data_ptr() for value in state.get(param, {}).values() if isinstance(value, torch.Tensor)]
                if not first and param.grad is not None:
                    out.append(param.grad.data_ptr())
        return tuple(out)

    def writes(self) -> list[torch.Tensor]:
        """What a step changes: weights that train, and buffers of modules in training mode."""
        out = [param for group in self._optimizer.param_groups for param in group["params"] if param.requires_grad]
        for module in self._modules:
            out += [buffer for buffer in module._buffers.values() if buffer is not None and module.training]
        return out

    def python_state(self) -> dict[str, Any]:
        """The Python state of modules and the loss that is cheap to compare: plain values, lengths, identities of tensors."""
        out: dict[str, Any] = {}

        def note(owner: str, held: Mapping[str, Any]) -> None:
            for name, value in held.items():
                if isinstance(value, _NUMBERS):
                    out[f"{owner}.{name}"] = value
                elif isinstance(value, torch.Tensor):
                    out[f"{owner}.{name}"] = id(value)
                elif isinstance(value, (list, dict, set)) or type(value).__name__ == "deque":
                    out[f"{owner}.{name}"] = len(value)

        for i, module in enumerate(self._modules):
            note(f"{type(module).__name__} {i}", {name: value for name, value in module.__dict__.items() if name[0] != "_"})
        function = getattr(self._loss, "__func__", self._loss)
        for owner in (getattr(self._loss, "__self__", None), self._loss):
            if owner is not None and not isinstance(owner, nn.Module):
                note("the loss", getattr(owner, "__dict__", {}))
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = getattr(function, "__closure__", None) or ()
        note("the loss", {name: _content(cell) for name, cell in zip(names, cells, strict=True)})
        return out


def _outline(batch: Any) -> Hashable:
    """A batch without its values: its structure, the shape and dtype of each tensor, and everything else by value."""
    if isinstance(batch, torch.Tensor):
        if batch.layout != torch.strided or type(batch) not in (torch.Tensor, nn.Parameter):
            raise Refused(f"the batch holds a {type(batch).__name__} that is not a plain tensor")
        return tuple(batch.shape), batch.dtype, batch.stride(), batch.requires_grad
    if batch is None or isinstance(batch, (int, float, str, bytes)):
        return batch
    if isinstance(batch, Mapping):
        return type(batch), tuple((key, _outline(value)) for key, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return type(batch), tuple(_outline(value) for value in batch)
    held = getattr(batch, "__dict__", None)
    if held:
        return type(batch), tuple((name, _outline(value)) for name, value in held.items())
    raise Refused(f"the batch holds a {type(batch).__name__}, which may change unnoticed")


def _numbers_of(loss: Any) -> tuple[Any, ...]:
    """Plain values that a loss reads from its closure or its object."""
    cells = getattr(getattr(loss, "__func__", loss), "__closure__", None) or ()
    held = [_content(cell) for cell in cells]
    for owner in (getattr(loss, "__self__", None), loss):
        if owner is not None and not isinstance(owner, nn.Module):
            held += getattr(owner, "__dict__", {}).values()
    return tuple([value for value in held if isinstance(value, _NUMBERS)])


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
