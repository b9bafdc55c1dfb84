"""The floor: the cheapest possible step, and the error that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pliant.core.budget import RESOURCES, Absolute, Budget, Progress
from pliant.core.errors import BudgetError
from pliant.core.types import Cost, Unit, match
from pliant.cost.profile import Profile
from pliant.planning.policy import Policy
from pliant.planning.solve import SLACK, Problem


def least_bytes(policy: Policy, profile: Profile, units: tuple[Unit, ...]) -> int:
    """Bytes of the cheapest step."""
    return min((cost.bytes for cost in _least(policy, profile, units)), default=0)


def has_time(policy: Policy, profile: Profile, units: tuple[Unit, ...], now: Progress) -> bool:
    """Whether the cheapest step keeps the time that is asked for now, or a full step does."""
    if policy.budget.time is None:
        return True
    asked = Budget(time=policy.budget.time).limits(profile.full, now)["seconds"]
    least = min((cost.seconds for cost in _least(policy, profile, units)), default=0.0)
    return min(least, profile.full.seconds) <= asked * (1 + SLACK)


def _least(policy: Policy, profile: Profile, units: tuple[Unit, ...]) -> list[Cost]:
    """The costs of the steps that may be the cheapest."""
    always = [unit for unit, taken in zip(units, always_chosen(policy, profile, units), strict=True) if taken]
    if always:
        return [profile.cost(always)]
    return [profile.cost([unit]) for unit in units if profile.due([unit])]


def always_chosen(policy: Policy, profile: Profile, units: tuple[Unit, ...]) -> NDArray[np.bool_]:
    """The units that are chosen in any case."""
    always = np.zeros(len(units), bool)
    always[list(match(tuple(unit.name for unit in units), policy.always))] = True
    if policy.head:
        always |= np.array([not set(profile.head).isdisjoint(unit.params) for unit in units], bool)
    return always


def floor_of(problem: Problem, profile: Profile, units: tuple[Unit, ...]) -> tuple[Cost, str]:
    """What the cheapest step costs, and in words what it trains."""
    if problem.always.any():
        chosen = [unit for unit, taken in zip(units, problem.always, strict=True) if taken]
        return profile.cost(chosen), "what is always chosen (" + ", ".join(repr(unit.name) for unit in chosen) + ")"
    reached = reached_by(problem)
    alone = np.array([problem.cost(np.arange(len(units)) == i) for i in reached])
    over = (np.maximum(alone - problem.limits, 0) / np.maximum(np.abs(problem.limits), 1e-300)).sum(axis=1)
    cheapest = reached[int(np.lexsort((alone.sum(axis=1), over))[0])]
    return profile.cost([units[cheapest]]), f"the cheapest unit ({units[cheapest].name!r})"


def check_floor(floor: Cost, what: str, base: Cost, limit: Mapping[str, float], full: Cost) -> None:
    """A budget that not even the cheapest step keeps is refused with the floor named."""
    for name, amount in limit.items():
        least, forward = getattr(floor, name), getattr(base, name)
        if least > amount * (1 + SLACK):
            kind = next(k for k, v in RESOURCES.items() if v == name)
            enough = least if name in ("bytes", "macs") else min(least, getattr(full, name))  # a full step's time always is
            raise BudgetError(
                f"{kind}={say(name, amount, full, np.floor)} is below the floor of {say(name, least, full)}: the forward "
                f"pass alone takes {say(name, forward, full)} of a full step and {what} adds "
                f"{say(name, least - forward, full)}. Use {kind}>={say(name, enough, full)}."
            )


def say(name: str, amount: float, full: Cost, toward: Callable[[float], float] = np.ceil) -> str:
    """An amount as a share of a full step, and as it is. Floors round up, so that a floor that is named is one that works."""
    whole, slack = getattr(full, name), (1 - SLACK / 2 if toward is np.ceil else 1 + SLACK / 2)
    share = toward(amount / whole * 1000 * slack) / 1000 if whole else float("nan")
    unit, size = {"seconds": ("ms", 1e-3), "bytes": ("KB", 1e3), "macs": ("KMAC", 1e3), "joules": ("J", 1.0)}[name]
    digits = 10.0 ** (np.floor(np.log10(amount / size)) - 3) if amount > 0 else 1.0
    return f"{share:.3f} ({toward(amount / size / digits * slack) * digits:.10g} {unit})"


def reached_by(problem: Problem) -> list[int]:
    """The units that the loss depends on: the others cost nothing, and a step that trains nothing else is impossible."""
    return np.flatnonzero(problem.reached).tolist() or list(range(len(problem.names)))


def in_reach(policy: Policy, profile: Profile, units: tuple[Unit, ...], progress: Progress | None = None) -> list[str]:
    """The parameters with a unit that alone stays within the MACs of a step: others need not be scored."""
    if policy.budget.macs is None:
        return list(dict.fromkeys(param for unit in units for param in unit.params))
    table, most = profile.table(units), policy.budget.limits(profile.full, progress or Progress())["macs"]
    alone = profile.base.macs + table.macs @ table.needed
    affordable = [unit for unit, macs in zip(units, alone, strict=True) if macs <= most]
    return list(dict.fromkeys(param for unit in affordable for param in unit.params))


def leaving_room(budget: Budget, profile: Profile) -> Budget:
    """The budget of captured steps: they keep all their memory, so inference must have room beside it."""
    if budget.memory is None:
        return budget

    def memory(now: Progress) -> Absolute:
        return Absolute(max(budget.limits(profile.full, now)["bytes"] - profile.inference, 1.0))

    return replace(budget, memory=memory)
