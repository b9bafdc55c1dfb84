"""Pliant trains only the part of a PyTorch model that is worth training now, inside the budget that a device gives."""

__version__ = "0.1.0"

from pliant import energy, measure, recipes, roofline, schedule, score, solve, units
from pliant.budget import Budget, Progress, within
from pliant.policy import Policy, plan
from pliant.profile import Profile
from pliant.session import Session
from pliant.types import BudgetError, Cost, Part, PliantError, ProbeError, ProfileMismatch, Selection, Unit

__all__ = [
    "Budget",
    "BudgetError",
    "Cost",
    "Part",
    "PliantError",
    "Policy",
    "ProbeError",
    "Profile",
    "ProfileMismatch",
    "Progress",
    "Selection",
    "Session",
    "Unit",
    "energy",
    "measure",
    "plan",
    "recipes",
    "roofline",
    "schedule",
    "score",
    "solve",
    "units",
    "within",
]
