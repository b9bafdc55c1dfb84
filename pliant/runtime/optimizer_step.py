"""What follows a loss: the scaled backward pass, clipping, and the optimizer's step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn


@dataclass(frozen=True)
class Update:
    """How a loss becomes a step: gradients clipped to the norm `clip`, scaled by `scaler`, the mean of `accumulate` batches."""

    clip: float | None = None
    scaler: torch.amp.GradScaler | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate}: at least one batch goes into an optimizer step.")

    def backward(self, value: torch.Tensor, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Gradients of one batch's share of the loss, onto the parameters; with `inputs`, onto these alone."""
        if self.accumulate > 1:
            value = value / self.accumulate
        if self.scaler is not None:
            value = self.scaler.scale(value)
        torch.autograd.backward(value, inputs=inputs)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip and step."""
        self._clip(optimizer)
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()

    def step_with(self, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A step of an optimizer that evaluates the loss itself, as often as it likes. Returns the first loss, detached."""
        if self.scaler is not None or self.accumulate > 1:
            raise ValueError(
                f"{type(optimizer).__name__} evaluates the loss of one batch several times in a step: it works neither with a "
                f"GradScaler nor with accumulate={self.accumulate}. Leave them out, or use an optimizer such as AdamW."
            )
        losses: list[torch.Tensor] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            value = loss()
            losses.append(value.detach())
            self.backward(value)
            self._clip(optimizer)
            return value

        optimizer.step(closure)  # type: ignore[arg-type]
        return losses[0]

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        if self.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            grads = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            nn.utils.clip_grad_norm_(grads, self.clip)

    def apart(self) -> Update:
        """The same with a scaler of its own, to try steps that nobody is to notice."""
        return replace(self, scaler=copy.deepcopy(self.scaler))


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step cannot be taken without a function that evaluates the loss, as that of LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def even_out_(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Before a step: a parameter that joins others in a fused SGD gets a momentum of zeros, of which its first step makes what
    it makes of none. PyTorch's kernel takes the momenta of all its parameters, or of none."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if not group.get("fused") or not group["momentum"] or group["dampening"]:  # dampened, a first step is another one
            continue
        steps = [param for param in group["params"] if param.grad is not None]
        new = [param for param in steps if optimizer.state.get(param, {}).get("momentum_buffer") is None]
        if 0 < len(new) < len(steps):
            for param in new:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
