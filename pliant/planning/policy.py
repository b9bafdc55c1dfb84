"""`Policy`: five words and a budget make a method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pliant.core.budget import Budget
from pliant.core.schedule import Schedule, once
from pliant.core.types import Unit
from pliant.cost.profile import Profile
from pliant.planning.solve import Solver


@dataclass(frozen=True)
class Policy:
    """units × signal × cost × solver × when, inside a budget.

    `units` turns a graph into units (`units.layers()`), `signal` says what each is worth (`score.update_gain()`), `cost`
    measures (`measure.timed`), `solver` decides (`solve.knapsack()`), `when` says how often (`schedule.every(steps=100)`).
    `always` names units that are chosen in any case; `head` adds the module nearest the loss, tied weights left out. `state`
    says whether optimizer state is kept or dropped when a unit leaves the selection; where memory is limited it is dropped.
    `head_first` is the share of the run in which only what is always chosen trains (20 steps where the length of the run is
    unknown); then the first selection is made, and it is taken back if the loss falls more slowly than before. `norm` is the
    batch-norm rule of the method, unless `Session(norm=…)` names another.
    Change one word with `dataclasses.replace` and you have an ablation.

    `cost` is called as `cost(model, optimizer, loss, batch, graph=…, update=…, norm=…, around=…, prices=…, ready=…)`, and
    returns a `Profile`. `graph` is the backward graph, already read (`measure.read_graph`). `update` says how gradients become
    a step. `norm` is the batch-norm rule of the session. Forward passes run inside `around()`. `prices` are those of custom
    kernels. `ready(batch)`, if not None, gives the forward pass of a step as the session runs it. A cost function may ignore
    all six.
    """

    units: Callable[..., tuple[Unit, ...]]
    signal: Any
    cost: Callable[..., Profile]
    solver: Solver
    when: Schedule = field(default_factory=once)
    budget: Budget = field(default_factory=Budget)
    always: tuple[str, ...] = ()
    head: bool = True
    state: Literal["keep", "drop"] = "keep"
    seed: int = 0
    name: str = "custom"
    head_first: float = 0.0
    norm: Literal["auto", "chosen", "frozen", "as-is"] = "auto"

    def __post_init__(self) -> None:
        if self.state not in ("keep", "drop"):
            raise ValueError(f"state={self.state!r}: the optimizer state of what leaves is 'keep' or 'drop'.")
        if not 0 <= self.head_first < 1:
            raise ValueError(f"head_first={self.head_first}: a share of the run, from 0 to less than 1.")
