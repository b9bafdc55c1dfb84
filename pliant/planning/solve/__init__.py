"""Values + prices + limits → what to choose.

A solver is a function `Problem → mask over the units`. Prices are not additive: a charge is due once, as soon as any of the
units that need it is chosen (`profile.Charge`). Pure numpy and scipy.
"""

from pliant.planning.solve.exact import knapsack, milp
from pliant.planning.solve.fixed import filled, fixed, greedy, tempered, where_norms_rest, within_layers
from pliant.planning.solve.problem import SLACK, Array, Mask, Problem, Solver
from pliant.planning.solve.rotating import cycle, freeze, sample, takes_turns, with_ends
from pliant.planning.solve.spread import spread

__all__ = [
    "SLACK",
    "Array",
    "Mask",
    "Problem",
    "Solver",
    "cycle",
    "filled",
    "fixed",
    "freeze",
    "greedy",
    "knapsack",
    "milp",
    "sample",
    "spread",
    "takes_turns",
    "tempered",
    "where_norms_rest",
    "with_ends",
    "within_layers",
]
