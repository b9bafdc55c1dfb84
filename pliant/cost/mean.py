"""The profile of a model whose graph is random: a mean over several readings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pliant.core.types import Cost
from pliant.cost.charge import Charge
from pliant.cost.profile import Profile


def mean(profiles: Sequence[Profile]) -> Profile:
    """One profile of steps of which each runs one of several graphs: seconds and MACs are their mean, bytes those of the first.

    Every reading brings its own charges, each at its share of the price. So the cost of any selection is the mean of its costs.
    """
    first, *others = profiles
    if not others:
        return first
    share = 1 / len(profiles)
    charges = [_at(share, charge, 0, keep=True) for charge in first.charges]
    for one in others:
        charges += [_at(share, charge, len(charges), keep=False) for charge in one.charges]
    return replace(
        first,
        charges=tuple(charges),
        base=_mean([one.base for one in profiles]),
        plain=_mean([one.plain for one in profiles if one.plain is not None]) if first.plain is not None else None,
        origin={**first.origin, "readings": len(profiles)},
        coverage=None if first.coverage is None else math.fsum(one.coverage or 0.0 for one in profiles) * share,
        uncounted=tuple(sorted({op for one in profiles for op in one.uncounted})),
        checks=tuple(check for one in profiles for check in one.checks),
        other_seconds=_other_seconds(profiles),
    )


def _at(share: float, charge: Charge, shift: int, keep: bool) -> Charge:
    """A share of a charge, in a list where it stands so much later; without `keep`, it takes no bytes."""
    cost = Cost(charge.cost.seconds * share, charge.cost.bytes if keep else 0, round(charge.cost.macs * share))
    return replace(charge, cost=cost, via=tuple(at + shift for at in charge.via), live=charge.live if keep else None)


def _mean(costs: Sequence[Cost]) -> Cost:
    share = 1 / len(costs)
    return replace(
        costs[0],
        seconds=math.fsum(cost.seconds for cost in costs) * share,
        macs=round(sum(cost.macs for cost in costs) * share),
    )


def _other_seconds(profiles: Sequence[Profile]) -> tuple[float, ...]:
    share = 1 / len(profiles)
    if not all(one.other_seconds for one in profiles):
        return ()
    of_charges = (seconds * share for one in profiles for seconds in one.other_seconds[:-1])
    return (*of_charges, math.fsum(one.other_seconds[-1] for one in profiles) * share)
