"""What decides how a run goes on, in plain types, and the way back from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pliant.runtime.trainable import check_in_groups
from pliant.session import checkpoint
from pliant.session.energy_use import EnergyUse
from pliant.session.loop import Loop


def state_of(loop: Loop) -> dict[str, Any]:
    """Everything that decides what happens next, in plain types."""
    if not loop.stepper.begins:
        there = f"{loop.stepper.batches} of {loop.update.accumulate} batches of this step are in"
        raise RuntimeError(f"{there}: save between optimizer steps.")
    if loop.laps.is_running:  # a step that the caller's scaler skipped
        loop.record(loop.stepper.end())
    return {
        "format": checkpoint.FORMAT,
        "step": loop.steps,
        "time": loop.time.state(),
        "unread": loop.laps.peek(),
        "change_seconds": loop.change_seconds,
        **loop.controller.state(),
        "undo": loop.undo.state() if loop.undo is not None else None,
        "slices": loop.engine.slices.state_dict() if loop.engine.slices is not None else None,
        "norms": loop.norms.state(),
        "not_captured": loop.engine.not_captured,
        "frozen": sorted(loop.flags.frozen),
    }


def load_into(loop: Loop, state: Mapping[str, Any]) -> None:
    """Go on from a saved state."""
    check(loop, state)
    loop.stepper.drop()
    loop.steps, loop.change_seconds = state["step"], state["change_seconds"]
    loop.time.load(state["time"])
    loop.controller.load(state, loop.progress)
    loop.flags.load(state["frozen"])
    loop.controller.frozen = loop.flags.frozen
    loop.norms.load(state["norms"])
    loop.engine.forget()
    loop.engine.origin = loop.controller.profile.origin if loop.controller.profile is not None else {}
    loop.engine.not_captured = state["not_captured"]
    has_room = not loop.engine.could_capture or loop.controller.has_room(loop.budget, loop.progress, loop.engine.mode)
    loop.engine.settle(loop.budget, room=has_room)  # what is saved has its prices
    if loop.budget.energy is not None and loop.controller.profile is not None:
        loop.energy = EnergyUse(loop.device, loop.controller.profile.watts)
    loop.laps.load(state["unread"])
    if loop.undo is not None and state["undo"] is not None:
        loop.undo.load(state["undo"])
    if loop.controller.selection is not None:
        loop.apply_(loop.selection)
        if state["slices"] and loop.engine.slices is not None:
            loop.engine.slices.load_state_dict(state["slices"])
    else:  # from before the first selection, which reads everything
        loop.flags.restore_()
    loop.log.write("resume", step=loop.steps, round=loop.round)


def check(loop: Loop, state: Mapping[str, Any]) -> None:
    """Refuse a state that does not fit before anything is changed."""
    selection = checkpoint.check_state(state, loop.policy.name, loop.params)
    if selection is not None:
        check_in_groups(loop.params, loop.engine.optimizer, selection.params)
        loop.engine.check(selection.parts, loop.engine.optimizer)
