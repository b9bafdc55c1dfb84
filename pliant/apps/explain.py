"""Why a selection is what it is: the value and the cost of each unit, and why it is not chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pliant.core.types import Unit
from pliant.session.session import Session

WORDS = {"seconds": "time", "bytes": "memory", "macs": "macs", "joules": "energy"}  # of a cost → of a budget


def explained(session: Session) -> dict[str, Any]:
    """What a session has chosen, as plain types; units nearest the loss first. Costs are shares of a plain full step.

    `alone` is a step with that unit alone; `cumulative` is a step with it and all chosen units before it. A unit that exceeds
    the budget even alone may not have been probed, so its value means nothing.
    """
    chosen, profile = session.selection, session.profile
    base = profile.metered(profile.base)
    full = {name: getattr(profile.full, name) for name in WORDS if getattr(profile.full, name)}

    def shares(units: Sequence[Unit]) -> dict[str, float]:
        cost = profile.cost(units)
        return {name: getattr(cost, name) / whole for name, whole in full.items()}

    def why(unit: Unit) -> str:
        value = chosen.values[unit.name]
        if unit in chosen.units:
            return "worth it" if value > 0 else "always"
        for units in ([unit], [*chosen.units, unit]):
            cost = shares(units)
            over = [name for name, limit in chosen.limit.items() if cost[name] * full[name] > limit]
            if over:
                return "no room: " + ", ".join(f"{WORDS[name]} {cost[name]:.3f}" for name in over)
            if not value > 0:
                return "worth nothing"
        return "left out by the recipe"

    total = sum(value for value in chosen.values.values() if value > 0)
    units, so_far = [], list[Unit]()
    for unit in session.units:
        is_chosen, value = unit in chosen.units, chosen.values[unit.name]
        so_far += [unit] if is_chosen else []
        units.append(
            {
                "name": unit.name,
                "chosen": is_chosen,
                "value": value,
                "share_of_value": max(value, 0.0) / total if total else None,
                "alone": shares([unit]),
                "cumulative": shares(so_far) if is_chosen else None,
                "why": why(unit),
            }
        )
    return {
        "format": "pliant.plan/1",
        "recipe": session.policy.name,
        "origin": dict(profile.origin),
        "full": full,
        "forward": {name: getattr(base, name) / whole for name, whole in full.items() if name != "bytes"},
        "asked": {name: limit / full[name] for name, limit in chosen.asked.items()},
        "limit": {name: limit / full[name] for name, limit in chosen.limit.items()},
        "cost": shares(chosen.units),
        "value": sum(max(chosen.values[unit.name], 0.0) for unit in chosen.units) / total if total else None,
        "units": units,
    }
