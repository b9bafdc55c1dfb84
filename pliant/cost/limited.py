"""Measuring inside a memory limit: bytes are counted from shapes, and seconds are measured on a part of the batch.

What a full step of the whole batch needs is what the limit forbids. So no such step is taken on the CPU. Seconds are measured
only where time or energy is limited too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pliant.core.budget import Budget
from pliant.core.errors import BudgetError
from pliant.cost.measure import spared, sparing, timed
from pliant.cost.profile import Profile
from pliant.graph.backward import trainable
from pliant.runtime import batches
from pliant.runtime.batches import Loss

_LEAST = 2  # samples: a batch norm needs more than one value per channel


def is_counted(model: nn.Module, budget: Budget) -> bool:
    """Whether memory is limited as the operating system counts it: on the CPU. Elsewhere an allocator counts."""
    return budget.memory is not None and next(model.parameters()).device.type == "cpu"


def needs_seconds(model: nn.Module, budget: Budget) -> bool:
    """Whether seconds are measured inside this budget."""
    return not is_counted(model, budget) or budget.time is not None or budget.energy is not None


def within(cost: Callable[..., Profile], budget: Budget) -> Callable[..., Profile]:
    """The same measurement, inside the budget's memory."""

    def measured(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, batch: Any, **how: Any) -> Profile:
        what = model, optimizer, loss, batch
        if not is_counted(model, budget) or cost is not timed:
            return sparing(cost)(*what, **how)
        shapes = spared(*what, **how)
        if not needs_seconds(model, budget):
            return shapes
        samples = _that_fit(model, shapes, batch, Budget(memory=budget.memory))
        if samples is not None:
            try:
                return timed(*what, **how, samples=samples)
            except (torch.OutOfMemoryError, BudgetError):
                raise
            except Exception:  # a loss that needs the whole batch; an error with another cause comes again below
                pass
        return sparing(timed)(*what, **how)  # outside the handler, which would keep the failed graph alive

    return measured


def _that_fit(model: nn.Module, shapes: Profile, batch: Any, memory: Budget) -> int | None:
    """So many samples that a full step of them, on copies of the parameters, stays within the limit; None: all, or no two
    can be told apart."""
    size = batches.size(batch)
    if size is None or size <= _LEAST:
        return None
    room = memory.limits(shapes.full)["bytes"] + shapes.inference - sum(p.nbytes for p in trainable(model).values())
    samples = max(int(size * room / (shapes.full.bytes + shapes.inference)), _LEAST)
    return samples if samples < size else None
