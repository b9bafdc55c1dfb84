"""Budgets: how far a run has come, and what one step, or a whole run, may cost."""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pliant.core.errors import BudgetError
from pliant.core.types import Cost


@dataclass(frozen=True)
class Progress:
    """How far a run has come: optimizer steps and selections so far, and its length if known.

    `elapsed` is the time since the session began. `aside` is the mean time between two steps, for loading and evaluating. Both
    are seconds of wall time.
    """

    step: int = 0
    round: int = 0
    steps_per_epoch: int | None = None
    total_steps: int | None = None
    elapsed: float = field(default=0.0, compare=False)
    aside: float = field(default=0.0, compare=False)

    @property
    def epoch(self) -> float:
        if self.steps_per_epoch is None:
            raise ValueError("the length of an epoch is unknown: give Session(steps_per_epoch=len(loader)), or use fit().")
        return self.step / self.steps_per_epoch

    @property
    def fraction(self) -> float:
        """The share of the run that is done, 0 to 1."""
        if self.total_steps is None:
            raise ValueError("the length of the run is unknown: give Session(total_steps=…), or use fit().")
        return min(self.step / max(self.total_steps, 1), 1.0)


@dataclass(frozen=True)
class Absolute:
    """An amount in seconds, bytes, MACs or joules, as the resource says; a bare float is a share of a full step."""

    amount: float


Amount = float | str | Absolute
Limit = Amount | Callable[[Progress], Amount] | None

_UNITS = {
    "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "h": 3600.0},
    "memory": {"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30},
    "macs": {"MAC": 1.0, "KMAC": 1e3, "MMAC": 1e6, "GMAC": 1e9, "TMAC": 1e12},
    "energy": {"J": 1.0, "mJ": 1e-3, "kJ": 1e3},
}
RESOURCES = {"time": "seconds", "memory": "bytes", "macs": "macs", "energy": "joules"}


def _parsed(kind: str, given: Amount) -> float | Absolute:
    """A share of a full step, or an absolute amount. The only place where amounts are read from text."""
    where = ", ".join(_UNITS[kind])
    if isinstance(given, Absolute):
        return given
    if isinstance(given, str):
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ]+|%)\s*", given)
        unit = _unit(kind, found[2]) if found else None
        if not found or (unit is None and found[2] != "%"):
            raise ValueError(f"{kind}={given!r} is not an amount: write a share like 0.4 or 40%, or a number with {where}.")
        if float(found[1]) <= 0:
            raise ValueError(f"{kind}={given!r} is not more than 0: write a share like 0.4, or a number with {where}.")
        if unit is not None:
            return Absolute(float(found[1]) * unit)
        if float(found[1]) > 100:
            raise ValueError(f"{kind}={given!r} is more than a full step: write at most 100%.")
        return float(found[1]) / 100
    if isinstance(given, bool) or not isinstance(given, numbers.Real) or not 0 < given <= 1:
        raise ValueError(
            f"{kind}={given!r} is neither a share of a full step (more than 0, at most 1) nor a string with a number and "
            f"{where}."
        )
    return float(given)


def _unit(kind: str, name: str) -> float | None:
    """The size of a unit; None for one that the kind does not have. `mb` is MB. Joules are as written: MJ is not mJ."""
    names = _UNITS[kind]
    if name in names or kind == "energy":
        return names.get(name)
    return {each.lower(): size for each, size in names.items()}.get(name.lower())


def within(whole_run: str) -> Callable[[Progress], Absolute]:
    """A time limit for a whole run: the remaining time is spread over the remaining steps. Needs `total_steps` or `fit`.

    >>> ten_minutes = within("10min")
    >>> ten_minutes(Progress(step=100, total_steps=400, elapsed=300.0, aside=0.25))
    Absolute(amount=0.75)
    """
    whole = _parsed("time", whole_run) if isinstance(whole_run, str) else None
    if not isinstance(whole, Absolute):
        raise ValueError(f"within({whole_run!r}): give a time with its unit, like within('20min').")

    def limit(progress: Progress) -> Absolute:
        if progress.total_steps is None:
            raise ValueError(f"within({whole_run!r}) needs the length of the run: give Session(total_steps=…), or use fit().")
        left = max(progress.total_steps - progress.step, 1)
        return Absolute(max((whole.amount - progress.elapsed) / left - progress.aside, 1e-9))

    return limit


@dataclass(frozen=True)
class Budget:
    """What one step may cost. Each limit is a share of a plain full step (0 < x ≤ 1), an amount, or a function of progress.

    >>> Budget(time="40%", memory="64 mb").limits(Cost(seconds=2.0, bytes=10**9))
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
                _parsed(kind, given)

    @property
    def moves(self) -> bool:
        """Whether a function of progress limits something."""
        return any(callable(getattr(self, kind)) for kind in RESOURCES)

    def limits(self, full: Cost, progress: Progress | None = None) -> dict[str, float]:
        """Absolute limits by field of `Cost`, for what is limited at all."""
        out = {}
        for kind, name in RESOURCES.items():
            given = getattr(self, kind)
            if given is None:
                continue
            if callable(given):
                given = given(progress if progress is not None else Progress())
            total, amount = getattr(full, name), _parsed(kind, given)
            if not total and name == "bytes" and not isinstance(amount, Absolute):
                raise BudgetError(
                    f"memory={given!r} is a share of 0: a full step takes no more memory than inference here. Leave "
                    f"memory= out, or give an amount, like memory='64MB'."
                )
            if not total and name != "bytes":
                raise BudgetError(
                    f"{kind}={given!r} cannot be kept: this profile holds no {name}. Measure with another `cost`, or open the "
                    f"session with this limit."
                )
            out[name] = amount.amount if isinstance(amount, Absolute) else amount * total
        return out

    def to_json(self) -> dict[str, Any] | None:
        """In plain types; None where a function of progress limits something."""
        given = {kind: getattr(self, kind) for kind in RESOURCES}
        if self.moves:
            return None
        return {kind: {"absolute": a.amount} if isinstance(a, Absolute) else a for kind, a in given.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Budget:
        return cls(**{kind: Absolute(a["absolute"]) if isinstance(a, Mapping) else a for kind, a in data.items()})
