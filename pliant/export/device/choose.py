"""Which parameters train inside a memory limit: a plan, a graph, the bytes that its program takes, and a corrected plan.

The planner of `pliant.plan` limits what a step of PyTorch takes beyond inference. A program for a device takes something else:
its whole arena, with the weights that change. So the limit that is planned for is corrected until the program itself fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pliant.core.budget import Absolute
from pliant.core.errors import BudgetError
from pliant.core.types import Selection, Unit
from pliant.cost.measure import counted, read_graph
from pliant.planning.floor import always_chosen
from pliant.planning.plan import plan
from pliant.planning.policy import Policy
from pliant.runtime.batches import Loss, Pieces
from pliant.signals.probe import probe

MOST_GRAPHS = 8
_MOST_PLANS = 24
_NEAR = 0.97  # of the limit: close enough, another graph would cost more than it finds


@dataclass(frozen=True)
class Candidate:
    """A selection with its joint graph and the bytes that the graph takes."""

    selection: Selection
    graph: Any
    bytes: int


def choose(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batch: Any,
    policy: Policy,
    limit: int | None,
    graph_of: Callable[[Selection], tuple[Any, int]],
    pieces: Pieces | None = None,
) -> tuple[Candidate, int]:
    """The selection of most value whose program fits, and how many graphs were made to find it.

    `graph_of` makes the joint graph of a selection and says how many bytes it takes.
    """
    graph = read_graph(model, loss, batch, "frozen")
    units = policy.units(graph)
    profile = policy.cost(model, optimizer, loss, batch, graph=graph, norm="frozen")
    if not any(charge.cost.bytes for charge in profile.charges):
        profile = counted(model, optimizer, loss, batch, graph=graph, norm="frozen")
    values = probe(policy.signal, model, optimizer, loss, batch, units, seed=policy.seed, pieces=pieces)
    free = replace(policy, budget=replace(policy.budget, memory=None))
    if limit is None:
        selection = plan(free, profile, values)
        return Candidate(selection, *graph_of(selection)), 1

    sizes = {name: param.numel() * param.element_size() for name, param in model.named_parameters()}
    values = {unit: 0.0 if _least(unit, sizes) > limit else value for unit, value in values.items()}

    def within(amount: float) -> Selection:
        return plan(replace(policy, budget=replace(policy.budget, memory=Absolute(max(amount, 1.0)))), profile, values)

    largest = plan(free, profile, values)
    seen: dict[frozenset[Any], Candidate] = {}
    low, low_bytes, high, high_bytes = 0.0, 0.0, float(largest.cost.bytes), 0.0
    asked, best = min(float(limit), high), None
    for _ in range(_MOST_PLANS):
        if len(seen) >= MOST_GRAPHS:
            break
        try:
            selection = within(asked)
        except BudgetError:
            low, asked = asked, (asked + high) / 2  # below the floor of the plan: nothing is to be found there
            if high - low < 0.02 * high:
                break
            continue
        key = frozenset(selection.parts)
        if key not in seen:
            seen[key] = Candidate(selection, *graph_of(selection))
        elif best is not None or high - low < 0.02 * high:
            break
        found = seen[key]
        if found.bytes <= limit:
            best = found if best is None or found.selection.value >= best.selection.value else best
            low, low_bytes = asked, float(found.bytes)
            if found.bytes >= _NEAR * limit or asked >= largest.cost.bytes:
                break
        elif best is None and high_bytes and found.bytes > _NEAR * high_bytes:
            break  # less memory to plan for makes the program no smaller: what is left are weights, not activations
        else:
            high, high_bytes = asked, float(found.bytes)
        if low_bytes and high_bytes:  # between what fits and what does not, in proportion
            asked = low + (high - low) * min(max((limit - low_bytes) / (high_bytes - low_bytes), 0.1), 0.9)
        elif high_bytes:
            asked = (low + high) / 2
        else:
            asked = min(high, asked * 2)
    if best is None and seen:
        stay = {unit for unit, is_fixed in zip(values, always_chosen(policy, profile, tuple(values)), strict=True) if is_fixed}
        best = _trimmed(min(seen.values(), key=lambda one: one.bytes).selection, stay, seen, values, limit, graph_of)
    if best is None:
        least = min(seen.values(), key=lambda one: one.bytes, default=None)
        needs = f": the smallest selection that was found takes {least.bytes:,} bytes" if least else ""
        raise BudgetError(
            f"memory={limit:,} bytes is below the floor of a program for this model and batch{needs}. Raise the limit, use a "
            f"smaller batch or smaller images, or choose units that are smaller (units.channels())."
        )
    return best, len(seen)


def _trimmed(
    selection: Selection,
    stay: set[Unit],
    seen: dict[frozenset[Any], Candidate],
    values: Mapping[Unit, float],
    limit: int,
    graph_of: Callable[[Selection], tuple[Any, int]],
) -> Candidate | None:
    """The better half of a selection, and of that, until its program fits: plans do not count the weights that change."""
    count, units = len(selection.units), sorted(selection.units, key=lambda unit: (unit not in stay, -values[unit]))
    while count > max(1, len(stay)):
        count = max(1, len(stay), count // 2)
        kept = tuple(unit for unit in selection.units if unit in set(units[:count]))
        part = replace(selection, units=kept, value=sum(values[unit] for unit in kept))
        found = seen[frozenset(part.parts)] = Candidate(part, *graph_of(part))
        if found.bytes <= limit:
            return found
    return None


def _least(unit: Unit, sizes: Mapping[str, int]) -> int:
    """Bytes that a program needs to train this unit, whatever else it does.

    A tensor that trains whole is held with its gradient. One of which a slice trains is put together where it is used.
    """
    return max(sizes[part.param] * (2 if part.dim is None else 1) for part in unit.parts)
