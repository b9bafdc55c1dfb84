"""What follows a loss: the scaled backward pass, clipping, and the optimizer's step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from pliant.runtime.fused_optimizer import fused
from pliant.runtime.heap import give_back
from pliant.runtime.torch_internals import norms

OnNan = Literal["skip", "raise", "ignore"]


@dataclass(frozen=True)
class Update:
    """How a loss becomes a step: gradients clipped to the norm `clip`, scaled by `scaler`, the mean of `accumulate` batches.

    `on_nan` says what happens where a gradient is not finite; None: the step is skipped on the CPU, and elsewhere nobody looks.
    A scaler skips such steps by itself.
    """

    clip: float | None = None
    scaler: torch.amp.GradScaler | None = None
    accumulate: int = 1
    on_nan: OnNan | None = None

    def __post_init__(self) -> None:
        if self.on_nan not in ("skip", "raise", "ignore", None):
            raise ValueError(f"on_nan={self.on_nan!r} is not known: give 'skip', 'raise' or 'ignore'.")
        if self.scaler is not None and not self.scaler.is_enabled():
            object.__setattr__(self, "scaler", None)  # it does nothing
        if self.accumulate < 1 or self.accumulate % 1:
            raise ValueError(f"accumulate={self.accumulate}: batches per optimizer step must be a whole number, at least 1.")
        if self.clip is not None and not float(self.clip) > 0:
            raise ValueError(f"clip={self.clip}: the norm to clip gradients to must be more than 0. None clips nothing.")

    def backward(self, value: torch.Tensor, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Gradients of one batch's share of the loss, onto the parameters; with `inputs`, onto these alone."""
        torch.autograd.backward(self._scaled(value), inputs=inputs)

    def gradients(self, value: torch.Tensor, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """The same, handed back. A DistributedDataParallel around the model does not notice."""
        return torch.autograd.grad(self._scaled(value), inputs, allow_unused=True)

    def _scaled(self, value: torch.Tensor) -> torch.Tensor:
        if self.accumulate > 1:
            value = value / self.accumulate
        give_back()  # what the forward pass has freed
        return self.scaler.scale(value) if self.scaler is not None else value

    def step(self, optimizer: torch.optim.Optimizer, fuse: bool = False) -> bool:
        """Clip and step, by a fused kernel if that may be. Returns False where it was skipped: a gradient is not finite."""
        params = _with_gradients(optimizer)
        norm = self._clip(optimizer, params)
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
            return True
        if self._is_nan(params, norm):
            return False
        with fused(optimizer) if fuse else nullcontext():
            optimizer.step()
        return True

    def _is_nan(self, params: Sequence[nn.Parameter], norm: torch.Tensor | None) -> bool:
        """Whether the step is to be skipped, since a gradient is not finite. `norm` is that of all gradients, if known."""
        if not self._looks(params) or (norm is not None and bool(norm.isfinite())) or _is_finite(params):
            return False
        if self.on_nan == "raise":
            raise FloatingPointError(
                "gradients of this step are not finite: weights and optimizer state are as before it. Check this batch; a "
                "lower learning rate or clip=… keeps training from diverging. on_nan='skip' leaves such steps out."
            )
        return True

    @property
    def reads_gradients(self) -> bool:
        """Whether a step waits for its gradients on any device."""
        return self.scaler is not None or self.on_nan in ("skip", "raise")

    def _looks(self, params: Sequence[nn.Parameter]) -> bool:
        return self.reads_gradients or (self.on_nan is None and all(param.device.type == "cpu" for param in params))

    def step_with(
        self,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[], torch.Tensor],
        inputs: Callable[[torch.Tensor], Sequence[torch.Tensor] | None],
    ) -> tuple[torch.Tensor, bool]:
        """A step of an optimizer that evaluates the loss itself, as often as it likes. Gradients go to `inputs` of a loss.

        Returns the first loss, detached, and whether the step was skipped: gradients of its first evaluation were not finite.
        """
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
            self.backward(value, inputs(value))
            params = _with_gradients(optimizer)
            norm = self._clip(optimizer, params)
            if len(losses) == 1 and self._is_nan(params, norm):  # later ones find weights that have moved
                raise _Skipped
            return value

        try:
            optimizer.step(closure)  # type: ignore[arg-type]
        except _Skipped:
            return losses[0], True
        return losses[0], False

    def _clip(self, optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> torch.Tensor | None:
        """The norm of the gradients, where they are clipped."""
        if self.clip is None:
            return None
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        return nn.utils.clip_grad_norm_(params, self.clip)

    def apart(self) -> Update:
        """The same with a scaler of its own, to try steps that nobody is to notice, whatever their gradients are."""
        return replace(self, scaler=copy.deepcopy(self.scaler), on_nan="ignore")


class _Skipped(Exception):
    """A step that is left out."""


def _with_gradients(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _is_finite(params: Sequence[nn.Parameter]) -> bool:
    """Whether all gradients are finite. Their norms tell, which take least time, unless large numbers make one overflow."""
    grads = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in params if p.grad is not None]
    found = norms(grads) if grads else ()
    if len({norm.device for norm in found}) > 1:
        found = tuple(norm.cpu() for norm in found)
    if not found or bool(torch.stack(found).isfinite().all()):
        return True
    return all(bool(grad.isfinite().all()) for grad in grads)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step cannot be taken without a function that evaluates the loss, as that of LBFGS."""
    kind: Any = type(optimizer)
    return _needs_closure(kind)


@cache
def _needs_closure(kind: Any) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
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
