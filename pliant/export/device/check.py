"""Every program is held against eager PyTorch before it is written: loss, predictions and gradients of several batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from pliant.export.device.errors import ExportError
from pliant.export.device.runner import Runner
from pliant.export.device.step import Step, Trained, shaped
from pliant.runtime.batches import Loss, map_tensors
from pliant.runtime.sandbox import sandbox

TOLERANCE = 1e-4  # of the largest value of each gradient
_SHAKEN, _SHAKES = 1e-6, 8  # relative change of the input, about ten times its rounding, and how often
_SMALL = 1e-6  # of the largest value of all gradients: below this a difference is rounding


def check(
    program: bytes,
    joint: Any,
    model: nn.Module,
    loss: Loss,
    batch: Any,
    trained: Sequence[Trained],
    tolerance: float = TOLERANCE,
) -> float:
    """The largest relative difference of a gradient; one above the tolerance is an error that names the operators.

    `model` is the user's, or, where weights were rounded, the copy that was exported. The program runs several times, since a
    kernel may leave something in memory that the next run reads.
    """
    runner = Runner(program, trained)
    is_users = all(one.name in dict(model.named_parameters()) for one in trained)
    sought = trained if is_users else [Trained(_inner(one), one.program_name, one.shape) for one in trained]
    worst = 0.0
    for given in (batch, map_tensors(batch, _turned), batch):
        want_loss, found = eager(model, loss, given, sought)
        want = {one.name: found[theirs.name] for one, theirs in zip(trained, sought, strict=True)}
        outputs, grads, _ = runner.run(Step(model, loss, given).inputs)
        scale = max(float(grad.abs().max()) for grad in want.values())
        if not torch.allclose(outputs[0], want_loss, rtol=tolerance, atol=tolerance):
            raise ExportError(f"the program computes a loss of {float(outputs[0]):.6g}, PyTorch {float(want_loss):.6g}.")
        off = {}
        for one in trained:
            difference = float((grads[one.name] - want[one.name]).abs().max())
            largest = max(float(want[one.name].abs().max()), _SMALL / tolerance * scale)
            off[one.name] = difference / largest if largest else 0.0
        wrong = [name for name, share in off.items() if not share <= tolerance]
        if wrong:
            room = _rounding(model, loss, given, sought, found)
            theirs = {one.name: other.name for one, other in zip(trained, sought, strict=True)}
            wrong = [name for name in wrong if not off[name] <= 2 * room[theirs[name]]]
        if wrong:
            raise ExportError(
                f"the program's gradient of {wrong[-1]!r} differs from PyTorch's by {off[wrong[-1]]:.2g} of its largest value "
                f"({len(wrong)} of {len(trained)} differ). The operators on the way to it: "
                f"{', '.join(_operators(joint, trained, wrong))}. Choose layers nearer the loss, or replace the operator."
            )
        worst = max(worst, *off.values())
    return worst


def _rounding(
    model: nn.Module, loss: Loss, batch: Any, sought: Sequence[Trained], grads: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """How much PyTorch's own gradients change, relatively, when the input changes in its sixth digit.

    An activation such as ReLU has a kink. Where a value lies on it, the last bit decides whether a gradient passes or not.
    """
    generator = torch.Generator().manual_seed(0)
    room = dict.fromkeys(grads, 0.0)

    def shaken(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator)
        return tensor * (1 + _SHAKEN * noise.to(tensor.dtype)) if tensor.is_floating_point() else tensor

    for _ in range(_SHAKES):
        for name, grad in eager(model, loss, map_tensors(batch, shaken), sought)[1].items():
            largest = max(float(grads[name].abs().max()), torch.finfo(torch.float32).tiny)
            room[name] = max(room[name], float((grad - grads[name]).abs().max()) / largest)
    return room


def _inner(one: Trained) -> str:
    """The name in the copy that was exported."""
    return one.program_name.removeprefix("model.")


def eager(model: nn.Module, loss: Loss, batch: Any, trained: Sequence[Trained]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of plain PyTorch. Leaves no trace."""
    names = {one.name for one in trained}
    params = {name: param for name, param in model.named_parameters() if name in names}
    with sandbox(model, train=names), torch.enable_grad():
        value = loss(model, batch)
        grads = torch.autograd.grad(value, list(params.values()), allow_unused=True)
    found = {name: grad for name, grad in zip(params, grads, strict=True) if grad is not None}
    unreached = sorted(names - set(found))
    if unreached:
        raise ExportError(
            f"the loss does not depend on {unreached[0]!r}, so it cannot train. Choose parameters that it reaches."
        )
    return value.detach(), {one.name: shaped(one, found) for one in trained}


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return -tensor if tensor.is_floating_point() else tensor


def _operators(joint: Any, trained: Sequence[Trained], wrong: Sequence[str]) -> list[str]:
    """Operators of the backward pass that a wrong gradient depends on, and no right one does."""
    outputs: dict[str, fx.Node] = {}
    for node, spec in zip(joint.graph.output_node().args[0], joint.graph_signature.output_specs, strict=True):
        if spec.kind.name == "GRADIENT_TO_PARAMETER":
            outputs[spec.target] = node
    by_name: Mapping[str, fx.Node] = {one.name: outputs[one.program_name] for one in trained}
    right: set[fx.Node] = set()
    for name, node in by_name.items():
        if name not in wrong:
            right |= _behind(node)
    suspects = _behind(by_name[wrong[-1]]) - right
    found = {str(node.target) for node in suspects if isinstance(node.target, torch._ops.OpOverload)}
    return sorted(found, key=lambda name: ("backward" not in name, name))[:6]


def _behind(node: fx.Node) -> set[fx.Node]:
    todo, seen = [node], set()
    while todo:
        now = todo.pop()
        if now not in seen:
            seen.add(now)
            todo += now.all_input_nodes
    return seen
