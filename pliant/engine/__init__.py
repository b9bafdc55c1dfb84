"""How a chosen step runs. `plain` is ordinary freezing with ordinary autograd: the reference of every comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Work:
    """One forward and backward pass to do: the user's loss on the user's model, and what to do with its value."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], torch.Tensor]
    batch: Any
    backward: Callable[[torch.Tensor], None]


Engine = Callable[[Work], torch.Tensor]


def plain(work: Work) -> torch.Tensor:
    """Ordinary autograd: what is not chosen has requires_grad=False, and PyTorch does the rest."""
    value = work.loss(work.model, work.batch)
    work.backward(value)
    return value.detach()


ENGINES: dict[str, Engine] = {"plain": plain}


def pick(name: str) -> tuple[str, Engine]:
    """The engine by name; "auto" takes the best one there is."""
    chosen = "plain" if name == "auto" else name
    if chosen not in ENGINES:
        raise ValueError(f"engine={name!r} is not there; choose 'auto' or one of: {', '.join(ENGINES)}.")
    return chosen, ENGINES[chosen]
