"""The best choice there is: a table along a chain for one budget, branch and bound on the true graph for several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pliant.planning.solve.fixed import greedy
from pliant.planning.solve.problem import SLACK, Array, Mask, Problem, Solver
from pliant.planning.solve.silence import silence

_MOST_TIGHTENINGS = 30  # moments of a peak that `milp` takes up one after the other
_ERROR_BITS = 12  # how finely a state of the knapsack table remembers what rounding did to its price


def knapsack(bins: int = 10_000) -> Solver:
    """The best choice under one limit, in one pass from the loss outwards.

    A plain 0/1 knapsack table over the prices that a unit pays alone; when unit d is the one furthest from the loss, it is read
    at `limit − (everything between the loss and d) − price(d)`, and the best read wins. O(units · bins).

    Up to log2(bins) units are enumerated, so the answer is exact on any graph. Beyond that the table has `bins` columns: the
    limit always holds, and the answer is the best one up to the width of a few columns. On a graph with branches the table
    works with prices that err on the safe side (see `_chain`); `milp` is exact there too.
    """

    if bins < 1:
        raise ValueError(f"knapsack(bins={bins}): must be at least 1.")

    def solve(problem: Problem) -> Mask:
        if not problem.is_single:
            raise ValueError(
                "knapsack() keeps one limit only, and the budget has several: use solve.milp() or solve.coverage()."
            )
        if (easy := everything_fits(problem)) is not None:
            return easy
        free = problem.free
        if 2 ** len(free) <= bins:
            few = fitting(problem, free)
            return few[int(np.argmax(few[:, free] @ problem.values[free]))]
        if len(problem.limits) > 1:
            problem = _at_its_highest(problem)
        own, between, alone = _chain(problem, free)
        limit = (problem.limits[0] - problem.cost(problem.always)[0]) * (1 + SLACK)
        picked = _table(problem.values[free], own, between, limit, bins)
        # Beside a branch, one unit at its true price may be worth more than all that the table can see.
        single = int(np.argmax(np.where(alone <= limit, problem.values[free], 0.0)))
        if alone[single] <= limit and problem.values[free[single]] > problem.values[free[picked]].sum():
            picked = np.array([single])
        taken = problem.always.copy()
        taken[free[picked]] = True
        return taken

    return solve


def _at_its_highest(problem: Problem) -> Problem:
    """One row for all moments of a peak: each charge at the moment where it weighs most. Errs on the safe side."""
    left = problem.limits - problem.cost(problem.always)
    unpaid = ~problem.needed[:, problem.always].any(axis=1)
    weight = np.where(problem.price > 0, problem.price / np.where(left > 0, left, np.nan)[:, None], 0.0)
    price = np.where(unpaid, np.nan_to_num(weight, nan=2.0).max(axis=0), 0.0)
    return replace(problem, price=price[None], limits=np.ones(1), resource=None)


def everything_fits(problem: Problem) -> Mask | None:
    """All of positive value, where that keeps the limits (always, where nothing is limited)."""
    everything = problem.always.copy()
    everything[problem.free] = True
    return everything if problem.fits(everything) else None


def fitting(problem: Problem, free: NDArray[np.intp]) -> Mask:
    """Every choice of a few units that keeps the limits at true prices, one in a row; what is always chosen comes first."""
    subsets = (np.arange(2 ** len(free))[:, None] >> np.arange(len(free))) & 1 == 1
    masks = np.repeat(problem.always[None], len(subsets), axis=0)
    masks[:, free] = subsets
    due = (masks.astype(np.float32) @ problem.needed.T.astype(np.float32)) > 0
    fits = np.all(due @ problem.price.T <= problem.limits * (1 + SLACK), axis=1)
    fits[0] = True  # whether that can be is for the caller to say
    return masks[fits]


def _chain(problem: Problem, free: NDArray[np.intp]) -> tuple[Array, Array, Array]:
    """The problem as a chain: what each free unit pays by itself, what lies between the loss and each, and, beside that, the
    true price of each if it were the only one.

    A charge that most units behind some depth need is part of the way there: everybody who goes that deep pays it. A charge
    that a few units share is paid by each of them. On a chain both are exact; on branches both may ask for more than the
    true price, never for less.
    """
    rows = problem.needed & ~problem.needed[:, problem.always].any(axis=1, keepdims=True)
    rows, price = rows[:, free], problem.price[0]
    count = rows.sum(axis=1)
    first = np.where(count > 0, rows.argmax(axis=1), 0)
    common = (count > 1) & (count > (len(free) - first) / 2)
    own = np.zeros(len(free))
    own += price[~common] @ rows[~common]
    between = np.zeros(len(free))
    np.add.at(between, first[common], price[common])
    return own, np.cumsum(between), price @ rows


def _table(values: Array, own: Array, between: Array, limit: float, bins: int) -> NDArray[np.intp]:
    """Positions of the best choice on a chain.

    Prices are rounded to the nearest of `bins` parts of their sum to find a state's column, and each state carries what
    rounding took or gave: rounding may merge two states, but what is read keeps the limit. Columns do not depend on the
    limit, so a larger limit reads the same table further right and its value never falls. A state is one integer, value ·
    2^bits − error, so that one maximum keeps both.
    """
    quantum = own.sum() / bins or 1.0
    price = np.rint(own / quantum).astype(int)
    bits = _ERROR_BITS + len(own).bit_length()
    error = np.ceil((own / quantum - price) * 2**_ERROR_BITS).astype(np.int64)
    worth = np.rint(values / values.sum() * 2.0 ** (61 - bits)).astype(np.int64)
    gain = (worth << bits) - error
    room = (limit - between - own) / quantum  # in columns, when d is the deepest
    width = int(np.clip(limit / quantum + len(own) // 2, 0, price.sum())) + 1
    filled = np.minimum(np.cumsum(price), width - 1) + 1  # columns beyond hold the same state as the last one
    table = np.zeros(width, np.int64)
    took = np.zeros((len(own), width), bool)
    winner, deepest, column, end = 0, -1, 0, 1
    rooms, worths, half = room.tolist(), worth.tolist(), 1 << (bits - 1)
    for d, p in enumerate(price):
        # Down to the first state whose true price fits; a state may be a little cheaper than its column, too.
        read = min(int(rooms[d]) + 3, end - 1) if rooms[d] >= 0 else -1
        while read >= 0:
            state = table.item(read)
            value = (state + half) >> bits
            if value + worths[d] <= winner:  # and further down nothing is worth more
                break
            if read + ((value << bits) - state) / 2**_ERROR_BITS <= rooms[d]:
                winner, deepest, column = value + worths[d], d, read
                break
            read -= 1
        if p < width:
            table[end : filled[d]] = table[end - 1]
            end = filled[d]
            other = table[: end - p] + gain[d]
            np.greater(other, table[p:end], out=took[d, p:end])
            np.maximum(other, table[p:end], out=table[p:end])
    chosen = [deepest] if deepest >= 0 else []
    for d in range(deepest - 1, -1, -1):
        column = min(column, filled[d] - 1)
        if took[d, column]:
            chosen.append(d)
            column -= price[d]
    return np.array(chosen, dtype=np.intp)


def milp(gap: float = 0.0, nodes: int = 20_000) -> Solver:
    """The best choice under any number of limits on the true graph: a mixed-integer program (HiGHS).

    x_u ∈ {0, 1} for units, y_j ≥ x_u for charges. It stops at the relative `gap` or after `nodes` branches, never by the clock,
    so that the same problem has the same answer everywhere; the better of its answer and the one-pass one is returned.
    """
    import scipy.optimize  # noqa: F401  # half a second that training would wait for, were it the first choice that imports

    if not gap >= 0 or nodes < 1:
        raise ValueError(f"milp(gap={gap}, nodes={nodes}): the gap is a share, 0 or more, and there is at least one node.")

    def solve(problem: Problem) -> Mask:
        if (easy := everything_fits(problem)) is not None:
            return easy
        one_pass = knapsack() if problem.is_single else greedy()
        best = one_pass(problem)
        rows = _first_rows(problem)
        tighter = 0.0
        for _ in range(_MOST_TIGHTENINGS):
            some = replace(problem, price=problem.price[rows], limits=problem.limits[rows])
            found = _branch_and_bound(some, best, gap, nodes, tighter)
            if found is None or problem.value(found) <= problem.value(best):
                return best
            if problem.fits(found):
                return found
            if not some.fits(found):
                if tighter:
                    return best
                tighter = 1e-5  # HiGHS accepts a limit missed by 1e-6; we do not
                continue
            over = problem.cost(found) - problem.limits
            over[rows] = -np.inf
            rows = np.append(rows, np.argmax(over))
        return best

    return solve


def _first_rows(problem: Problem) -> NDArray[np.intp]:
    """The rows to begin with: of each resource the moment that is highest when everything is chosen."""
    kinds = problem.resource or tuple(str(row) for row in range(len(problem.limits)))
    everything = problem.always.copy()
    everything[problem.free] = True
    over = problem.cost(everything) - problem.limits
    first = {kind: max((r for r, k in enumerate(kinds) if k == kind), key=lambda r: over[r]) for kind in kinds}
    return np.array(sorted(first.values()), dtype=np.intp)


def _branch_and_bound(problem: Problem, best: Mask, gap: float, nodes: int, tighter: float) -> Mask | None:
    """The best choice of those that are worth more than `best`, if there are any."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    free = problem.free
    unpaid = ~problem.needed[:, problem.always].any(axis=1)
    rows, price = problem.needed[unpaid][:, free], problem.price[:, unpaid]
    count = rows.sum(axis=1)
    single, shared = count == 1, count > 1
    n, m = len(free), int(shared.sum())
    left = problem.limits - problem.cost(problem.always)
    limited = np.isfinite(left)
    left, price = left[limited], price[limited]
    own = price[:, single] @ rows[single]
    scale = np.where(left > 0, left, 1.0)[:, None]
    weights = np.concatenate([own, price[:, shared]], axis=1) / scale
    over, under = _precedence(rows[shared])
    links = coo_array(
        (
            np.concatenate([np.ones(len(over)), -np.ones(len(over))]),
            (np.tile(np.arange(len(over)), 2), np.concatenate([over + n, under])),
        ),
        shape=(len(over), n + m),
    )
    constraints = [LinearConstraint(weights, -np.inf, (left / scale[:, 0]) - tighter)]
    if len(over):
        constraints.append(LinearConstraint(links.tocsr(), 0, np.inf))
    worth = np.concatenate([problem.values[free] / problem.values[free].max(), np.zeros(m)])
    constraints.append(LinearConstraint(worth[None], worth[:n] @ best[free] + 1e-7, np.inf))
    with silence():
        result = milp(
            -worth,
            integrality=np.ones(n + m),  # charges follow units, so they are whole anyway; said, HiGHS searches less
            bounds=Bounds(0, 1),
            constraints=constraints,
            options={"mip_rel_gap": gap, "node_limit": nodes},
        )
    if result.x is None:
        return None
    chosen = problem.always.copy()
    chosen[free[result.x[:n] > 0.5]] = True
    return chosen


def _precedence(rows: Mask) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Pairs (charge, what it follows) that say y ≥ x for every member, in few links: through smaller charges where they nest.

    What is followed is a unit (its position) or a charge (units + its position).
    """
    n = rows.shape[1]
    order = np.argsort(rows.sum(axis=1), kind="stable")
    over: list[int] = []
    under: list[int] = []
    for k, j in enumerate(order.tolist()):
        open_ = rows[j].copy()
        smaller = order[:k]
        inside = smaller[~(rows[smaller] & ~rows[j]).any(axis=1)]
        for i in inside[::-1].tolist():
            if not open_.any():
                break
            if (rows[i] & open_).sum() > 1:
                over.append(j)
                under.append(n + i)
                open_ &= ~rows[i]
        for u in np.flatnonzero(open_).tolist():
            over.append(j)
            under.append(u)
    return np.array(over, dtype=np.intp), np.array(under, dtype=np.intp)
