"""The selection map: every unit in every round, and the model as a strip of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pliant.apps.report import tables
from pliant.apps.report.run import LoggedRound, Run, blocks
from pliant.core import text

# The colours of the selection map: the least share of the round's largest value, and its text in the legend.
CLASSES = ((0.1, "over 10 %"), (0.01, "over 1 %"), (0.001, "over 0.1 %"), (0.0001, "over 0.01 %"), (0.0, "less"))
_MANY = 100  # units: a longer map scrolls inside its frame


@dataclass(frozen=True)
class Cell:
    """One unit in one round: colour, value, whether it was trained, and in which share of the steps."""

    shade: str
    value: str | None  # in full precision
    shown: str
    state: str
    trained: str


def selection_map(run: Run) -> dict[str, Any] | None:
    """Units × rounds: the colour is the value, the size the share of the round's steps in which the unit was trained."""
    rounds = run.rounds
    if not rounds or not run.units:
        return None
    rows = [
        {"name": name, "first": name == names[0], "cost": _alone(run, name), "cells": [_cell(one, name) for one in rounds]}
        for _, names in blocks(run.units)
        for name in names
    ]
    return {
        "rounds": [one.number for one in rounds],
        "rows": rows,
        "long": len(run.units) > _MANY,
        "shades": [(f"v{5 - i}", label) for i, (_, label) in enumerate(CLASSES)],
        "numbers": tables.units(run),
    }


def _cell(one: LoggedRound, unit: str) -> Cell:
    value, trained = one.value(unit), one.trained(unit)
    state = "chosen" if trained == 1 else "not chosen" if not trained else f"chosen in {trained:.0%} of the round’s steps"
    return Cell(shade(one, unit), None if value is None else repr(value), text.number(value), state, f"{trained:.2g}")


def shade(one: LoggedRound, unit: str) -> str:
    """The CSS class of a value: v5 is the highest, v0 is zero or less, vx is unknown."""
    value = one.value(unit)
    if value is None:
        return "vx"
    if value <= 0:
        return "v0"
    return f"v{5 - next(i for i, (least, _) in enumerate(CLASSES) if value >= least * one.largest)}"


def _alone(run: Run, unit: str) -> str | None:
    """The cost of a step with this unit alone, if the log has it."""
    cost, full = run.start.costs.get(unit), run.full
    if cost is None:
        return None
    amounts = [text.seconds(cost.seconds), f"{text.share(cost.seconds / full.seconds)} of a full step"] if full.seconds else []
    amounts += [text.size(cost.bytes)] if full.bytes else []
    return ", ".join([*amounts, text.macs(cost.macs)] if full.macs else amounts)


def strip(run: Run) -> list[dict[str, Any]]:
    """The blocks of the model, from input to output, with the share of steps in which each unit was trained."""
    out = []
    for block, names in blocks(run.units) if run.chosen else ():
        shares = [run.trained(name) for name in names]
        count = f"{len(names)} unit{'s' * (len(names) > 1)}"
        out.append(
            {
                "name": block,
                "label": f"{block}: trained in {sum(shares) / len(shares):.0%} of steps, {count}",
                "units": [(f"{s:.1%}", f"{name}: {s:.0%}") for name, s in zip(names, shares, strict=True)],
            }
        )
    return out
