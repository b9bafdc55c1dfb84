"""Figures as HTML and SVG that stretch with the page while their text and strokes keep their size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Literal

from pliant.core.text import Html, seconds, tag

Points = Sequence[tuple[float, float]]
_MOST = 400  # points of one line: more than a page shows
_WIDE, _HIGH = 1000, 400  # of the plane that is stretched


@dataclass(frozen=True)
class Series:
    """Points under one name, from left to right; `kind` is how they are drawn, `look` the class that colours them."""

    name: str
    points: Points
    kind: Literal["line", "dots", "stairs"]
    look: str


def chart(label: str, series: Sequence[Series], y_text: Callable[[float], str], y_floor: float | None = None) -> Html:
    """Lines and dots over steps. `label` is what a screen reader says; the numbers themselves stand in a table beside it."""
    series = [each for each in series if each.points]
    if not series:
        return Html()
    left, right = min(each.points[0][0] for each in series), max(each.points[-1][0] for each in series)
    right = max(right, left + 1)
    series = [each if each.kind == "stairs" else replace(each, points=thinned(each.points)) for each in series]
    ys = [y for each in series for _, y in each.points]
    marks = ticks(min(ys) if y_floor is None else y_floor, max(ys))

    def at(x: float, y: float) -> tuple[float, float]:
        return (x - left) / (right - left), (marks[-1] - y) / (marks[-1] - marks[0])

    lines = [tag("path", class_=f"{each.kind} {each.look}", d=_path(each, at)) for each in series]
    return tag(
        "div", legend(series), _plot(label, lines, marks, y_text, (f"{left:.0f}", "step", f"{right:.0f}")), class_="chart"
    )


def scatter(label: str, points: Sequence[tuple[str, float, float]], front: Sequence[int]) -> Html:
    """Named points (seconds, share), the front of the best joined by a line."""
    wide = ticks(0.0, max(x for _, x, _ in points))[-1]
    marks = ticks(min(y for _, _, y in points), max(y for _, _, y in points))

    def at(x: float, y: float) -> tuple[float, float]:
        return x / wide, (marks[-1] - y) / (marks[-1] - marks[0])

    best = Series("", [points[i][1:] for i in front], "line", "asked")
    lines = [tag("path", class_="line asked", d=_path(best, at))] if len(front) > 1 else []
    dots = []
    for i, (name, x, y) in enumerate(points):
        across, down = at(x, y)
        look = f"dot {'best ' * (i in front)}{'left' if across > 0.6 else 'right'}"  # where no line goes
        dots.append(tag("span", tag("b", name), class_=look, style=f"left:{across:.2%};top:{down:.2%}"))
    below = ("0", "training time", seconds(wide))
    return tag("div", _plot(label, lines, marks, lambda share: f"{100 * share:g} %", below, dots), class_="chart")


def _plot(
    label: str,
    lines: Sequence[Html],
    marks: Sequence[float],
    y_text: Callable[[float], str],
    below: Sequence[str],
    dots: Sequence[Html] = (),
) -> Html:
    heights = [(marks[-1] - mark) / (marks[-1] - marks[0]) for mark in marks]
    grid = [tag("path", class_="grid", d=f"M0 {_HIGH * height:.1f}h{_WIDE}") for height in heights]
    box = {"viewBox": f"0 0 {_WIDE} {_HIGH}", "preserveAspectRatio": "none", "role": "img", "aria_label": label}
    texts = [tag("span", y_text(mark), style=f"top:{height:.2%}") for mark, height in zip(marks, heights, strict=True)]
    return tag(
        "div",
        tag("div", *texts, class_="ys", aria_hidden="true"),
        tag("div", tag("svg", *grid, *lines, **box), tag("div", *dots, aria_hidden="true"), class_="field"),
        tag("div", *(tag("span", text) for text in below), class_="xs", aria_hidden="true"),
        class_="plot",
    )


def _path(series: Series, at: Callable[[float, float], tuple[float, float]]) -> str:
    points = series.points
    if series.kind == "stairs":
        corners = [points[0]]
        for (_, before), (x, y) in pairwise(points):
            corners += [(x, before), (x, y)]
        points = corners
    places = [f"{_WIDE * x:.1f} {_HIGH * y:.1f}" for x, y in (at(*point) for point in points)]
    return "".join(f"M{place}h0" for place in places) if series.kind == "dots" else "M" + "L".join(places)


_KEYS = {"line": "M2 4h20", "stairs": "M2 4h20", "dots": "M5 4h0M12 4h0M19 4h0"}


def legend(series: Sequence[Series]) -> Html:
    def key(each: Series) -> Html:
        path = tag("path", class_=f"{each.kind} {each.look}", d=_KEYS[each.kind])
        return tag("svg", path, class_="key", viewBox="0 0 24 8", aria_hidden="true")

    return tag("ul", *(tag("li", key(each), each.name) for each in series), class_="legend")


def thinned(points: Points) -> Points:
    """No more points than a page can show: neighbours become their medians."""
    if len(points) <= _MOST:
        return points
    each = math.ceil(len(points) / _MOST)
    groups = (points[i : i + each] for i in range(0, len(points), each))
    return [(group[len(group) // 2][0], median(y for _, y in group)) for group in groups]


def smoothed(points: Points, width: int) -> Points:
    """The running mean of so many neighbours, where there are three times as many.

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
    """A handful of round numbers that span from at most `low` to at least `high`.

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


def bars(label: str, rows: Sequence[tuple[str, Sequence[tuple[str, float, str]], str]]) -> Html:
    """Stacked bars on one scale: for each a name, its pieces (look, amount, text) and what it comes to."""
    whole = max((math.fsum(amount for _, amount, _ in pieces) for _, pieces, _ in rows), default=0.0)
    if whole <= 0:
        return Html()
    out = []
    for name, pieces, total in rows:
        drawn = [tag("i", class_=look, style=f"width:{amount / whole:.3%}", title=text) for look, amount, text in pieces]
        said = tag("div", name, class_="name"), tag("div", *drawn, class_="bar"), tag("div", total, class_="total")
        out.append(tag("div", *said, class_="one"))
    return tag("div", *out, class_="bars", role="img", aria_label=label)
