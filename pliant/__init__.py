"""Pliant trains only the layers of a PyTorch model that are worth training now, inside the budget that you give."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pliant.moved import install_short_names

__version__ = "0.1.0"

install_short_names()

# Names are imported when they are first used, so that `pliant --help` need not import torch. This table is what Python reads:
# "module" or "module:name". The imports below it are what editors and type checkers read. A test compares the two.
_HOMES = {
    "Budget": "pliant.core.budget:Budget",
    "BudgetError": "pliant.core.errors:BudgetError",
    "Cost": "pliant.core.types:Cost",
    "Features": "pliant.engine.prefix.feature_cache:Features",
    "Mode": "pliant.core.mode:Mode",
    "Part": "pliant.core.types:Part",
    "PliantError": "pliant.core.errors:PliantError",
    "Policy": "pliant.planning.policy:Policy",
    "ProbeError": "pliant.core.errors:ProbeError",
    "Profile": "pliant.cost.profile:Profile",
    "ProfileMismatch": "pliant.core.errors:ProfileMismatch",
    "Progress": "pliant.core.budget:Progress",
    "Selection": "pliant.core.types:Selection",
    "Session": "pliant.session.session:Session",
    "Unit": "pliant.core.types:Unit",
    "energy": "pliant.runtime.energy",
    "losses": "pliant.runtime.losses",
    "load": "pliant.apps.trained:load",
    "measure": "pliant.cost.measure",
    "plan": "pliant.planning.plan:plan",
    "recipes": "pliant.planning.recipes",
    "roofline": "pliant.cost.roofline",
    "schedule": "pliant.core.schedule",
    "score": "pliant.signals",
    "solve": "pliant.planning.solve",
    "units": "pliant.graph.units",
    "with_ids": "pliant.runtime.sample_ids:with_ids",
    "within": "pliant.core.budget:within",
}

if TYPE_CHECKING:
    from pliant import signals as score
    from pliant.apps.trained import load
    from pliant.core import schedule
    from pliant.core.budget import Budget, Progress, within
    from pliant.core.errors import BudgetError, PliantError, ProbeError, ProfileMismatch
    from pliant.core.mode import Mode
    from pliant.core.types import Cost, Part, Selection, Unit
    from pliant.cost import measure, roofline
    from pliant.cost.profile import Profile
    from pliant.engine.prefix.feature_cache import Features
    from pliant.graph import units
    from pliant.planning import recipes, solve
    from pliant.planning.plan import plan
    from pliant.planning.policy import Policy
    from pliant.runtime import energy, losses
    from pliant.runtime.sample_ids import with_ids
    from pliant.session.session import Session

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
    "load",
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


def __getattr__(name: str) -> Any:
    """A public name, when it is first used."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place, _, held = home.partition(":")
    module = importlib.import_module(place)
    globals()[name] = getattr(module, held) if held else module
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
