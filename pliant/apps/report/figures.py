"""The geometry of figures: numbers → paths and positions in percent, which the templates draw.

A drawing stretches with the page, while its text and strokes keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Literal

from pliant.core.text import seconds

Points = Sequence[tuple[float, float]]
_MOST_POINTS = 400  # of one line: more than a page can show
_WIDTH, _HEIGHT = 1000, 400  # of the viewBox, which is stretched


@dataclass(frozen=True)
class Series:
    """Points under one name, from left to right; `kind` is how they are drawn, `look` the CSS class that colours them."""

    name: str
    points: Points
    kind: Literal["line", "dots", "stairs", "above"]  # above: beyond the upper edge, where a mark stands for each
    look: str

    @property
    def style(self) -> str:
        """The CSS classes."""
        return f"{self.kind} {self.look}"

    @property
    def key(self) -> str:
        """The path of its symbol in the legend."""
        return {"dots": "M5 4h0M12 4h0M19 4h0", "above": "M8 7h8l-4-6z"}.get(self.kind, "M2 4h20")


@dataclass(frozen=True)
class Dot:
    """A named point at a position in percent."""

    name: str
    style: str
    left: str
    top: str


@dataclass(frozen=True)
class Chart:
    """A chart, ready to be drawn. `label` is what a screen reader says; the numbers are in a table beside it."""

    label: str
    lines: tuple[tuple[str, str], ...]  # CSS classes and path of each
    marks: tuple[tuple[str, str, str], ...]  # of the vertical axis: text, position in percent, path of the grid line
    below: tuple[str, str, str]  # under the horizontal axis: left, middle, right
    legend: tuple[Series, ...] = ()
    dots: tuple[Dot, ...] = ()

    @property
    def box(self) -> str:
        return f"0 0 {_WIDTH} {_HEIGHT}"


@dataclass(frozen=True)
class Piece:
    """One part of a stacked bar; `look` is its CSS class."""

    look: str
    text: str
    width: str


@dataclass(frozen=True)
class Bars:
    """Stacked bars on one scale: name, pieces and total of each."""

    label: str
    rows: tuple[tuple[str, tuple[Piece, ...], str], ...]


def chart(
    label: str,
    series: Sequence[Series],
    y_text: Callable[[float], str],
    y_floor: float | None = None,
    x_name: str = "step",
    x_text: Callable[[float], str] = lambda x: f"{x:.0f}",
) -> Chart | None:
    """Lines and dots over steps, or over something else; None without any point."""
    series = [each for each in series if each.points]
    ys = [y for each in series for _, y in each.points if each.kind != "above"]
    if not ys:
        return None
    left, right = min(each.points[0][0] for each in series), max(each.points[-1][0] for each in series)
    if x_name == "step":
        right = max(right, left + 1)
    else:  # an amount, counted from nothing
        left, right = 0.0, right if right > 0 else 1.0
    series = [each if each.kind == "stairs" else replace(each, points=thinned(each.points)) for each in series]
    marks = ticks(min(ys) if y_floor is None else y_floor, max(ys))

    def at(x: float, y: float) -> tuple[float, float]:
        return (x - left) / (right - left), (marks[-1] - y) / (marks[-1] - marks[0])

    lines = tuple((each.style, _path(each, at)) for each in series if each.kind != "above")
    above = (x for each in series if each.kind == "above" for x, _ in each.points)
    dots = tuple(Dot("", "above", f"{at(x, 0.0)[0]:.2%}", "0%") for x in above)
    return Chart(label, lines, _marks(marks, y_text), (x_text(left), x_name, x_text(right)), tuple(series), dots)


def scatter(label: str, points: Sequence[tuple[str, float, float]], front: Sequence[int]) -> Chart | None:
    """Named points (seconds, share), with a line through those on the Pareto front; None without any point."""
    if not points:
        return None
    widest = ticks(0.0, max(x for _, x, _ in points))[-1]
    low, high = min(y for _, _, y in points), max(y for _, _, y in points)
    marks = ticks(low, high) if high > low else ticks(max(low - 0.05, 0.0), min(low + 0.05, 1.0))

    def at(x: float, y: float) -> tuple[float, float]:
        return x / widest, (marks[-1] - y) / (marks[-1] - marks[0])

    best = Series("", [points[i][1:] for i in front], "line", "asked")
    lines = ((best.style, _path(best, at)),) if len(front) > 1 else ()
    dots = []
    for i, (name, x, y) in enumerate(points):
        across, down = at(x, y)
        style = f"dot {'best ' * (i in front)}{'left' if across > 0.6 else 'right'}"  # the name is beside the line
        dots.append(Dot(name, style, f"{across:.2%}", f"{down:.2%}"))
    below = ("0", "training time", seconds(widest))
    return Chart(label, lines, _marks(marks, lambda share: f"{100 * share:g} %"), below, dots=tuple(dots))


def bars(label: str, rows: Sequence[tuple[str, Sequence[tuple[str, float, str]], str]]) -> Bars | None:
    """Stacked bars from rows of (name, pieces, total), each piece (look, amount, text); None if all are zero."""
    whole = max((math.fsum(amount for _, amount, _ in pieces) for _, pieces, _ in rows), default=0.0)
    if whole <= 0:
        return None
    drawn = (
        (name, tuple(Piece(look, text, f"{amount / whole:.3%}") for look, amount, text in pieces), total)
        for name, pieces, total in rows
    )
    return Bars(label, tuple(drawn))


def _marks(marks: Sequence[float], y_text: Callable[[float], str]) -> tuple[tuple[str, str, str], ...]:
    heights = [(marks[-1] - mark) / (marks[-1] - marks[0]) for mark in marks]
    return tuple(
        (y_text(mark), f"{height:.2%}", f"M0 {_HEIGHT * height:.1f}h{_WIDTH}")
        for mark, height in zip(marks, heights, strict=True)
    )


def _path(series: Series, at: Callable[[float, float], tuple[float, float]]) -> str:
    points = series.points
    if series.kind == "stairs":
        corners = [points[0]]
        for (_, before), (x, y) in pairwise(points):
            corners += [(x, before), (x, y)]
        points = corners
    places = [f"{_WIDTH * x:.1f} {_HEIGHT * y:.1f}" for x, y in (at(*point) for point in points)]
    return "".join(f"M{place}h0" for place in places) if series.kind == "dots" else "M" + "L".join(places)


def thinned(points: Points) -> Points:
    """At most as many points as a page can show: each group of neighbours becomes its median."""
    if len(points) <= _MOST_POINTS:
        return points
    each = math.ceil(len(points) / _MOST_POINTS)
    groups = (points[i : i + each] for i in range(0, len(points), each))
    return [(group[len(group) // 2][0], median(y for _, y in group)) for group in groups]


def smoothed(points: Points, width: int) -> Points:
    """The running mean over `width` neighbours; empty for less than three times as many points.

    >>> smoothed([(1, 0.0), (2, 3.0), (3, 0.0), (4, 3.0), (5, 0.0), (6, 3.0)], 2)
    [(2, 1.5), (3, 1.5), (4, 1.5), (5, 1.5), (6, 1.5)]
    """
    if len(points) < 3 * width:
        return []
    out, total = [], math.fsum(y for _, y in points[:width])
    for i in range(width, len(points) + 1):
        out.append((points[i - (width + 1) // 2][0], total / width))
        if i < len(points):
            total += points[i][1] - points[i - width][1]
    return out


def ticks(low: float, high: float) -> list[float]:
    """A few round numbers from at most `low` to at least `high`.

    >>> ticks(0, 0.93)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        high = low + (abs(low) or 1.0)
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(power * n for n in (1, 2, 2.5, 5, 10, 20) if (high - low) / (power * n) <= 5)
    digits = max(2 - math.floor(math.log10(step)), 0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, digits) for i in range(first, max(last, first + 1) + 1)]
