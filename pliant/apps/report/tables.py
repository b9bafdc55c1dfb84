"""Runs → the tables and sentences that every form of the report shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from pliant.apps import pareto
from pliant.apps.report import tiles
from pliant.apps.report.run import Chosen, LoggedClasses, LoggedRoofline, Run
from pliant.core import text
from pliant.core.text import NOTHING, Table
from pliant.core.types import Cost

# resource → its name in a budget, and how amounts are written
RESOURCES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "seconds": ("time", text.seconds),
    "bytes": ("memory", text.size),
    "macs": ("compute", text.macs),
    "joules": ("energy", text.joules),
}
PARTS = ("forward", "dX", "dW", "optimizer")


def state(run: Run) -> str:
    if run.ended:
        return "finished"
    return "cut short" if run.torn else "running, or stopped without an end"


def facts(run: Run) -> Table:
    """The recipe, the device and other facts about a run."""
    names = {"policy": "recipe", "when": "chooses", "torch": "PyTorch", "pliant": "Pliant", "taken": "measured at"}
    rows = [(names.get(key, key), value) for key, value in run.start.facts.items() if value]
    rows += [("units", str(len(run.units))), ("rounds", str(len(run.rounds))), ("steps", str(len(run.steps)))]
    rows += [("process memory", text.size(run.resident))] if run.resident is not None else []
    rows += [("growth of its peak", text.size(run.growth))] if run.growth is not None else []
    rows += [("energy", text.joules(run.joules))] if run.joules is not None else []
    return Table("About this run", ("", ""), [*rows, ("state", state(run))], words=2)


def options(run: Run) -> Table:
    """The options of `pliant train`, as the run began with them."""
    return Table(
        "Options", ("option", "value"), [(name.replace("_", "-"), value) for name, value in run.options.items()], words=2
    )


def headline(run: Run) -> Table:
    """The numbers that the terminal and the page begin with."""
    rows = [(tile.name, tile.amount, "; ".join(filter(None, tile.notes))) for tile in tiles.tiles(run)]
    return Table("In short", ("", "", ""), rows, words=3)


def rates(run: Run) -> Table:
    """The learning rate at both ends of every round."""
    rows = []
    for round in run.rounds:
        known = [step.lr for each in round.chosen for step in each.steps if step.lr is not None]
        if known:
            rows.append((str(round.number), str(round.steps), text.number(known[0]), text.number(known[-1])))
    return Table("Learning rate in each round", ("round", "steps", "first", "last"), rows)


def by_class(found: LoggedClasses) -> Table:
    """Every class: how many samples, the share that was found, the share that was right when it was named, and what others
    are mostly taken for."""
    rows = []
    for i, name in enumerate(found.names):
        hits, count, named = found.confusion.get((i, i), 0), found.samples(i), found.named(i)
        others = [(n, -guess) for (true, guess), n in found.confusion.items() if true == i != guess]
        most = max(others, default=None)
        taken = f"{found.names[-most[1]]} ({most[0]})" if most is not None else NOTHING
        shares = (text.percent(hits / whole if whole else None) for whole in (count, named))
        rows.append((name, taken, str(count), *shares))
    columns = ("class", "mostly taken for", "samples", "found", "right when named")
    return Table(f"Results by class: {found.where}", columns, rows, words=2)


def labels(run: Run) -> list[str]:
    """The name of each selection: its round, and its number if the round was corrected."""
    before: Counter[int] = Counter()
    out = []
    for each in run.chosen:
        mine = each.selection.round
        place, before[mine] = before[mine], before[mine] + 1
        out.append(f"{mine}" if not place else f"{mine}, corrected" if place == 1 else f"{mine}, corrected {place}×")
    return out


def measured(chosen: Chosen, resource: str) -> float | None:
    return {"seconds": chosen.seconds, "bytes": chosen.bytes}.get(resource)


def limited(run: Run) -> list[str]:
    """Time, which is always measured, and the resources that have a budget."""
    return [r for r in RESOURCES if r == "seconds" or any(r in each.selection.asked for each in run.chosen)]


def predicted(run: Run, chosen: Chosen, resource: str) -> float | None:
    """The predicted cost of a step; None if the profile does not know that resource."""
    return getattr(chosen.selection.cost, resource) if getattr(run.full, resource) else None


def promises(run: Run, resource: str) -> Table:
    """What was asked, predicted and measured, for each selection: amounts, and shares of a plain full step."""
    name, write = RESOURCES[resource]
    full = getattr(run.full, resource) or 0.0

    def cells(amount: float | None) -> tuple[str, str]:
        return write(amount), text.share(amount / full if amount is not None and full else None)

    rows = []
    for label, each in zip(labels(run), run.chosen, strict=True):
        amounts = each.selection.asked.get(resource), predicted(run, each, resource), measured(each, resource)
        shown = [cell for amount in amounts for cell in cells(amount)]
        rows.append((label, str(each.selection.step + 1), str(len(each.steps)), *shown))
    columns = ("round", "from step", "steps", "asked", "share", "predicted", "share", "measured", "share")
    whole = f"; shares of a plain full step, which takes {write(full)}" if full else ""
    title = f"{name.capitalize()} per step: asked, predicted, measured{whole}"
    return Table(title, columns, rows)


def learning(run: Run) -> Table:
    """The first and the last loss of every round."""
    rows = []
    for round in run.rounds:
        losses = [step.loss for each in round.chosen for step in each.steps if step.loss is not None]
        ends = [text.number(losses[0]), text.number(losses[-1])] if losses else [NOTHING, NOTHING]
        rows.append((str(round.number), str(round.steps), *ends))
    return Table("Loss in each round", ("round", "steps", "first loss", "last loss"), rows)


def evaluations(run: Run) -> Table:
    rows = [(str(e.step), e.split, text.percent(e.accuracy), text.number(e.loss)) for e in run.evaluations]
    return Table("Accuracy", ("step", "split", "accuracy", "loss"), rows, words=2)


def units(run: Run) -> Table:
    """The cost of every unit, its last value and how often it was trained."""
    rows = []
    full = run.full
    for name in run.units:
        cost, value = run.start.costs.get(name), run.rounds[-1].value(name) if run.rounds else None
        alone = text.share(cost.seconds / full.seconds) if cost and full.seconds else NOTHING
        amounts = (text.seconds(cost.seconds), alone, text.size(cost.bytes)) if cost else (NOTHING,) * 3
        rows.append((name, text.number(value), *amounts, text.percent(run.trained(name))))
    columns = ("unit", "last value", "step with it alone", "share of full", "its memory", "of steps trained")
    return Table("Units from input to output", columns, rows)


def splits(run: Run, resource: str) -> list[tuple[str, dict[str, Cost]]]:
    """Predicted steps by part (forward, dX, dW, optimizer): a plain full step, the mean step, the last one."""
    out = [("a plain full step", dict(run.start.split))]
    if resource != "bytes":  # peaks have no mean
        out.append(("this run, mean step", run.mean_split()))
    last = next((each for each in reversed(run.chosen) if each.split), None)
    if last is not None and (resource == "bytes" or len({each.selection.cost for each in run.chosen}) > 1):
        out.append((f"round {last.selection.round}", dict(last.split)))
    return [(name, split) for name, split in out if split and any(getattr(cost, resource) for cost in split.values())]


def split(run: Run, resource: str) -> Table:
    name, write = RESOURCES[resource]
    rows = []
    for what, parts in splits(run, resource):
        amounts = [getattr(parts[part], resource) if part in parts else 0.0 for part in PARTS]
        rows.append((what, *(write(amount) for amount in amounts), write(sum(amounts))))
    what = "Live tensors at a step’s peak" if resource == "bytes" else f"{name.capitalize()} of a step"
    title = f"{what}, as predicted, by part"
    return Table(title, ("", *PARTS, "total"), rows)


def roofline(roof: LoggedRoofline) -> Table:
    """The numbers of the roofline plot."""
    rows = []
    for row in roof.rows:
        bound = row.bound(roof.peaks)
        rows.append((row.name, bound, text.seconds(row.seconds), text.number(row.intensity), text.number(row.rate / 1e9)))
    return Table("Roofline of the backward pass", ("unit", "bound by", "time", "FLOP/byte", "GFLOP/s"), rows, words=2)


def comparison(runs: Sequence[Run]) -> Table:
    """One line per run; a star marks those that no other run beats in accuracy and time."""
    best, metered = front(runs), any(run.joules is not None for run in runs)
    rows = []
    for i, run in enumerate(runs):
        score, mean, full = run.best, run.step_seconds, run.full.seconds
        rows.append(
            (
                f"{run.name} ★" if i in best else run.name,
                run.start.facts.get("policy", NOTHING),
                f"{text.percent(score.accuracy)} {score.split}" if score else NOTHING,
                text.seconds(run.seconds),
                text.seconds(mean),
                text.share(mean / full if mean is not None and full else None),
                text.size(run.bytes),
                *([text.joules(run.joules)] if metered else []),
                str(len(run.steps)),
            )
        )
    energy = ("energy",) if metered else ()
    columns = ("run", "recipe", "best accuracy", "training time", "mean step", "of full step", "peak memory", *energy, "steps")
    return Table("Runs side by side; ★: no other is both more accurate and faster", columns, rows, words=2)


def front(runs: Sequence[Run]) -> list[int]:
    """Positions of the runs on the Pareto front of training time and accuracy, fastest first."""
    best = pareto.front([(run.seconds, run.best.accuracy if run.best is not None else None) for run in runs])
    return sorted(best, key=lambda i: (runs[i].seconds, i))


def gaps(run: Run) -> list[str]:
    """What is missing in the log, and what is a prediction and not a measurement."""
    out = []
    if run.torn:
        out.append("The log's last line was cut short. This report ends with the last whole line.")
    if not run.ended:
        out.append("The log has no end: the run is still training, or it stopped without closing its session.")
    if run.earlier:
        out.append(f"The log holds {run.earlier} earlier run{'s' * (run.earlier > 1)}, which this report leaves out.")
    out += [f"The run was resumed at step {step}: repeated steps are shown once." for step in run.resumed]
    if run.loose:
        out.append(f"{len(run.loose)} steps come before the first selection in this log: what they trained is not known.")
    if not run.evaluations:
        out.append(
            "Accuracy: the log has no evaluation. `pliant train` writes them; your own loop can log the event “evaluated”."
        )
    if any(step.loss is None for step in run.steps):
        out.append("Loss: some steps have none. The session does not see it in your own loop, or it was not finite.")
    if run.chosen and run.bytes is None:
        out.append("Memory is predicted, not measured: it is measured only with a memory budget.")
    costs = run.full, *(each.selection.cost for each in run.chosen)
    if run.joules is None and not any(cost.joules is not None for cost in costs):
        out.append("Energy: no meter was read.")
    if run.chosen and not run.full.seconds:
        out.append("Seconds are measured but not predicted: this recipe counts costs instead of timing them.")
    if run.start.split:
        out.append(
            "The split into forward, dX, dW and optimizer is predicted by the profile; it was not measured during the run."
        )
    else:
        out.append(
            "Costs of units and the split of a step are not in this log: an older version wrote it, or its start is missing."
        )
    if run.start.checks:
        worst = max((abs(predicted / fastest - 1) for predicted, fastest, _ in run.start.checks if fastest), default=0.0)
        out.append(f"Predictions of the profile differ from measured steps by up to {worst:.1%}.")
    if run.start.coverage is not None and run.start.coverage < 1:
        out.append(f"Timed nodes cover {run.start.coverage:.1%} of the backward pass; the rest is spread over them.")
    if run.start.uncounted:
        out.append(f"Operations whose multiply-accumulates were not counted: {', '.join(run.start.uncounted)}.")
    if run.roof is None:
        out.append(f"Roofline: {run.no_roof or 'not in the log'}.")
    out.append("Training time includes measuring, choosing and steps, but not evaluating and saving.")
    return out


def strip(run: Run) -> str:
    """The selection map in characters: one line per unit from the input to the loss, one column per round."""
    width = max(len(text.plain(name)) for name in run.units) if run.units else 0
    lines = [
        f"{text.plain(name).ljust(width)}  {''.join('·░▒▓█'[-int(-4 * round.trained(name) // 1)] for round in run.rounds)}"
        for name in run.units
    ]
    return "\n".join([*lines, "", "█ trained in all steps of a round, ▓▒░ in some, · in none"])


Part = Table | list[str] | str  # a table, a list of sentences, or preformatted text


def parts(run: Run) -> list[tuple[str, list[Part]]]:
    """The whole report of one run, by heading."""
    about: list[Part] = [headline(run), facts(run), *([options(run)] if run.options else [])]
    out: list[tuple[str, list[Part]]] = [("About", about)]
    if run.chosen:
        out.append(("Asked, predicted, measured", [promises(run, resource) for resource in limited(run)]))
        more = [table for table in (evaluations(run), rates(run), *map(by_class, run.by_class)) if table.rows]
        out.append(("Learning", [learning(run), *more]))
        out.append(("Selection map", [strip(run)]))
        out.append(("Units", [units(run)]))
    costs = [split(run, resource) for resource in ("seconds", "bytes") if splits(run, resource)]
    if costs:
        out.append(("Where a step's time and memory go", [*costs]))
    if run.roof is not None:
        out.append(("Roofline", [roofline(run.roof)]))
    if run.notes:
        out.append(("Notes", [[f"step {step}: {note}" for step, note in run.notes]]))
    out.append(("What was not measured", [gaps(run)]))
    return out
