"""Runs → one HTML page that needs nothing else.

Here are the numbers and words of each section; the HTML is in `templates/`. Jinja escapes whatever comes from a log, and the
content security policy allows only the script of this package.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from pliant.apps.report import figures, tables
from pliant.apps.report.comparing import SMOOTH, comparison
from pliant.apps.report.figures import Bars, Chart, Points, Series
from pliant.apps.report.run import LoggedClasses, Run
from pliant.apps.report.selection_map import selection_map, strip
from pliant.apps.report.tiles import progress, tiles
from pliant.core import text
from pliant.core.text import Table
from pliant.cost.roofline import svg_plot

_MOST_CLASSES = 50  # of a confusion matrix that is worth looking at


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


def _views(runs: Sequence[Run]) -> dict[str, Any]:
    return {"runs": [_view(run) for run in runs], "comparison": comparison(runs) if len(runs) > 1 else None}


def _view(run: Run) -> dict[str, Any]:
    """What the template of one run shows."""
    return {
        "name": run.name,
        "torn": run.torn,
        "progress": progress(run),
        "tiles": tiles(run),
        "facts": tables.facts(run).rows,
        "options": tables.options(run).rows,
        "promises": _figures(_promise(run, resource) for resource in tables.limited(run)),
        "learning": _figures((_loss(run), _accuracy(run), _rate(run))),
        "by_class": [_by_class(found) for found in run.by_class],
        "map": selection_map(run),
        "strip": strip(run),
        "split": _figures(_split(run, resource) for resource in ("seconds", "bytes")),
        "roofline": _roofline(run),
        "notes": run.notes,
        "gaps": tables.gaps(run),
    }


Candidate = tuple[str, Chart | Bars | None, Table]  # title, drawing and numbers of a figure


def _figures(candidates: Iterable[Candidate]) -> list[Figure]:
    """The figures that have something to draw."""
    return [Figure(title, drawing, numbers) for title, drawing, numbers in candidates if drawing is not None]


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
        top = 1.25 * max((y for each in series for _, y in each.points), default=math.inf)
        steps = [(s.number, s.seconds / (full or 1.0)) for s in run.steps if s.seconds is not None]
        series.insert(0, Series("each step", [(x, y) for x, y in steps if y <= top], "dots", "each"))
        above = [(x, y) for x, y in steps if y > top]
        slowest = (text.number if full else text.seconds)(max((y for _, y in above), default=0.0))
        series.append(Series(f"slower, up to {slowest} ({_steps(len(above))})", above, "above", "each"))
    name, write = tables.RESOURCES[resource]
    title = f"{name.capitalize()} as a share of a full step ({write(full)})" if full else f"{name.capitalize()} per step"
    label = f"{title}, over the steps of the run: {', '.join(s.name for s in series if s.points)}"
    return title, figures.chart(label, series, text.number if full else write, 0.0), tables.promises(run, resource)


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _loss(run: Run) -> Candidate:
    losses = [(step.number, step.loss) for step in run.steps if step.loss is not None]
    smooth: Points = figures.smoothed(losses, SMOOTH)
    series = [
        Series("each step", losses, "dots" if smooth else "line", "each" if smooth else "measured"),
        Series(f"mean of {SMOOTH}", smooth, "line", "measured"),
    ]
    label = f"training loss, from {text.number(losses[0][1])} to {text.number(losses[-1][1])}" if losses else ""
    return "Training loss", figures.chart(label, series, text.number), tables.learning(run)


def _rate(run: Run) -> Candidate:
    rates = [(step.number, step.lr) for step in run.steps if step.lr is not None]
    label = f"learning rate, from {text.number(rates[0][1])} to {text.number(rates[-1][1])}" if rates else ""
    series = [Series("learning rate", rates, "line", "measured")]
    return "Learning rate", figures.chart(label, series, text.number, 0.0), tables.rates(run)


def _accuracy(run: Run) -> Candidate:
    splits = dict.fromkeys(each.split for each in run.evaluations)
    series = []
    for split, look in zip(splits, ("measured", "predicted", "asked"), strict=False):
        points = [(e.step, e.accuracy) for e in run.evaluations if e.split == split and e.accuracy is not None]
        series.append(Series(split, points, "line", look))
    label = "; ".join(f"{s.name} accuracy, {text.percent(s.points[-1][1])} at the end" for s in series if s.points)
    return "Accuracy", figures.chart(label, series, lambda share: f"{100 * share:g} %"), tables.evaluations(run)


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


def _by_class(found: LoggedClasses) -> dict[str, Any]:
    """Results by class, and the confusion matrix where there are few."""
    few = range(len(found.names) if len(found.names) <= _MOST_CLASSES else 0)
    matrix = []
    for i in few:
        row, whole = [found.confusion.get((i, j), 0) for j in few], found.samples(i)
        matrix.append((found.names[i], [(str(n), f"{n / whole:.2f}" if whole else "0", i == j) for j, n in enumerate(row)]))
    right, samples = sum(n for (true, guess), n in found.confusion.items() if true == guess), sum(found.confusion.values())
    said = f"{found.where}: {text.percent(right / samples if samples else None)}, {right} of {samples} samples"
    return {"said": said, "table": tables.by_class(found), "names": found.names, "matrix": matrix}
