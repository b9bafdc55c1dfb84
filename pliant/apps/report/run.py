"""One run as its log describes it: what was chosen, step by step, and what it cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from pliant.core.types import Cost, Selection
from pliant.cost.roofline import Peaks, RooflineRow


@dataclass(frozen=True)
class Start:
    """The start of a run. Logs of older versions lack some fields."""

    facts: Mapping[str, str] = field(default_factory=dict)
    full: Cost = field(default_factory=Cost)
    units: tuple[str, ...] = ()  # from the input to the loss
    costs: Mapping[str, Cost] = field(default_factory=dict)  # of a step with one unit alone
    split: Mapping[str, Cost] = field(default_factory=dict)  # of a plain full step
    checks: tuple[tuple[float, float, float], ...] = ()
    coverage: float | None = None
    uncounted: tuple[str, ...] = ()
    profiling_seconds: float | None = None


@dataclass(frozen=True)
class Step:
    number: int
    loss: float | None
    seconds: float | None


@dataclass(frozen=True)
class Chosen:
    """A selection and the steps that it was used for. A round that was corrected has several."""

    selection: Selection
    split: Mapping[str, Cost] = field(default_factory=dict)
    choosing_seconds: float = 0.0
    steps: tuple[Step, ...] = ()
    bytes: int | None = None  # the highest peak that was measured

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the chosen units."""
        return frozenset(unit.name for unit in self.selection.units)

    @property
    def seconds(self) -> float | None:
        """The median step, because the first steps of a selection take longer: they warm up or are measured."""
        return _median(step.seconds for step in self.steps)


@dataclass(frozen=True)
class LoggedRound:
    """The selections of one round: the first one and its corrections."""

    number: int
    chosen: tuple[Chosen, ...]

    @cached_property
    def steps(self) -> int:
        return sum(len(each.steps) for each in self.chosen)

    @cached_property
    def largest(self) -> float:
        return max(self.chosen[-1].selection.values.values(), default=0.0)

    def value(self, unit: str) -> float | None:
        return self.chosen[-1].selection.values.get(unit)

    def trained(self, unit: str) -> float:
        """The share of the round's steps in which the unit was trained; without steps, 1 if the unit is chosen."""
        if not self.steps:
            return float(unit in self.chosen[-1].names)
        return sum(len(each.steps) for each in self.chosen if unit in each.names) / self.steps


@dataclass(frozen=True)
class LoggedEvaluation:
    step: int
    split: str
    accuracy: float | None
    loss: float | None


@dataclass(frozen=True)
class LoggedRoofline:
    """A roofline: the peaks of the device, and the backward pass of each unit."""

    peaks: Peaks
    rows: tuple[RooflineRow, ...]


@dataclass(frozen=True)
class Run:
    """One run as its log describes it."""

    name: str
    start: Start = field(default_factory=Start)
    chosen: tuple[Chosen, ...] = ()
    loose: tuple[Step, ...] = ()  # before the first selection in the log
    evaluations: tuple[LoggedEvaluation, ...] = ()
    notes: tuple[tuple[int, str], ...] = ()
    roof: LoggedRoofline | None = None
    no_roof: str = ""  # why there is none
    resumed: tuple[int, ...] = ()  # the steps at which it was resumed
    resident: int | None = None  # the largest resident memory of the process
    growth: int | None = None  # how far its peak has risen since the session was opened
    ended: bool = False
    torn: bool = False  # the last line was cut short
    earlier: int = 0  # number of runs before it in the same file

    @cached_property
    def rounds(self) -> tuple[LoggedRound, ...]:
        numbers = dict.fromkeys(each.selection.round for each in self.chosen)
        return tuple(LoggedRound(n, tuple(each for each in self.chosen if each.selection.round == n)) for n in numbers)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return (*self.loose, *(step for each in self.chosen for step in each.steps))

    @cached_property
    def units(self) -> tuple[str, ...]:
        """Everything that could be chosen, from the input to the loss."""
        if self.start.units:
            return self.start.units
        names = dict.fromkeys(name for each in self.chosen for name in each.selection.values)
        return tuple(reversed(names))

    @property
    def full(self) -> Cost:
        return self.chosen[-1].selection.full if self.chosen else self.start.full

    @property
    def step_seconds(self) -> float | None:
        """The median step of the run."""
        return _median(step.seconds for step in self.steps)

    @property
    def seconds(self) -> float:
        """Training time: profiling, choosing and steps, without evaluating and loading data."""
        choosing = sum(each.choosing_seconds for each in self.chosen)
        return (self.start.profiling_seconds or 0.0) + choosing + sum(step.seconds or 0.0 for step in self.steps)

    @property
    def bytes(self) -> int | None:
        """The highest measured peak beyond inference."""
        return max((each.bytes for each in self.chosen if each.bytes is not None), default=None)

    @property
    def accuracy(self) -> LoggedEvaluation | None:
        """The last evaluation on test, else on validation, else on any split."""
        known = [each for each in self.evaluations if each.accuracy is not None]
        for split in ("test", "validation"):
            of = [each for each in known if each.split == split]
            if of:
                return of[-1]
        return known[-1] if known else None

    def trained(self, unit: str) -> float:
        """The share of the run's steps in which the unit was trained."""
        steps = sum(round.steps for round in self.rounds)
        if not steps:
            return self.rounds[-1].trained(unit) if self.rounds else 0.0
        return sum(round.trained(unit) * round.steps for round in self.rounds) / steps

    def mean_split(self) -> dict[str, Cost]:
        """The predicted mean cost of a step by part (forward, dX, dW, optimizer); empty if the log lacks it."""
        steps = sum(len(each.steps) for each in self.chosen if each.split)
        out: dict[str, Cost] = {}
        for each in self.chosen:
            for part, cost in each.split.items() if steps else ():
                out[part] = out.get(part, Cost()) + cost.times(len(each.steps) / steps)
        return out


def _median(amounts: Iterable[float | None]) -> float | None:
    known = [amount for amount in amounts if amount is not None]
    return median(known) if known else None


def blocks(units: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Units grouped into blocks of the model: by their names up to the first number, else by the first word.

    >>> blocks(["blocks.0.conv", "blocks.0.norm", "blocks.1.conv", "head"])
    [('blocks.0', ['blocks.0.conv', 'blocks.0.norm']), ('blocks.1', ['blocks.1.conv']), ('head', ['head'])]
    """
    words = [name.split(".") for name in units]
    shared = 0
    while len(words) > 1 and all(len(w) > shared + 1 for w in words) and len({w[shared] for w in words}) == 1:
        shared += 1
    out: list[tuple[str, list[str]]] = []
    for name, word in zip(units, words, strict=True):
        end = next((i + 1 for i, part in enumerate(word) if i >= shared and part.isdigit()), shared + 1)
        block = ".".join(word[shared:end])
        if out and out[-1][0] == block:
            out[-1][1].append(name)
        else:
            out.append((block, [name]))
    return out
