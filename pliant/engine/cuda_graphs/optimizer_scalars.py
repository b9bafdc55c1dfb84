"""Learning rates and step counts: the optimizer keeps them on the CPU, and a captured step reads copies on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pliant.runtime.torch_internals import add_to_each_


class OptimizerScalars:
    """The learning rates and step counts of one optimizer, in memory that kernels read.

    Schedulers and state dicts see the user's own. Before a replay the copies are updated from them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._given = [group["lr"] for group in optimizer.param_groups]  # the user's value of each rate
        self._rates = [_rate(group, device) for group in optimizer.param_groups]
        self._counts = _counts(optimizer)  # of Adam: the user's, on the CPU, and the kernels' copy
        self.hold_counts = False  # whether the copies are up to date

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the optimizer's step reads the copies, as a capture needs it."""
        optimizer, copies = self._optimizer, {id(users): kernels for users, kernels in self._counts}
        swapped = [
            (state, state["step"])
            for state in optimizer.state.values()
            if isinstance(state, dict) and id(state.get("step")) in copies
        ]
        was = [dict(group) for group in optimizer.param_groups]
        try:
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = rate.is_cuda
                elif rate.is_cuda:  # SGD reads a rate from memory in its fused form alone
                    group["fused"], group["foreach"] = True, False
            for state, count in swapped:
                state["step"] = copies[id(count)]
            yield
        finally:
            for group, before in zip(optimizer.param_groups, was, strict=True):
                for name in ("lr", "capturable", "fused", "foreach"):
                    if name in before:
                        group[name] = before[name]
            for state, count in swapped:
                state["step"] = count

    def keep_used(self) -> None:
        """Drop counts that the capture did not change: all of them, if the optimizer's step comes with a later batch."""
        self._counts = [pair for pair in self._counts if pair[1]._version]

    def refresh_rates(self) -> None:
        for i, group in enumerate(self._optimizer.param_groups):
            lr = group["lr"]
            if isinstance(lr, torch.Tensor):
                self._rates[i].copy_(lr)
            elif lr != self._given[i]:
                self._rates[i].fill_(lr)
                self._given[i] = lr

    def refresh_counts(self) -> None:
        for users, kernels in self._counts:
            kernels.copy_(users)

    def count(self) -> None:
        """The kernels counted a step: count it in the user's counts too."""
        if self._counts:
            add_to_each_([users for users, _ in self._counts], 1)


def _rate(group: dict[str, Any], device: torch.device) -> torch.Tensor:
    """A learning rate as kernels read it: float32 for fused SGD, the dtype of the parameters for Adam."""
    double = "capturable" in group and any(param.dtype == torch.float64 for param in group["params"])
    return torch.as_tensor(group["lr"], dtype=torch.float64 if double else torch.float32, device=device).clone()


def _counts(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For every step count of a trained parameter on the CPU, a copy on the parameter's device."""
    out = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            count = optimizer.state.get(param, {}).get("step")
            if param.requires_grad and isinstance(count, torch.Tensor) and count.device != param.device:
                out.append((count, count.to(param.device)))
    return out
