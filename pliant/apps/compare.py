"""Recipes × budgets × seeds on one task, a process for each; what they came to, and which of them no other one beats."""

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
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from pliant.apps import run_folder as folder
from pliant.apps import tasks as task
from pliant.apps.tasks import TaskError
from pliant.apps.train import Options
from pliant.cost import roofline
from pliant.runtime.files import write_aside

_COMMAND = (sys.executable, "-c", "from pliant.cli import main; main()", "train")


@dataclass(frozen=True)
class Cell:
    """One run of a comparison: a recipe, what it may spend ("time", 0.5; nothing where it keeps no budget), a seed."""

    recipe: str
    kind: str
    amount: str
    seed: int

    @property
    def name(self) -> str:
        """For files: what is not a letter, a digit or a dot becomes a dash."""
        words = "-".join(filter(None, (self.recipe, self.kind, self.amount, f"seed{self.seed}")))
        return "".join(c if c.isalnum() or c in "._" else "-" for c in words)

    @property
    def budget(self) -> str:
        return f"{self.kind}={self.amount}" if self.kind else ""


@dataclass(frozen=True)
class Row:
    """A cell that ran: its result (see `train.Result`), or the error that it ended with."""

    cell: Cell
    result: Mapping[str, Any] | None
    error: str = ""


@dataclass(frozen=True)
class Line:
    """A recipe with a budget, over its seeds: means, and the least and the most where they are told.

    `accuracy` is that at the end of training, on the validation split. `seconds` are those of the whole run, measuring and
    choosing included, evaluating not. `to_reference` is the mean of those seeds that came as far (`reached`). `front`: no other
    line is at least as accurate in less time, or more accurate in as much.
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
    """All rows, a line for each recipe and budget, and the accuracy that times are told to."""

    rows: tuple[Row, ...]
    lines: tuple[Line, ...]
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
    """Every recipe with every budget that it keeps, for every seed. One that keeps none runs without.

    >>> [cell.name for cell in cells(["full", "last"], [("time", "0.5"), ("macs", "0.5")], [0])]
    ['full-seed0', 'last-time-0.5-seed0']
    """
    out = []
    for recipe in dict.fromkeys(recipes):
        keeps = task.budgets(recipe)
        kept = [(kind, amount) for kind, amount in dict.fromkeys(budgets) if kind in keeps]
        if keeps and not kept:
            raise TaskError(f"the recipe {recipe!r} keeps {' and '.join(keeps)}: give such a budget, or leave it out.")
        for kind, amount in kept or [("", "")]:
            budget: dict[str, Any] = {kind: amount} if kind else {}
            task.policy(recipe, **budget)  # what is misspelt is told before anything runs
            out += [Cell(recipe, kind, amount, seed) for seed in dict.fromkeys(seeds)]
    if not out:
        raise TaskError("there is nothing to compare: give recipes and seeds.")
    return out


def compare(
    base: Options,
    run: Sequence[Cell],
    out: str | os.PathLike[str],
    *,
    jobs: int = 1,
    threads: int = 1,
    reference: float | None = None,
    watch: Callable[[Row, int, int], None] | None = None,
) -> Comparison:
    """Run every cell in a process of its own, `jobs` at a time, and compare. `base` holds what all of them share.

    The folder keeps a file for each cell, so that the same call goes on where it was stopped: what ended well is not run again,
    what was cut off is resumed, what failed is tried once more. `watch` is told of each row, and how many of all are there.

    The reference accuracy is, unless given, what `full` comes to.
    """
    place = Path(out)
    with folder.locked(place):
        (place / "cells").mkdir(exist_ok=True)
        rows: dict[Cell, Row] = {}
        for cell in run:
            known = _known(place, cell, base)
            if known is not None:
                rows[cell] = known
        done = 0
        for row in rows.values():
            done += 1
            if watch is not None:
                watch(row, done, len(run))
        left = [cell for cell in run if cell not in rows]
        if left:
            _prepare(base, threads)
        pool, running = ThreadPoolExecutor(jobs), _Running(threads)
        try:
            for row in pool.map(lambda cell: running.run(place, cell, base), left):
                rows[row.cell] = row
                done += 1
                if watch is not None:
                    watch(row, done, len(run))
        finally:
            running.stop()
            pool.shutdown(cancel_futures=True)
        found = summary([rows[cell] for cell in run], reference)
        write_aside(place / "comparison.json", json.dumps(found.to_json(), indent=1).encode())
    return found


def _prepare(base: Options, threads: int) -> None:
    """What every cell would stumble over is told once, before any begins. And a CPU's peaks are measured if nobody has yet:
    cells would do so side by side, and each disturb the other."""
    if torch.cuda.is_available() and base.device.startswith(("auto", "cuda")):
        return  # a GPU is the cells' alone
    with torch.random.fork_rng(devices=[]):
        task.load(
            base.model,
            base.data,
            size=base.size,
            seed=0,
            device=base.device,
            scratch=base.scratch,
            validation=base.validation,
        )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with suppress(RuntimeError):  # then a cell's log says why it has none
            roofline.peaks("cpu")
    finally:
        torch.set_num_threads(before)


def _options(base: Options, cell: Cell, place: Path) -> Options:
    budget: dict[str, Any] = {cell.kind: cell.amount} if cell.kind else {}
    out = os.fspath(place / "runs" / cell.name)
    return replace(base, recipe=cell.recipe, seed=cell.seed, out=out, keep_anyway=True, measure_memory=True, **budget)


def _known(place: Path, cell: Cell, base: Options) -> Row | None:
    """The row of a cell that ended well, if there is one. Of another comparison, it is an error."""
    file = place / "cells" / f"{cell.name}.json"
    if not file.exists():
        return None
    try:
        held = json.loads(file.read_text())
        was, result = dict(held["options"]), held["result"]
    except (ValueError, KeyError, TypeError) as error:
        raise TaskError(f"{os.fspath(file)!r} is not what a comparison wrote: remove it to run that cell again.") from error
    for name, now in asdict(_options(base, cell, place)).items():
        if name != "out" and was.get(name) != now:
            raise TaskError(
                f"{os.fspath(place)!r} holds another comparison: {name} is {was.get(name)!r} there and {now!r} here. Choose "
                f"another folder (--out)."
            )
    return Row(cell, result) if result is not None else None


class _Running:
    """The processes that run now, so that they can be asked to stop: each saves itself then."""

    def __init__(self, threads: int) -> None:
        self._processes: set[subprocess.Popen[str]] = set()
        self._stopping = False
        one_line = {"COLUMNS": "10000"}  # of an error
        self._environment = {**os.environ, **one_line, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}

    def run(self, place: Path, cell: Cell, base: Options) -> Row:
        """One `pliant train` with a cell's options; its row is a file before it is told."""
        if self._stopping:
            return Row(cell, None, "stopped")
        options = _options(base, cell, place)
        process = subprocess.Popen(
            [*_COMMAND, *_arguments(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
            start_new_session=True,  # Ctrl-C comes from us, once
        )
        self._processes.add(process)
        if self._stopping:  # meanwhile
            process.send_signal(signal.SIGINT)
        try:
            said, complaint = process.communicate()
        finally:
            self._processes.discard(process)
        row = Row(cell, None, _last_line(complaint) or f"it ended with exit code {process.returncode}")
        if process.returncode == 0:
            row = Row(cell, json.loads(said))
        if not self._stopping:
            held = {"format": "pliant.cell/1", "options": asdict(options), "result": row.result, "error": row.error}
            write_aside(place / "cells" / f"{cell.name}.json", json.dumps(held, indent=1).encode())
        return row

    def stop(self) -> None:
        self._stopping = True
        for process in list(self._processes):
            process.send_signal(signal.SIGINT)


def _arguments(options: Options) -> list[str]:
    """Options as the command line has them; a run that was cut off needs no more than its folder."""
    if options.out is not None and folder.Folder(Path(options.out)).run.exists():
        return ["--resume", "--out", options.out, "--keep-anyway", "--measure-memory", "--json"]
    out = []
    for field in fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            name = f"--{field.name.replace('_', '-')}"
            out += [name] if value is True else [f"{name}={value}"]
    return [*out, "--json"]


def _last_line(text: str) -> str:
    return " ".join(text.strip().splitlines()[-1:]).removeprefix("pliant: ")


# ---------------------------------------------------------------- what they came to


def summary(rows: Sequence[Row], reference: float | None = None) -> Comparison:
    """Rows as lines. Pure: the same rows, the same lines."""
    if reference is None:
        full = [_end(row.result)["accuracy"] for row in rows if row.cell.recipe == "full" and row.result is not None]
        reference = fmean(full) if full else None
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.cell.recipe, row.cell.budget), []).append(row)
    lines = [_line(recipe, budget, group, reference) for (recipe, budget), group in groups.items()]
    best = front([(line.seconds, line.accuracy) for line in lines])
    return Comparison(tuple(rows), tuple(replace(line, front=i in best) for i, line in enumerate(lines)), reference)


def _end(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The evaluation at the end of a run."""
    last: Mapping[str, Any] = result["evaluations"][-1]
    return last


def _line(recipe: str, budget: str, group: Sequence[Row], reference: float | None) -> Line:
    results = [row.result for row in group if row.result is not None]
    errors = [row.error for row in group if row.result is None]
    line = Line(recipe, budget, len(group), len(errors), error=errors[0] if errors else "")
    if not results:
        return line
    accuracies = tuple(_end(result)["accuracy"] for result in results)
    times = [_reached(result, reference) for result in results]
    came = [time for time in times if time is not None]
    return replace(
        line,
        accuracy=fmean(accuracies),
        accuracies=accuracies,
        seconds_per_step=_mean(result["seconds_per_step"] for result in results),
        seconds=_mean(result["seconds"] for result in results),
        to_reference=_mean(came),
        reached=len(came),
        memory_bytes=_mean(result["memory_bytes"] for result in results),
        joules=_mean(result["joules"] for result in results),
    )


def _reached(result: Mapping[str, Any], reference: float | None) -> float | None:
    """When a run was first seen to be as accurate as the reference; evaluations are the only times at which it is."""
    if reference is None:
        return None
    return next((one["seconds"] for one in result["evaluations"] if one["accuracy"] >= reference), None)


def _mean(values: Iterable[float | None]) -> float | None:
    """None where one of them is: half a mean is none."""
    known = list(values)
    return fmean(value for value in known if value is not None) if known and None not in known else None


def front(points: Sequence[tuple[float | None, float | None]]) -> set[int]:
    """Positions of the (cost, gain) that no other one beats: the Pareto front. What is not known is not on it.

    >>> sorted(front([(1.0, 0.5), (2.0, 0.9), (3.0, 0.8), (2.0, None)]))
    [0, 1]
    """
    known = [(i, cost, gain) for i, (cost, gain) in enumerate(points) if cost is not None and gain is not None]
    return {i for i, cost, gain in known if not any(c <= cost and g >= gain and (c, g) != (cost, gain) for _, c, g in known)}
