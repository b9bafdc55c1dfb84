"""The module that is exported: a copy of the model with its loss, prepared so that its frozen part is as small as it can be.

Frozen batch norms disappear into the convolution before them, or become a product and a sum. Of a sliced parameter only the
slice is a parameter. Frozen weights may be int8.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils import _pytree as pytree

from pliant.core.types import Part
from pliant.engine.slices.slices import merged
from pliant.export.device.errors import ExportError
from pliant.runtime.batches import Loss

_LEAST_INT8 = 1024  # elements; a smaller weight saves less than its scales and its own operators take
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


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


def prepared(model: nn.Module, loss: Loss, batch: Any, parts: Sequence[Part], int8: bool) -> tuple[Step, tuple[Trained, ...]]:
    """A step of a copy of the model in which exactly these parts train. The model itself is left alone."""
    check_modes(model)
    net = copy.deepcopy(model)
    params = dict(net.named_parameters())
    slices = merged(params, parts)
    chosen = list(dict.fromkeys(part.param for part in parts))
    for name, param in net.named_parameters(remove_duplicate=False):
        param.requires_grad_(name in chosen)
    step = Step(net, loss, batch)
    _simplify_norms_(step)
    for name, (dim, index) in slices.items():
        _parametrize_(net, name, _Slice(params[name], dim, index))
    if int8:
        _store_int8_(net)
    trained = []
    for name in chosen:
        sliced: tuple[int, tuple[int, ...]] | tuple[None, None] = slices.get(name, (None, None))
        owner, _, leaf = name.rpartition(".")
        inner = f"{owner}.parametrizations.{leaf}.original".lstrip(".") if name in slices else name
        trained.append(Trained(name, f"model.{inner}", tuple(net.get_parameter(inner).shape), *sliced))
    return step, tuple(trained)


def check_modes(model: nn.Module) -> None:
    """Refuse what computes otherwise in training mode: a program has one mode."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ExportError(
                f"{name!r} is a batch norm that uses the statistics of each batch, which no exported program does. Call "
                f"model.eval(), so that it uses its running statistics."
            )
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            raise ExportError(f"{name!r} is a dropout in training mode: a program draws no numbers. Call model.eval().")


# ---------------------------------------------------------------- batch norm


class _Affine(nn.Module):
    """A frozen batch norm on running statistics: one product and one sum per element, of which backward keeps nothing."""

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        if norm.running_mean is None or norm.running_var is None:  # excluded by `check_modes`
            raise ValueError("a batch norm without running statistics")
        scale = (norm.running_var + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight.detach()
        shift = -norm.running_mean * scale + (0.0 if norm.bias is None else norm.bias.detach())
        self.register_buffer("scale", scale.clone())
        self.register_buffer("shift", shift.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (-1, *[1] * (x.dim() - 2))
        return x * self.get_buffer("scale").view(shape) + self.get_buffer("shift").view(shape)


def _simplify_norms_(step: Step) -> None:
    """Fold each frozen batch norm into a frozen convolution that only it reads; make the others a product and a sum."""
    net = step.model
    norms = {
        name: module
        for name, module in net.named_modules()
        if isinstance(module, _BatchNorm) and not any(p.requires_grad for p in module.parameters())
    }
    if not norms:
        return
    before = _convolutions_before(step)
    for name, norm in norms.items():
        conv = net.get_submodule(before[name]) if name in before else None
        if isinstance(conv, _CONVOLUTIONS) and not any(p.requires_grad for p in conv.parameters()):
            stats = norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
            conv.weight, conv.bias = fuse_conv_bn_weights(conv.weight, conv.bias, *stats)  # type: ignore[arg-type]
            for param in conv.parameters():
                param.requires_grad_(False)
            net.set_submodule(name, nn.Identity())
        else:
            net.set_submodule(name, _Affine(norm))


def _convolutions_before(step: Step) -> dict[str, str]:
    """The convolution whose only reader is this norm, by name of the norm. Read from the exported forward pass."""
    from pliant.export.device.joint import exported

    program = exported(step)
    owner = {
        node: name.removeprefix("model.").rpartition(".")[0]
        for node, name in {**program.graph_signature.inputs_to_parameters, **program.graph_signature.inputs_to_buffers}.items()
    }
    found: dict[str, str] = {}
    for node in program.graph.nodes:
        if not str(node.target).startswith("aten.batch_norm"):
            continue
        source, mean = node.args[0], node.args[3]
        weight = source.args[1] if str(source.target).startswith("aten.conv") and len(source.args) > 1 else None
        if len(source.users) == 1 and weight is not None and len(weight.users) == 1 and len(mean.users) == 1:
            found[owner[mean.name]] = owner.get(weight.name, "")
    return found


# ---------------------------------------------------------------- weights that are computed


class _Slice(nn.Module):
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


def _store_int8_(net: nn.Module) -> None:
    for name, param in list(net.named_parameters()):
        if not param.requires_grad and param.dim() > 1 and param.numel() >= _LEAST_INT8 and "parametrizations" not in name:
            _parametrize_(net, name, _Int8())


def _parametrize_(net: nn.Module, name: str, computed: nn.Module) -> None:
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
