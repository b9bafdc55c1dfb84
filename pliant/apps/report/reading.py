"""A run log on disk → one run, without the steps that a resumed run repeated."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from pliant.apps.report.run import Chosen, LoggedClasses, LoggedEvaluation, LoggedRoofline, Run, Start, Step
from pliant.core.errors import PliantError
from pliant.core.types import Cost, Selection, Unit
from pliant.cost.roofline import Peaks, RooflineRow

LOG = "run.jsonl"  # its name inside a run's folder
_OPTIONS = "run.json"  # what `pliant train` writes there first


class LogError(PliantError, ValueError):
    """A log that does not exist, or that is not the log of a run."""


class NothingYet(LogError):
    """A log that will be one: its run has only just begun."""


def log_of(run: str | os.PathLike[str]) -> Path:
    """The path of a run's log, from the folder of the run or from the log itself. A run that has just begun has none yet."""
    given = Path(run)
    log = given / LOG if given.is_dir() else given
    if not log.is_file() and not (log != given and (given / _OPTIONS).is_file()):
        what = f"there is no {LOG} in the folder {os.fspath(given)!r}" if log != given else f"there is no {os.fspath(given)!r}"
        raise LogError(f"{what}. Give a run's folder or its log: what Session(log=…) writes.")
    return log


def load(run: str | os.PathLike[str]) -> Run:
    """Read a run's log up to its last whole line."""
    return Tail(run).read()


class Tail:
    """Reads a log again and again while it grows: each time, only the new lines.

    An incomplete last line waits for the next read. A log that was truncated or replaced is read from its beginning.
    """

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.log = log_of(run)
        self._forget()

    def _forget(self) -> None:
        self._file: tuple[int, int] | None = None  # device and inode of the file
        self._read = 0  # bytes, up to the end of a whole line
        self._last = b""  # the line that ends there
        self._written: float | None = None  # when the log was last written to
        self._collected = Lines(os.fspath(self.log))

    def read(self) -> Run:
        """The run as its log describes it now."""
        where = os.fspath(self.log)
        try:
            torn = self._see_more()
        except OSError as error:
            if not self._read and isinstance(error, FileNotFoundError):
                raise NothingYet(f"there is no {where!r} yet: the run has logged nothing. Try again later.") from error
            self._forget()
            raise LogError(f"{where!r} cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:  # not JSON
            self._forget()
            raise LogError(f"{where!r} is not a run log: {error}") from error
        if not self._collected.count and self._collected.skipped:
            first = self._collected.skipped[0]
            raise LogError(
                f"{where!r} is not a run log: it holds no text of one (line {first}). Give a file that Session(log=…) writes."
            )
        if not self._collected.count:
            state = "holds no whole line" if torn else "is empty"
            raise NothingYet(f"{where!r} {state}: the run has logged nothing yet. Try again after its first step.")
        return replace(self._collected.run(self.name), torn=torn, written=self._written)

    @property
    def name(self) -> str:
        """The name of the run: that of its folder, or of its log if that has a name of its own."""
        return self.log.resolve().parent.name if self.log.name == LOG else self.log.stem

    def _see_more(self) -> bool:
        """Read the complete new lines; returns whether an incomplete line follows them."""
        with open(self.log, "rb") as file:
            status = os.fstat(file.fileno())
            which = status.st_dev, status.st_ino
            if self._read and (self._file != which or not self._has_grown(file)):
                self._forget()
            self._file, self._written = which, status.st_mtime
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return True
                try:
                    self._collected.see(_event(line))
                except json.JSONDecodeError:
                    self._collected.skip()
                self._read += len(line)
                self._last = line
        return False

    def _has_grown(self, file: BinaryIO) -> bool:
        """Whether the last line that was read is still at the same place."""
        file.seek(self._read - len(self._last))
        return file.read(len(self._last)) == self._last


def _event(line: bytes) -> Any:
    """A line as data; a character that is damaged is replaced by one that says so."""
    try:
        return json.loads(line)
    except UnicodeDecodeError:
        return json.loads(line.decode("utf-8", "replace"))


def named(runs: Iterable[Run]) -> list[Run]:
    """The runs, numbered if several have the same name."""
    out: list[Run] = []
    for run in runs:
        same = sum(other.name == run.name or other.name.startswith(f"{run.name} (") for other in out)
        out.append(replace(run, name=f"{run.name} ({same + 1})") if same else run)
    return out


class Lines:
    """Collects the lines of a log and gives the run that they describe so far.

    If a file holds several runs, only the last one counts, and errors in earlier lines are ignored.
    """

    def __init__(self, where: str) -> None:
        self.count = 0
        self.skipped: list[int] = []  # numbers of damaged lines
        self._where = where
        self._starts = 0
        self._reading = _Reading()
        self._has_choice = self._has_event = False  # a line about what was chosen or will be; any event
        self._announced = False  # a line "run" came, whose "start" is yet to come
        self._wrong: LogError | None = None

    def skip(self) -> None:
        """A line that is no JSON: something damaged the file, and the other lines count."""
        self.skipped.append(self.count + len(self.skipped) + 1)

    def see(self, line: Any) -> None:
        self.count += 1
        event = line.get("event") if isinstance(line, dict) else None
        self._has_event |= isinstance(line, dict) and "event" in line
        self._has_choice |= event in ("run", "start", "round", "resume")
        if event == "run" or (event == "start" and not self._announced):
            self._starts += 1
            if self._starts > 1:
                self._reading, self._wrong = _Reading(), None
        self._announced = event == "run" or (self._announced and event != "start")
        if self._wrong is not None:
            return
        try:
            self._reading.see(line)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            self._wrong = LogError(
                f"{self._where!r}, line {self.count + len(self.skipped)}: not a line of a run log ({reason})."
            )
            self._wrong.__cause__ = error

    def run(self, name: str) -> Run:
        if not self._has_choice and self._has_event:
            raise NothingYet(
                f"{self._where!r} does not say yet what was chosen: the run logged too little. Try again after its first step."
            )
        if not self._has_choice:
            raise LogError(
                f"{self._where!r} is not a run log: no line in it says what was chosen. Give a file that Session(log=…) writes."
            )
        if self._wrong is not None:
            raise self._wrong
        run = self._reading.run()
        at = run.steps[-1].number if run.steps else 0
        damaged = tuple((at, f"line {number} of the log is damaged and was left out") for number in self.skipped)
        return replace(run, name=name, earlier=max(self._starts - 1, 0), notes=(*run.notes, *damaged))


class _Reading:
    """Collects the events of one run. A resumed run continues from a checkpoint: earlier events after it are dropped."""

    def __init__(self) -> None:
        self.start = Start()
        self.chosen: list[Chosen] = []
        self.steps: list[Step] = []
        self.peaks: list[tuple[int, int]] = []
        self.evaluations: list[LoggedEvaluation] = []
        self.notes: list[tuple[int, str]] = []
        self.resumed: list[int] = []
        self.roof: LoggedRoofline | None = None
        self.no_roof = ""
        self.resident: int | None = None
        self.growth: int | None = None
        self.options: dict[str, str] = {}
        self.total_steps: int | None = None
        self.by_class: dict[str, LoggedClasses] = {}
        self.result: dict[str, float] = {}
        self.began: tuple[float | None, int] = None, 0
        self.ended = False

    def see(self, line: Any) -> None:
        """Add one line; unknown events are ignored."""
        event = line["event"]
        if event in ("step", "round", "resume"):  # it goes on
            self.ended, self.result = False, {}
        if line.get("resident") is not None:
            self.resident = max(self.resident or 0, int(_number(line["resident"])))
        if line.get("growth") is not None:
            self.growth = max(self.growth or 0, int(_number(line["growth"])))
        if event == "run":
            self.options = {str(name): str(value) for name, value in line["options"].items() if value not in (None, False)}
            self.total_steps = int(_number(line["total_steps"]))
        elif event == "start":
            self.start = _start(line)
            self.began = _maybe(line.get("at")), 0
            if line.get("total_steps") is not None:
                self.total_steps = int(_number(line["total_steps"]))
        elif event == "round":
            self.chosen.append(_chosen(line))
        elif event == "step":
            self.steps.append(Step(int(line["step"]), _maybe(line["loss"]), _maybe(line["seconds"]), _maybe(line.get("lr"))))
        elif event == "memory":
            self.peaks.append((int(line["step"]), int(_number(line["measured"]))))
        elif event == "evaluated":
            scores = _maybe(line.get("accuracy")), _maybe(line.get("loss")), _maybe(line.get("seconds"))
            self.evaluations.append(LoggedEvaluation(int(line["step"]), str(line.get("split", "validation")), *scores))
        elif event == "note":
            self.notes.append((int(line["step"]), str(line["text"])))
        elif event == "roofline":
            self.no_roof = str(line.get("why", ""))
            self.roof = None if self.no_roof else _roof(line)
        elif event == "classes":
            found = _by_class(line)
            self.by_class[found.where] = found
        elif event == "summary":
            self.result = {name: float(value) for name, value in line.items() if isinstance(value, (bool, int, float))}
        elif event == "resume":
            self.began = _maybe(line.get("at")), int(line["step"])
            self._go_back(int(line["step"]))
        elif event == "end":
            self.ended = True

    def _go_back(self, step: int) -> None:
        self.resumed.append(step)
        self.chosen = [
            each for each in self.chosen if each.selection.step < step
        ]  # a selection at a step is made after that step
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
            no_roof=self.no_roof,
            resumed=tuple(self.resumed),
            resident=self.resident,
            growth=self.growth,
            options=self.options,
            total_steps=self.total_steps,
            by_class=tuple(self.by_class.values()),
            result=self.result,
            began=self.began,
            ended=self.ended,
        )


def _start(line: Mapping[str, Any]) -> Start:
    facts = {key: line[key] for key in ("policy", "when", "signal", "engine", "seed") if key in line}
    origin = {
        key: line["origin"][key] for key in ("device", "threads", "batch", "dtype", "torch", "taken") if key in line["origin"]
    }
    return Start(
        facts={key: str(value) for key, value in {**facts, **origin, "pliant": line.get("pliant", "")}.items()},
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


def _by_class(line: Mapping[str, Any]) -> LoggedClasses:
    names, confusion = tuple(map(str, line["classes"])), dict[tuple[int, int], int]()
    for true, guess, count in line["confusion"]:
        pair = int(_number(true)), int(_number(guess))
        if not all(0 <= label < len(names) for label in pair):
            raise ValueError(f"there is no class {max(pair)}")
        confusion[pair] = int(_number(count))
    split = str(line.get("split") or line.get("data") or "validation")
    where = f"{split} split" if split in ("train", "validation", "test") else split
    return LoggedClasses(f"{where}, {line.get('weights', 'last')} weights (step {int(line['step'])})", names, confusion)


def _roof(line: Mapping[str, Any]) -> LoggedRoofline:
    rows = (
        RooflineRow(str(u["name"]), _number(u["seconds"]), int(_number(u["macs"])), int(_number(u["moved"])))
        for u in line["units"]
    )
    return LoggedRoofline(Peaks.from_json(line["peaks"]), tuple(rows))


def _cost(data: Mapping[str, Any]) -> Cost:
    joules = _maybe(data.get("joules"))
    return Cost(_number(data["seconds"]), int(_number(data["bytes"])), int(_number(data["macs"])), joules)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is not a number")
    if not abs(value) < 1e300:  # so that a sum of a few is finite too
        raise ValueError(f"{value!r} is out of range")
    return float(value)


def _maybe(value: Any) -> float | None:
    return None if value is None else _number(value)
