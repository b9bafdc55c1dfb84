"""The backward pass of each unit against the peaks of a device, in numbers and as a plot."""

from __future__ import annotations

import html
import math
import string
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pliant.core.types import Unit
from pliant.cost.charge import Charge, ChargeKind
from pliant.cost.peaks import Peaks, peaks, roof_seconds
from pliant.cost.profile import Profile
from pliant.graph.backward import Graph, Node

__all__ = ["Peaks", "RooflineRow", "backward_moved", "letters", "peaks", "roof_seconds", "rows", "svg_plot", "text_plot"]


@dataclass(frozen=True)
class RooflineRow:
    """A unit's backward: measured seconds, multiply-accumulates, and the bytes that it must at least move."""

    name: str
    seconds: float
    macs: int
    moved: int

    @property
    def flops(self) -> int:
        return 2 * self.macs

    @property
    def intensity(self) -> float:
        """FLOP per byte; 0 if nothing is moved."""
        return self.flops / self.moved if self.moved else 0.0

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds if self.seconds else 0.0

    def bound(self, peaks: Peaks) -> Literal["compute", "memory"]:
        """What the roof over this intensity is made of."""
        return "compute" if self.macs and self.flops >= self.moved * peaks.ridge else "memory"

    def share(self, peaks: Peaks) -> float:
        """The least possible time over the measured one. Above 1, the bytes came from a cache or the peaks are too low."""
        return roof_seconds(self.macs, self.moved, peaks) / self.seconds if self.seconds else 0.0


# ---------------------------------------------------------------- a model's units


def rows(graph: Graph, profile: Profile, units: Iterable[Unit]) -> list[RooflineRow]:
    """The backward pass of each unit: input gradients and parameters' gradients of its own operations."""
    out = []
    for unit in units:
        own = set(unit.params)
        nodes = {i: node for i, node in enumerate(graph.nodes) if not node.carrier and not own.isdisjoint(node.params)}
        mine = [charge for charge in profile.charges if charge.node in nodes and _is_backward_of(charge, own)]
        seconds, macs = sum(charge.cost.seconds for charge in mine), sum(charge.cost.macs for charge in mine)
        out.append(RooflineRow(unit.name, seconds, macs, sum(backward_moved(node) for node in nodes.values())))
    return out


def _is_backward_of(charge: Charge, params: set[str]) -> bool:
    """Whether a charge of a node pays for its input gradients, or for gradients of these parameters."""
    if charge.kind is ChargeKind.WEIGHT_GRAD:
        return not params.isdisjoint(charge.params)
    return charge.kind is ChargeKind.INPUT_GRAD


def backward_moved(node: Node) -> int:
    """Bytes that a node's backward must at least move.

    Each gradient of a product reads two of (input, weight, output) and writes the third: as much as the forward pass moves.
    """
    return node.moved * (len(node.data) + bool(node.params) if node.macs else 1)


# ---------------------------------------------------------------- plots


class _Chart:
    """What both plots show: whole decades around the roof and the rows that have a place among them."""

    def __init__(self, rows: Iterable[RooflineRow], peaks: Peaks) -> None:
        self.rows, self.peaks = [], peaks
        self.left_out: dict[str, list[str]] = {}
        for row in rows:
            if _has_place(row):
                self.rows.append(row)
            else:
                why = "no seconds or no bytes" if row.macs else "no FLOPs"
                self.left_out.setdefault(why, []).append(_printable(row.name))
        self.x = _decades(peaks.ridge / 3, peaks.ridge * 3, *(row.intensity for row in self.rows))
        self.y = _decades(self.roof(10.0 ** self.x[0]), peaks.flops, *(row.rate for row in self.rows))

    def roof(self, intensity: float) -> float:
        """The FLOP/s that are attainable at an intensity."""
        return min(self.peaks.flops, intensity * self.peaks.bandwidth)

    def place(self, intensity: float, rate: float) -> tuple[float, float]:
        """Shares of the width from the left, and of the height from above."""
        x, y = self.x, self.y
        return (math.log10(intensity) - x[0]) / (x[-1] - x[0]), (y[-1] - math.log10(rate)) / (y[-1] - y[0])

    def head(self) -> tuple[str, str]:
        threads = f"{self.peaks.threads} thread{'s' * (self.peaks.threads != 1)}"
        numbers = f"{self.peaks.flops / 1e9:.4g} GFLOP/s, {self.peaks.bandwidth / 1e9:.4g} GB/s"
        return (
            f"{_printable(self.peaks.device)}, {self.peaks.dtype}, {threads}",
            f"peaks {numbers}, ridge {self.peaks.ridge:.3g} FLOP/byte",
        )

    def describe(self, row: RooflineRow) -> str:
        placed = f"{_printable(row.name)}: {row.intensity:.3g} FLOP/byte, {row.rate / 1e9:.3g} GFLOP/s"
        return f"{placed}, {row.share(self.peaks):.0%} of the roof, {row.bound(self.peaks)}-bound"

    def foot(self, width: int) -> list[str]:
        texts = [f"{why}: {', '.join(names)}" for why, names in self.left_out.items()]
        return [line for text in texts for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)]


def _decades(*values: float) -> range:
    """Powers of ten, from one below to one above all values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return range(low, max(high, low + 1) + 1)


def _printable(name: str) -> str:
    """A name on one line, without what XML cannot hold."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def letters(rows: Sequence[RooflineRow]) -> list[str]:
    """How `text_plot` marks each row: a letter, * after the 52nd, nothing where it has no place in the plot."""
    names = iter(string.ascii_letters)
    return [next(names, "*") if _has_place(row) else "" for row in rows]


def _has_place(row: RooflineRow) -> bool:
    return row.intensity > 0 and 0 < row.rate < math.inf


def text_plot(rows: Iterable[RooflineRow], peaks: Peaks, width: int = 72, height: int = 18, legend: bool = True) -> str:
    """The roofline in plain characters, log-log: a letter per unit (see `letters`), + where several meet."""
    margin = 9
    columns, lines = width - margin, height - 4
    if columns < 20 or lines < 4:
        raise ValueError(f"a roofline needs at least 29 × 8 characters: got width={width}, height={height}.")
    chart = _Chart(rows, peaks)
    grid = [[" "] * columns for _ in range(lines)]

    def cell(intensity: float, rate: float) -> tuple[int, int]:
        x, y = chart.place(intensity, rate)
        return round(y * (lines - 1)), round(x * (columns - 1))

    for column in range(columns):
        intensity = 10 ** (chart.x[0] + (chart.x[-1] - chart.x[0]) * column / (columns - 1))
        grid[cell(intensity, chart.roof(intensity))[0]][column] = "/" if intensity < peaks.ridge else "-"
    marks = letters(chart.rows)
    for letter, row in zip(marks, chart.rows, strict=True):
        y, x = cell(row.intensity, row.rate)
        grid[y][x] = letter if grid[y][x] in " /-" else "+"
    labels = {cell(1, 10.0**power)[0]: f"{10.0 ** (power - 9):g}" for power in chart.y}
    ticks = ""
    for power in chart.x:
        label = f"{10.0**power:g}"
        at = min(margin + cell(10.0**power, 1)[1], width - len(label))
        ticks = ticks.ljust(at) + label if at > len(ticks) else ticks
    who, numbers = chart.head()
    body = [f"{labels.get(number, ''):>{margin - 2}} |{''.join(line)}".rstrip() for number, line in enumerate(grid)]
    units = [f"{letter} {chart.describe(row)}" for letter, row in zip(marks, chart.rows, strict=True)] if legend else []
    return "\n".join([who, f"GFLOP/s   {numbers}", *body, ticks, "FLOP/byte".rjust(width), *units, *chart.foot(width)])


_STYLE = """<style>
.roofline { color: #222; font: 12px system-ui, sans-serif; }
.roofline .unit { font-size: 10px; }
.roofline text { fill: currentColor; } .roofline .grid { stroke: currentColor; opacity: .15; }
.roofline .roof { stroke: currentColor; stroke-width: 2; fill: none; }
.roofline circle { stroke: #c2410c; stroke-width: 2; fill: #c2410c; } .roofline .memory { fill-opacity: 0; }
@media (prefers-color-scheme: dark) { .roofline { color: #ddd; } .roofline circle { stroke: #fb923c; fill: #fb923c; } }
</style>"""


_LETTER, _LINE = 5.6, 12.0  # width and height of a label's characters, roughly
_LONGEST = 26  # characters of a label


def _short(name: str) -> str:
    """A name as a label: the end of a long one says more than its beginning."""
    name = _printable(name)
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"


def _labelled(
    rows: Sequence[RooflineRow], places: Sequence[tuple[float, float]], frame: tuple[float, float, float, float]
) -> list[tuple[RooflineRow, float, float]]:
    """Rows with the place of their label beside the dot. The slowest rows come first; one whose label would cover another
    label or another dot has none."""
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    out = []
    for i in sorted(range(len(rows)), key=lambda i: -rows[i].seconds):
        (x, y), wide = places[i], _LETTER * len(_short(rows[i].name))
        for left, base in ((x + 7, y + 4), (x - 7 - wide, y + 4), (x + 5, y - 6), (x + 5, y + 14), (x - wide - 5, y - 6)):
            box = left, base - 0.8 * _LINE, left + wide, base + 0.2 * _LINE
            inside = frame[0] <= box[0] and box[2] <= frame[2] + 30 and frame[1] <= box[1] and box[3] <= frame[3]
            if inside and not any(a < box[2] and box[0] < c and b < box[3] and box[1] < d for a, b, c, d in taken):
                taken.append(box)
                out.append((rows[i], round(left, 1), round(base, 1)))
                break
    return out


def svg_plot(rows: Iterable[RooflineRow], peaks: Peaks, title: str = "") -> str:
    """The roofline as one SVG that needs nothing else: full dots are compute-bound, hollow ones memory-bound."""
    chart = _Chart(rows, peaks)
    left, top, wide, high = 70, 76, 620, 320
    below = top + high
    title = _printable(title) or "Roofline"
    foot = chart.foot(100)

    def at(intensity: float, rate: float) -> tuple[float, float]:
        x, y = chart.place(intensity, rate)
        return round(left + x * wide, 1), round(top + y * high, 1)

    def text(x: float, y: float, what: str, anchor: str = "start") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(what)}</text>'

    label = html.escape(". ".join([title, *chart.head(), f"Units: {len(chart.rows)}"]))
    box = f'viewBox="0 0 {left + wide + 30} {below + 48 + 16 * len(foot)}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" class="roofline" {box} role="img" aria-label="{label}">', _STYLE]
    out += [text(left, 18 + 16 * number, line) for number, line in enumerate((title, *chart.head()))]
    for power in chart.x[:: 1 + len(chart.x) // 12]:
        x, _ = at(10.0**power, 1)
        out.append(f'<path class="grid" d="M{x} {top}v{high}"/>' + text(x, below + 16, f"{10.0**power:g}", "middle"))
    for power in chart.y[:: 1 + len(chart.y) // 12]:
        _, y = at(1, 10.0**power)
        out.append(f'<path class="grid" d="M{left} {y}h{wide}"/>' + text(left - 6, y + 4, f"{10.0 ** (power - 9):g}", "end"))
    out.append(text(left + wide, below + 34, "FLOP/byte", "end") + text(left - 6, top - 12, "GFLOP/s", "end"))
    corners = [at(x, chart.roof(x)) for x in (10.0 ** chart.x[0], peaks.ridge, 10.0 ** chart.x[-1])]
    out.append(f'<path class="roof" d="M{" L".join(f"{x} {y}" for x, y in corners)}"/>')
    places = [at(row.intensity, row.rate) for row in chart.rows]
    for row, (x, y) in zip(chart.rows, places, strict=True):
        dot = f'<circle class="{row.bound(peaks)}" cx="{x}" cy="{y}" r="4">'
        out.append(f"{dot}<title>{html.escape(chart.describe(row))}</title></circle>")
    for row, x, y in _labelled(chart.rows, places, (left, top, left + wide, below)):
        out.append(f'<text class="unit" x="{x}" y="{y}">{html.escape(_short(row.name))}</text>')
    out += [text(left, below + 52 + 16 * number, line) for number, line in enumerate(foot)]
    return "\n".join([*out, "</svg>", ""])
