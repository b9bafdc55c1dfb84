"""A run log as it is on disk → one run: what was chosen, step by step, without what a resumed run did over."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from pliant import runlog
from pliant.roofline import Peaks, Row
from pliant.types import Cost, PliantError, Selection, Unit

LOG = "run.jsonl"  # its name inside a run's folder


class LogError(PliantError, ValueError):
    """A log that is not there, or is none of a run."""


@dataclass(frozen=True)
class Start:
    """What the run began with. Logs of older versions lack some of it."""

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
    """A selection and what happened while it was in force; several belong to one round where it was corrected."""

    selection: Selection
    split: Mapping[str, Cost] = field(default_factory=dict)
    choosing_seconds: float = 0.0
    steps: tuple[Step, ...] = ()
    bytes: int | None = None  # the highest peak that was measured

    @cached_property
    def names(self) -> frozenset[str]:
        """Of the units that are chosen."""
        return frozenset(unit.name for unit in self.selection.units)

    @property
    def seconds(self) -> float | None:
        """The median step: the first ones of a choice warm up or are measured, which takes longer."""
        return _median(step.seconds for step in self.steps)


@dataclass(frozen=True)
class Round:
    """All that was in force between two times of choosing anew."""

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
        """The share of its steps in which the unit was trained; of a round without steps, whether the unit is chosen."""
        if not self.steps:
            return float(unit in self.chosen[-1].names)
        return sum(len(each.steps) for each in self.chosen if unit in each.names) / self.steps


@dataclass(frozen=True)
class Evaluation:
    step: int
    split: str
    accuracy: float | None
    loss: float | None


@dataclass(frozen=True)
class Roof:
    """A roofline: what the device can do, and where each unit's backward pass stands."""

    peaks: Peaks
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Run:
    """One run as its log tells it."""

    name: str
    start: Start = field(default_factory=Start)
    chosen: tuple[Chosen, ...] = ()
    loose: tuple[Step, ...] = ()  # before the first choice that the log holds
    evaluations: tuple[Evaluation, ...] = ()
    notes: tuple[tuple[int, str], ...] = ()
    roof: Roof | None = None
    resumed: tuple[int, ...] = ()  # the steps that it went on from
    resident: int | None = None  # the most that the process was seen to take up
    ended: bool = False
    torn: bool = False  # the last line was cut short
    earlier: int = 0  # runs that stand before it in the same file

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        numbers = dict.fromkeys(each.selection.round for each in self.chosen)
        return tuple(Round(n, tuple(each for each in self.chosen if each.selection.round == n)) for n in numbers)

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
        """What training took: profiling, choosing and steps. Evaluating and loading data are not in it."""
        choosing = sum(each.choosing_seconds for each in self.chosen)
        return (self.start.profiling_seconds or 0.0) + choosing + sum(step.seconds or 0.0 for step in self.steps)

    @property
    def bytes(self) -> int | None:
        """The highest peak beyond inference that was measured."""
        return max((each.bytes for each in self.chosen if each.bytes is not None), default=None)

    @property
    def accuracy(self) -> Evaluation | None:
        """The last one told, of the split that counts: test, else validation, else whatever there is."""
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
        """What an average step of the run was predicted to cost, by what it is paid for; empty where the log does not say."""
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
    """Units that follow each other in one block of the model: up to the first number in their names, else by the first word.

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


# ---------------------------------------------------------------- reading


def log_of(run: str | os.PathLike[str]) -> Path:
    """Where the log of a run is: the run's folder, or the log itself, may be given."""
    given = Path(run)
    log = given / LOG if given.is_dir() else given
    if not log.is_file():
        what = f"there is no {LOG} in the folder {os.fspath(given)!r}" if log != given else f"there is no {os.fspath(given)!r}"
        raise LogError(f"{what}. Give a run's folder or its log: what Session(log=…) writes.")
    return log


def load(run: str | os.PathLike[str]) -> Run:
    """Read a run's log up to its last whole line."""
    log = log_of(run)
    try:
        lines = list(runlog.read(log))
        torn = _is_torn(log)
    except OSError as error:
        raise LogError(f"{os.fspath(log)!r} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise LogError(f"{os.fspath(log)!r} is not a run log: it holds no text. Give what Session(log=…) writes.") from error
    except (ValueError, RecursionError) as error:  # no JSON
        raise LogError(f"{os.fspath(log)!r} is not a run log: {error}") from error
    if not lines:
        state = "holds no whole line" if torn else "is empty"
        raise LogError(f"{os.fspath(log)!r} {state}: the run told nothing yet. Try again after its first step.")
    name = log.resolve().parent.name if log.name == LOG else log.stem
    return replace(parse(lines, name, os.fspath(log)), torn=torn)


def _is_torn(log: Path) -> bool:
    with open(log, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def named(runs: Iterable[Run]) -> list[Run]:
    """The runs, told apart where several have one name."""
    out: list[Run] = []
    for run in runs:
        same = sum(other.name == run.name or other.name.startswith(f"{run.name} (") for other in out)
        out.append(replace(run, name=f"{run.name} ({same + 1})") if same else run)
    return out


def parse(lines: Sequence[Any], name: str, where: str = "the log") -> Run:
    """The run that these lines tell of: the last one, where several stand in one file."""
    if not any(isinstance(line, dict) and line.get("event") in ("start", "round", "resume") for line in lines):
        if any(isinstance(line, dict) and "event" in line for line in lines):
            raise LogError(
                f"{where!r} does not say what was chosen: the run told too little yet. Try again after its first step."
            )
        raise LogError(f"{where!r} is not a run log: no line in it says what was chosen. Give what Session(log=…) writes.")
    starts = [i for i, line in enumerate(lines) if isinstance(line, dict) and line.get("event") == "start"]
    earlier = max(len(starts) - 1, 0)
    first = starts[-1] if earlier else 0
    reading = _Reading()
    for number, line in enumerate(lines[first:], first + 1):
        try:
            reading.see(line)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise LogError(f"{where!r}, line {number}: not a line of a run log ({reason}).") from error
    return replace(reading.run(), name=name, earlier=earlier)


class _Reading:
    """Collects lines. A resumed run goes on from a checkpoint: what the log holds beyond it was done over."""

    def __init__(self) -> None:
        self.start = Start()
        self.chosen: list[Chosen] = []
        self.steps: list[Step] = []
        self.peaks: list[tuple[int, int]] = []
        self.evaluations: list[Evaluation] = []
        self.notes: list[tuple[int, str]] = []
        self.resumed: list[int] = []
        self.roof: Roof | None = None
        self.resident: int | None = None
        self.ended = False

    def see(self, line: Any) -> None:
        """Take in one line; events that are not known are passed over."""
        event = line["event"]
        self.ended = self.ended and event not in ("step", "round", "resume")
        if line.get("resident") is not None:
            self.resident = max(self.resident or 0, int(_number(line["resident"])))
        if event == "start":
            self.start = _start(line)
        elif event == "round":
            self.chosen.append(_chosen(line))
        elif event == "step":
            self.steps.append(Step(int(line["step"]), _maybe(line["loss"]), _maybe(line["seconds"])))
        elif event == "memory":
            self.peaks.append((int(line["step"]), int(_number(line["measured"]))))
        elif event == "evaluated":
            scores = _maybe(line.get("accuracy")), _maybe(line.get("loss"))
            self.evaluations.append(Evaluation(int(line["step"]), str(line.get("split", "validation")), *scores))
        elif event == "note":
            self.notes.append((int(line["step"]), str(line["text"])))
        elif event == "roofline":
            self.roof = _roof(line)
        elif event == "resume":
            self._go_back(int(line["step"]))
        elif event == "end":
            self.ended = True

    def _go_back(self, step: int) -> None:
        self.resumed.append(step)
        self.chosen = [each for each in self.chosen if each.selection.step < step]  # the choice at a step comes after it
        self.steps = [each for each in self.steps if each.number <= step]
        self.peaks = [each for each in self.peaks if each[0] <= step]
        self.evaluations = [each for each in self.evaluations if each.step <= step]
        self.notes = [each for each in self.notes if each[0] <= step]

    def run(self) -> Run:
        begins = [each.selection.step for each in self.chosen]
        spans: list[list[Step]] = [[] for _ in range(len(begins) + 1)]
        for step in self.steps:
            spans[bisect_right(begins, step.number - 1)].append(step)
        chosen = list(self.chosen)
        for i, each in enumerate(chosen):
            until = begins[i + 1] if i + 1 < len(begins) else float("inf")
            peaks = [size for step, size in self.peaks if begins[i] < step <= until]
            chosen[i] = replace(each, steps=tuple(spans[i + 1]), bytes=max(peaks, default=None))
        return Run(
            name="",
            start=self.start,
            chosen=tuple(chosen),
            loose=tuple(spans[0]),
            evaluations=tuple(self.evaluations),
            notes=tuple(self.notes),
            roof=self.roof,
            resumed=tuple(self.resumed),
            resident=self.resident,
            ended=self.ended,
        )


def _start(line: Mapping[str, Any]) -> Start:
    said = {key: line[key] for key in ("policy", "when", "signal", "engine", "seed") if key in line}
    origin = {
        key: line["origin"][key] for key in ("device", "threads", "batch", "dtype", "torch", "taken") if key in line["origin"]
    }
    return Start(
        facts={key: str(value) for key, value in {**said, **origin, "pliant": line.get("pliant", "")}.items()},
        full=_cost(line["full"]),
        units=tuple(reversed([str(name) for name in line["units"]])),
        costs={str(name): _cost(cost) for name, cost in line.get("costs", {}).items()},
        split={str(part): _cost(cost) for part, cost in line.get("split", {}).items()},
        checks=tuple((_number(a), _number(b), _number(c)) for a, b, c in line.get("checks", ())),
        coverage=_maybe(line.get("coverage")),
        uncounted=tuple(str(name) for name in line.get("uncounted", ())),
        profiling_seconds=_maybe(line.get("profiling_seconds")),
    )


def _chosen(line: Mapping[str, Any]) -> Chosen:
    selection = Selection(
        units=tuple(Unit.from_json(unit) for unit in line["units"]),
        cost=_cost(line["cost"]),
        limit={str(name): _number(amount) for name, amount in line["limit"].items() if amount is not None},
        value=_maybe(line["value"]) or 0.0,
        round=int(line["round"]),
        step=int(line["step"]),
        full=_cost(line["full"]),
        values={str(name): _number(value) for name, value in line["values"].items() if value is not None},
        asked={str(name): _number(amount) for name, amount in line["asked"].items() if amount is not None},
    )
    split = {str(part): _cost(cost) for part, cost in line.get("split", {}).items()}
    return Chosen(selection, split, _maybe(line.get("choosing_seconds")) or 0.0)


def _roof(line: Mapping[str, Any]) -> Roof:
    rows = (
        Row(str(u["name"]), _number(u["seconds"]), int(_number(u["macs"])), int(_number(u["moved"]))) for u in line["units"]
    )
    return Roof(Peaks.from_json(line["peaks"]), tuple(rows))


def _cost(data: Mapping[str, Any]) -> Cost:
    joules = _maybe(data.get("joules"))
    return Cost(_number(data["seconds"]), int(_number(data["bytes"])), int(_number(data["macs"])), joules)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    if not abs(value) < 1e300:  # no sum of a few is infinite either
        raise ValueError(f"{value!r} is out of range")
    return float(value)


def _maybe(value: Any) -> float | None:
    return None if value is None else _number(value)
