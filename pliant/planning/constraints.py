"""Limits of a step → constraints of the solver's problem.

A limit on seconds, MACs or joules becomes one constraint: what is chosen may add no more than the limit less the forward pass.
A memory limit becomes one constraint for each moment of a step, because memory is a peak: at every moment, what is live then
must fit. Which bytes are live when is in the `PriceTable`. Its `standing` is what inference holds at a moment, less the peak of
inference: 0 or negative, so other moments than that peak leave more room.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pliant.core.types import Cost
from pliant.cost.profile import PriceTable
from pliant.planning.solve import SLACK, Array


def constraints(
    table: PriceTable, forward: Cost, limit: Mapping[str, float], watts: float | None
) -> tuple[Array, Array, tuple[str, ...]]:
    """One row per constraint: the price of each charge, the room left for charges, and the name of the resource."""
    prices: list[Array] = []
    room: list[float] = []
    resource: list[str] = []
    for name, amount in limit.items():
        joules = table.seconds[None] * (watts or 0.0)
        rows = {"seconds": table.seconds[None], "macs": table.macs[None], "bytes": table.bytes, "joules": joules}[name]
        standing = table.standing if name == "bytes" else np.zeros(1)
        prices += list(rows)
        room += (amount * (1 + SLACK) - getattr(forward, name) - standing).tolist()
        resource += [name] * len(rows)
    return np.array(prices).reshape(len(prices), len(table.needed)), np.array(room), tuple(resource)


def without_free_charges(table: PriceTable) -> PriceTable:
    """A table without the charges that cost nothing: a parameter that the loss does not reach has no others."""
    some = (table.seconds > 0) | (table.macs > 0) | (table.bytes > 0).any(axis=0)
    return PriceTable(table.needed[some], table.seconds[some], table.bytes[:, some], table.standing, table.macs[some])
