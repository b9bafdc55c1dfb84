"""The joint graph of forward and backward pass. The only place that knows PyTorch's unstable function for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pliant.core.errors import first_line
from pliant.export.device.errors import ExportError
from pliant.export.device.lower import quiet
from pliant.export.device.step import Step


def exported(step: Step) -> Any:
    """The forward pass as an exported program."""
    with _refusing("the forward pass"), torch.no_grad():
        return torch.export.export(step, step.inputs, strict=False)


def joint(step: Step) -> Any:
    """Forward and backward pass of what requires a gradient, as one exported program; output 0 is the loss."""
    from torch.export.experimental import _export_forward_backward

    _check_reached(step)
    with _refusing("the forward pass"), torch.enable_grad():
        program = torch.export.export(step, step.inputs, strict=False)
    with _refusing("the backward pass"):
        return _export_forward_backward(program, joint_loss_index=0)


def _check_reached(step: Step) -> None:
    """Refuse parameters that the loss does not depend on, which PyTorch's function does not name."""
    params = {name.removeprefix("model."): param for name, param in step.named_parameters() if param.requires_grad}
    with torch.enable_grad():
        value = step(*step.inputs)[0]
    found = (
        torch.autograd.grad(value, list(params.values()), allow_unused=True) if value.requires_grad else [None] * len(params)
    )
    unreached = [name for name, grad in zip(params, found, strict=True) if grad is None]
    if unreached:
        raise ExportError(
            f"the loss does not depend on {unreached[0]!r} in a copy of the model, so it cannot train. Choose parameters that "
            f"it reaches, and let layers be called as attributes: a function kept in the model still calls the original's."
        )


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Whatever torch.export raises becomes one error that says what to look for."""
    try:
        with quiet():
            yield
    except Exception as error:
        raise ExportError(
            f"{what} cannot be exported: {first_line(error)} A program is one fixed graph: no branch or loop may depend on "
            f"values of tensors, shapes are those of the batch, and every operator must be known to torch.export."
        ) from error
