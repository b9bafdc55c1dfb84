"""The step to export: a copy of the model in which the chosen parts train, and batch norms cost as little as they can.

Frozen batch norms disappear into the convolution before them, or become a product and a sum.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.fusion import fuse_conv_bn_weights

from pliant.core.types import Part
from pliant.engine.slices.slices import merged
from pliant.export.device.errors import ExportError
from pliant.export.device.joint import exported
from pliant.export.device.step import Slice, Step, Trained, parametrize_, store_int8_
from pliant.runtime.batches import Loss

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


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
        parametrize_(net, name, Slice(params[name], dim, index))
    if int8:
        store_int8_(net)
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
        if not str(source.target).startswith("aten.conv") or len(source.args) < 2:
            continue
        weight = source.args[1]
        once = all(len(one.users) == 1 for one in (source, weight, mean))
        if once and weight.name in owner and mean.name in owner:
            found[owner[mean.name]] = owner[weight.name]
    return found
