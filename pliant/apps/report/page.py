"""Runs → one HTML page that needs nothing else.

Here are the numbers and words of each section; the HTML is in `templates/`. Jinja escapes whatever comes from a log, and the
content security policy allows only the script of this package.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from pliant.apps.report import figures, tables
from pliant.apps.report.figures import Bars, Chart, Points, Series
from pliant.apps.report.run import LoggedRound, Run, blocks
from pliant.core import text
from pliant.core.text import Table
from pliant.cost.roofline import svg_plot

# The colours of the selection map: the least share of the round's largest value, and its text in the legend.
CLASSES = ((0.1, "over 10 %"), (0.01, "over 1 %"), (0.001, "over 0.1 %"), (0.0001, "over 0.01 %"), (0.0, "less"))
_SMOOTH = 15  # steps
_MANY = 100  # units: a longer map scrolls inside its frame


def page(runs: Sequence[Run], live: bool = False) -> str:
    """The whole document; a `live` page asks its server for updates."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    assets = {"css": _asset("page.css"), "script": _asset("page.js")}
    return _templates().get_template("page.html").render(title=title, policy=policy(live), live=live, **assets, **_views(runs))


def body(runs: Sequence[Run]) -> str:
    """The part of the page that changes while a run trains."""
    return _templates().get_template("body.html").render(**_views(runs))


def policy(live: bool) -> str:
    """The content security policy: run the page's own script, contact its own server if it is live, load nothing."""
    digest = base64.b64encode(hashlib.sha256(_asset("page.js").encode()).digest()).decode()
    connect = "; connect-src 'self'" * live
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:{connect}"


def _asset(name: str) -> str:
    return (files("pliant.apps.report") / name).read_text(encoding="utf-8")


@cache
def _templates() -> jinja2.Environment:
    def printable(value: Any) -> Any:
        """Text without control characters; HTML that a template made stays as it is."""
        return value if hasattr(value, "__html__") else text.plain(value)

    return jinja2.Environment(
        loader=jinja2.PackageLoader("pliant.apps.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@dataclass(frozen=True)
class Figure:
    """A figure with its title and the table of its numbers."""

    title: str
    drawing: Chart | Bars
    numbers: Table


@dataclass(frozen=True)
class Tile:
    """One of the numbers at the top of a report, with what it means."""

    name: str
    amount: str
    notes: tuple[str, ...]


def _views(runs: Sequence[Run]) -> dict[str, Any]:
    return {"runs": [_view(run) for run in runs], "comparison": _comparison(runs) if len(runs) > 1 else None}


def _view(run: Run) -> dict[str, Any]:
    """What the template of one run shows."""
    tiles = (_step_tile(run), _memory_tile(run), _accuracy_tile(run), _trained_tile(run))
    return {
        "name": run.name,
        "torn": run.torn,
        "tiles": [tile for tile in tiles if tile is not None],
        "facts": tables.facts(run).rows,
        "promises": _figures(_promise(run, resource) for resource in tables.limited(run)),
        "learning": _figures((_loss(run), _accuracy(run))),
        "map": _map(run),
        "strip": _strip(run),
        "split": _figures(_split(run, resource) for resource in ("seconds", "bytes")),
        "roofline": _roofline(run),
        "notes": run.notes,
        "gaps": tables.gaps(run),
    }


Candidate = tuple[str, Chart | Bars | None, Table]  # title, drawing and numbers of a figure


def _figures(candidates: Iterable[Candidate]) -> list[Figure]:
    """The figures that have something to draw."""
    return [Figure(title, drawing, numbers) for title, drawing, numbers in candidates if drawing is not None]


# ---------------------------------------------------------------- tiles


def _step_tile(run: Run) -> Tile | None:
    step, full = run.step_seconds, run.full.seconds
    if step is None:
        return None
    if not full:
        return Tile("Median step", text.seconds(step), ("measured",))
    asked = run.chosen[-1].selection.asked.get("seconds") if run.chosen else None
    promise = f"asked {text.share(asked / full)}; " if asked is not None else ""
    return Tile("Median step", text.share(step / full), ("of a full step", f"{promise}{text.seconds(step)}"))


def _memory_tile(run: Run) -> Tile | None:
    if not run.chosen or not run.full.bytes:
        return None
    peak, asked = run.bytes, run.chosen[-1].selection.asked.get("bytes")
    promise = f"asked {text.size(asked)}" if asked is not None else ""
    if peak is None:
        predicted = max(each.selection.cost.bytes for each in run.chosen)
        return Tile("Training memory", text.size(predicted), ("predicted, not measured", promise))
    return Tile("Training memory", text.size(peak), ("measured", promise))


def _accuracy_tile(run: Run) -> Tile | None:
    score = run.accuracy
    if score is None:
        return None
    first = next(each for each in run.evaluations if each.split == score.split)
    since = f"{text.percent(first.accuracy)} at step {first.step}" if first is not score else ""
    return Tile("Accuracy", text.percent(score.accuracy), (f"{score.split}, step {score.step}", since))


def _trained_tile(run: Run) -> Tile | None:
    if not run.chosen:
        return None
    last = run.chosen[-1].selection
    return Tile("Trained", f"{len(last.units)} of {len(run.units)}", (f"units in round {last.round}",))


# ---------------------------------------------------------------- charts over steps


def _promise(run: Run, resource: str) -> Candidate:
    """Asked, predicted and measured of one resource, as shares of a plain full step if that is known."""
    full = getattr(run.full, resource) or 0.0
    asked, predicted, measured = (list[tuple[float, float]]() for _ in range(3))
    for each in run.chosen:
        first = each.selection.step + 1
        last = max(each.steps[-1].number if each.steps else first, first)
        amounts = each.selection.asked.get(resource), tables.predicted(run, each, resource), tables.measured(each, resource)
        for points, amount in zip((asked, predicted, measured), amounts, strict=True):
            points += [(x, amount / (full or 1.0)) for x in (first, last)] if amount is not None else []
    series = [
        Series("asked", asked, "stairs", "asked"),
        Series("predicted", predicted, "stairs", "predicted"),
        Series("measured (median)" if resource == "seconds" else "measured", measured, "stairs", "measured"),
    ]
    if resource == "seconds":  # one very slow step would squeeze all others: it is drawn at the upper edge
        top = 1.25 * max((y for each in series for _, y in each.points), default=0.0)
        steps = [(s.number, min(s.seconds / (full or 1.0), top)) for s in run.steps if s.seconds is not None]
        series.insert(0, Series("each step", steps, "dots", "each"))
    name, write = tables.RESOURCES[resource]
    title = f"{name.capitalize()} as a share of a full step ({write(full)})" if full else f"{name.capitalize()} per step"
    label = f"{title}, over the steps of the run: {', '.join(s.name for s in series if s.points)}"
    return title, figures.chart(label, series, text.number if full else write, 0.0), tables.promises(run, resource)


def _loss(run: Run) -> Candidate:
    losses = [(step.number, step.loss) for step in run.steps if step.loss is not None]
    smooth: Points = figures.smoothed(losses, _SMOOTH)
    series = [
        Series("each step", losses, "dots" if smooth else "line", "each" if smooth else "measured"),
        Series(f"mean of {_SMOOTH}", smooth, "line", "measured"),
    ]
    label = f"training loss, from {text.number(losses[0][1])} to {text.number(losses[-1][1])}" if losses else ""
    return "Training loss", figures.chart(label, series, text.number), tables.learning(run)


def _accuracy(run: Run) -> Candidate:
    splits = dict.fromkeys(each.split for each in run.evaluations)
    series = []
    for split, look in zip(splits, ("measured", "predicted", "asked"), strict=False):
        points = [(e.step, e.accuracy) for e in run.evaluations if e.split == split and e.accuracy is not None]
        series.append(Series(split, points, "line", look))
    label = "; ".join(f"{s.name} accuracy, {text.percent(s.points[-1][1])} at the end" for s in series if s.points)
    return "Accuracy", figures.chart(label, series, lambda share: f"{100 * share:g} %"), tables.evaluations(run)


# ---------------------------------------------------------------- what was chosen


@dataclass(frozen=True)
class Cell:
    """One unit in one round: colour, value, whether it was trained, and in which share of the steps."""

    shade: str
    value: str | None  # in full precision
    shown: str
    state: str
    trained: str


def _map(run: Run) -> dict[str, Any] | None:
    """Units × rounds: the colour is the value, the size the share of the round's steps in which the unit was trained."""
    rounds = run.rounds
    if not rounds or not run.units:
        return None
    rows = [
        {"name": name, "first": name == names[0], "cost": _alone(run, name), "cells": [_cell(one, name) for one in rounds]}
        for _, names in blocks(run.units)
        for name in names
    ]
    return {
        "rounds": [one.number for one in rounds],
        "rows": rows,
        "width": max(22, min(64, 640 // len(rounds))),
        "long": len(run.units) > _MANY,
        "shades": [(f"v{5 - i}", label) for i, (_, label) in enumerate(CLASSES)],
        "numbers": tables.units(run),
    }


def _cell(one: LoggedRound, unit: str) -> Cell:
    value, trained = one.value(unit), one.trained(unit)
    state = "chosen" if trained == 1 else "not chosen" if not trained else f"chosen in {trained:.0%} of the round’s steps"
    return Cell(shade(one, unit), None if value is None else repr(value), text.number(value), state, f"{trained:.2g}")


def shade(one: LoggedRound, unit: str) -> str:
    """The CSS class of a value: v5 is the highest, v0 is zero or less, vx is unknown."""
    value = one.value(unit)
    if value is None:
        return "vx"
    if value <= 0:
        return "v0"
    return f"v{5 - next(i for i, (least, _) in enumerate(CLASSES) if value >= least * one.largest)}"


def _alone(run: Run, unit: str) -> str | None:
    """The cost of a step with this unit alone, if the log has it."""
    cost, full = run.start.costs.get(unit), run.full
    if cost is None:
        return None
    amounts = [text.seconds(cost.seconds), f"{text.share(cost.seconds / full.seconds)} of a full step"] if full.seconds else []
    amounts += [text.size(cost.bytes)] if full.bytes else []
    return ", ".join([*amounts, text.macs(cost.macs)] if full.macs else amounts)


def _strip(run: Run) -> list[dict[str, Any]]:
    """The blocks of the model, from input to output, with the share of steps in which each unit was trained."""
    out = []
    for block, names in blocks(run.units) if run.chosen else ():
        shares = [run.trained(name) for name in names]
        count = f"{len(names)} unit{'s' * (len(names) > 1)}"
        out.append(
            {
                "name": block,
                "label": f"{block}: trained in {sum(shares) / len(shares):.0%} of steps, {count}",
                "units": [(f"{s:.1%}", f"{name}: {s:.0%}") for name, s in zip(names, shares, strict=True)],
            }
        )
    return out


# ---------------------------------------------------------------- what it cost


def _split(run: Run, resource: str) -> Candidate:
    """A step by forward, dX, dW and optimizer."""
    title = {"seconds": "Time of a step", "bytes": "Live tensors at a step’s peak"}[resource]
    write = tables.RESOURCES[resource][1]
    rows = []
    for what, split in tables.splits(run, resource):
        amounts = [(part, getattr(split[part], resource)) for part in tables.PARTS if part in split]
        pieces = [(part, max(amount, 0.0), f"{part} {write(amount)}") for part, amount in amounts]
        rows.append((what, pieces, write(sum(amount for _, amount in amounts))))
    label = "; ".join(f"{what}: {', '.join(piece for _, _, piece in pieces)}" for what, pieces, _ in rows)
    return title, figures.bars(label, rows), tables.split(run, resource)


def _roofline(run: Run) -> dict[str, Any] | None:
    if run.roof is None:
        return None
    return {"svg": svg_plot(run.roof.rows, run.roof.peaks, "Backward pass"), "numbers": tables.roofline(run.roof)}


def _comparison(runs: Sequence[Run]) -> dict[str, Any]:
    """Accuracy against time, and all runs in one table."""
    points: list[tuple[str, float, float]] = []
    places: dict[int, int] = {}
    for i, run in enumerate(runs):
        if run.accuracy is not None and run.accuracy.accuracy is not None:
            places[i] = len(points)
            points.append((run.name, run.seconds, run.accuracy.accuracy))
    label = "; ".join(f"{name}: {text.percent(share)} in {text.seconds(took)}" for name, took, share in points)
    title, front = "Accuracy against training time", [places[i] for i in tables.front(runs)]
    return {
        "title": title,
        "chart": figures.scatter(f"{title}. {label}", points, front),
        "missing": ", ".join(run.name for i, run in enumerate(runs) if i not in places),
        "table": tables.comparison(runs),
    }
