"""The data types: units and their parts, costs, and selections.

Arithmetic and JSON only: nothing here knows about torch, so every decision can be replayed from a file.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from pliant.core import text

# ---------------------------------------------------------------- what can be chosen


@dataclass(frozen=True)
class Part:
    """A parameter, or the slice `index` of it along `dim`."""

    param: str
    dim: int | None = None
    index: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Unit:
    """The smallest thing that can be chosen: one or more parts that train together or not at all."""

    name: str
    parts: tuple[Part, ...]

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(part.param for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "parts": [[p.param, p.dim, None if p.index is None else list(p.index)] for p in self.parts]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Unit:
        parts = ((param, dim, None if index is None else tuple(index)) for param, dim, index in data["parts"])
        return cls(data["name"], tuple(Part(*part) for part in parts))


def narrowed(units: Iterable[Unit], params: Collection[str]) -> tuple[Unit, ...]:
    """The units with the parts that belong to these parameters; a unit without any is left out."""
    found = (replace(unit, parts=tuple(part for part in unit.parts if part.param in params)) for unit in units)
    return tuple(unit for unit in found if unit.parts)


def match(names: Sequence[str], globs: Iterable[str], what: str = "unit") -> tuple[int, ...]:
    """Positions of the names that match any of the globs; a glob that matches nothing is an error.

    >>> match(["stem.weight", "head.weight", "head.bias"], ["head.*"])
    (1, 2)
    """
    found: set[int] = set()
    for glob in globs:
        hits = {i for i, name in enumerate(names) if fnmatch.fnmatchcase(name, glob)}
        if not hits:
            shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
            raise ValueError(f"no {what} matches {glob!r}. {what.capitalize()}s here: {shown} ({len(names)}).")
        found |= hits
    return tuple(sorted(found))


def nearest(name: str, known: Iterable[str]) -> str:
    """What a misspelt name may have meant, as the end of an error message; empty where nothing is near.

    >>> nearest("plaint", ["pliant", "full"])
    " Did you mean 'pliant'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


# ---------------------------------------------------------------- what it costs


_LAST_BITS = 1e-13  # relative; what a share that is no binary fraction may add to a product


@dataclass(frozen=True)
class Cost:
    """Seconds, bytes, multiply-accumulates and joules of a step; `joules` is None if they were not measured."""

    seconds: float = 0.0
    bytes: int = 0
    macs: int = 0
    joules: float | None = None

    def __add__(self, other: Cost) -> Cost:
        joules = None if self.joules is None or other.joules is None else self.joules + other.joules
        return Cost(self.seconds + other.seconds, self.bytes + other.bytes, self.macs + other.macs, joules)

    def times(self, share: float) -> Cost:
        """A share of it; bytes and MACs are rounded up, unless only the last bits of a float ask for it.

        >>> Cost(macs=12 * 72).times(7 / 12).macs, Cost(macs=7).times(0.5).macs, Cost(macs=10**15).times(1.0).macs == 10**15
        (504, 4, True)
        """
        joules = None if self.joules is None else self.joules * share
        return Cost(self.seconds * share, _rounded_up(self.bytes * share), _rounded_up(self.macs * share), joules)


def _rounded_up(amount: float) -> int:
    """The next whole number; a number that the last bits of a float alone exceed is not rounded up."""
    near = round(amount)
    return near if abs(amount - near) <= _LAST_BITS * near else math.ceil(amount)


# ---------------------------------------------------------------- what was decided


@dataclass(frozen=True)
class Selection:
    """What was chosen, and why: its cost, the limits it keeps, and the value of each unit.

    `asked` are the limits of the budget. `limit` are those that were planned for: they differ if measured steps corrected them.
    `value` is the sum over the chosen units. `values` has every unit that could be chosen. `full` is the cost of a full step.
    """

    units: tuple[Unit, ...]
    cost: Cost
    limit: Mapping[str, float]
    value: float
    round: int = 0
    step: int = 0
    full: Cost = field(default_factory=Cost)
    values: Mapping[str, float] = field(default_factory=dict)  # of every candidate, chosen or not
    asked: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def params(self) -> frozenset[str]:
        """Names of the parameters that any chosen part belongs to."""
        return frozenset(param for unit in self.units for param in unit.params)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Everything that trains: parameters, and slices of them."""
        return tuple(part for unit in self.units for part in unit.parts)

    def share(self, resource: str = "seconds") -> float:
        """The predicted cost as a share of that of a full step: "seconds", "bytes", "macs" or "joules"."""
        whole = getattr(self.full, resource)
        return getattr(self.cost, resource) / whole if whole else 0.0

    def __str__(self) -> str:
        shares = [
            f"{self.share(name):.2f} of a full step's {name}"
            for name in ("seconds", "bytes", "macs", "joules")
            if getattr(self.full, name)
        ]
        names = ", ".join(unit.name for unit in self.units[:6]) + (", …" if len(self.units) > 6 else "")
        return f"round {self.round}: {len(self.units)} of {len(self.values)} units ({names}), " + ", ".join(shares)

    def _repr_html_(self) -> str:
        """How a notebook shows it: what was chosen, and what that is worth."""
        known = [name for name in ("seconds", "bytes", "macs", "joules") if getattr(self.full, name)]
        costs = ", ".join(f"{text.share(self.share(name))} of a full step’s {name}" for name in known)
        rows = [(unit.name, text.number(self.values.get(unit.name))) for unit in self.units]
        title = f"Round {self.round}, from step {self.step + 1}: {len(self.units)} of {len(self.values)} units; {costs}"
        return text.Table(title, ("unit", "value"), rows).first(20).html()

    def to_json(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "round": self.round,
            "step": self.step,
            "units": [unit.to_json() for unit in self.units],
            "cost": asdict(self.cost),
            "full": asdict(self.full),
            "limit": dict(self.limit),
            "values": dict(self.values),
            "asked": dict(self.asked),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Selection:
        return cls(
            tuple(Unit.from_json(unit) for unit in data["units"]),
            Cost(**data["cost"]),
            data["limit"],
            data["value"],
            data["round"],
            data["step"],
            Cost(**data["full"]),
            data["values"],
            data["asked"],
        )
