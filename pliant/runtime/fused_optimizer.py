"""PyTorch's fused kernels for the optimizer's step on a CPU: each tensor is read once, not once for each part of the formula.

PyTorch uses them only where `fused=True` is given. They may round differently: SGD in few elements, Adam in most.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import optim

_KINDS = (optim.SGD, optim.Adam, optim.AdamW)
_NOTE = "_need_device_dtype_check_for_fused"  # an attribute that such a step leaves behind


@contextmanager
def fused(optimizer: optim.Optimizer) -> Iterator[None]:
    """The step that is taken inside is a fused one, where that is possible and the user left the choice to PyTorch.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad, optimizer = torch.ones(2), torch.optim.SGD([weight], lr=0.5)
    >>> with fused(optimizer):
    ...     optimizer.step()
    >>> weight.tolist(), optimizer.param_groups[0]["fused"]
    ([0.5, 0.5], None)
    """
    if not _can_fuse(optimizer):
        yield
        return
    had = _NOTE in optimizer.__dict__
    for group in optimizer.param_groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group in optimizer.param_groups:
            group["fused"] = None
        if not had:
            optimizer.__dict__.pop(_NOTE, None)


def _can_fuse(optimizer: optim.Optimizer) -> bool:
    if type(optimizer) not in _KINDS or not all(_is_open(group) for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        params = [param for param in group["params"] if param.grad is not None]
        states = [optimizer.state.get(param, {}) for param in params]
        held = [one for state in states for one in state.values() if isinstance(one, torch.Tensor)]
        if not all(  # a kernel reads the memory of each in order; written out, since this runs in every step
            one.is_cpu and one.dtype is torch.float32 and one.layout is torch.strided and one.is_contiguous()
            for one in (*params, *(param.grad for param in params), *held)
        ):
            return False
        if group.get("dampening") and len({state.get("momentum_buffer") is None for state in states}) > 1:
            return False  # the kernel takes the momenta of all, or of none; see `optimizer_step.even_out_`
    return True


def _is_open(group: dict[str, Any]) -> bool:
    """Whether the user left it to PyTorch how the step is computed."""
    asked = [group.get("fused", False), group.get("foreach", False)]
    special = group.get("differentiable") or group.get("capturable") or isinstance(group["lr"], torch.Tensor)
    return asked == [None, None] and not special
