"""What each step of a round trains: the layers of most value in the whole round, then what fits into the time that is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pliant.core.schedule import Schedule
from pliant.core.types import Unit
from pliant.planning.solve import Mask, Problem, Solver

_LEVELS = 8  # limits that are tried, from the cheapest step to a full one
Price = Callable[[tuple[Unit, ...]], float]


class Pace:
    """How the time of a round is spent. It learns from every step how long steps really take.

    `left` are the seconds until the deadline. A step that trains some units takes at most its price times `slow`: as long as
    the longest so far, and by as much longer as that one was longer than the shortest. A step for which layers were chosen
    counts only until two others are known. What it took longer than them is `opening`, the seconds that choosing takes.
    """

    def __init__(self, seconds: float, price: Price) -> None:
        self.left, self.slow, self.opening = seconds, 1.0, 0.0
        self._price_of = price
        self._units: tuple[Unit, ...] | None = None  # what the last step trained
        self.price = 0.0  # and its price
        self._least = float("inf")  # that of the cheapest step, where a step may train less than the one before
        self._took = 0
        self._chose = 0.0, 0.0  # seconds and price of the last step that chose
        self._known = 0  # the others: how many, and the seconds per price of the shortest and the longest
        self._shortest, self._longest = float("inf"), 0.0

    def stepped(self, units: tuple[Unit, ...], seconds: float) -> None:
        """A step trained these units in so many seconds."""
        if units != self._units:
            self._units, self.price = units, self._price_of(units)
            self._chose = seconds, self.price
        else:
            self._known += 1
            self._shortest = min(self._shortest, seconds / self.price)
            self._longest = max(self._longest, seconds / self.price)
        if self._known < 2:
            self.slow = max(self.slow, seconds / self.price) if self._took else seconds / self.price
        else:
            self.slow = 2 * self._longest - self._shortest
        if self._known:
            self.opening = max(self._chose[0] - self._shortest * self._chose[1], 0.0)
        self._took += 1

    def fits(self) -> bool:
        """Whether one more step like the last one ends before the deadline."""
        return self.slow * self.price <= self.left * (1 + 1e-9)

    def fits_less(self) -> bool:
        """Whether the cheapest step does, if a step may train less than the one before."""
        return self.opening + self.slow * self._least <= self.left * (1 + 1e-9)

    def when(self) -> Schedule:
        """Choose again as soon as a step does not fit any more, but a cheaper one does."""
        return Schedule("when time is short", lambda now, last, drift: self._took > 0 and not self.fits() and self.fits_less())

    def solver(self, best: Solver, steps: int) -> Solver:
        """What is worth most in `steps` steps, or in as many as the round holds; in the time left then, what `best` finds.

        The first row of the problem are seconds.
        """
        forward = self._price_of(())
        first = paced(best, self.left, steps, forward)

        def solve(problem: Problem) -> Mask:
            room = problem.limits.copy()
            room[0] = min(room[0], (self.left - self.opening) / self.slow - forward)
            within = replace(problem, limits=room)
            self._least = forward + float(problem.cost(problem.always)[0])
            return best(within) if self._took or not within.fits(wanted := first(problem)) else wanted

        return solve


def paced(solver: Solver, seconds: float, steps: int, forward: float) -> Solver:
    """The selection whose value times the steps that fit into `seconds` is highest; `steps` is the most that are asked for.

    A step costs `forward` seconds and what the selection adds to it. `solver` finds the best selection for one limit; it is
    asked for several, from the cheapest step to one that trains everything. The first row of the problem are seconds.
    """

    def solve(problem: Problem) -> Mask:
        everything = problem.always | (problem.allowed & problem.reached)
        least, most = (float(problem.cost(mask)[0]) for mask in (problem.always, everything))
        best, found = problem.always, -1.0
        for limit in np.linspace(least, most, _LEVELS):
            room = problem.limits.copy()
            room[0] = min(room[0], limit * (1 + 1e-9))
            chosen = solver(replace(problem, limits=room))
            fit = min(float(steps), seconds / (forward + float(problem.cost(chosen)[0])))
            if fit * problem.value(chosen) > found:
                best, found = chosen, fit * problem.value(chosen)
        return best

    return solve
