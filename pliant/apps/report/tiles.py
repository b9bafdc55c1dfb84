"""The numbers at the top of a report, and how far a run has come."""

from __future__ import annotations

from dataclasses import dataclass

from pliant.apps.report.run import Run
from pliant.core import text


@dataclass(frozen=True)
class Tile:
    """One of the numbers at the top of a report, with what it means."""

    name: str
    amount: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Progress:
    """How far a run has come: a share between 0 and 1, None where its length is unknown, and that in words."""

    share: float | None
    said: str


def tiles(run: Run) -> list[Tile]:
    found = (_accuracy(run), _time(run), _step(run), _memory(run), _energy(run), _trained(run))
    return [tile for tile in found if tile is not None]


def progress(run: Run) -> Progress | None:
    """None for a run that has ended."""
    if run.ended:
        return None
    done = run.steps[-1].number if run.steps else 0
    share = None if not run.total_steps else min(done / run.total_steps, 1.0)
    of = "" if share is None else f" of {run.total_steps} ({share:.0%})"
    if run.steps:
        left = run.seconds_left
        return Progress(share, f"step {done}{of}" + ("" if left is None else f", {text.seconds(left)} left"))
    if run.chosen:
        return Progress(share, f"first steps{of and f', 0{of}'}")
    if run.start.units:
        return Progress(share, "costs are measured; choosing what to train")
    if run.evaluations:
        return Progress(share, "measuring what each layer costs, which takes as long as about seven full steps")
    return Progress(share, "starting")


def _accuracy(run: Run) -> Tile | None:
    last, best = run.accuracy, run.best
    if last is None or best is None:
        return None
    first = next(each for each in run.evaluations if each.split == last.split)
    more = [f"last {text.percent(last.accuracy)}"] if last is not best else []
    more += [f"{text.percent(first.accuracy)} before training"] if first.step == 0 and first is not best else []
    return Tile("Best accuracy", text.percent(best.accuracy), (f"{best.split}, step {best.step}", ", ".join(more)))


def _time(run: Run) -> Tile | None:
    if not run.steps:
        return None
    full = run.result.get("full_seconds")
    whole = f"full training: {text.seconds(full)}" if full is not None else f"{len(run.steps)} steps"
    return Tile("Training time", text.seconds(run.seconds), ("with measuring and choosing", whole))


def _step(run: Run) -> Tile | None:
    step, full = run.step_seconds, run.full.seconds
    if step is None:
        return None
    if not full:
        return Tile("Mean step", text.seconds(step), ("measured",))
    asked = run.chosen[-1].selection.asked.get("seconds") if run.chosen else None
    promise = f"; asked {text.share(asked / full)}" if asked is not None else ""
    return Tile("Mean step", text.seconds(step), (f"{text.share(step / full)} of a full step{promise}",))


def _memory(run: Run) -> Tile | None:
    if not run.chosen or not run.full.bytes:
        return None
    peak, asked = run.bytes, run.chosen[-1].selection.asked.get("bytes")
    promise = f"asked {text.size(asked)}" if asked is not None else f"a full step: {text.size(run.full.bytes)}"
    if peak is None:
        predicted = max(each.selection.cost.bytes for each in run.chosen)
        return Tile("Training memory", text.size(predicted), ("predicted, not measured", promise))
    return Tile("Training memory", text.size(peak), ("measured, beyond inference", promise))


def _energy(run: Run) -> Tile | None:
    return None if run.joules is None else Tile("Energy", text.joules(run.joules), ("measured, whole run",))


def _trained(run: Run) -> Tile | None:
    if not run.chosen:
        return None
    last = run.chosen[-1].selection
    return Tile("Trained", f"{len(last.units)} of {len(run.units)}", (f"units in round {last.round}",))
