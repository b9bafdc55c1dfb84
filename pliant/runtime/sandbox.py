"""Passes and optimizer steps that leave no trace."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pliant.runtime.compiled import eager
from pliant.runtime.optimizer_step import needs_closure
from pliant.runtime.rng import rng_states, set_rng_states
from pliant.runtime.torch_internals import NormBase, is_sharded, reshard_
from pliant.runtime.trainable import found, restore_


@contextmanager
def sandbox(model: nn.Module, train: Collection[str] | None = None) -> Iterator[None]:
    """Whatever runs inside leaves no trace: buffers, gradients, random states, modes and trainable flags are put back.

    Inside, gradients start out as None and just the parameters in `train` are trainable (None: as they are). Compiled code
    runs eagerly. Weights and optimizer state are not copied: whoever needs a step takes it on a `scratch` optimizer.
    """
    was = found(model)
    buffers = {module: dict(module._buffers) for module in was.training}
    own = {m: [b for b in held.values() if b is not None and not is_expanded(b)] for m, held in buffers.items()}
    copies = {module: [(b, b.clone(), b._version) for b in several] for module, several in own.items()}
    grads = {param: param.grad for param in was.requires_grad}
    is_spread, rng = any(map(is_sharded, grads)), rng_states()
    try:
        for param in grads:
            param.grad = None
        if train is not None:
            for name, param in model.named_parameters():
                param.requires_grad_(name in train)
        torch.clear_autocast_cache()
        if is_spread:
            reshard_(model)
        with eager():
            yield
    finally:
        restore_(was)
        if is_spread:
            reshard_(model)
        for module, flag in was.training.items():
            if module.training != flag:
                module.training = flag
        for module, held in buffers.items():
            if isinstance(module, torch.jit.ScriptModule):  # its buffers cannot be removed or added
                for name, buffer in held.items():
                    setattr(module, name, buffer)
                continue
            module._buffers.clear()
            module._buffers.update(held)
        with torch.no_grad():
            for several in copies.values():
                # A norm writes to its statistics without saying so, but counts. What nobody wrote to goes on as unwritten.
                is_written = any(buffer._version != version for buffer, _, version in several)
                for buffer, copy, _ in several:
                    (buffer if is_written else buffer.data).copy_(copy)
        for param, grad in grads.items():
            param.grad = grad
        set_rng_states(rng)


def spare_statistics_(model: nn.Module) -> None:
    """Inside of a sandbox: let norms write into copies of their statistics. What was derived from the real ones stays valid."""
    for module in model.modules():
        if isinstance(module, NormBase) and not isinstance(module, torch.jit.ScriptModule):
            module._buffers.update({name: None if b is None else b.clone() for name, b in module._buffers.items()})


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements share one place in memory: nothing can be written into such a tensor."""
    strides = tensor.stride()
    return 0 in strides and any(stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True))


def scratch(
    optimizer: torch.optim.Optimizer,
    params: Sequence[nn.Parameter],
    dtype: torch.dtype | None = None,
    values: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """An optimizer like the user's (class, settings of each parameter's group), with fresh state, over copies of `params`, or
    of `values` that stand for them.

    Hooks and schedulers of the user's optimizer do not see it; take its steps with `scratch_step`.
    """
    if needs_closure(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} makes its update from a closure, not from a gradient: its update gain is unknown. Use "
            f"another signal, such as score.grad_norm(), or another optimizer, such as AdamW."
        )
    copies = {
        id(param): nn.Parameter(value.detach().to(dtype or value.dtype, copy=True))
        for param, value in zip(params, params if values is None else values, strict=True)
    }
    like = object.__new__(type(optimizer))
    like.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    like.state = defaultdict(dict)
    like.param_groups = []
    for group in optimizer.param_groups:
        mine = [copies[id(param)] for param in group["params"] if id(param) in copies]
        if mine:
            like.param_groups.append({**group, "params": mine})
            if isinstance(optimizer, torch.optim.Adagrad):  # makes its state when it is built, not at the first step
                start = group["initial_accumulator_value"]
                like.state.update(torch.optim.Adagrad(mine, initial_accumulator_value=start).state)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(like, name, OrderedDict())
    return like, [copies[id(param)] for param in params]


def hide_step_(like: torch.optim.Optimizer) -> None:
    """Make a scratch optimizer's own `step`, which a scaler calls, as unseen as `scratch_step`. Makes no reference cycle."""
    me = weakref.ref(like)

    def step() -> None:
        found = me()
        if found is not None:
            scratch_step(found)

    like.__dict__["step"] = step


def scratch_step(like: torch.optim.Optimizer) -> None:
    """One step of a scratch optimizer, unseen by hooks that torch holds for all optimizers."""
    step: Any = type(like).step
    if getattr(step, "hooked", False):  # torch wraps every optimizer's step to call them
        step = step.__wrapped__
    step(like)
