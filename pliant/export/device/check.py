"""Every program is held against eager PyTorch before it is written: loss, predictions and gradients of several batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from pliant.export.device.errors import ExportError
from pliant.export.device.graphs import behind
from pliant.export.device.runner import Runner
from pliant.export.device.step import Step, Trained, shaped
from pliant.runtime.batches import Loss, map_tensors
from pliant.runtime.sandbox import sandbox

TOLERANCE = 1e-4  # of the largest value of each gradient
_SHAKEN, _SHAKES = 1e-6, 8  # relative change of inputs and weights, about ten times their rounding, and how often
_AT_LEAST = 3  # batches
_OTHER, _MOST_OTHERS = 1e-2, 8  # relative change that makes another batch of this one, and how many are tried
_SMALL = 1e-6  # of the largest value of all gradients: below this a difference is rounding


def check(
    program: bytes,
    joint: Any,
    model: nn.Module,
    loss: Loss,
    batch: Any,
    trained: Sequence[Trained],
) -> float:
    """The largest relative difference of a gradient from PyTorch's. One above the tolerance is an error that names operators.

    Where rounding decides on which side of the kink of a ReLU a value lies, PyTorch's own gradient has no 1e-4 to compare
    with: it jumps when weights change in their sixth digit. A gradient that differs by such a jump is held against another
    batch. Each gradient has to be equal on one batch at least, and may differ on none for another reason.

    `model` is the user's, or, where weights were rounded, the copy that was exported. The program runs several times, since a
    kernel may leave something in memory that the next run reads.
    """
    runner = Runner(program, trained)
    is_users = all(one.name in dict(model.named_parameters()) for one in trained)
    sought = trained if is_users else [Trained(_inner(one), one.program_name, one.shape) for one in trained]
    equal: dict[str, float] = {}  # by name, the largest difference within the tolerance
    off: dict[str, float] = {}
    for turn, given in enumerate((batch, map_tensors(batch, _turned), batch, *_others(batch))):
        if turn >= _AT_LEAST and len(equal) == len(trained):
            break
        off = _differences(runner, model, loss, given, trained, sought)
        differs = {name: share for name, share in off.items() if not share <= TOLERANCE}
        jumps = _jumps(model, loss, given, trained, sought) if differs else {}
        wrong = [name for name, share in differs.items() if not share <= 2 * jumps[name]]
        if wrong:
            raise _refusal(joint, trained, wrong, off)
        equal.update({name: max(share, equal.get(name, 0.0)) for name, share in off.items() if name not in differs})
    if len(equal) < len(trained):
        raise _refusal(joint, trained, [name for name in off if name not in equal], off)
    return max(equal.values())


def _refusal(joint: Any, trained: Sequence[Trained], wrong: Sequence[str], off: Mapping[str, float]) -> ExportError:
    return ExportError(
        f"the program's gradient of {wrong[-1]!r} differs from PyTorch's by {off[wrong[-1]]:.2g} of its largest value "
        f"({len(wrong)} of {len(trained)} differ). The operators on the way to it: "
        f"{', '.join(_operators(joint, trained, wrong))}. Choose layers nearer the loss, or replace the operator."
    )


def _differences(
    runner: Runner,
    model: nn.Module,
    loss: Loss,
    batch: Any,
    trained: Sequence[Trained],
    sought: Sequence[Trained],
) -> dict[str, float]:
    """Of each gradient of a batch, relative to its largest value. Loss and predictions have to be equal."""
    want_loss, found = eager(model, loss, batch, sought)
    step = Step(model, loss, batch)
    with sandbox(model), torch.no_grad():
        predictions = step(*step.inputs)[1:]
    outputs, grads, _ = runner.run(step.inputs)
    if not torch.allclose(outputs[0], want_loss, rtol=TOLERANCE, atol=TOLERANCE):
        raise ExportError(
            f"the program computes a loss of {float(outputs[0]):.6g}, PyTorch {float(want_loss):.6g}. A program draws no "
            f"random numbers and keeps nothing from batch to batch: neither may the model or the loss."
        )
    for got, want in zip(outputs[1:], predictions, strict=True):
        if not torch.allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE * float(want.abs().max())):
            raise ExportError("the program predicts something else than PyTorch, though its loss is the same.")
    wanted = {one.name: found[theirs.name] for one, theirs in zip(trained, sought, strict=True)}
    least = _SMALL / TOLERANCE * max(float(grad.abs().max()) for grad in wanted.values())
    return {name: _relative(grads[name], grad, least) for name, grad in wanted.items()}


def _relative(grad: torch.Tensor, want: torch.Tensor, least: float = 0.0) -> float:
    largest = max(float(want.abs().max()), least, torch.finfo(torch.float32).tiny)
    return float((grad - want).abs().max()) / largest


def _jumps(model: nn.Module, loss: Loss, batch: Any, trained: Sequence[Trained], sought: Sequence[Trained]) -> dict[str, float]:
    """How much PyTorch's own gradients change, relatively, when inputs and weights change in their sixth digit."""
    grads = eager(model, loss, batch, sought)[1]
    generator = torch.Generator().manual_seed(0)
    most = dict.fromkeys(grads, 0.0)
    for _ in range(_SHAKES):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for param in other.parameters():
                param.copy_(_shaken(param, _SHAKEN, generator))
        given = map_tensors(batch, lambda tensor: _shaken(tensor, _SHAKEN, generator))
        for name, grad in eager(other, loss, given, sought)[1].items():
            most[name] = max(most[name], _relative(grad, grads[name]))
    return {one.name: most[theirs.name] for one, theirs in zip(trained, sought, strict=True)}


def _others(batch: Any) -> Iterator[Any]:
    """Batches like this one."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(_MOST_OTHERS):
        yield map_tensors(batch, lambda tensor: _shaken(tensor, _OTHER, generator))


def _shaken(tensor: torch.Tensor, amount: float, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor * (1 + amount * torch.randn(tensor.shape, generator=generator).to(tensor.dtype))


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
    suspects = behind([by_name[wrong[-1]]]) - behind(node for name, node in by_name.items() if name not in wrong)
    found = {str(node.target) for node in suspects if isinstance(node.target, torch._ops.OpOverload)}
    return sorted(found, key=lambda name: ("backward" not in name, name))[:6]
