"""How much to train in each step where fewer steps are allowed too: the choice of the most value in a round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pliant.planning.solve import Mask, Problem, Solver

_LEVELS = 8  # limits that are tried, from the cheapest step to a full one


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
