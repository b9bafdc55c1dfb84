"""`Policy`: five words and a budget make a method. `plan`: the pure decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pliant.budget import RESOURCES, Budget, Progress
from pliant.profile import Profile, Table
from pliant.schedule import Schedule, once
from pliant.solve import SLACK, Array, Problem, Solver, takes_turns
from pliant.types import BudgetError, Cost, Selection, Unit, match


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


def in_reach(policy: Policy, profile: Profile, units: tuple[Unit, ...], progress: Progress | None = None) -> list[str]:
    """The parameters of which some unit, alone, takes no more MACs than a step may: others need not be scored."""
    if policy.budget.macs is None:
        return list(dict.fromkeys(param for unit in units for param in unit.params))
    table, most = profile.table(units), policy.budget.limits(profile.full, progress or Progress())["macs"]
    alone = profile.base.macs + table.macs @ table.needed
    affordable = [unit for unit, macs in zip(units, alone, strict=True) if macs <= most]
    return list(dict.fromkeys(param for unit in affordable for param in unit.params))


def plan(
    policy: Policy,
    profile: Profile,
    values: Mapping[Unit, float],
    progress: Progress | None = None,
    correction: float | None = None,
    within: float | None = None,
    near: Sequence[Unit] = (),
) -> Selection:
    """Choose units under the policy's budget. Pure: same inputs and seed, same answer.

    A value that is not a number says nothing for its unit; the unit is then chosen only if it always is. A budget below the
    floor is an error. With a `correction`, seconds are planned for that many times what was asked, or for the floor where that
    is more: steps that ran slower or faster than predicted are not the user's mistake. `within` are the bytes to plan for in
    place of those asked, or the floor where that is more, as long as it is within what was asked. A choice that is `near` is
    changed no more than must be: where it leaves something over it is added to, and where it costs too much it is taken from.
    Where nothing of it can stay, and for solvers that take turns, the choice is a fresh one.
    """
    progress = progress if progress is not None else Progress()
    units = tuple(values)
    if not units:
        raise ValueError("there is nothing to choose from: no parameter of the model can be trained.")
    names = tuple(unit.name for unit in units)
    worth = np.array([values[unit] for unit in units], float)
    worth[~np.isfinite(worth)] = 0.0
    always = _always(policy, profile, units)
    full = profile.full
    asked = policy.budget.limits(full, progress)
    if "joules" in asked:
        raise BudgetError("a budget in joules cannot be kept yet: profiles hold no joules.")
    table, limit = _that_cost(profile.table(units)), dict(asked)
    done = progress.fraction if progress.total_steps is not None else None
    rest = profile.origin.get("norms") == "frozen"

    def problem_within(limit: Mapping[str, float]) -> Problem:
        price, room, resource = _rows(table, profile.base, limit)
        turn = progress.round, policy.seed
        return Problem(names, worth, table.needed, price, room, always, *turn, resource, *profile.sizes(units), done, rest)

    floor, what = _floor(problem_within(limit), profile, units)
    if correction is not None and "seconds" in limit:
        limit["seconds"] = max(limit["seconds"] * correction, floor.seconds)
    if within is not None and "bytes" in limit:
        limit["bytes"] = min(limit["bytes"], max(within, floor.bytes))
    _check_floor(floor, what, profile.base, limit, full)
    problem = problem_within(limit)
    held = np.isin(names, [] if takes_turns(policy.solver) else [unit.name for unit in near])
    if held.any() and not problem.fits(held):
        if not _some_fits(problem, held):  # nothing of it can stay: choose afresh
            return plan(policy, profile, values, progress, correction, within)
        problem = replace(problem, may=held | always)
    elif held.any():
        always = always | held
        problem = problem_within(limit)
    chosen = policy.solver(problem) & (problem.allowed | always)
    if not chosen.any():  # no value is positive and nothing is always chosen: the best single unit that fits
        order = sorted((i for i in _reached(problem) if problem.allowed[i]), key=lambda i: -worth[i])
        best = next(i for i in order if problem.fits(np.arange(len(units)) == i))
        chosen = np.arange(len(units)) == best
    picked = tuple(unit for unit, taken in zip(units, chosen, strict=True) if taken)
    cost = profile.cost(picked)
    for name, amount in limit.items():
        if getattr(cost, name) > amount * (1 + 2 * SLACK):
            raise BudgetError(
                f"the choice of {len(picked)} units costs {_say(name, getattr(cost, name), full)}, more than the limit of "
                f"{_say(name, amount, full)}. Raise the budget, or choose with a solver that keeps it (knapsack, milp, greedy, "
                "spread)."
            )
    return Selection(
        picked,
        cost,
        limit,
        problem.value(chosen & (always | (worth > 0))),
        progress.round,
        progress.step,
        full,
        dict(zip(names, worth.tolist(), strict=True)),
        asked,
    )


def leaving_room(budget: Budget, profile: Profile) -> Budget:
    """What captured steps may take of a budget: they hold on to all that they take, so inference must have room beside it."""
    if budget.memory is None:
        return budget

    def memory(now: Progress) -> str:
        return f"{max(budget.limits(profile.full, now)['bytes'] - profile.inference, 1.0)}B"

    return replace(budget, memory=memory)


def least_bytes(policy: Policy, profile: Profile, units: tuple[Unit, ...]) -> int:
    """What a step takes up that trains no more than it must."""
    always = [unit for unit, taken in zip(units, _always(policy, profile, units), strict=True) if taken]
    if always:
        return profile.cost(always).bytes
    return min((profile.cost([unit]).bytes for unit in units if profile.due([unit])), default=0)


def _always(policy: Policy, profile: Profile, units: tuple[Unit, ...]) -> NDArray[np.bool_]:
    """The units that are chosen whatever they are worth."""
    always = np.zeros(len(units), bool)
    always[list(match(tuple(unit.name for unit in units), policy.always))] = True
    if policy.head:
        always |= np.array([not set(profile.head).isdisjoint(unit.params) for unit in units], bool)
    return always


def _some_fits(problem: Problem, held: NDArray[np.bool_]) -> bool:
    """Whether what is always chosen fits or, where nothing is, one of those that are held."""
    if problem.always.any():
        return problem.fits(problem.always)
    return any(problem.fits(np.arange(len(held)) == i) for i in np.flatnonzero(held & problem.reached))


def _that_cost(table: Table) -> Table:
    """A table without the charges that are free: a parameter that the loss does not reach has no others."""
    some = (table.seconds > 0) | (table.macs > 0) | (table.bytes > 0).any(axis=0)
    return Table(table.needed[some], table.seconds[some], table.bytes[:, some], table.standing, table.macs[some])


def _rows(table: Table, base: Cost, limit: Mapping[str, float]) -> tuple[Array, Array, tuple[str, ...]]:
    """The prices of the limited resources, what is left for them beside the forward pass, and which row is which."""
    prices: list[Array] = []
    room: list[float] = []
    resource: list[str] = []
    for name, amount in limit.items():
        rows = {"seconds": table.seconds[None], "macs": table.macs[None], "bytes": table.bytes}[name]
        standing = table.standing if name == "bytes" else np.zeros(1)
        prices += list(rows)
        room += (amount * (1 + SLACK) - getattr(base, name) - standing).tolist()
        resource += [name] * len(rows)
    return np.array(prices).reshape(len(prices), len(table.needed)), np.array(room), tuple(resource)


def _floor(problem: Problem, profile: Profile, units: tuple[Unit, ...]) -> tuple[Cost, str]:
    """What the cheapest step costs, and in words what it trains."""
    if problem.always.any():
        chosen = [unit for unit, taken in zip(units, problem.always, strict=True) if taken]
        return profile.cost(chosen), "what is always chosen (" + ", ".join(unit.name for unit in chosen) + ")"
    reached = _reached(problem)
    alone = np.array([problem.cost(np.arange(len(units)) == i) for i in reached])
    over = (np.maximum(alone - problem.limits, 0) / np.maximum(np.abs(problem.limits), 1e-300)).sum(axis=1)
    cheapest = reached[int(np.lexsort((alone.sum(axis=1), over))[0])]
    return profile.cost([units[cheapest]]), f"the cheapest unit ({units[cheapest].name!r})"


def _reached(problem: Problem) -> list[int]:
    """The units that the loss hangs on: the others cost nothing, and a step that trains nothing else cannot be taken."""
    return np.flatnonzero(problem.reached).tolist() or list(range(len(problem.names)))


def _check_floor(floor: Cost, what: str, base: Cost, limit: Mapping[str, float], full: Cost) -> None:
    """A budget that not even the cheapest step keeps is refused with the floor named."""
    for name, amount in limit.items():
        least, forward = getattr(floor, name), getattr(base, name)
        if least > amount * (1 + SLACK):
            kind = next(k for k, v in RESOURCES.items() if v == name)
            raise BudgetError(
                f"{kind}={_say(name, amount, full, np.floor)} is below the floor of {_say(name, least, full)}: the forward "
                f"pass alone takes {_say(name, forward, full)} of a full step and {what} adds "
                f"{_say(name, least - forward, full)}. Use {kind}>={_say(name, least, full)}."
            )


def _say(name: str, amount: float, full: Cost, toward: Callable[[float], float] = np.ceil) -> str:
    """An amount as a share of a full step, and as it is. Floors round up, so that a floor that is named is one that works."""
    whole, slack = getattr(full, name), (1 - SLACK / 2 if toward is np.ceil else 1 + SLACK / 2)
    share = toward(amount / whole * 1000 * slack) / 1000 if whole else float("nan")
    unit, size = {"seconds": ("ms", 1e-3), "bytes": ("KB", 1e3), "macs": ("KMAC", 1e3)}[name]
    digits = 10.0 ** (np.floor(np.log10(amount / size)) - 3) if amount > 0 else 1.0
    return f"{share:.3f} ({toward(amount / size / digits * slack) * digits:.10g} {unit})"
