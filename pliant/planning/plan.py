"""The pure decision: units, prices, values and a budget in, a selection out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pliant.core.budget import Progress
from pliant.core.errors import BudgetError
from pliant.core.types import Selection, Unit
from pliant.cost.profile import Profile
from pliant.planning.constraints import constraints, without_free_charges
from pliant.planning.floor import always_chosen, check_floor, floor_of, reached_by, say
from pliant.planning.policy import Policy
from pliant.planning.solve import SLACK, Problem, Rotating


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

    `values` says what each unit is worth. One whose value is not a number is chosen only if the policy always chooses it. A
    budget below the floor, the cheapest possible step, raises `BudgetError`, unless a full step keeps it.

    The other arguments serve a session that corrects its plan:

    - `correction` multiplies the seconds and joules to plan for, since steps may run slower or faster than predicted.
    - `within` replaces the bytes to plan for. Neither goes below the floor, nor `within` above what was asked.
    - `near` is the selection in force. It changes as little as possible: units are only added, or only removed. Where none
      of it can stay, and for a `Rotating` solver, it is ignored.
    """
    progress = progress if progress is not None else Progress()
    units = tuple(values)
    if not units:
        raise ValueError("there is nothing to choose from: `values` has no unit. Check requires_grad flags and the optimizer.")
    names = tuple(unit.name for unit in units)
    worth = np.array([values[unit] for unit in units], float)
    worth[~np.isfinite(worth)] = 0.0
    always = always_chosen(policy, profile, units)
    full = profile.full
    asked = policy.budget.limits(full, progress)
    if "bytes" in asked and not full.bytes and not any(charge.cost.bytes for charge in profile.charges):
        raise BudgetError("memory= cannot be kept: this profile holds no bytes. Measure with another `cost`.")
    base = profile.metered(profile.base)
    table, limit = without_free_charges(profile.table(units)), dict(asked)
    done = progress.fraction if progress.total_steps is not None else None
    frozen_norms = profile.origin.get("norms") == "frozen"

    def problem_within(limit: Mapping[str, float]) -> Problem:
        price, room, resource = constraints(table, base, limit, profile.watts)
        turn = progress.round, policy.seed
        sizes = profile.sizes(units)
        return Problem(names, worth, table.needed, price, room, always, *turn, resource, *sizes, done, frozen_norms)

    floor, what = floor_of(problem_within(limit), profile, units)
    for name in ("seconds", "joules"):
        # What a full step keeps is never refused, though a small model may measure as slower with less of it trained.
        if name in limit and (correction is not None or limit[name] >= getattr(full, name)):
            limit[name] = max(limit[name] * (1.0 if correction is None else correction), getattr(floor, name))
    if within is not None and "bytes" in limit:
        limit["bytes"] = min(limit["bytes"], max(within, floor.bytes))
    check_floor(floor, what, base, limit, full)
    problem = problem_within(limit)
    held = np.isin(names, [] if isinstance(policy.solver, Rotating) else [unit.name for unit in near])
    if held.any() and not problem.fits(held):
        if not _some_fits(problem, held):  # nothing of it can stay: choose afresh
            return plan(policy, profile, values, progress, correction, within)
        problem = replace(problem, may=held | always)
    elif held.any():
        always = always | held
        problem = problem_within(limit)
    chosen = policy.solver(problem) & (problem.allowed | always)
    if not chosen.any():  # no value is positive and nothing is always chosen: the best single unit that fits
        order = sorted((i for i in reached_by(problem) if problem.allowed[i]), key=lambda i: -worth[i])
        best = next(i for i in order if problem.fits(np.arange(len(units)) == i))
        chosen = np.arange(len(units)) == best
    picked = tuple(unit for unit, taken in zip(units, chosen, strict=True) if taken)
    cost = profile.cost(picked)
    for name, amount in limit.items():
        if getattr(cost, name) > amount * (1 + 2 * SLACK):
            raise BudgetError(
                f"the choice of {len(picked)} units costs {say(name, getattr(cost, name), full)}, more than the limit of "
                f"{say(name, amount, full)}. Raise the budget, or choose with a solver that keeps it (knapsack, milp, greedy, "
                "coverage)."
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


def without(values: Mapping[Unit, float], params: Collection[str]) -> dict[Unit, float]:
    """The same values of units that lack these parameters; a unit that has no others is left out."""
    if not params:
        return dict(values)
    rest = {unit: tuple(part for part in unit.parts if part.param not in params) for unit in values}
    return {replace(unit, parts=parts): values[unit] for unit, parts in rest.items() if parts}


def _some_fits(problem: Problem, held: NDArray[np.bool_]) -> bool:
    """Whether the units that are always chosen fit or, without any, one of those that are held."""
    if problem.always.any():
        return problem.fits(problem.always)
    return any(problem.fits(np.arange(len(held)) == i) for i in np.flatnonzero(held & problem.reached))
