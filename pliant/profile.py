"""What one step of one model costs on one device, for any selection: a list of charges, each due once.

Arithmetic and JSON only, like the other nouns.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pliant import markup
from pliant.types import Cost, Part, ProfileMismatch, Unit, write_aside

KEPT = "kept"
AGAIN = "again"
KINDS = (KEPT, AGAIN, "optimizer", "gradient", "scratch", "forward", "dX", "dW")
ENGINES = ("plain", "lean")  # that costs are known for
CACHED = "cached"
_FORMAT = "pliant.profile/6"
# What a step is made of, and the kinds of charges that each pays; everything else a node does counts as its way through (dX).
SPLIT = {
    "forward": (KEPT, AGAIN, "forward"),
    "dX": ("dX", "node"),
    "dW": ("dW", "gradient"),
    "optimizer": ("optimizer", "scratch"),
}


@dataclass(frozen=True)
class Charge:
    """A cost that is due once, as soon as any of `params` is chosen or any of the charges `via` is due.

    A weight gradient names its parameter; an input gradient names the charges further from the loss that wait for it;
    a tensor kept for backward names every operation that reads it. So the backward graph, and the union of what
    it keeps, are one list. `via` points to later entries of the list only. `live` says during which moments of a step (see
    `Profile`) its bytes stand, from the first up to the second; None: all along. `engine`: due only where that engine runs the
    step, or, if it is "cached", as far as the forward pass before anything chosen is spared.
    """

    name: str
    cost: Cost
    params: tuple[str, ...] = ()
    via: tuple[int, ...] = ()
    live: tuple[int, int] | None = None
    engine: str | None = None

    def share_of(self, dim: int | None, share: float) -> float:
        """How much of it is due for a slice of its parameter: of a kept input, as much as the slice has of the inputs.

        Beside a slice's gradient a copy of the slice itself stands, for the optimizer.
        """
        if dim is None or (self.kind == KEPT and dim != 1):
            return 1.0
        if self.kind == "gradient":
            return min(2 * share, 1.0)  # and no slice costs more than the whole
        return share if self.kind in (KEPT, "optimizer", "gradient", "scratch") or self.name.startswith("dW ") else 1.0

    def share(self, pieces: Iterable[tuple[int | None, float]], behind: bool = False) -> float:
        """How much of it is due for these pieces (dimension and share) of its parameters, and whether it is `behind` them.

        The largest decides, and copies come beside it.
        """
        most, copies = float(behind), 0.0
        for dim, share in pieces:
            if self.is_copied(dim):
                copies += share
            else:
                most = max(most, self.share_of(dim, share))
        return most + copies

    def is_copied(self, dim: int | None) -> bool:
        """Whether a slice along this dimension keeps a copy of its own: its channels of a layer's input."""
        return self.kind == KEPT and dim == 1

    @property
    def kind(self) -> str:
        """What it pays for: one of `KINDS`, or "node", which is to run a node at all."""
        word = self.name.split(" ")[0].rstrip(":")
        return word if word in KINDS else "node"


@dataclass(frozen=True)
class Table:
    """The charges of a profile seen from a list of units: charge j is due when a unit of row j of `needed` is chosen.

    Bytes are by moment: at each of them, `standing` and what is due must fit.
    """

    needed: NDArray[np.bool_]  # (charges, units); no two rows are equal
    seconds: NDArray[np.float64]
    bytes: NDArray[np.float64]  # (moments, charges)
    standing: NDArray[np.float64]  # (moments,): beside the charges, against the peak of the forward pass alone
    macs: NDArray[np.float64]


@dataclass(frozen=True)
class Profile:
    """What one step of one model costs on one device, for any selection.

    `base` is what every step pays (the forward pass); `charges` stand in the order in which backward runs. `head`
    names the parameters of the module nearest the loss. `origin` says where and when this was taken. `coverage` is the
    share of the backward time that was attributed to nodes; `uncounted` names operations whose MACs are unknown.

    Seconds and MACs add up; bytes are a peak. A step goes through `moments` (the operations of the forward pass, the nodes of
    the backward pass, the optimizer), and each entry of it holds the bytes that live then even if nothing trains. The bytes of
    a selection are its highest moment less the highest of `moments`: what training needs on top of inference.

    `plain` is what a step of training without this library costs, where that is not the same as choosing everything.
    `checks` are whole steps that were taken to test the measurement: seconds predicted, of the fastest try, of the slowest.
    `engine` runs the steps; `on("lean")` is the same profile for another one. `spared` is how much of the forward pass before
    anything chosen a step does not pay for: all of it (1) where features come from a cache, some of its seconds where it runs
    as inference. Then only the rest of it is in `base`, and the spared part is due for what lies between the loss and anything
    chosen. `shapes` are those of the parameters: a slice costs its share of what its parameter's gradient, optimizer state and,
    along the inputs, kept activations cost. `other_seconds` are those of each charge, and last of `base` where nothing is
    spared, for steps that are `captured` as one launch; where the charges hold those already, for steps that are not. Empty:
    nobody knows of a difference.
    """

    charges: tuple[Charge, ...]
    base: Cost
    head: tuple[str, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)
    coverage: float | None = None
    uncounted: tuple[str, ...] = ()
    moments: tuple[int, ...] = (0,)
    plain: Cost | None = None
    checks: tuple[tuple[float, float, float], ...] = ()
    engine: str = "plain"
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    spared: float = 0.0
    captured: bool = False
    other_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for i, charge in enumerate(self.charges):
            if any(not i < j < len(self.charges) for j in charge.via):
                raise ValueError(f"charge {i} ({charge.name!r}) has via={charge.via}: it may point to later charges only.")
            if charge.live is not None and not 0 <= charge.live[0] <= charge.live[1] <= len(self.moments):
                raise ValueError(f"charge {i} ({charge.name!r}) has live={charge.live} of {len(self.moments)} moments.")
        if self.other_seconds and len(self.other_seconds) != len(self.charges) + 1:
            raise ValueError(f"{len(self.other_seconds)} other seconds for {len(self.charges)} charges and the base.")

    def on(self, engine: str, spared: float | None = None, captured: bool | None = None) -> Profile:
        """The same profile for steps that another engine runs, that spare so much of the forward pass, or that are captured;
        1.0 is still a plain full step."""
        if engine not in ENGINES:
            raise ValueError(f"engine={engine!r} is not known to profiles; one of: {', '.join(ENGINES)}.")
        spared = self.spared if spared is None else spared
        if not 0 <= spared <= 1:
            raise ValueError(f"spared={spared}: from nothing (0) to all (1) of the forward pass before anything chosen.")
        if captured is not None and captured != self.captured and self.other_seconds:
            return self._otherwise().on(engine, spared)
        if (engine, spared) == (self.engine, self.spared):
            return self
        seconds, macs = (old - new for old, new in zip(self._all_that(self.spared), self._all_that(spared), strict=True))
        base = replace(self.base, seconds=self.base.seconds + seconds, macs=self.base.macs + int(macs))
        return replace(self, engine=engine, spared=spared, base=base if seconds or macs else self.base, plain=self.full)

    def _otherwise(self) -> Profile:
        """The same profile with its other seconds, nothing spared."""
        whole = self.on(self.engine, 0.0)
        *others, base = self.other_seconds
        charges = (replace(c, cost=replace(c.cost, seconds=s)) for c, s in zip(whole.charges, others, strict=True))
        return replace(
            whole,
            charges=tuple(charges),
            base=replace(whole.base, seconds=base),
            plain=whole.full,
            captured=not self.captured,
            other_seconds=whole.seconds,
        )

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of each charge, and last of `base`."""
        return *(charge.cost.seconds for charge in self.charges), self.base.seconds

    def _all_that(self, spared: float) -> tuple[float, float]:
        """Seconds and MACs that are spared where nothing is chosen; inference takes less time, but all MACs."""
        several = [charge.cost for charge in self.charges if charge.engine == CACHED]
        seconds = spared * math.fsum(cost.seconds for cost in several)
        return seconds, sum(cost.macs for cost in several) if spared == 1 else 0

    @cached_property
    def _priced(self) -> tuple[Charge, ...]:
        """The charges as they are due: of the forward pass, what was spared of it."""
        if self.spared in (0, 1):
            return self.charges
        return tuple(
            replace(c, cost=replace(c.cost, seconds=self.spared * c.cost.seconds, macs=0)) if c.engine == CACHED else c
            for c in self.charges
        )

    def cost(self, units: Iterable[Unit], engine: str | None = None, spared: float | None = None) -> Cost:
        """What one step costs when just these units are chosen. THE judge: solvers are checked against it.

        Without `engine` and `spared`: on the engine that this profile is for, with as much of the forward pass spared.
        """
        there = self.on(engine or self.engine, spared)
        if there is not self:
            return there.cost(units)
        due = self.due(units)
        seconds = self.base.seconds + math.fsum(charge.cost.seconds for charge in due)
        macs = self.base.macs + sum(charge.cost.macs for charge in due)
        return Cost(seconds, self.base.bytes + int(self._standing(due).max()) - max(self.moments), macs)

    def alone(self, units: tuple[Unit, ...]) -> list[Cost]:
        """For each unit, what a step costs when just that one is chosen: `cost([unit])`, for all of them at once."""
        table = self.table(units)
        seconds, macs = (self.base.seconds + table.seconds @ table.needed, self.base.macs + table.macs @ table.needed)
        peaks = (table.standing[:, None] + table.bytes @ table.needed).max(0, initial=0.0)
        amounts = zip(seconds.tolist(), peaks.tolist(), macs.tolist(), strict=True)
        return [Cost(s, self.base.bytes + math.ceil(b), math.ceil(m)) for s, b, m in amounts]

    def with_one_more(self, units: tuple[Unit, ...], chosen: Iterable[Unit]) -> list[float]:
        """For each unit, the seconds of a step that trains it beside those that are chosen."""
        table, these = self.table(units), set(chosen)
        due = table.needed[:, [unit in these for unit in units]].any(axis=1)
        more = table.seconds[~due] @ table.needed[~due]
        return (self.base.seconds + table.seconds[due].sum() + more).tolist()

    def split(self, units: Iterable[Unit]) -> dict[str, Cost]:
        """The same cost by what it is paid for: `forward`, `dX`, `dW` and `optimizer`.

        Seconds and MACs add up to it. Bytes are all that lives at the step's highest moment: activations of the forward pass,
        gradients on their way, gradients of parameters, what the optimizer holds. So they add up to the peak itself, which is
        the cost's bytes on top of inference's own peak.
        """
        due = self.due(units)
        peak = int(self._standing(due).argmax())
        out = {}
        for part, kinds in SPLIT.items():
            mine = [charge for charge in due if charge.kind in kinds]
            seconds, macs = math.fsum(charge.cost.seconds for charge in mine), sum(charge.cost.macs for charge in mine)
            held = sum(c.cost.bytes for c in mine if c.live is None or c.live[0] <= peak < c.live[1])
            out[part] = Cost(seconds, held, macs)
        out["forward"] += replace(self.base, bytes=self.base.bytes + self.moments[peak])
        return out

    def _standing(self, due: Sequence[Charge]) -> NDArray[np.int64]:
        """The bytes that live at each moment while these charges are due."""
        change = np.zeros(len(self.moments) + 1, np.int64)
        size = np.array([charge.cost.bytes for charge in due], np.int64)
        live = np.array([charge.live or (0, len(self.moments)) for charge in due], np.intp).reshape(-1, 2)
        np.add.at(change, live[:, 0], size)
        np.subtract.at(change, live[:, 1], size)
        return np.cumsum(change)[:-1] + np.array(self.moments, np.int64)

    def kept(self, units: Iterable[Unit]) -> int:
        """Bytes that stay for the backward pass when just these units are chosen."""
        return sum(charge.cost.bytes for charge in self.due(units) if charge.kind == KEPT)

    def due(self, units: Iterable[Unit]) -> list[Charge]:
        """The charges that a step pays when just these units are chosen."""
        chosen = self._pieces(part for unit in units for part in unit.parts)
        asked = sum(self._bits.get(param, 0) for param in chosen)
        due = [(charge, behind) for charge, own, behind in self._reach if (own | behind) & asked]
        if all(dim is None for dim, _ in chosen.values()):
            return [charge for charge, _ in due]
        out = []
        for charge, behind in due:
            share = charge.share([chosen[p] for p in charge.params if p in chosen], bool(behind & asked))
            out.append(charge if share == 1.0 else replace(charge, cost=charge.cost.times(share)))
        return out

    @cached_property
    def _bits(self) -> dict[str, int]:
        """A bit for each parameter, so that a number can stand for a set of them."""
        return {param: 1 << i for i, param in enumerate(self.params)}

    @cached_property
    def _reach(self) -> list[tuple[Charge, int, int]]:
        """Each charge that counts on this engine, with its own parameters and those that make it due by way of others."""
        own = [sum(self._bits[param] for param in set(charge.params)) for charge in self.charges]
        behind = [0] * len(self.charges)
        for i in range(len(self.charges) - 1, -1, -1):
            for j in self.charges[i].via:
                behind[i] |= own[j] | behind[j]
        return [each for each in zip(self._priced, own, behind, strict=True) if self._counts(each[0])]

    def _counts(self, charge: Charge) -> bool:
        return charge.engine in (None, self.engine) or (self.spared > 0 and charge.engine == CACHED)

    def _pieces(self, parts: Iterable[Part]) -> dict[str, tuple[int | None, float]]:
        """For each parameter that parts are of: along which dimension they cut it (None: not at all), and how much of it they
        are together."""
        cut: dict[str, tuple[int | None, set[int]]] = {}
        for part in parts:
            dim, index = cut.get(part.param, (part.dim, set()))
            if part.dim is None or part.index is None or dim != part.dim:
                cut[part.param] = None, set()
            elif dim is not None:
                cut[part.param] = dim, index.union(part.index)
        out: dict[str, tuple[int | None, float]] = {}
        for param, (dim, index) in cut.items():
            share = len(index) / self.shapes[param][dim] if dim is not None and param in self.shapes else 1.0
            out[param] = (dim, share) if share < 1 else (None, 1.0)
        return out

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Every parameter that some charge names, nearest the loss first."""
        return tuple(dict.fromkeys(p for charge in self.charges for p in charge.params))

    def param_bytes(self, name: str) -> int:
        """What a gradient of this parameter takes up."""
        return sum(charge.cost.bytes for charge in self.charges if charge.name == f"gradient: {name}")

    def sizes(self, units: tuple[Unit, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What each unit is, wherever it stands: the number of its elements, and the MACs of its own gradients."""
        if units not in self._sizes:  # as for tables
            self._sizes.clear()
            self._sizes[units] = self._sizes_of(units)
        return self._sizes[units]

    @cached_property
    def _sizes(self) -> dict[tuple[Unit, ...], tuple[NDArray[np.float64], NDArray[np.float64]]]:
        return {}

    def _sizes_of(self, units: Sequence[Unit]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        elements = {param: math.prod(shape) for param, shape in self.shapes.items()}
        macs: dict[str, int] = {}
        for charge in self.charges:
            if charge.name.startswith("dW ") and len(charge.params) == 1:
                macs[charge.params[0]] = macs.get(charge.params[0], 0) + charge.cost.macs
        pieces = [self._pieces(unit.parts) for unit in units]
        sums = [[sum(of.get(p, 0) * share for p, (_, share) in piece.items()) for piece in pieces] for of in (elements, macs)]
        return np.array(sums[0], float), np.array(sums[1], float)

    def output_bytes(self, name: str) -> int:
        """What the outputs of the operations that use this parameter take up."""
        return sum(c.cost.bytes for c in self.charges if c.kind == "node" and name in c.params)

    @cached_property
    def without_optimizer(self) -> Profile:
        """What forward and backward passes cost that no step of the optimizer follows."""
        charges = (replace(c, cost=Cost()) if c.kind in ("optimizer", "scratch") else c for c in self.charges)
        return replace(self, charges=tuple(charges))

    @cached_property
    def full(self) -> Cost:
        """What a plain full step costs: the meaning of 1.0 in a budget."""
        return self.plain or self.cost([self.everything])

    @property
    def everything(self) -> Unit:
        """All there is to train, as one unit."""
        return Unit("*", tuple(Part(p) for p in self.params))

    def table(self, units: tuple[Unit, ...]) -> Table:
        """The charges as arrays over these units, equal rows merged, rows that no unit needs left out."""
        if units not in self._tables:  # asked for again whenever a plan is corrected
            self._tables.clear()
            self._tables[units] = self._table(units)
        return self._tables[units]

    @cached_property
    def _tables(self) -> dict[tuple[Unit, ...], Table]:
        return {}

    def _table(self, units: Sequence[Unit]) -> Table:
        whole = {param: np.zeros(len(units), bool) for param in self.params}  # units that choose all of it
        cut: dict[str, list[tuple[int, int, float]]] = {}  # units that choose a slice: (unit, dimension, share)
        for i, unit in enumerate(units):
            for param, (dim, share) in self._pieces(unit.parts).items():
                if param in whole and dim is None:
                    whole[param][i] = True
                elif param in whole and dim is not None:
                    cut.setdefault(param, []).append((i, dim, share))
        rows: list[NDArray[np.bool_]] = [np.zeros(0, bool)] * len(self.charges)
        merged: dict[bytes, tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64]]] = {}

        def add(row: NDArray[np.bool_], charge: Charge, share: float = 1.0) -> None:
            if row.any() and self._counts(charge):
                new = row, np.zeros(2), np.zeros(len(self.moments))
                _, price, held = merged.setdefault(row.tobytes(), new)
                price += (charge.cost.seconds * share, charge.cost.macs * share)
                held[slice(*(charge.live or (0, None)))] += charge.cost.bytes * share

        for i in range(len(self.charges) - 1, -1, -1):
            charge, row, own = self._priced[i], np.zeros(len(units), bool), dict[int, list[tuple[int | None, float]]]()
            for j in charge.via:
                row |= rows[j]
            for param in charge.params:
                row |= whole[param]
                for k, dim, share in cut.get(param, ()):
                    own.setdefault(k, []).append((dim, share))
            behind = bool(row.any())
            for k, pieces in own.items():
                rest = [charge.share_of(dim, 0.0) for dim, _ in pieces if not charge.is_copied(dim)]
                row[k] |= max(rest, default=0.0) == 1.0 or (behind and bool(rest))
                share = charge.share(pieces, bool(row[k])) - row[k]
                if share > 0:  # each pays for its own slice
                    add(np.arange(len(units)) == k, charge, share)
            add(row, charge)
            rows[i] = row.copy()
            rows[i][list(own)] = True
        needed = np.array([row for row, _, _ in merged.values()], bool).reshape(len(merged), len(units))
        prices = np.array([price for _, price, _ in merged.values()], float).reshape(len(merged), 2)
        held = np.array([held for _, _, held in merged.values()], float).reshape(len(merged), len(self.moments)).T
        standing = np.array(self.moments, float) - max(self.moments)
        alone = _highest(held, standing)
        return Table(needed, prices[:, 0], held[alone], standing[alone], prices[:, 1])

    def check_origin(self, now: Mapping[str, Any], allow_mismatch: bool = False) -> None:
        """Raise `ProfileMismatch` unless this profile was taken under the conditions `now`."""
        differ = [key for key in now if key in self.origin and self.origin[key] != now[key]]
        if differ and not allow_mismatch:
            was = ", ".join(f"{key} {self.origin[key]!r}" for key in differ)
            runs = ", ".join(f"{key} {now[key]!r}" for key in differ)
            raise ProfileMismatch(
                f"this profile was taken at {was}; the model now runs at {runs}. Measure again, or pass allow_mismatch=True."
            )

    def _repr_html_(self) -> str:
        """How a notebook shows it: a full step, by what it is paid for."""
        split, whole = self.split([self.everything]), self.cost([self.everything])
        rows = [
            (part, markup.seconds(cost.seconds), markup.size(cost.bytes), markup.macs(cost.macs))
            for part, cost in [
                *split.items(),
                ("together", Cost(whole.seconds, sum(c.bytes for c in split.values()), whole.macs)),
            ]
        ]
        where = ", ".join(f"{key} {self.origin[key]}" for key in ("device", "batch") if key in self.origin)
        title = f"A full step on the {self.engine} engine; {where or 'origin unknown'}"
        return markup.Table(title, ("", "time", "live at its peak", "compute"), rows).html()

    def to_json(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "base": asdict(self.base),
            "charges": [
                {
                    "name": c.name,
                    "cost": {key: value for key, value in asdict(c.cost).items() if value},
                    "params": list(c.params),
                    "via": list(c.via),
                    "live": None if c.live is None else list(c.live),
                    "engine": c.engine,
                }
                for c in self.charges
            ],
            "head": list(self.head),
            "origin": dict(self.origin),
            "coverage": self.coverage,
            "uncounted": list(self.uncounted),
            "moments": list(self.moments),
            "plain": None if self.plain is None else asdict(self.plain),
            "checks": [list(check) for check in self.checks],
            "engine": self.engine,
            "spared": self.spared,
            "captured": self.captured,
            "other_seconds": list(self.other_seconds),
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        found = data.get("format") if isinstance(data, Mapping) else None
        if found != _FORMAT:
            raise ValueError(f"not a Pliant profile: format is {found!r}, expected {_FORMAT!r}.")
        charges = tuple(
            Charge(
                c["name"],
                Cost(**c["cost"]),
                tuple(c["params"]),
                tuple(c["via"]),
                tuple(c["live"]) if c["live"] else None,
                c["engine"],
            )
            for c in data["charges"]
        )
        return cls(
            charges,
            Cost(**data["base"]),
            tuple(data["head"]),
            data["origin"],
            data["coverage"],
            tuple(data["uncounted"]),
            tuple(data["moments"]),
            Cost(**data["plain"]) if data["plain"] else None,
            tuple((predicted, fastest, slowest) for predicted, fastest, slowest in data["checks"]),
            data["engine"],
            {name: tuple(shape) for name, shape in data["shapes"].items()},
            data["spared"],
            data["captured"],
            tuple(data["other_seconds"]),
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


def _highest(held: NDArray[np.float64], standing: NDArray[np.float64]) -> NDArray[np.intp]:
    """Positions of the moments that some choice may make the highest: one that a neighbour always tops is left out."""
    kept: list[int] = []
    for t in range(len(standing)):
        while kept and standing[kept[-1]] <= standing[t] and (held[kept[-1]] <= held[t]).all():
            kept.pop()
        if not kept or standing[kept[-1]] < standing[t] or not (held[kept[-1]] >= held[t]).all():
            kept.append(t)
    return np.array(kept, dtype=np.intp)
