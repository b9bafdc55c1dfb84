"""The module that is exported, a model with its loss, and weights that are computed.

Of a sliced parameter only the slice is a parameter. Frozen weights may be int8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from pliant.export.device.errors import ExportError
from pliant.runtime.batches import Loss

_LEAST_INT8 = 1024  # elements; a smaller weight saves less than its scales and its own operators take


@dataclass(frozen=True)
class Trained:
    """A parameter, or the slice `index` of it along `dim`, that trains on the device, and its name in the program."""

    name: str
    program_name: str
    shape: tuple[int, ...]
    dim: int | None = None
    index: tuple[int, ...] | None = None


class Step(nn.Module):
    """The loss of a batch and what the model returned, as a function of the batch's tensors."""

    def __init__(self, model: nn.Module, loss: Loss, batch: Any) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._leaves, self._spec = pytree.tree_flatten(batch)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given, returned = iter(inputs), []
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        hook = self.model.register_forward_hook(lambda module, args, output: returned.append(output))
        try:
            loss = self._loss(self.model, pytree.tree_unflatten(leaves, self._spec))
        finally:
            hook.remove()
        seen = pytree.tree_leaves(returned[-1]) if returned else []
        return loss, *(leaf.detach() for leaf in seen if isinstance(leaf, torch.Tensor))


# ---------------------------------------------------------------- weights that are computed


class Slice(nn.Module):
    """A weight of which a slice is a parameter; the rest is frozen."""

    def __init__(self, param: torch.Tensor, dim: int, index: Sequence[int]) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("index", torch.tensor(index), persistent=False)
        self.register_buffer("rest", param.detach().clone())

    def right_inverse(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.index_select(self.dim, self.get_buffer("index"))

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        at = (slice(None),) * self.dim + (self.get_buffer("index"),)
        return torch.ops.aten.index_put(self.get_buffer("rest"), [None if isinstance(i, slice) else i for i in at], part)


class _Int8(nn.Module):
    """A frozen weight in int8 with one scale for each output channel."""

    def right_inverse(self, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = whole.detach().abs().amax(dim=tuple(range(1, whole.dim())), keepdim=True)
        scale = (largest / 127).clamp_min(torch.finfo(torch.float32).tiny)
        return (whole / scale).round().to(torch.int8), scale

    def forward(self, stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return stored.to(torch.float32) * scale


def store_int8_(net: nn.Module) -> None:
    for name, param in list(net.named_parameters()):
        if not param.requires_grad and param.dim() > 1 and param.numel() >= _LEAST_INT8 and "parametrizations" not in name:
            parametrize_(net, name, _Int8())


def parametrize_(net: nn.Module, name: str, computed: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    names = [n for n, p in net.named_parameters(remove_duplicate=False) if p is net.get_parameter(name)]
    if len(names) > 1:
        raise ExportError(f"{name!r} is the same tensor as {names[1]!r}, so a slice of it cannot be exported. Choose it whole.")
    parametrize.register_parametrization(net.get_submodule(owner), leaf, computed, unsafe=True)


def shaped(trained: Trained, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The trained part of the tensor with this name."""
    whole = tensors[trained.name]
    if trained.dim is None or trained.index is None:
        return whole
    return whole.index_select(trained.dim, torch.tensor(trained.index, device=whole.device))
