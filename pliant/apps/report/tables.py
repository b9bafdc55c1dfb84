"""One run, or several → tables and sentences: what every form of the report says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pliant.apps.report.run import Chosen, Roof, Run
from pliant.core import text
from pliant.core.text import NOTHING, Table
from pliant.core.types import Cost

# resource → how a budget calls it, and how its amounts are written
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
    """Who ran what on which device."""
    names = {"policy": "recipe", "when": "chooses", "torch": "PyTorch", "pliant": "Pliant", "taken": "measured at"}
    rows = [(names.get(key, key), value) for key, value in run.start.facts.items() if value]
    rows += [("units", str(len(run.units))), ("rounds", str(len(run.rounds))), ("steps", str(len(run.steps)))]
    rows += [("process memory", text.size(run.resident))] if run.resident is not None else []
    return Table("About this run", ("", ""), [*rows, ("state", state(run))], words=2)


def label(run: Run, i: int) -> str:
    """The name of the i-th selection: its round, and which of several it is where the round was corrected."""
    mine = run.chosen[i].selection.round
    place = sum(each.selection.round == mine for each in run.chosen[:i])
    return f"{mine}" if not place else f"{mine}, corrected" if place == 1 else f"{mine}, corrected {place}×"


def measured(chosen: Chosen, resource: str) -> float | None:
    return {"seconds": chosen.seconds, "bytes": chosen.bytes}.get(resource)


def limited(run: Run) -> list[str]:
    """The resources that a budget was given for, and time, which is measured in any case."""
    return [r for r in RESOURCES if r == "seconds" or any(r in each.selection.asked for each in run.chosen)]


def predicted(run: Run, chosen: Chosen, resource: str) -> float | None:
    """What a step was said to cost; None where the profile does not know that resource."""
    return getattr(chosen.selection.cost, resource) if getattr(run.full, resource) else None


def promises(run: Run, resource: str) -> Table:
    """What was asked, predicted and measured, for each selection: amounts, and shares of a plain full step."""
    name, write = RESOURCES[resource]
    full = getattr(run.full, resource) or 0.0

    def cells(amount: float | None) -> tuple[str, str]:
        return write(amount), text.share(amount / full if amount is not None and full else None)

    rows = []
    for i, each in enumerate(run.chosen):
        told = each.selection.asked.get(resource), predicted(run, each, resource), measured(each, resource)
        amounts = [text for amount in told for text in cells(amount)]
        rows.append((label(run, i), str(each.selection.step + 1), str(len(each.steps)), *amounts))
    columns = ("round", "from step", "steps", "asked", "share", "predicted", "share", "measured", "share")
    whole = f"; shares of a plain full step, which takes {write(full)}" if full else ""
    title = f"{name.capitalize()} per step: asked, predicted, measured{whole}"
    return Table(title, columns, rows)


def learning(run: Run) -> Table:
    """The loss at both ends of every round."""
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
    """Every unit with what it costs, its last value and how often it was trained."""
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
    """Steps by what they are paid for: a plain full one, this run's on average, the last."""
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
    title = f"{what}, as predicted, by what it is paid for"
    return Table(title, ("", *PARTS, "together"), rows)


def roofline(roof: Roof) -> Table:
    """What the roofline plots, in numbers."""
    rows = []
    for row in roof.rows:
        bound = row.bound(roof.peaks)
        rows.append((row.name, bound, text.seconds(row.seconds), text.number(row.intensity), text.number(row.rate / 1e9)))
    return Table("Roofline of the backward pass", ("unit", "bound by", "time", "FLOP/byte", "GFLOP/s"), rows, words=2)


def comparison(runs: Sequence[Run]) -> Table:
    """A line for each run; those that no other beats in accuracy and time are marked."""
    best = front(runs)
    rows = []
    for i, run in enumerate(runs):
        score, median, full = run.accuracy, run.step_seconds, run.full.seconds
        rows.append(
            (
                f"{run.name} ★" if i in best else run.name,
                run.start.facts.get("policy", NOTHING),
                f"{text.percent(score.accuracy)} {score.split}" if score else NOTHING,
                text.seconds(run.seconds),
                text.seconds(median),
                text.share(median / full if median is not None and full else None),
                text.size(run.bytes),
                str(len(run.steps)),
            )
        )
    columns = ("run", "recipe", "accuracy", "training time", "median step", "of full step", "peak memory", "steps")
    return Table("Runs side by side; ★: no other is both more accurate and faster", columns, rows, words=2)


def front(runs: Sequence[Run]) -> list[int]:
    """Positions of the runs that no other one beats: at least as accurate and as fast, and better in one of them."""
    points = [(i, run.seconds, run.accuracy.accuracy) for i, run in enumerate(runs) if run.accuracy is not None]
    known = [(i, seconds, accuracy) for i, seconds, accuracy in points if accuracy is not None]
    beaten = {
        i
        for i, seconds, accuracy in known
        for _, other, better in known
        if other <= seconds and better >= accuracy and (other, better) != (seconds, accuracy)
    }
    return [i for i, _, _ in sorted(known, key=lambda point: point[1]) if i not in beaten]


def gaps(run: Run) -> list[str]:
    """What the log does not hold, and what in it is a prediction: so that nobody takes one for a measurement."""
    out = []
    if run.torn:
        out.append("The log's last line was cut short. This report ends with the last whole one.")
    if not run.ended:
        out.append("The log has no end: the run still goes on, or it was stopped without closing its session.")
    if run.earlier:
        out.append(f"The log holds {run.earlier} earlier run{'s' * (run.earlier > 1)}, which this report leaves out.")
    out += [f"The run was resumed at step {step}: what was done over is told once." for step in run.resumed]
    if run.loose:
        out.append(f"{len(run.loose)} steps come before the first choice in this log: what they trained is not known.")
    if not run.evaluations:
        out.append(
            "Accuracy: nothing in the log evaluates the model. `pliant train` does, as do lines with the event “evaluated”."
        )
    if any(step.loss is None for step in run.steps):
        out.append("Loss: some steps have none. In a loop of your own the session does not see it; a loss may not be finite.")
    if run.chosen and run.bytes is None:
        out.append("Memory is predicted, not measured: steps are followed only where a budget limits memory.")
    if not any(cost.joules is not None for cost in (run.full, *(each.selection.cost for each in run.chosen))):
        out.append("Energy: no meter was read.")
    if run.chosen and not run.full.seconds:
        out.append("Seconds are measured but not predicted: this recipe counts costs instead of timing them.")
    if run.start.split:
        out.append(
            "The split into forward, dX, dW and optimizer is the profile's prediction; no step was taken apart while it ran."
        )
    else:
        out.append(
            "Costs of units and the split of a step are not in this log: an older version wrote it, or it begins midway."
        )
    if run.start.checks:
        worst = max((abs(predicted / fastest - 1) for predicted, fastest, _ in run.start.checks if fastest), default=0.0)
        out.append(f"Whole steps taken to test the profile differ from its predictions by up to {worst:.1%}.")
    if run.start.coverage is not None and run.start.coverage < 1:
        out.append(f"Nodes of the backward graph explain {run.start.coverage:.1%} of its time; the rest is spread over them.")
    if run.start.uncounted:
        out.append(f"Operations whose multiply-accumulates are not known: {', '.join(run.start.uncounted)}.")
    if run.roof is None:
        out.append(f"Roofline: {run.no_roof or 'not in the log'}.")
    out.append("Training time holds profiling, choosing and steps; loading data and evaluating are not in it.")
    return out


def strip(run: Run) -> str:
    """The selection map in characters: a line for each unit from the input to the loss, a column for each round."""
    width = max(len(text.plain(name)) for name in run.units) if run.units else 0
    lines = [
        f"{text.plain(name).ljust(width)}  {''.join('·░▒▓█'[-int(-4 * round.trained(name) // 1)] for round in run.rounds)}"
        for name in run.units
    ]
    return "\n".join([*lines, "", "█ trained in all steps of a round, ▓▒░ in some, · in none"])


Part = Table | list[str] | str  # a table, a list of sentences, characters to show as they are


def parts(run: Run) -> list[tuple[str, list[Part]]]:
    """The whole report on one run, by heading."""
    out: list[tuple[str, list[Part]]] = [("About", [facts(run)])]
    if run.chosen:
        out.append(("Asked, predicted, measured", [promises(run, resource) for resource in limited(run)]))
        out.append(("Learning", [learning(run), *([evaluations(run)] if run.evaluations else [])]))
        out.append(("Selection map", [strip(run)]))
        out.append(("Units", [units(run)]))
    costs = [split(run, resource) for resource in ("seconds", "bytes") if splits(run, resource)]
    if costs:
        out.append(("Where a step's time and memory go", [*costs]))
    if run.roof is not None:
        out.append(("Roofline", [roofline(run.roof)]))
    if run.notes:
        out.append(("Notes", [[f"step {step}: {text}" for step, text in run.notes]]))
    out.append(("What was not measured", [gaps(run)]))
    return out
