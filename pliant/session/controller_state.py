"""What a controller decides by, in plain types, and the way back from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pliant.core.budget import Budget, Progress
from pliant.core.types import Selection, Unit
from pliant.cost.profile import Profile
from pliant.session.controller import Controller
from pliant.session.feedback import Feedback
from pliant.signals.drift import Drift


def state_of(controller: Controller) -> dict[str, Any]:
    """Everything that decides what is chosen next, in plain types."""
    return {
        "policy": controller.policy.name,
        "last": [controller.last.step, controller.last.round],
        "asks_anyway": controller.asks_anyway,
        "units": [unit.to_json() for unit in controller.units],
        "profile": controller.profile.to_json() if controller.profile is not None else None,
        "selection": controller.selection.to_json() if controller.selection is not None else None,
        "pending": controller.pending.to_json() if controller.pending is not None else None,
        "values": {unit.name: value for unit, value in controller.values.items()},
        "drift": controller.drift.state(),
        "feedback": controller.feedback.state(),
        "budget": controller.policy.budget.to_json(),
        "seed": controller.policy.seed,
    }


def load_into(controller: Controller, state: Mapping[str, Any], now: Progress) -> None:
    """Go on from a saved state: same values, same selection, same measurements."""
    controller.units = tuple(Unit.from_json(unit) for unit in state["units"])
    by_name = {unit.name: unit for unit in controller.units}
    controller.last = replace(now, step=state["last"][0], round=state["last"][1])
    controller.asks_anyway = state["asks_anyway"]
    if state["profile"]:
        controller.profile = Profile.from_json(state["profile"])
    controller.selection = Selection.from_json(state["selection"]) if state["selection"] else None
    controller.pending = Selection.from_json(state["pending"]) if state["pending"] else None
    controller.values = {by_name[name]: value for name, value in state["values"].items()}
    controller.drift = Drift.of(state["drift"])
    controller.feedback = Feedback.of(state["feedback"])
    controller.policy = replace(controller.policy, seed=state["seed"])
    if state["budget"] is not None:
        controller.policy = replace(controller.policy, budget=Budget.from_json(state["budget"]))
