"""What one step of one model costs on one device, for any selection: a list of charges, each due once. Arithmetic and JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pliant.core import text
from pliant.core.errors import ProfileMismatch
from pliant.core.mode import Mode
from pliant.core.types import Cost, Part, Unit
from pliant.cost import profile_json
from pliant.cost.charge import SPLIT, Charge, ChargeKind, Piece, pieces_of
from pliant.cost.table import PriceTable, tabulate
from pliant.runtime.files import write_aside
from pliant.runtime.sealed import check_json, seal_json

__all__ = ["SPARED_BY_INFERENCE", "SPLIT", "Charge", "ChargeKind", "PriceTable", "Profile"]

# The share of the prefix's forward time that inference saves in captured steps, until it is measured in the run itself. Five
# runs of MobileNetV2 on an H200 measured 0.32 to 0.54; step_h200.md has the same steps without a session.
SPARED_BY_INFERENCE = 0.3


@dataclass(frozen=True)
class Profile:
    """What one step of one model costs on one device, for any selection.

    `base` is what every step pays (the forward pass). `charges` are the rest, in the order in which backward runs. `head` names
    the parameters of the module nearest the loss. `origin` says where and when this was measured. `coverage` is the share of
    the backward time that was attributed to nodes. `uncounted` names operations whose MACs are unknown.

    Seconds and MACs add up; bytes are a peak. A step goes through `moments`: the operations of the forward pass, the nodes of
    the backward pass, the optimizer. Each entry holds the bytes that are live then even if nothing trains. The bytes of a
    selection are its highest moment less the highest of `moments`: what training needs beyond inference.

    `plain` is the cost of a plain full step, if that is not the same as choosing everything. `checks` are whole steps that were
    measured to test the profile: seconds predicted, of the fastest try, of the slowest. `shapes` are those of the parameters.
    A slice pays its share of its parameter's gradient, of the optimizer state and, along the inputs, of saved activations.

    `mode` says how the steps run; `on(mode)` is the same profile for another mode. `spared` is the share of the prefix (the
    forward pass before the first chosen layer) that a step does not pay: all of it with a cache, some of its seconds if it runs
    as inference. Then `base` is smaller, and each layer from the loss to the first chosen one pays for its forward pass.
    `other_seconds` are those of captured steps (or of eager ones, if `mode` has graphs): of each charge, and last of `base`
    with nothing spared. Empty: no difference is known.

    `prefix_saves` is the share of the prefix's seconds that eager steps save by running it as inference, as measured. `watts`
    is the mean power of training steps, if measured: joules are watts × seconds.
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
    mode: Mode = field(default_factory=Mode)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()  # weights that are stored as (inputs, outputs)
    spared: float = 0.0
    other_seconds: tuple[float, ...] = ()
    watts: float | None = None
    prefix_saves: float = 0.0

    def __post_init__(self) -> None:
        for i, charge in enumerate(self.charges):
            if any(not i < j < len(self.charges) for j in charge.via):
                raise ValueError(f"charge {i} ({charge.name!r}) has via={charge.via}: it may point to later charges only.")
            if charge.live is not None and not 0 <= charge.live[0] <= charge.live[1] <= len(self.moments):
                raise ValueError(f"charge {i} ({charge.name!r}) has live={charge.live} of {len(self.moments)} moments.")
        if self.other_seconds and len(self.other_seconds) != len(self.charges) + 1:
            raise ValueError(f"{len(self.other_seconds)} other seconds for {len(self.charges)} charges and the base.")

    def on(self, mode: Mode, spared: float | None = None) -> Profile:
        """The same profile for steps that run in this mode. A share of 1.0 is still a plain full step.

        `spared` is the share of the prefix that a step does not pay. By default: all of it with a cache, `SPARED_BY_INFERENCE`
        in captured steps, `prefix_saves` in others.
        """
        if spared is None:
            by_inference = SPARED_BY_INFERENCE if mode.graphs else self.prefix_saves
            spared = 1.0 if mode.cached else by_inference if mode.prefix else 0.0
        if not 0 <= spared <= 1:
            raise ValueError(f"spared={spared}: a share of the forward pass before the first chosen layer, from 0 to 1.")
        if mode.graphs != self.mode.graphs and self.other_seconds:
            return self._otherwise().on(mode, spared)
        if (mode, spared) == (self.mode, self.spared):
            return self
        seconds, macs = (old - new for old, new in zip(self._all_that(self.spared), self._all_that(spared), strict=True))
        base = replace(self.base, seconds=self.base.seconds + seconds, macs=self.base.macs + int(macs))
        return replace(self, mode=mode, spared=spared, base=base if seconds or macs else self.base, plain=self.full)

    def _otherwise(self) -> Profile:
        """The same profile with its other seconds, nothing spared."""
        whole = self.on(self.mode, 0.0)
        *others, base = self.other_seconds
        charges = (replace(c, cost=replace(c.cost, seconds=s)) for c, s in zip(whole.charges, others, strict=True))
        return replace(
            whole,
            charges=tuple(charges),
            base=replace(whole.base, seconds=base),
            plain=whole.full,
            mode=replace(self.mode, graphs=not self.mode.graphs),
            other_seconds=whole.seconds,
        )

    def with_watts(self, watts: float) -> Profile:
        """The same profile at this measured power. A full step, the meaning of 1.0, keeps the joules that it had first."""
        if not (math.isfinite(watts) and watts > 0):
            raise ValueError(f"watts={watts}: measured power is a positive number.")
        return replace(self, watts=watts, plain=self.plain if self.watts is None else self.full)

    def metered(self, cost: Cost) -> Cost:
        """The same cost with its joules, where power is known and they are not."""
        if self.watts is None or cost.joules is not None:
            return cost
        return replace(cost, joules=self.watts * cost.seconds)

    def seconds_within(self, limits: Mapping[str, float]) -> float | None:
        """The longest step that these limits allow by their seconds and, at the measured power, their joules; None: any."""
        allowed = [limits["seconds"]] if "seconds" in limits else []
        if "joules" in limits and self.watts is not None:
            allowed.append(limits["joules"] / self.watts)
        return min(allowed, default=None)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of each charge, and last of `base`."""
        return *(charge.cost.seconds for charge in self.charges), self.base.seconds

    def _all_that(self, spared: float) -> tuple[float, float]:
        """Seconds and MACs that are spared where nothing is chosen; inference takes less time, but all MACs."""
        several = [charge.cost for charge in self.charges if charge.kind is ChargeKind.FORWARD]
        seconds = spared * math.fsum(cost.seconds for cost in several)
        return seconds, sum(cost.macs for cost in several) if spared == 1 else 0

    @cached_property
    def _priced(self) -> tuple[Charge, ...]:
        """The charges as they are due: of the forward pass, the share that is spared."""
        if self.spared in (0, 1):
            return self.charges
        return tuple(self._spared(charge) if charge.kind is ChargeKind.FORWARD else charge for charge in self.charges)

    def _spared(self, charge: Charge) -> Charge:
        return replace(charge, cost=replace(charge.cost, seconds=self.spared * charge.cost.seconds, macs=0))

    def cost(self, units: Iterable[Unit], engine: Literal["plain", "lean"] | None = None, cached: bool | None = None) -> Cost:
        """What one step costs if exactly these units are chosen. Every solver is checked against it.

        By default for steps in the mode of this profile. `engine` says "lean" or "plain" instead, and `cached` whether the
        forward pass before the first chosen layer is read from a cache.
        """
        if engine not in (None, "plain", "lean"):
            raise ValueError(f"engine={engine!r} is not known to profiles; one of: plain, lean.")
        lean = self.mode.lean if engine is None else engine == "lean"
        if cached is not None:
            return self.on(replace(self.mode, lean=lean, prefix=cached, cached=cached)).cost(units)
        there = self.on(replace(self.mode, lean=lean), self.spared)
        if there is not self:
            return there.cost(units)
        due = self.due(units)
        seconds = self.base.seconds + math.fsum(charge.cost.seconds for charge in due)
        macs = self.base.macs + sum(charge.cost.macs for charge in due)
        return self.metered(Cost(seconds, self.base.bytes + int(self._standing(due).max()) - max(self.moments), macs))

    def alone(self, units: tuple[Unit, ...]) -> list[Cost]:
        """For each unit, what a step costs if only that one is chosen: `cost([unit])`, for all of them at once."""
        table = self.table(units)
        seconds, macs = (self.base.seconds + table.seconds @ table.needed, self.base.macs + table.macs @ table.needed)
        peaks = (table.standing[:, None] + table.bytes @ table.needed).max(0, initial=0.0)
        amounts = zip(seconds.tolist(), peaks.tolist(), macs.tolist(), strict=True)
        return [self.metered(Cost(s, self.base.bytes + math.ceil(b), math.ceil(m))) for s, b, m in amounts]

    def split(self, units: Iterable[Unit]) -> dict[str, Cost]:
        """The same cost by what it is paid for: `forward`, `dX`, `dW` and `optimizer`.

        Seconds and MACs add up to it. Bytes are all that is live at the step's highest moment: activations, gradients,
        optimizer state. They add up to the peak itself, which is the bytes of `cost` plus the peak of inference.
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

    @property
    def inference(self) -> int:
        """Bytes that a forward pass without gradients takes at its peak."""
        return max(self.moments)

    def kept(self, units: Iterable[Unit]) -> int:
        """Bytes that are saved for the backward pass if exactly these units are chosen."""
        return sum(charge.cost.bytes for charge in self.due(units) if charge.kind is ChargeKind.KEPT)

    def due(self, units: Iterable[Unit]) -> list[Charge]:
        """The charges that a step pays if exactly these units are chosen."""
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
        """A bit for each parameter, so that a number can represent a set of them."""
        return {param: 1 << i for i, param in enumerate(self.params)}

    @cached_property
    def _reach(self) -> list[tuple[Charge, int, int]]:
        """Each charge that counts in this mode, with its own parameters and those that make it due by way of others."""
        own = [sum(self._bits[param] for param in set(charge.params)) for charge in self.charges]
        behind = [0] * len(self.charges)
        for i in range(len(self.charges) - 1, -1, -1):
            for j in self.charges[i].via:
                behind[i] |= own[j] | behind[j]
        return [each for each in zip(self._priced, own, behind, strict=True) if self._counts(each[0])]

    def _counts(self, charge: Charge) -> bool:
        if charge.kind is ChargeKind.FORWARD:
            return self.spared > 0
        return charge.lean is None or charge.lean == self.mode.lean

    def _pieces(self, parts: Iterable[Part]) -> dict[str, Piece]:
        return pieces_of(parts, self.shapes, self.transposed)

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Every parameter that some charge names, nearest the loss first."""
        return tuple(dict.fromkeys(p for charge in self.charges for p in charge.params))

    def param_bytes(self, name: str) -> int:
        """What a gradient of this parameter takes up."""
        return sum(c.cost.bytes for c in self.charges if c.kind is ChargeKind.GRADIENT and c.params == (name,))

    def sizes(self, units: tuple[Unit, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The size of each unit: the number of its elements, and the MACs of its own gradients."""
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
            if charge.kind is ChargeKind.WEIGHT_GRAD and len(charge.params) == 1:
                macs[charge.params[0]] = macs.get(charge.params[0], 0) + charge.cost.macs
        pieces = [self._pieces(unit.parts) for unit in units]
        sums = [[sum(of.get(p, 0) * share for p, (_, share) in piece.items()) for piece in pieces] for of in (elements, macs)]
        return np.array(sums[0], float), np.array(sums[1], float)

    def output_bytes(self, name: str) -> int:
        """What the outputs of the operations that use this parameter take up."""
        return sum(c.cost.bytes for c in self.charges if c.kind is ChargeKind.NODE and name in c.params)

    @cached_property
    def without_optimizer(self) -> Profile:
        """What forward and backward passes cost that no step of the optimizer follows."""
        charges = (replace(c, cost=Cost()) if c.kind in SPLIT["optimizer"] else c for c in self.charges)
        return replace(self, charges=tuple(charges))

    @cached_property
    def full(self) -> Cost:
        """What a plain full step costs, on the kernels that this was measured on: the meaning of 1.0 in a budget."""
        return self.metered(self.plain or self.cost([self.everything]))

    @property
    def everything(self) -> Unit:
        """All there is to train, as one unit."""
        return Unit("*", tuple(Part(p) for p in self.params))

    def table(self, units: tuple[Unit, ...]) -> PriceTable:
        """The charges as arrays over these units, equal rows merged, rows that no unit needs left out."""
        if units not in self._tables:  # used again whenever a plan is corrected
            self._tables.clear()
            chosen = [self._pieces(unit.parts) for unit in units]
            self._tables[units] = tabulate(self._priced, self._counts, self.moments, chosen)
        return self._tables[units]

    @cached_property
    def _tables(self) -> dict[tuple[Unit, ...], PriceTable]:
        return {}

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
            (part, text.seconds(cost.seconds), text.size(cost.bytes), text.macs(cost.macs))
            for part, cost in [
                *split.items(),
                ("together", Cost(whole.seconds, sum(c.bytes for c in split.values()), whole.macs)),
            ]
        ]
        where = ", ".join(f"{key} {self.origin[key]}" for key in ("device", "batch") if key in self.origin)
        title = f"A full step, {self.mode}; {where or 'origin unknown'}"
        return text.Table(title, ("", "time", "live at its peak", "compute"), rows).html()

    def to_json(self) -> dict[str, Any]:
        return profile_json.to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        return cls(**profile_json.fields_of(data))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON with a checksum: aside first, then renamed, so that an interrupted write leaves the old file."""
        write_aside(path, json.dumps(seal_json(self.to_json())).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str], now: Mapping[str, Any] | None = None, allow_mismatch: bool = False) -> Profile:
        """Read a profile; with `now` (see `measure.origin`) also check that it was taken under these conditions."""
        try:
            profile = cls.from_json(check_json(json.loads(Path(path).read_bytes())))
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # no text, no JSON, no profile, or half of one
            raise ValueError(
                f"{os.fspath(path)!r} is not a whole Pliant profile: {error}. Measure and save it again."
            ) from error
        if now is not None:
            profile.check_origin(now, allow_mismatch)
        return profile
