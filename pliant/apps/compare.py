"""Recipes × budgets × seeds on one task, each in its own process; their results and their Pareto front."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from pliant.apps import run_folder, tasks
from pliant.apps.pareto import front
from pliant.apps.tasks import TaskError
from pliant.apps.train import Options, load_task
from pliant.cost import peaks
from pliant.runtime.files import write_aside

_COMMAND = (sys.executable, "-c", "from pliant.cli import main; main()", "train")


@dataclass(frozen=True)
class Cell:
    """One run of a comparison: a recipe, a budget ("time", "0.5"; empty if the recipe takes none) and a seed."""

    recipe: str
    kind: str
    amount: str
    seed: int

    @property
    def name(self) -> str:
        """A file name: other characters than letters, digits, dots, dashes and underscores become dashes.

        A short hash then tells what differs in them alone.
        """
        words = "-".join(filter(None, (self.recipe, self.kind, self.amount)))
        safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in words)
        if safe != words:
            safe += f"-{sha256(repr((self.recipe, self.kind, self.amount)).encode()).hexdigest()[:8]}"
        return f"{safe}-seed{self.seed}"

    @property
    def budget(self) -> str:
        return f"{self.kind}={self.amount}" if self.kind else ""


@dataclass(frozen=True)
class CellResult:
    """A cell that ran: its result (see `train.Result`), or its error."""

    cell: Cell
    result: Mapping[str, Any] | None
    error: str = ""


@dataclass(frozen=True)
class SummaryLine:
    """The mean over seeds of one recipe with one budget.

    `accuracy` is that of the validation split at the end of training. `seconds` covers the whole run, including measuring and
    choosing but not evaluating. `to_reference` is the time to the reference accuracy, over the seeds that `reached` it.
    `front`: no other line is at least as accurate in less time, or more accurate in the same time.
    """

    recipe: str
    budget: str
    seeds: int
    failed: int
    accuracy: float | None = None
    accuracies: tuple[float, ...] = ()
    seconds_per_step: float | None = None
    seconds: float | None = None
    to_reference: float | None = None
    reached: int = 0
    memory_bytes: float | None = None
    joules: float | None = None
    front: bool = False
    error: str = ""


@dataclass(frozen=True)
class Comparison:
    """The result of every cell, a line per recipe and budget, and the reference accuracy."""

    rows: tuple[CellResult, ...]
    lines: tuple[SummaryLine, ...]
    reference: float | None

    def to_json(self) -> dict[str, Any]:
        rows = [{**asdict(row.cell), "result": row.result, "error": row.error} for row in self.rows]
        return {
            "format": "pliant.comparison/1",
            "reference": self.reference,
            "lines": [asdict(line) for line in self.lines],
            "rows": rows,
        }


def cells(recipes: Iterable[str], budgets: Sequence[tuple[str, str]], seeds: Sequence[int]) -> list[Cell]:
    """Every recipe with every budget that it takes, for every seed. A recipe that takes no budget runs once per seed.

    >>> [cell.name for cell in cells(["full", "last"], [("time", "0.5"), ("macs", "0.5")], [0])]
    ['full-seed0', 'last-time-0.5-seed0']
    """
    out = []
    for recipe in dict.fromkeys(recipes):
        takes = tasks.budgets(recipe)
        usable = [(kind, amount) for kind, amount in dict.fromkeys(budgets) if kind in takes]
        if takes and not usable:
            raise TaskError(f"the recipe {recipe!r} needs a budget of {' or '.join(takes)}: give one, or leave the recipe out.")
        for kind, amount in usable or [("", "")]:
            budget: dict[str, Any] = {kind: amount} if kind else {}
            tasks.policy(recipe, **budget)  # a misspelt name or budget fails here, before anything runs
            out += [Cell(recipe, kind, amount, seed) for seed in dict.fromkeys(seeds)]
    if not out:
        raise TaskError("there is nothing to compare: give at least one recipe and one seed.")
    return out


def compare(
    base: Options,
    cells: Sequence[Cell],
    out: str | os.PathLike[str],
    *,
    jobs: int = 1,
    threads: int = 1,
    reference: float | None = None,
    on_row: Callable[[CellResult, int, int], None] | None = None,
) -> Comparison:
    """Run every cell in its own process, `jobs` at a time, and compare the results. `base` holds the options that all share.

    The folder has a file per cell, so that the same call continues a stopped comparison: finished cells are not run again,
    interrupted cells are resumed, failed cells are tried again. `on_row` is called with each result, the number of results so
    far and their total.

    The default reference is the accuracy of `full`.
    """
    place = Path(out)
    with run_folder.locked(place):
        (place / "cells").mkdir(exist_ok=True)
        rows: dict[Cell, CellResult] = {}

        def add(row: CellResult) -> None:
            rows[row.cell] = row
            if on_row is not None:
                on_row(row, len(rows), len(cells))

        for row in [row for cell in cells if (row := _finished(place, cell, base)) is not None]:
            add(row)
        left = [cell for cell in cells if cell not in rows]
        for cell in left:
            _check_begun(place, cell, base)
        if left:
            _prepare(base, threads)
        pool, running = ThreadPoolExecutor(jobs), _Running(threads)
        try:
            for row in pool.map(lambda cell: running.run(place, cell, base), left):
                add(row)
        finally:
            running.stop()
            pool.shutdown(cancel_futures=True)
        found = summary([rows[cell] for cell in cells], reference)
        write_aside(place / "comparison.json", json.dumps(found.to_json(), indent=1).encode())
    return found


def _prepare(base: Options, threads: int) -> None:
    """Report an error that every cell would have once, before any cell starts. Also measure the peaks of a CPU if they are not
    known yet: cells would measure them at the same time and disturb each other."""
    if torch.cuda.is_available() and base.device.startswith(("auto", "cuda")):
        return  # the GPU belongs to the cells alone
    with torch.random.fork_rng(devices=[]):
        load_task(base)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with suppress(RuntimeError):  # the log of each cell then says why there are no peaks
            peaks.peaks("cpu")
    finally:
        torch.set_num_threads(before)


def _options(base: Options, cell: Cell, place: Path) -> Options:
    budget: dict[str, Any] = {cell.kind: cell.amount} if cell.kind else {}
    out = os.fspath(place / "runs" / cell.name)
    return replace(base, recipe=cell.recipe, seed=cell.seed, out=out, keep_anyway=True, measure_memory=True, **budget)


def _finished(place: Path, cell: Cell, base: Options) -> CellResult | None:
    """The result of a cell that has finished, if there is one. A file of another comparison is an error."""
    file = place / "cells" / f"{cell.name}.json"
    if not file.exists():
        return None
    try:
        held = json.loads(file.read_text())
        was, result = dict(held["options"]), held["result"]
    except (ValueError, KeyError, TypeError) as error:
        raise TaskError(f"{os.fspath(file)!r} is not what a comparison writes. Remove it to run that cell again.") from error
    _check_same(place, was, asdict(_options(base, cell, place)), but=("out",))
    return CellResult(cell, result) if result is not None else None


def _check_begun(place: Path, cell: Cell, base: Options) -> None:
    """Refuse to resume a cell whose run began with other options."""
    options = _options(base, cell, place)
    if run_folder.Folder(Path(options.out or "")).run.exists():
        may_change = [field.name for field in fields(options) if field.metadata["may_change"]]
        _check_same(
            place, asdict(Options()) | run_folder.options_of(options.out or ""), asdict(options.resolved()), but=may_change
        )


def _check_same(place: Path, was: Mapping[str, Any], now: Mapping[str, Any], but: Sequence[str]) -> None:
    for name in now:
        if name not in but and was.get(name) != now[name]:
            raise TaskError(
                f"{os.fspath(place)!r} holds another comparison: {name} is {was.get(name)!r} there and {now[name]!r} here. "
                f"Choose another folder (--out)."
            )


class _Running:
    """The processes that run now. `stop` interrupts them, and each saves its state."""

    def __init__(self, threads: int) -> None:
        self._processes: set[subprocess.Popen[str]] = set()
        self._stopping = False
        alike = {"COLUMNS": "10000", "PLIANT_PROFILES": "off"}  # an error message is one line; every cell pays for measuring
        self._environment = {**os.environ, **alike, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}

    def run(self, place: Path, cell: Cell, base: Options) -> CellResult:
        """Run `pliant train` with the options of a cell, and write the result to its file."""
        if self._stopping:
            return CellResult(cell, None, "stopped")
        options = _options(base, cell, place)
        process = subprocess.Popen(
            [*_COMMAND, *_arguments(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
            start_new_session=True,  # only `stop` interrupts it, and only once
        )
        self._processes.add(process)
        if self._stopping:  # it may have been set since the check above
            process.send_signal(signal.SIGINT)
        try:
            stdout, stderr = process.communicate()
        finally:
            self._processes.discard(process)
        row = CellResult(cell, None, _last_line(stderr) or f"it ended with exit code {process.returncode}")
        if process.returncode == 0:
            row = CellResult(cell, json.loads(stdout))
        if not self._stopping:
            held = {"format": "pliant.cell/1", "options": asdict(options), "result": row.result, "error": row.error}
            write_aside(place / "cells" / f"{cell.name}.json", json.dumps(held, indent=1).encode())
        return row

    def stop(self) -> None:
        self._stopping = True
        for process in list(self._processes):
            process.send_signal(signal.SIGINT)


def _arguments(options: Options) -> list[str]:
    """Options as command-line arguments. An interrupted run needs only its folder, and its model, which may be code."""
    if options.out is not None and run_folder.Folder(Path(options.out)).run.exists():
        return ["--resume", "--model", options.model, "--out", options.out, "--keep-anyway", "--measure-memory", "--json"]
    out = []
    for field in fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            name = f"--{field.name.replace('_', '-')}"
            out += [name] if value is True else [f"{name}={value}"]
    return [*out, "--json"]


def _last_line(text: str) -> str:
    return " ".join(text.strip().splitlines()[-1:]).removeprefix("pliant: ")


# ---------------------------------------------------------------- summary


def summary(rows: Sequence[CellResult], reference: float | None = None) -> Comparison:
    """The mean over seeds of each recipe and budget, and the Pareto front."""
    if reference is None:
        full = [_end(row.result)["accuracy"] for row in rows if row.cell.recipe == "full" and row.result is not None]
        reference = fmean(full) if full else None
    groups: dict[tuple[str, str], list[CellResult]] = {}
    for row in rows:
        groups.setdefault((row.cell.recipe, row.cell.budget), []).append(row)
    lines = [_line(recipe, budget, group, reference) for (recipe, budget), group in groups.items()]
    best = front([(line.seconds, line.accuracy) for line in lines])
    return Comparison(tuple(rows), tuple(replace(line, front=i in best) for i, line in enumerate(lines)), reference)


def _end(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The evaluation at the end of a run."""
    last: Mapping[str, Any] = result["evaluations"][-1]
    return last


def _line(recipe: str, budget: str, group: Sequence[CellResult], reference: float | None) -> SummaryLine:
    results = [row.result for row in group if row.result is not None]
    errors = [row.error for row in group if row.result is None]
    line = SummaryLine(recipe, budget, len(group), len(errors), error=errors[0] if errors else "")
    if not results:
        return line
    accuracies = tuple(_end(result)["accuracy"] for result in results)
    times = [_seconds_to(reference, result) for result in results]
    reached = [time for time in times if time is not None]
    return replace(
        line,
        accuracy=fmean(accuracies),
        accuracies=accuracies,
        seconds_per_step=_mean(result["seconds_per_step"] for result in results),
        seconds=_mean(result["seconds"] for result in results),
        to_reference=_mean(reached),
        reached=len(reached),
        memory_bytes=_mean(result["memory_bytes"] for result in results),
        joules=_mean(result["joules"] for result in results),
    )


def _seconds_to(reference: float | None, result: Mapping[str, Any]) -> float | None:
    """The time of the first evaluation with at least the reference accuracy."""
    if reference is None:
        return None
    return next((one["seconds"] for one in result["evaluations"] if one["accuracy"] >= reference), None)


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean, or None if any value is unknown."""
    known = list(values)
    return fmean(value for value in known if value is not None) if known and None not in known else None
