"""Values + prices + limits → what to choose.

A solver is a function `Problem → mask over the units`. Prices are not additive: a charge is due once, as soon as any of the
units that need it is chosen (`cost.charge.Charge`). Pure numpy and scipy.
"""

from pliant.planning.solve.coverage import coverage
from pliant.planning.solve.exact import knapsack, milp
from pliant.planning.solve.fixed import fixed, greedy, within_layers
from pliant.planning.solve.problem import SLACK, Array, Mask, Problem, Solver
from pliant.planning.solve.rotating import Rotating, cycle, freeze, sample, with_ends

__all__ = [
    "SLACK",
    "Array",
    "Mask",
    "Problem",
    "Rotating",
    "Solver",
    "coverage",
    "cycle",
    "fixed",
    "freeze",
    "greedy",
    "knapsack",
    "milp",
    "sample",
    "with_ends",
    "within_layers",
]
