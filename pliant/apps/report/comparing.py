"""Several runs on one page: accuracy against time, their curves over each other, and one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pliant.apps.report import figures, tables
from pliant.apps.report.figures import Chart, Points, Series
from pliant.apps.report.run import Run
from pliant.core import text

LOOKS = 6  # colours of curves; a seventh run has the first colour, dashed
SMOOTH = 15  # steps


def comparison(runs: Sequence[Run]) -> dict[str, Any]:
    """Accuracy against time, the curves of all runs, and all runs in one table."""
    points: list[tuple[str, float, float]] = []
    places: dict[int, int] = {}
    for i, run in enumerate(runs):
        if run.best is not None and run.best.accuracy is not None:
            places[i] = len(points)
            points.append((run.name, run.seconds, run.best.accuracy))
    label = "; ".join(f"{name}: {text.percent(share)} in {text.seconds(took)}" for name, took, share in points)
    title, front = "Best accuracy against training time", [places[i] for i in tables.front(runs)]
    return {
        "title": title,
        "chart": figures.scatter(f"{title}. {label}", points, front),
        "missing": ", ".join(run.name for i, run in enumerate(runs) if i not in places),
        "table": tables.comparison(runs),
        "curves": [(name, drawing) for name, drawing in _curves(runs) if drawing is not None],
    }


def _curves(runs: Sequence[Run]) -> list[tuple[str, Chart | None]]:
    def percent(share: float) -> str:
        return f"{100 * share:g} %"

    over_time = {"x_name": "training time", "x_text": lambda x: text.seconds(x) if x else "0"}
    return [
        ("Accuracy over steps", _overlaid("accuracy", runs, _accuracies, percent)),
        ("Accuracy over training time", _overlaid("accuracy over time", runs, _timed_accuracies, percent, **over_time)),
        (
            f"Training loss{f', mean of {SMOOTH} steps' * all(map(_is_long, runs))}",
            _overlaid("training loss", runs, _losses, text.number),
        ),
        ("Time of a step, as a share of a full step", _overlaid("step time", runs, _shares, text.number, y_floor=0.0)),
    ]


def _overlaid(
    what: str, runs: Sequence[Run], points: Callable[[Run], Points], y_text: Callable[[float], str], **how: Any
) -> Chart | None:
    kind = "stairs" if points is _shares else "line"
    drawn = [
        Series(run.name, points(run), kind, f"run{i % LOOKS}{' again' * (i >= LOOKS)}")  # type: ignore[arg-type]
        for i, run in enumerate(runs)
    ]
    ends = [f"{one.name} from {y_text(one.points[0][1])} to {y_text(one.points[-1][1])}" for one in drawn if one.points]
    return figures.chart(f"{what}: {'; '.join(ends)}", drawn, y_text, **how)


def _accuracies(run: Run) -> Points:
    return [(each.step, each.accuracy) for each in run.scored if each.accuracy is not None]


def _timed_accuracies(run: Run) -> Points:
    return [(each.seconds, each.accuracy) for each in run.scored if each.seconds is not None and each.accuracy is not None]


def _is_long(run: Run) -> bool:
    return len(run.steps) >= 3 * SMOOTH


def _losses(run: Run) -> Points:
    losses = [(step.number, step.loss) for step in run.steps if step.loss is not None]
    return figures.smoothed(losses, SMOOTH) or losses


def _shares(run: Run) -> Points:
    """The median step of every selection, for as long as it lasted."""
    full, out = run.full.seconds, list[tuple[float, float]]()
    for each in run.chosen if full else ():
        if each.seconds is not None:
            out += [(x, each.seconds / full) for x in (each.steps[0].number, each.steps[-1].number)]
    return out
