"""Values + prices + limits → what to choose.

A solver is a function `Problem → mask over the units`. Prices are not additive: a charge is due once, as soon as any of the
units that need it is chosen (`types.Charge`). Pure numpy and scipy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from pliant.types import match

Mask = NDArray[np.bool_]
Array = NDArray[np.float64]
SLACK = 1e-9  # relative; what rounding in a sum of floats may add
_MOST_TIGHTENINGS = 30  # moments of a peak that `milp` takes up one after the other
_ERROR_BITS = 12  # how finely a state of the knapsack table remembers what rounding did to its price


@dataclass(frozen=True)
class Problem:
    """Choose units of the most value so that every limit holds.

    Units stand nearest the loss first. Charge j costs `price[:, j]` and is due when a unit of `needed[j]` is chosen; `limits`
    are what is left beside the forward pass. There is one row per limited resource, but a peak (bytes) has one for each
    moment that may be the highest: `resource` tells which rows belong together (None: each stands for itself). `round` and
    `seed` make random choices repeatable; `done` is the share of the run that is behind, where its length is known.
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
    elements: Array | None = None  # (units,): numbers that train in each, wherever it stands
    macs: Array | None = None  # (units,): of its own gradients, without the way there
    done: float | None = None

    def cost(self, chosen: Mask) -> Array:
        """What this choice costs, per row."""
        due = self.needed[:, chosen].any(axis=1)
        return self.price[:, due].sum(axis=1)

    def fits(self, chosen: Mask) -> bool:
        return bool(np.all(self.cost(chosen) <= self.limits * (1 + SLACK)))

    def value(self, chosen: Mask) -> float:
        return float(self.values[chosen].sum())

    @property
    def is_single(self) -> bool:
        """Whether all rows are moments of one resource."""
        return len(self.limits) < 2 or (self.resource is not None and len(set(self.resource)) == 1)

    @property
    def free(self) -> NDArray[np.intp]:
        """Units that are worth choosing and not chosen anyway."""
        return np.flatnonzero((self.values > 0) & ~self.always)

    @property
    def reached(self) -> Mask:
        """The units that the loss hangs on: to train any other changes nothing."""
        return np.asarray(self.needed.any(axis=0))

    def rng(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.round])


Solver = Callable[[Problem], Mask]


def knapsack(bins: int = 10_000) -> Solver:
    """The best choice under one limit, in one pass from the loss outwards.

    A plain 0/1 knapsack table over the prices that a unit pays alone; when unit d is the one furthest from the loss, it is read
    at `limit − (everything between the loss and d) − price(d)`, and the best read wins. O(units · bins).

    Up to log2(bins) units are enumerated, so the answer is exact on any graph. Beyond that the table has `bins` columns: the
    limit always holds, and the answer is the best one up to the width of a few columns. On a graph with branches the table
    works with prices that err on the safe side (see `_chain`); `milp` is exact there too.
    """

    if bins < 1:
        raise ValueError(f"knapsack(bins={bins}): a table has at least one column.")

    def solve(problem: Problem) -> Mask:
        if not problem.is_single:
            raise ValueError("knapsack() keeps one budget at a time; use milp() for several.")
        if (easy := _everything_fits(problem)) is not None:
            return easy
        free = problem.free
        if 2 ** len(free) <= bins:
            return _enumerate(problem, free)
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


def _everything_fits(problem: Problem) -> Mask | None:
    """All of positive value, where that keeps the limits (always, where nothing is limited)."""
    everything = problem.always.copy()
    everything[problem.free] = True
    return everything if problem.fits(everything) else None


def _enumerate(problem: Problem, free: NDArray[np.intp]) -> Mask:
    """Every subset of a few units, with its true price."""
    subsets = (np.arange(2 ** len(free))[:, None] >> np.arange(len(free))) & 1 == 1
    masks = np.repeat(problem.always[None], len(subsets), axis=0)
    masks[:, free] = subsets
    due = (masks.astype(np.float32) @ problem.needed.T.astype(np.float32)) > 0
    fits = np.all(due @ problem.price.T <= problem.limits * (1 + SLACK), axis=1)
    values = np.where(fits, subsets @ problem.values[free], -np.inf)
    return masks[int(np.argmax(values))]


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
    rounding took or gave: rounding may merge two states, but what is read keeps the limit. Columns do not hang on the
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
        if (easy := _everything_fits(problem)) is not None:
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


def greedy(by: str = "value", stop: bool = False) -> Solver:
    """Take units one by one as long as they fit; `stop` at the first that does not.

    `by` says in which order: falling "value", falling "ratio" of value to price, falling "score" of value to size, or "order",
    from the loss outwards. The score is TinyTrain's: value / ((elements / most elements) · (MACs / most MACs)) of the unit by
    itself, whatever way lies between it and the loss. arXiv 2307.09988.
    """
    if by not in ("value", "ratio", "score", "order"):
        raise ValueError(f"greedy(by={by!r}): choose 'value', 'ratio', 'score' or 'order'.")

    def solve(problem: Problem) -> Mask:
        if by == "order":
            return _fill(problem, [int(i) for i in np.flatnonzero(~problem.always)], stop)
        keys = problem.values
        if by == "ratio":
            limited = np.isfinite(problem.limits) & (problem.limits > 0)
            alone = np.array([problem.cost(_only(problem, i)) for i in range(len(keys))])[:, limited]
            keys = keys / np.maximum((alone / problem.limits[limited]).sum(axis=1), 1e-12)
        if by == "score":
            if problem.elements is None or problem.macs is None:
                raise ValueError("greedy(by='score') needs to know how large units are: give Problem elements and macs.")
            for size in (problem.elements, problem.macs):
                keys = keys / (np.maximum(size, 1) / max(size.max(), 1))
        return _fill(problem, sorted((int(i) for i in problem.free), key=lambda i: -keys[i]), stop)

    return solve


def _only(problem: Problem, unit: int) -> Mask:
    mask = np.zeros(len(problem.names), bool)
    mask[unit] = True
    return mask


def _fill(problem: Problem, order: list[int], stop: bool, most: int | None = None) -> Mask:
    chosen, taken = problem.always.copy(), 0
    for unit in order:
        if most is not None and taken >= most:
            break
        chosen[unit] = True
        if problem.fits(chosen):
            taken += 1
            continue
        chosen[unit] = False
        if stop:
            break
    return chosen


def within_layers(solver: Solver, share: float = 0.25) -> Solver:
    """Layers by another solver, each as its best `share` of channels; then more channels while they fit, of those layers first.

    Units of one layer are those whose names agree up to a bracket ("layer[out 0:8]"); others stand for themselves.
    """
    if not 0 < share <= 1:
        raise ValueError(f"within_layers(share={share}): more than 0, at most 1.")

    def solve(problem: Problem) -> Mask:
        layers: dict[str, list[int]] = {}
        for i, name in enumerate(problem.names):
            layers.setdefault(name.partition("[")[0], []).append(i)
        best = {name: sorted(units, key=lambda i: -problem.values[i]) for name, units in layers.items()}
        first = {name: units[: max(1, round(share * len(units)))] for name, units in best.items()}
        always = np.array([problem.always[units].any() for units in layers.values()])
        picked = [_members(problem, units, first[name]) for name, units in layers.items()]
        coarse = replace(
            problem,
            names=tuple(layers),
            values=np.array([problem.values[units].sum() for units in picked]),
            needed=np.stack([problem.needed[:, units].any(axis=1) for units in picked], axis=1),
            always=always,
            elements=_by_layer(problem.elements, layers),
            macs=_by_layer(problem.macs, layers),
        )
        taken = solver(coarse)
        chosen = problem.always.copy()
        for units, is_taken in zip(picked, taken, strict=True):
            chosen[units] |= is_taken
        inside = {i for name, is_taken in zip(layers, taken, strict=True) if is_taken for i in layers[name]}
        more = [i for i in range(len(problem.names)) if problem.values[i] > 0 and not chosen[i]]
        order = sorted(more, key=lambda i: (i not in inside, -problem.values[i]))
        return _fill(replace(problem, always=chosen), order, stop=False)

    return solve


def _by_layer(sizes: Array | None, layers: dict[str, list[int]]) -> Array | None:
    return None if sizes is None else np.array([sizes[units].sum() for units in layers.values()])


def _members(problem: Problem, units: list[int], best: list[int]) -> list[int]:
    """What stands for a layer: what is always chosen of it, else its best channels."""
    return [i for i in units if problem.always[i]] or best


def fixed(*globs: str) -> Solver:
    """Always the units whose names match; budgets are not looked at here (a choice over its budget is still refused)."""

    def solve(problem: Problem) -> Mask:
        chosen = problem.always.copy()
        chosen[list(match(problem.names, globs))] = True
        return chosen

    return solve


def sample(k: int | None = None) -> Solver:
    """Units in random order, each if it still fits; at most `k`. Another draw each round, the same for the same seed.

    What the loss does not hang on is not drawn.
    """

    if k is not None and k < 1:
        raise ValueError(f"sample(k={k}): a draw holds at least one unit.")

    def solve(problem: Problem) -> Mask:
        free = problem.reached & ~problem.always
        order = [int(i) for i in problem.rng().permutation(len(problem.names)) if free[i]]
        return _fill(problem, order, stop=False, most=k)

    return _in_turns(solve) if k is not None else solve


def cycle(k: int = 1, order: str = "descending") -> Solver:
    """The next `k` units each round, and around again: "descending" from the loss outwards, "ascending" from the input on, or
    "random", in another order each time around. What the loss does not hang on has no turn.
    """

    if k < 1:
        raise ValueError(f"cycle(k={k}): a round holds at least one unit.")
    if order not in ("descending", "ascending", "random"):
        raise ValueError(f"cycle(order={order!r}): choose 'descending', 'ascending' or 'random'.")

    def solve(problem: Problem) -> Mask:
        others = np.flatnonzero(problem.reached & ~problem.always)

        def unit(turn: int) -> int:
            lap, place = divmod(turn, len(others))
            if order == "random":
                return int(np.random.default_rng([problem.seed, lap]).permutation(others)[place])
            return int(others[place if order == "descending" else -1 - place])

        start = problem.round * k
        return _fill(problem, [unit(start + i) for i in range(min(k, len(others)))], stop=False)

    return _in_turns(solve)


def with_ends(solver: Solver) -> Solver:
    """Another solver, for what lies between: the unit nearest the loss and the one furthest from it are chosen in any case."""

    def solve(problem: Problem) -> Mask:
        always, reached = problem.always.copy(), np.flatnonzero(problem.reached)
        always[[*reached[:1], *reached[-1:]]] = True
        return solver(replace(problem, always=always))

    return _in_turns(solve) if takes_turns(solver) else solve


def freeze(start: float = 0.8, cubed: bool = True) -> Solver:
    """All units at first; then they leave for good, one after another from the input on. FreezeOut, arXiv 1706.04983.

    Of the L units that are not always chosen, number i from the input (counted from 0) leaves when
    t_i = start + (1 − start)·i/L of the run is done; with `cubed`, when t_i³ is. What the loss does not hang on is not chosen.
    """
    if not 0 <= start < 1:
        raise ValueError(f"freeze(start={start}): the first unit leaves after a share of the run, at least 0 and less than 1.")

    def solve(problem: Problem) -> Mask:
        if problem.done is None:
            raise ValueError("freezing by and by needs the length of the run: give Session total_steps=…, or use fit().")
        others = np.flatnonzero(problem.reached & ~problem.always)
        from_input = np.arange(len(others))[::-1]
        leave_at = (start + (1 - start) * from_input / max(len(others), 1)) ** (3 if cubed else 1)
        stay = problem.done < leave_at * (1 - SLACK)
        return _fill(problem, [int(i) for i in others[stay]], stop=False)

    return _in_turns(solve)


def takes_turns(solver: Solver) -> bool:
    """Whether a solver chooses so many units, or those whose turn it is, rather than what is worth most."""
    return solver in _TURNS


def _in_turns(solver: Solver) -> Solver:
    _TURNS.add(solver)
    return solver


_TURNS: WeakSet[Solver] = WeakSet()
