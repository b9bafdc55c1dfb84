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
    lr: float | None = None


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
    seconds: float | None = None  # of training until then


@dataclass(frozen=True)
class LoggedClasses:
    """Results by class: how many samples of each class were taken for which class, by their numbers. `where` says which
    samples and which weights."""

    where: str
    names: tuple[str, ...]
    confusion: Mapping[tuple[int, int], int]

    def samples(self, label: int) -> int:
        """How many samples the class has."""
        return sum(count for (true, _), count in self.confusion.items() if true == label)

    def named(self, label: int) -> int:
        """How many samples were taken for the class."""
        return sum(count for (_, guess), count in self.confusion.items() if guess == label)


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
    options: Mapping[str, str] = field(default_factory=dict)  # of `pliant train`
    total_steps: int | None = None
    by_class: tuple[LoggedClasses, ...] = ()
    result: Mapping[str, float] = field(default_factory=dict)  # what `pliant train` said in the end: numbers by name
    began: tuple[float | None, int] = (None, 0)  # when the first step here began, and how many there were before
    written: float | None = field(default=None, compare=False)  # when the log was last written to
    ended: bool = False
    torn: bool = False  # the last line was cut short
    earlier: int = 0  # number of runs before it in the same file

    @cached_property
    def rounds(self) -> tuple[LoggedRound, ...]:
        found: dict[int, list[Chosen]] = {}
        for each in self.chosen:
            found.setdefault(each.selection.round, []).append(each)
        return tuple(LoggedRound(number, tuple(chosen)) for number, chosen in found.items())

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
        """A plain full step."""
        return self.chosen[-1].selection.full if self.chosen else self.start.full

    @cached_property
    def step_seconds(self) -> float | None:
        """The mean step of the run: what a budget is compared with."""
        if "seconds_per_step" in self.result:
            return self.result["seconds_per_step"]
        known = [step.seconds for step in self.steps if step.seconds is not None]
        return sum(known) / len(known) if known else None

    @cached_property
    def seconds(self) -> float:
        """Training time: measuring, choosing and steps, without evaluating and saving. `pliant train` times it as a whole; in
        other logs it is the sum of what was timed."""
        if "seconds" in self.result:
            return self.result["seconds"]
        timed = [(each.seconds, each.step) for each in self.evaluations if each.seconds is not None]
        if timed:
            taken, until = timed[-1]
            parts = (each.choosing_seconds for each in self.chosen if each.selection.step >= until > 0)
            first = (self.start.profiling_seconds or 0.0) if until == 0 else 0.0
            return taken + first + sum(parts) + sum(s.seconds or 0.0 for s in self.steps if s.number > until)
        choosing = sum(each.choosing_seconds for each in self.chosen)
        return (self.start.profiling_seconds or 0.0) + choosing + sum(step.seconds or 0.0 for step in self.steps)

    @property
    def seconds_left(self) -> float | None:
        """What the steps that are left will take at the pace of those since the run began or was resumed."""
        (began, before), done = self.began, self.steps[-1].number if self.steps else 0
        if self.ended or self.total_steps is None or began is None or self.written is None or done <= before:
            return None
        return max(self.written - began, 0.0) / (done - before) * max(self.total_steps - done, 0)

    @property
    def joules(self) -> float | None:
        """Of the whole run, where there was a meter."""
        return self.result.get("joules")

    @property
    def bytes(self) -> int | None:
        """The highest measured peak beyond inference; `pliant train --measure-memory` measures one in the end."""
        if self.result.get("bytes_measured"):
            return int(self.result["bytes"])
        return max((each.bytes for each in self.chosen if each.bytes is not None), default=None)

    @property
    def accuracy(self) -> LoggedEvaluation | None:
        """The last evaluation on test, else on validation, else on any split."""
        known = self.scored
        return known[-1] if known else None

    @property
    def best(self) -> LoggedEvaluation | None:
        """The best evaluation of the same split; the first one among equals."""
        return max(self.scored, key=lambda each: (each.accuracy or 0.0, -each.step), default=None)

    @cached_property
    def scored(self) -> list[LoggedEvaluation]:
        """The evaluations of the split that counts: test if there is one, else validation."""
        known = [each for each in self.evaluations if each.accuracy is not None]
        for split in ("test", "validation"):
            of = [each for each in known if each.split == split]
            if of:
                return of
        return [each for each in known if each.split == known[-1].split]

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
