"""The nouns: what can be chosen, what it costs, what may be spent, and what was decided.

Arithmetic and JSON only: nothing here knows about torch, so every decision can be replayed from a file.
"""

from __future__ import annotations

import fnmatch
import json
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class PliantError(Exception):
    """Whatever Pliant refuses to do."""


class BudgetError(PliantError, ValueError):
    """A budget that no selection can keep."""


class ProfileMismatch(PliantError, ValueError):
    """A profile that was taken under other conditions than those of now."""


class ProbeError(PliantError, RuntimeError):
    """A probe batch from which nothing can be learned."""


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


# ---------------------------------------------------------------- what it costs


@dataclass(frozen=True)
class Cost:
    """Seconds, bytes, multiply-accumulates and joules; `joules` is None where nothing measures them."""

    seconds: float = 0.0
    bytes: int = 0
    macs: int = 0
    joules: float | None = None

    def __add__(self, other: Cost) -> Cost:
        joules = None if self.joules is None or other.joules is None else self.joules + other.joules
        return Cost(self.seconds + other.seconds, self.bytes + other.bytes, self.macs + other.macs, joules)


@dataclass(frozen=True)
class Charge:
    """A cost that is due once, as soon as any of `params` is chosen or any of the charges `via` is due.

    A weight gradient names its parameter; an input gradient names the charges further from the loss that wait for it;
    a tensor kept for backward names every operation that reads it. So the backward graph, and the union of what
    it keeps, are one list. `via` points to later entries of the list only.
    """

    name: str
    cost: Cost
    params: tuple[str, ...] = ()
    via: tuple[int, ...] = ()


@dataclass(frozen=True)
class Table:
    """The charges of a profile seen from a list of units: charge j is due when a unit of row j of `needed` is chosen."""

    needed: NDArray[np.bool_]  # (charges, units); no two rows are equal
    seconds: NDArray[np.float64]
    bytes: NDArray[np.float64]
    macs: NDArray[np.float64]


@dataclass(frozen=True)
class Profile:
    """What one step of one model costs on one device, for any selection.

    `base` is what every step pays (the forward pass); `charges` stand in the order in which backward runs. `head`
    names the parameters of the module nearest the loss. `origin` says where and when this was taken. `coverage` is the
    share of the backward time that was attributed to nodes; `uncounted` names operations whose MACs are unknown.
    """

    charges: tuple[Charge, ...]
    base: Cost
    head: tuple[str, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)
    coverage: float | None = None
    uncounted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for i, charge in enumerate(self.charges):
            if any(not i < j < len(self.charges) for j in charge.via):
                raise ValueError(f"charge {i} ({charge.name!r}) has via={charge.via}: it may point to later charges only.")

    def cost(self, units: Iterable[Unit], engine: str = "plain", cached: bool = False) -> Cost:
        """What one step costs when just these units are chosen. THE judge: solvers are checked against it."""
        if engine != "plain" or cached:
            raise ValueError(f"this profile knows engine='plain' without a cache only (given: {engine!r}, {cached=}).")
        chosen = {param for unit in units for param in unit.params}
        total = self.base
        due = [False] * len(self.charges)
        for i in range(len(self.charges) - 1, -1, -1):
            charge = self.charges[i]
            due[i] = any(p in chosen for p in charge.params) or any(due[j] for j in charge.via)
            if due[i]:
                total = total + charge.cost
        return total

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Every parameter that some charge names, nearest the loss first."""
        return tuple(dict.fromkeys(p for charge in self.charges for p in charge.params))

    @cached_property
    def full(self) -> Cost:
        """What a plain full step costs: the meaning of 1.0 in a budget."""
        return self.cost([Unit("*", tuple(Part(p) for p in self.params))])

    def table(self, units: Sequence[Unit]) -> Table:
        """The charges as arrays over these units, equal rows merged, rows that no unit needs left out."""
        column = {param: np.zeros(len(units), bool) for param in self.params}
        for i, unit in enumerate(units):
            for param in unit.params:
                if param in column:
                    column[param][i] = True
        rows: list[NDArray[np.bool_]] = [np.zeros(0, bool)] * len(self.charges)
        merged: dict[bytes, tuple[NDArray[np.bool_], NDArray[np.float64]]] = {}
        for i in range(len(self.charges) - 1, -1, -1):
            charge, row = self.charges[i], np.zeros(len(units), bool)
            for param in charge.params:
                row |= column[param]
            for j in charge.via:
                row |= rows[j]
            rows[i] = row
            if row.any():
                price = merged.setdefault(row.tobytes(), (row, np.zeros(3)))[1]
                price += (charge.cost.seconds, charge.cost.bytes, charge.cost.macs)
        needed = np.array([row for row, _ in merged.values()], bool).reshape(len(merged), len(units))
        prices = np.array([price for _, price in merged.values()], float).reshape(len(merged), 3)
        return Table(needed, prices[:, 0], prices[:, 1], prices[:, 2])

    def check_origin(self, now: Mapping[str, Any], allow_mismatch: bool = False) -> None:
        """Raise `ProfileMismatch` unless this profile was taken under the conditions `now`."""
        differ = [key for key in now if key in self.origin and self.origin[key] != now[key]]
        if differ and not allow_mismatch:
            was = ", ".join(f"{key} {self.origin[key]!r}" for key in differ)
            runs = ", ".join(f"{key} {now[key]!r}" for key in differ)
            raise ProfileMismatch(
                f"this profile was taken at {was}; the model now runs at {runs}. Measure again, or pass allow_mismatch=True."
            )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "pliant.profile/1",
            "base": asdict(self.base),
            "charges": [
                {"name": c.name, "cost": asdict(c.cost), "params": list(c.params), "via": list(c.via)} for c in self.charges
            ],
            "head": list(self.head),
            "origin": dict(self.origin),
            "coverage": self.coverage,
            "uncounted": list(self.uncounted),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        found = data.get("format") if isinstance(data, Mapping) else None
        if found != "pliant.profile/1":
            raise ValueError(f"not a Pliant profile: format is {found!r}, expected 'pliant.profile/1'.")
        charges = tuple(Charge(c["name"], Cost(**c["cost"]), tuple(c["params"]), tuple(c["via"])) for c in data["charges"])
        return cls(
            charges,
            Cost(**data["base"]),
            tuple(data["head"]),
            data["origin"],
            data["coverage"],
            tuple(data["uncounted"]),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON: aside first, then renamed, so that an interrupted write leaves the old file."""
        write_aside(path, json.dumps(self.to_json()).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str], now: Mapping[str, Any] | None = None, allow_mismatch: bool = False) -> Profile:
        """Read a profile; with `now` (see `measure.origin`) also check that it was taken under these conditions."""
        try:
            profile = cls.from_json(json.loads(Path(path).read_bytes()))
        except (ValueError, KeyError, TypeError) as error:  # no text, no JSON, no profile, or half of one
            raise ValueError(
                f"{os.fspath(path)!r} is not a whole Pliant profile: {error}. Measure and save it again."
            ) from error
        if now is not None:
            profile.check_origin(now, allow_mismatch)
        return profile


def write_aside(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that it is either the old one or the new one, never half of one."""
    target = Path(path)
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)


# ---------------------------------------------------------------- what may be spent


@dataclass(frozen=True)
class Progress:
    """Where a run stands: optimizer steps and selections so far, and what is known of its length."""

    step: int = 0
    round: int = 0
    steps_per_epoch: int | None = None
    total_steps: int | None = None

    @property
    def epoch(self) -> float:
        if self.steps_per_epoch is None:
            raise ValueError("epochs are asked for but unknown: give Session steps_per_epoch=len(loader), or use fit().")
        return self.step / self.steps_per_epoch

    @property
    def fraction(self) -> float:
        """The share of the run that is done, 0 to 1."""
        if self.total_steps is None:
            raise ValueError("the length of the run is asked for but unknown: give Session total_steps=…, or use fit().")
        return min(self.step / max(self.total_steps, 1), 1.0)


Amount = float | str
Limit = Amount | Callable[[Progress], Amount] | None

_UNITS = {
    "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0},
    "memory": {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30},
    "macs": {"MAC": 1.0, "KMAC": 1e3, "MMAC": 1e6, "GMAC": 1e9, "TMAC": 1e12},
    "energy": {"J": 1.0, "mJ": 1e-3, "kJ": 1e3},
}
RESOURCES = {"time": "seconds", "memory": "bytes", "macs": "macs", "energy": "joules"}


def _amount(kind: str, given: Amount, full: float | None) -> float:
    """An absolute amount from a share of `full` or from a number with its unit."""
    where = ", ".join(_UNITS[kind])
    if isinstance(given, str):
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ]+)\s*", given)
        if not found or found[2] not in _UNITS[kind]:
            raise ValueError(f"{kind}={given!r} is not an amount: write a share like 0.4, or a number with {where}.")
        amount = float(found[1]) * _UNITS[kind][found[2]]
        if amount <= 0:
            raise ValueError(f"{kind}={given!r} must be more than nothing.")
        return amount
    if isinstance(given, bool) or not isinstance(given, numbers.Real) or not 0 < given <= 1:
        raise ValueError(f"{kind}={given!r} is neither a share in (0, 1] of a full step nor a number with {where}.")
    return float("inf") if full is None else float(given) * full


@dataclass(frozen=True)
class Budget:
    """What one step may cost. A share of a plain full step (0 < x ≤ 1), an amount with its unit, or a function of progress.

    >>> Budget(time=0.4, memory="64MB").limits(Cost(seconds=2.0, bytes=10**9))
    {'seconds': 0.8, 'bytes': 64000000.0}
    """

    time: Limit = None
    memory: Limit = None
    macs: Limit = None
    energy: Limit = None

    def __post_init__(self) -> None:
        for kind in RESOURCES:
            given = getattr(self, kind)
            if given is not None and not callable(given):
                _amount(kind, given, None)

    def limits(self, full: Cost, progress: Progress | None = None) -> dict[str, float]:
        """Absolute limits by field of `Cost`, for what is limited at all."""
        out = {}
        for kind, name in RESOURCES.items():
            given = getattr(self, kind)
            if given is None:
                continue
            if callable(given):
                given = given(progress if progress is not None else Progress())
            total = getattr(full, name)
            if not total:
                raise BudgetError(
                    f"{kind}={given!r} cannot be kept: this profile holds no {name}; measure with another `cost`."
                )
            out[name] = _amount(kind, given, total)
        return out


# ---------------------------------------------------------------- what was decided


@dataclass(frozen=True)
class Selection:
    """What was chosen, and enough to explain it: its cost, the limits it kept, each unit's value, when it was made."""

    units: tuple[Unit, ...]
    cost: Cost
    limit: Mapping[str, float]
    value: float
    round: int = 0
    step: int = 0
    full: Cost = field(default_factory=Cost)
    values: Mapping[str, float] = field(default_factory=dict)  # of every candidate, chosen or not

    @cached_property
    def params(self) -> frozenset[str]:
        """Names of the parameters that any chosen part belongs to."""
        return frozenset(param for unit in self.units for param in unit.params)

    def share(self, resource: str = "seconds") -> float:
        """Cost as a share of a plain full step's."""
        whole = getattr(self.full, resource)
        return getattr(self.cost, resource) / whole if whole else 0.0

    def __str__(self) -> str:
        shares = [
            f"{self.share(name):.2f} of a full step's {name}"
            for name in ("seconds", "bytes", "macs")
            if getattr(self.full, name)
        ]
        names = ", ".join(unit.name for unit in self.units[:6]) + (", …" if len(self.units) > 6 else "")
        return f"round {self.round}: {len(self.units)} of {len(self.values)} units ({names}), " + ", ".join(shares)

    def to_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name in ("value", "round", "step")} | {
            "units": [unit.to_json() for unit in self.units],
            "cost": asdict(self.cost),
            "full": asdict(self.full),
            "limit": dict(self.limit),
            "values": dict(self.values),
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
        )
