"""Values + prices + limits → what to choose.

A solver is a function `Problem → mask over the units`. Prices are not additive: a charge is due once, as soon as any of the
units that need it is chosen (`profile.Charge`). Pure numpy and scipy.
"""

from pliant.solve.exact import knapsack, milp
from pliant.solve.neighbours import spread
from pliant.solve.problem import SLACK, Array, Mask, Problem, Solver
from pliant.solve.rules import filled, fixed, greedy, tempered, where_norms_rest, within_layers
from pliant.solve.turns import cycle, freeze, sample, takes_turns, with_ends

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
