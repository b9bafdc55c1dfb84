"""`Policy`: five words and a budget make a method. `plan`: the pure decision."""

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
    `always` names units that are chosen in any case; `head` adds the module nearest the loss. `state` is what becomes of
    the optimizer state of what leaves; where memory is limited it is dropped. `start` is what trains until `when` asks for
    another choice: what is "scored" on the first batch, or the "head" alone, since nothing behind a new head can be scored
    before it has learned something (so `when` must come due). Change one word with `dataclasses.replace` and
    you have an ablation.
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
    start: Literal["scored", "head"] = "scored"
    seed: int = 0
    name: str = "custom"

    def __post_init__(self) -> None:
        if self.state not in ("keep", "drop"):
            raise ValueError(f"state={self.state!r}: the optimizer state of what leaves is 'keep' or 'drop'.")
        if self.start not in ("scored", "head"):
            raise ValueError(f"start={self.start!r}: until the next choice trains what is 'scored', or the 'head' alone.")
        if self.start == "head" and not (self.head or self.always):
            raise ValueError("start='head' trains nothing: with head=False there is none that is always chosen.")
        if self.start == "head" and not self.when.comes_due:
            raise ValueError(f"start='head' with when={self.when.name!r} never trains anything else: use start='scored'.")
