"""The default solver: chosen layers that cover their neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pliant.planning.solve.exact import everything_fits, fitting
from pliant.planning.solve.problem import SLACK, Array, Mask, Problem, Solver

_FROZEN = 0.8  # the discount where batch norms use running statistics
_FEW = 12  # up to so many units, every choice is tried
_STARTS = 16  # with more units, choices are grown from as many depths


def coverage(discount: float | None = None, power: float = 0.25) -> Solver:
    """A chosen layer counts for itself and, with a discount per layer of distance, for its neighbours.

    What one layer learns, the next need not learn again. So a chosen unit counts in full. For a unit that is not chosen, the
    best chosen unit near it counts, by no more than the unit is worth itself:

        Σ_u max over chosen c of min(v_u, v_c) · discount^|u − c|,    v = value^power

    The fourth root (`power`) brings values nearer to each other: a unit that is worth 16 times as much as another counts twice.
    With `discount` 0 the roots add up. The larger the discount, the less a second unit adds beside a first: fewer layers are
    chosen, and they reach further from the loss. The default is 0.8 if batch norms use running statistics, and 0 if they use
    batch statistics (docs/notebook.md has the measurements). Only positive values count.

    It keeps any number of limits. Up to 12 units, every choice is tried, so the answer is the best one. With more, it adds unit
    by unit the one that gains most for its price. It starts from what is always chosen, and from that with one more unit at
    each of 16 depths. Then it replaces single units by others as long as that is better.
    """
    if discount is not None and not 0 <= discount < 1:
        raise ValueError(f"coverage(discount={discount}): must be 0 (values add up) or more, and less than 1.")
    if not 0 <= power <= 1:
        raise ValueError(f"coverage(power={power}): must be from 0 (all units count the same) to 1 (values count as they are).")

    def solve(problem: Problem) -> Mask:
        everything = everything_fits(problem)
        if everything is not None:
            return everything
        roots = np.where(problem.values > 0, np.abs(problem.values) ** power, 0.0)
        default = _FROZEN if problem.frozen_norms else 0.0
        return _Search(replace(problem, values=roots), default if discount is None else discount).best()

    return solve


class _Search:
    """One problem, and what each choice of it is worth."""

    def __init__(self, problem: Problem, discount: float) -> None:
        self.problem = problem
        self.free = problem.free
        values, place = problem.values, np.arange(len(problem.names))
        distance = np.abs(place[:, None] - place)
        self.worth = np.minimum(values[:, None], values) * float(discount) ** distance  # (of, if chosen)
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
        starts = np.stack([self.problem.always, *(_flipped(self.problem.always, unit) for unit in deep)])
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
            others = [self.grown(_flipped(chosen, unit)) for unit in self.free[chosen[self.free]]]
            best = self.best_of([chosen, *others])
            now, then = self.values(np.stack([chosen, best]))
            if not then > now * (1 + SLACK):
                return chosen
            chosen = best


def _flipped(mask: Mask, unit: int) -> Mask:
    """The same choice with one unit more, or less."""
    out = mask.copy()
    out[unit] = not out[unit]
    return out
