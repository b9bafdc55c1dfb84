"""This device's two peaks, FLOP/s and bytes/s, and where a layer's backward stands against them."""

from __future__ import annotations

import html
import json
import math
import os
import string
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from pliant.core.types import Unit
from pliant.cost.charge import Charge, ChargeKind
from pliant.cost.profile import Profile
from pliant.graph.backward import Graph, Node
from pliant.runtime.clock import Watch, device_name
from pliant.runtime.files import write_aside

Work = Callable[[], object]
Seconds = Callable[[Work], float]  # runs some work and tells how long it took

_REPEATS = 4  # of each timed work, after one that is not counted; the best one tells the peak
_SPEND = 0.5  # seconds: no matmul is begun that would take longer than this with its repeats
_RISE = 1.02  # a rate that rises by less has stopped rising
_SIZES = tuple(2**n for n in range(8, 14))
_COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}  # large against the caches


@dataclass(frozen=True)
class Peaks:
    """The most that a device computes and moves in a second."""

    flops: float  # FLOP/s
    bandwidth: float  # bytes/s
    device: str
    dtype: str
    threads: int

    def __post_init__(self) -> None:
        for name, value in (("flops", self.flops), ("bandwidth", self.bandwidth)):
            if not 0 < value < math.inf:
                raise ValueError(f"a peak is a positive number: {name}={value}. Measure it with peaks().")

    @property
    def ridge(self) -> float:
        """The intensity, FLOP per byte, from which on computing takes longer than moving."""
        return self.flops / self.bandwidth

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Peaks:
        numbers = float(data["flops"]), float(data["bandwidth"])
        return cls(*numbers, str(data["device"]), str(data["dtype"]), int(data["threads"]))


def roof_seconds(macs: int, moved: int, peaks: Peaks, launch: float = 0.0) -> float:
    """The least time for this much work: max(2·MACs / peak, bytes / bandwidth) + launch.

    >>> roof_seconds(500, 100, Peaks(flops=1000, bandwidth=50, device="cpu", dtype="float32", threads=1))
    2.0
    """
    return max(2 * macs / peaks.flops, moved / peaks.bandwidth) + launch


@dataclass(frozen=True)
class Row:
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

    @property
    def moving(self) -> float:
        """Bytes/s."""
        return self.moved / self.seconds if self.seconds else 0.0

    def bound(self, peaks: Peaks) -> Literal["compute", "memory"]:
        """What the roof over this intensity is made of."""
        return "compute" if self.macs and self.flops >= self.moved * peaks.ridge else "memory"

    def share(self, peaks: Peaks) -> float:
        """The least possible time over the measured one. Above 1, the bytes came from a cache or the peaks are too low."""
        return roof_seconds(self.macs, self.moved, peaks) / self.seconds if self.seconds else 0.0


# ---------------------------------------------------------------- a model's units


def rows(graph: Graph, profile: Profile, units: Iterable[Unit]) -> list[Row]:
    """Where the backward pass of each unit stands: its own operations' input gradients and parameters' gradients."""
    out = []
    for unit in units:
        own = set(unit.params)
        nodes = {i: node for i, node in enumerate(graph.nodes) if not node.carrier and not own.isdisjoint(node.params)}
        mine = [charge for charge in profile.charges if charge.node in nodes and _is_backward_of(charge, own)]
        seconds, macs = sum(charge.cost.seconds for charge in mine), sum(charge.cost.macs for charge in mine)
        out.append(Row(unit.name, seconds, macs, sum(backward_moved(node) for node in nodes.values())))
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


# ---------------------------------------------------------------- the peaks of this device


def peaks(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, again: bool = False) -> Peaks:
    """This device's peaks: measured once, then read from `$PLIANT_CACHE/peaks.json` (else the user's cache folder).

    `again` measures anew. On CUDA, measuring shows in torch's peak memory statistics.
    """
    device = torch.device(device)
    if device.type not in _COPY_BYTES:
        raise ValueError(f"peaks are measured on cpu and cuda: got {str(device)!r}. Give the device's own as Peaks(…).")
    if not dtype.is_floating_point:
        raise ValueError(f"peaks are those of a floating point dtype: got {dtype}. Use torch.float32, say.")
    key = _key(device, dtype)
    if not again:
        try:
            return Peaks.from_json(_kept()[key])
        except (KeyError, TypeError, ValueError):  # not there, or not a whole one
            pass
    found = measured(clock(device), device, dtype)
    _keep(key, found)
    return found


def measured(seconds: Seconds, device: torch.device, dtype: torch.dtype) -> Peaks:
    """The peaks of a device by this clock."""
    flops, bandwidth = _matmul_peak(seconds, device, dtype), _copy_peak(seconds, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was copied is large, and others may need it
    return Peaks(flops, bandwidth, device_name(device), str(dtype).removeprefix("torch."), torch.get_num_threads())


def clock(device: torch.device) -> Seconds:
    """Runs some work on a device and tells its seconds; a lone CPU thread does not count what others do meanwhile."""
    watch = Watch(device)
    return lambda work: watch.time(work)[0]


def _best(seconds: Seconds, work: Work) -> float:
    work()
    return min(seconds(work) for _ in range(_REPEATS))


def _matmul_peak(seconds: Seconds, device: torch.device, dtype: torch.dtype) -> float:
    """The best rate of square matmuls that grow until it stops rising. Ones cost a GPU less power than real data does."""
    peak = 0.0
    for size in _SIZES:
        try:
            a, out = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
            took = _best(seconds, partial(torch.mm, a, a, out=out))
        except torch.OutOfMemoryError:
            if not peak:
                raise
            break
        rate = 2 * size**3 / took if took > 0 else 0.0  # a coarse clock may not see a small one
        rises, peak = rate > _RISE * peak or not rate, max(rate, peak)
        if not rises or 8 * took * (_REPEATS + 1) > _SPEND:
            break
    return peak


def _copy_peak(seconds: Seconds, device: torch.device) -> float:
    """The best rate of large copies; each byte is read and written."""
    size = _COPY_BYTES[device.type]
    while True:
        try:
            a, b = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
            took = _best(seconds, partial(b.copy_, a))
            return 2 * size / took if took > 0 else 0.0
        except RuntimeError:  # short of memory: the CPU has no error of its own for that
            if size <= 2**20:
                raise
            size //= 2


def _key(device: torch.device, dtype: torch.dtype) -> str:
    """All that the peaks depend on."""
    parts = [device_name(device), f"{torch.get_num_threads()} threads", str(dtype), f"torch {torch.__version__}"]
    if device.type == "cuda":  # what allow_tf32 says; that one raises once fp32_precision was set
        parts.append(f"tf32 {torch.backends.cuda.matmul.fp32_precision == 'tf32'}")
    return ", ".join(parts)


def _cache_file() -> Path:
    own, users = os.environ.get("PLIANT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return (Path(own) if own else (Path(users) if users else Path.home() / ".cache") / "pliant") / "peaks.json"


def _kept() -> dict[str, Any]:
    try:
        kept = json.loads(_cache_file().read_bytes())
    except (OSError, ValueError, RuntimeError):  # no file, no JSON, no home
        return {}
    return kept if isinstance(kept, dict) else {}


def _keep(key: str, found: Peaks) -> None:
    try:
        file = _cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_aside(file, json.dumps(_kept() | {key: found.to_json()}, indent=1).encode())
    except (OSError, RuntimeError):  # nowhere to keep it: measured again next time
        pass


# ---------------------------------------------------------------- plots


class _Chart:
    """What both plots show: whole decades around the roof and the rows that have a place among them."""

    def __init__(self, rows: Iterable[Row], peaks: Peaks) -> None:
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

    def tell(self, row: Row) -> str:
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


def letters(rows: Sequence[Row]) -> list[str]:
    """How `text_plot` marks each row: a letter, * after the 52nd, nothing where it has no place in the plot."""
    names = iter(string.ascii_letters)
    return [next(names, "*") if _has_place(row) else "" for row in rows]


def _has_place(row: Row) -> bool:
    return row.intensity > 0 and 0 < row.rate < math.inf


def text_plot(rows: Iterable[Row], peaks: Peaks, width: int = 72, height: int = 18, legend: bool = True) -> str:
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
        at = margin + cell(10.0**power, 1)[1]
        ticks = ticks.ljust(at) + f"{10.0**power:g}" if at > len(ticks) else ticks
    who, numbers = chart.head()
    body = [f"{labels.get(number, ''):>{margin - 2}} |{''.join(line)}".rstrip() for number, line in enumerate(grid)]
    units = [f"{letter} {chart.tell(row)}" for letter, row in zip(marks, chart.rows, strict=True)] if legend else []
    return "\n".join([who, f"GFLOP/s   {numbers}", *body, ticks, "FLOP/byte".rjust(width), *units, *chart.foot(width)])


_STYLE = """<style>
.roofline { color: #222; font: 12px system-ui, sans-serif; }
.roofline text { fill: currentColor; } .roofline .grid { stroke: currentColor; opacity: .15; }
.roofline .roof { stroke: currentColor; stroke-width: 2; fill: none; }
.roofline circle { stroke: #c2410c; stroke-width: 2; fill: #c2410c; } .roofline .memory { fill-opacity: 0; }
@media (prefers-color-scheme: dark) { .roofline { color: #ddd; } .roofline circle { stroke: #fb923c; fill: #fb923c; } }
</style>"""


def svg_plot(rows: Iterable[Row], peaks: Peaks, title: str = "") -> str:
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
    for row in chart.rows:
        x, y = at(row.intensity, row.rate)
        dot = f'<circle class="{row.bound(peaks)}" cx="{x}" cy="{y}" r="4">'
        out.append(f"{dot}<title>{html.escape(chart.tell(row))}</title></circle>")
    out += [text(left, below + 52 + 16 * number, line) for number, line in enumerate(foot)]
    return "\n".join([*out, "</svg>", ""])
