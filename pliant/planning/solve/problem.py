"""The problem that every solver solves: values, prices and limits. `planning/constraints` makes its rows from a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Array = NDArray[np.float64]
SLACK = 1e-9  # relative; what rounding in a sum of floats may add


@dataclass(frozen=True)
class Problem:
    """Choose units of the most value so that every limit holds.

    Units are in order, nearest the loss first. Charge j costs `price[:, j]` and is due when a unit of `needed[j]` is chosen.
    `limits` are those of a step less its forward pass. There is one row per limited resource, and for memory one row per
    moment of a step. `resource` names the resource of each row (None: all differ). `round` and `seed` make random choices
    repeatable. `done` is the share of the run that is done, if its length is known.
    """

    names: tuple[str, ...]
    values: Array  # (units,)
    needed: Mask  # (charges, units)
    price: Array  # (rows, charges)
    limits: Array  # (rows,)
    always: Mask  # (units,)
    round: int = 0
    seed: int = 0
    resource: tuple[str, ...] | None = None  # (rows,)
    elements: Array | None = None  # (units,): elements of each
    macs: Array | None = None  # (units,): of its own gradients alone
    done: float | None = None
    frozen_norms: bool = False  # whether every batch norm uses its running statistics, also in what trains
    may: Mask | None = None  # (units,): those that may be chosen; None: all. Others keep their place and value

    def cost(self, chosen: Mask) -> Array:
        """What this choice costs, per row."""
        due = self.needed[:, chosen].any(axis=1)
        return self.price[:, due].sum(axis=1)

    def is_within(self, cost: Array) -> bool:
        return bool(np.all(cost <= self.limits * (1 + SLACK)))

    def fits(self, chosen: Mask) -> bool:
        return self.is_within(self.cost(chosen))

    def value(self, chosen: Mask) -> float:
        return float(self.values[chosen].sum())

    @property
    def is_single(self) -> bool:
        """Whether all rows are moments of one resource."""
        return len(self.limits) < 2 or (self.resource is not None and len(set(self.resource)) == 1)

    @property
    def free(self) -> NDArray[np.intp]:
        """Units that are worth choosing, may be, and are not chosen anyway."""
        return np.flatnonzero((self.values > 0) & ~self.always & self.allowed)

    @property
    def allowed(self) -> Mask:
        """The units that may be chosen."""
        return np.ones(len(self.names), bool) if self.may is None else self.may

    @property
    def reached(self) -> Mask:
        """The units that the loss depends on: to train any other changes nothing."""
        return np.asarray(self.needed.any(axis=0))

    def rng(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.round])


Solver = Callable[[Problem], Mask]
