"""`Policy`: five choices and a budget make a method."""

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
    """What can be chosen, what it is worth, what it costs, how it is decided and when, inside a budget.

    - `units` turns a graph into units: `units.layers()`
    - `signal` says what each unit is worth: `score.update_gain()`
    - `cost` measures what each costs: `measure.timed`
    - `solver` decides: `solve.knapsack()`
    - `when` says how often: `schedule.every(steps=100)`
    - `budget` is what a step may cost: `Budget(time=0.5)`
    - `always` names units that are always chosen. `head` adds the head, the module nearest the loss.
    - `state`: the optimizer state of a unit that is no longer chosen is kept ("keep") or dropped ("drop"). With a memory limit
      it is always dropped.
    - `head_first`: the share of the run in which only the units of `always` and `head` train (20 steps if the length of the run
      is unknown), and longer while the loss halves. The first selection after it is taken back if the head alone does better.
    - `norm` is the batch-norm rule of the method, unless `Session(norm=…)` names another.

    To change one choice, use `dataclasses.replace`.

    `cost` is called as `cost(model, optimizer, loss, batch, graph=…, update=…, norm=…, around=…, prices=…, ready=…)`, and
    returns a `Profile`. It may ignore all keyword arguments. `graph` is the backward graph (`measure.read_graph`). `update`
    holds clipping, scaler and accumulation. `norm` is the batch-norm rule of the session. Forward passes run inside
    `around()`. `prices` are those of custom kernels. `ready(batch)`, if not None, returns the forward pass of a step as the
    session runs it.
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
            raise ValueError(f"state={self.state!r}: optimizer state of units that are no longer chosen: use 'keep' or 'drop'.")
        if not 0 <= self.head_first < 1:
            raise ValueError(f"head_first={self.head_first} is not a share of the run: use 0 or more, and less than 1.")
