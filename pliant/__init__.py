"""Pliant trains only the part of a PyTorch model that is worth training now, inside the budget that a device gives."""

__version__ = "0.1.0"

from pliant import signals as score
from pliant.core import schedule
from pliant.core.budget import Budget, Progress, within
from pliant.core.errors import BudgetError, PliantError, ProbeError, ProfileMismatch
from pliant.core.mode import Mode
from pliant.core.types import Cost, Part, Selection, Unit
from pliant.cost import measure, roofline
from pliant.cost.profile import Profile
from pliant.engine.prefix.feature_cache import Features
from pliant.graph import units
from pliant.moved import install_short_names
from pliant.planning import recipes, solve
from pliant.planning.plan import plan
from pliant.planning.policy import Policy
from pliant.runtime import energy, losses
from pliant.runtime.sample_ids import with_ids
from pliant.session.session import Session

install_short_names()

__all__ = [
    "Budget",
    "BudgetError",
    "Cost",
    "Features",
    "Mode",
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
    "losses",
    "measure",
    "plan",
    "recipes",
    "roofline",
    "schedule",
    "score",
    "solve",
    "units",
    "with_ids",
    "within",
]
