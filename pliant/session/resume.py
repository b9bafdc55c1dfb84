"""What decides how a run goes on, in plain types, and the way back from it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import torch

from pliant.core import schema
from pliant.core.budget import Budget
from pliant.core.schema import NUMBER, Either
from pliant.core.types import Selection, Unit
from pliant.cost.profile import Profile
from pliant.cost.profile_json import COST
from pliant.engine.slices.slices import merged
from pliant.runtime.trainable import check_in_groups
from pliant.session import controller_state
from pliant.session.energy_use import EnergyUse
from pliant.session.feedback import Feedback
from pliant.session.loop import Loop

FORMAT = "pliant.session/19"
_MAYBE_NUMBER, _NUMBERS = Either(None, NUMBER), {str: NUMBER}
_UNIT = {"name": str, "parts": [(str, Either(None, int), Either(None, [int]))]}
_SELECTION = {
    "units": [_UNIT],
    "cost": COST,
    "full": COST,
    "value": NUMBER,
    "round": int,
    "step": int,
    **dict.fromkeys(("limit", "values", "asked"), _NUMBERS),
}
_ROUND = {
    **dict.fromkeys(("number", "step", "steps", "predicted_bytes", "batch"), int),
    **dict.fromkeys(("predicted", "full", "seconds"), NUMBER),
    **dict.fromkeys(("asked", "asked_bytes", "measured_bytes"), _MAYBE_NUMBER),
}
_STATES = {str: Either(None, {str: Any})}
_UNDO = Either(None, {"params": {str: torch.Tensor}, "buffers": {str: torch.Tensor}, "state": _STATES})
_STATE = {
    "format": str,
    "step": int,
    "time": {"elapsed": NUMBER, "spent": {"profiling": NUMBER, "choosing": NUMBER}, "first": _MAYBE_NUMBER},
    "unread": [NUMBER],
    "change_seconds": NUMBER,
    "policy": str,
    "last": (int, int),
    "asks_anyway": bool,
    "units": [_UNIT],
    "profile": Either(None, dict),
    "selection": Either(None, _SELECTION),
    "pending": Either(None, _SELECTION),
    "values": _NUMBERS,
    "drift": {"count": int, "then": _NUMBERS, "now": _NUMBERS},
    "feedback": {
        "ratio": NUMBER,
        "peaks": [(NUMBER, NUMBER)],
        "recent": _MAYBE_NUMBER,
        "overspent": NUMBER,
        "owed": NUMBER,
        "aside": NUMBER,
        "waited": int,
        "corrections": int,
        "turns": Either(None, {"mine": [NUMBER], "full": [NUMBER]}),
        "rounds": [_ROUND],
    },
    "budget": Either(None, dict),
    "seed": int,
    "undo": _UNDO,
    "slices": Either(None, {str: {"dim": int, "index": [int], "state": {str: Any}}}),
    "norms": {
        "frozen": Either(None, [str]),
        "statistics": {"looks": int, "distance": NUMBER, "replaced": bool, "mean": {str: torch.Tensor}},
    },
    "beginning": {
        "tries": int,
        "passed": int,
        "over": bool,
        "silent": _MAYBE_NUMBER,
        **{key: [NUMBER] for key in ("losses", "first", "beside")},
        "after": Either(None, [NUMBER]),
        "undo": _UNDO,
        "second": Either(None, {"params": {str: torch.Tensor}, "state": _STATES, "models": [[[int]]]}),
        "scale": Either(None, {str: NUMBER}),
    },
    "not_captured": Either(None, str),
    "not_inferred": {str: str},
    "frozen": [str],
}


def state_of(loop: Loop) -> dict[str, Any]:
    """Everything that decides what happens next, in plain types."""
    if not loop.stepper.begins:
        there = f"{loop.stepper.batches} of {loop.update.accumulate} batches of this step are in"
        raise RuntimeError(f"{there}: save between optimizer steps.")
    if loop.laps.is_running:  # a step that the caller's scaler skipped
        loop.record(loop.stepper.end())
    return {
        "format": FORMAT,
        "step": loop.steps,
        "time": loop.time.state(),
        "unread": loop.laps.peek(),
        "change_seconds": loop.change_seconds,
        **controller_state.state_of(loop.controller),
        "undo": loop.undo.state() if loop.undo is not None else None,
        "slices": loop.engine.slices.state_dict() if loop.engine.slices is not None else None,
        "norms": loop.norms.state(),
        "beginning": loop.beginning.state(),
        "not_captured": loop.engine.not_captured,
        "not_inferred": loop.engine.not_inferred,
        "frozen": sorted(loop.flags.frozen),
    }


def load_into(loop: Loop, state: Mapping[str, Any]) -> None:
    """Go on from a saved state that was checked."""
    loop.stepper.drop()
    loop.steps, loop.change_seconds = state["step"], state["change_seconds"]
    loop.time.load(state["time"])
    controller_state.load_into(loop.controller, state, loop.progress)
    loop.flags.load(state["frozen"])
    loop.controller.frozen = loop.flags.frozen
    loop.norms.load(state["norms"])
    loop.beginning.load(state["beginning"], loop.model, loop.engine.optimizer)
    loop.engine.forget()
    loop.engine.origin = loop.controller.profile.origin if loop.controller.profile is not None else {}
    loop.engine.not_captured = state["not_captured"]
    has_room = not loop.engine.could_capture or loop.controller.has_room(loop.budget, loop.progress, loop.engine.mode)
    loop.engine.settle(loop.budget, room=has_room)  # what is saved has its prices
    if loop.budget.energy is not None and loop.controller.profile is not None:
        loop.energy = EnergyUse(loop.device, loop.controller.profile.watts)
    loop.laps.load(state["unread"])
    if state["undo"] is None:
        loop.undo = None  # nobody knows how the run began
    elif loop.undo is not None:
        loop.undo.load(state["undo"])
    if loop.controller.selection is not None:
        loop.apply_(loop.selection)
        loop.engine.not_inferred = state["not_inferred"]
        if state["slices"] and loop.engine.slices is not None:
            loop.engine.slices.load_state_dict(state["slices"])
    else:  # from before the first selection, which reads everything
        loop.flags.restore_()
    loop.log.write("resume", step=loop.steps, round=loop.round, at=time.time())


def check(loop: Loop, state: Mapping[str, Any]) -> None:
    """Refuse a state that is damaged, or of another format, recipe or model, before anything is changed."""
    found = state.get("format") if isinstance(state, Mapping) else None
    if isinstance(found, str) and found != FORMAT and found.startswith("pliant.session/"):
        raise ValueError(
            f"this state was saved by another version of Pliant: format is {found!r}, expected {FORMAT!r}. Finish the run "
            f"with the version that began it, or begin it again."
        )
    if found != FORMAT:
        raise ValueError(
            f"not the state of a Pliant session of this version: format is {found!r}, expected {FORMAT!r}. Begin a new run."
        )
    schema.check(_STATE, state, "state")
    if state["policy"] != loop.policy.name:
        raise ValueError(
            f"this state is of the recipe {state['policy']!r}; this session runs {loop.policy.name!r}. Open the session with "
            f"the recipe of the state."
        )
    try:
        units = {unit.name: unit for unit in map(Unit.from_json, state["units"])}
        chosen = [Selection.from_json(state[key]) for key in ("selection", "pending") if state[key]]
        if state["profile"] is not None:
            Profile.from_json(state["profile"])
        if state["budget"] is not None:
            Budget.from_json(state["budget"])
        Feedback.of(state["feedback"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this state is damaged: {error}. Load an earlier one.") from error
    known = {param for unit in units.values() for param in unit.params} | {p for each in chosen for p in each.params}
    _check_known("trainable parameter", known, loop.params)
    _check_known("unit", state["values"], units)
    _check_known("trainable parameter", state["frozen"], loop.params)
    for selection in chosen:
        check_in_groups(loop.params, loop.engine.optimizer, selection.params)
        loop.engine.check(selection.parts, loop.engine.optimizer)
        merged(loop.params, selection.parts)
    _check_tensors(loop, state, merged(loop.params, chosen[0].parts) if state["selection"] else {})


def _check_tensors(loop: Loop, state: Mapping[str, Any], sliced: Mapping[str, tuple[int, tuple[int, ...]]]) -> None:
    """What a state holds of single parameters and buffers must fit them."""
    params, buffers = dict(loop.model.named_parameters()), dict(loop.model.named_buffers())
    second = {"buffers": {}, **state["beginning"]["second"]} if state["beginning"]["second"] else None
    for copy in filter(None, (state["undo"], state["beginning"]["undo"], second)):
        _check_known("parameter", copy["state"], params)
        here: Mapping[str, torch.Tensor]
        for kind, here in (("params", params), ("buffers", buffers)):
            _check_known("parameter or buffer", copy[kind], here)
            for name, tensor in copy[kind].items():
                if tensor.shape != here[name].shape:
                    raise ValueError(
                        f"this state is of another model: {name!r} is {tuple(tensor.shape)}, not {tuple(here[name].shape)}."
                    )
    for name, one in (state["slices"] or {}).items():
        if sliced.get(name) != (one["dim"], tuple(one["index"])):
            raise ValueError(f"this state is damaged: it has a slice of {name!r} that is not chosen. Load an earlier one.")


def _check_known(what: str, names: Collection[str], here: Collection[str]) -> None:
    missing = sorted(set(names) - set(here))
    if missing:
        raise ValueError(f"this state is of another model: it has {missing[0]!r}, which is not a {what} here.")
