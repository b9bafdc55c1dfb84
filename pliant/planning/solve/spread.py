"""Units that stand for their neighbours: a choice that is spread out, and so reaches further than a dense one."""

from __future__ import annotations

import numpy as np

from pliant.planning.solve.exact import everything_fits, fitting
from pliant.planning.solve.problem import SLACK, Array, Mask, Problem, Solver

_FEW = 12  # units of which every choice is looked at
_STARTS = 16  # of more, choices are grown from as many depths


def spread(alike: float = 0.8) -> Solver:
    """Choose so that every unit has a chosen one near it: what one layer learns, the next need not.

    A unit counts with all of its value where it is chosen. Where it is not, a chosen one stands for it, by the less the further
    away it is, and by no more than it is worth itself; of the chosen ones the best counts:

        Σ_u max over chosen c of min(value(u), value(c)) · alike^|u − c|

    With 0, values add up. The larger `alike`, the less is a second unit worth beside a first, and the sooner its price is
    better spent on the way to others: fewer layers are chosen, and they reach further from the loss.

    Any number of limits, at true prices. Of up to 12 units every choice is looked at. Of more, choices are grown unit by unit,
    by what adds most for its price, from what is always chosen, and from it with one more at each of 16 depths; then one unit
    at a time is taken out and others are grown in its place, for as long as that is better.
    """
    if not 0 <= alike < 1:
        raise ValueError(f"spread(alike={alike}): from 0, where units have nothing in common, to less than 1.")

    def solve(problem: Problem) -> Mask:
        everything = everything_fits(problem)
        return _Spread(problem, alike).best() if everything is None else everything

    return solve


class _Spread:
    """One problem, and what each choice of it is worth."""

    def __init__(self, problem: Problem, alike: float) -> None:
        self.problem = problem
        self.free = problem.free
        values, place = np.where(problem.values > 0, problem.values, 0.0), np.arange(len(problem.names))
        self.worth = np.minimum(values[:, None], values) * float(alike) ** np.abs(place[:, None] - place)  # (of, if chosen)
        limited = np.isfinite(problem.limits)
        kinds = np.array(problem.resource or [str(row) for row in range(len(problem.limits))])[limited]
        self.kinds = [kinds == kind for kind in dict.fromkeys(kinds.tolist())]  # the rows of each resource
        scale = np.where(problem.limits > 0, problem.limits, 1.0)[limited]
        self.shares = problem.price[limited] / scale[:, None]  # of each limit
        self.room = problem.limits[limited] / scale * (1 + SLACK)
        self.needed, self.is_free = problem.needed.astype(float), np.isin(place, self.free)

    def best(self) -> Mask:
        if len(self.free) <= _FEW:
            few = fitting(self.problem, self.free)
            return few[int(np.argmax(self.values(few)))]
        deep = self.free[np.linspace(0, len(self.free) - 1, min(_STARTS, len(self.free))).round().astype(int)]
        starts = np.stack([self.problem.always, *(_turned(self.problem.always, unit) for unit in deep)])
        found = [self.grown(start) for k, start in enumerate(starts) if k == 0 or self.problem.fits(start)]
        return self.polished(self.best_of(found))

    def values(self, masks: Mask) -> Array:
        """What each of these choices is worth."""
        covered = np.zeros(masks.shape)
        for unit in np.flatnonzero(masks.any(axis=0)):
            rows = masks[:, unit]
            covered[rows] = np.maximum(covered[rows], self.worth[:, unit])
        return covered.sum(axis=1)

    def best_of(self, found: list[Mask]) -> Mask:
        return found[int(np.argmax(self.values(np.stack(found))))]

    def grown(self, chosen: Mask) -> Mask:
        """With more units, as many as fit: each time the one that adds most for what it adds to the price."""
        chosen = chosen.copy()
        covered = self.worth[:, chosen].max(axis=1, initial=0.0)
        while (unit := self._next(chosen, covered)) is not None:
            chosen[unit] = True
            covered = np.maximum(covered, self.worth[:, unit])
        return chosen

    def _next(self, chosen: Mask, covered: Array) -> int | None:
        due = self.problem.needed[:, chosen].any(axis=1)
        paid, more = self.shares @ due, np.where(due, 0.0, self.shares) @ self.needed  # (rows,), (rows, units)
        left = self.is_free & ~chosen & np.all(paid[:, None] + more <= self.room[:, None], axis=0)
        if not left.any():
            return None
        adds = np.maximum(self.worth - covered[:, None], 0).sum(axis=0)
        price = sum((more[rows].max(axis=0) for rows in self.kinds), start=np.full(len(chosen), 1e-12))
        return int(np.argmax(np.where(left, adds / price, -1.0)))

    def polished(self, chosen: Mask) -> Mask:
        """The same, or better: without one of its units, and with others in its place."""
        while True:
            others = [self.grown(_turned(chosen, unit)) for unit in self.free[chosen[self.free]]]
            best = self.best_of([chosen, *others])
            now, then = self.values(np.stack([chosen, best]))
            if not then > now * (1 + SLACK):
                return chosen
            chosen = best


def _turned(mask: Mask, unit: int) -> Mask:
    """The same choice with one unit more, or less."""
    out = mask.copy()
    out[unit] = not out[unit]
    return out
