"""A model on this device: its units with their costs, their arithmetic intensity, and the roof over them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from rich.table import Table
from torch import nn

from pliant.core.types import Unit
from pliant.cost.measure import read_graph, timed
from pliant.cost.profile import Profile
from pliant.cost.roofline import Peaks, RooflineRow, letters, peaks, rows
from pliant.graph import units as kinds
from pliant.runtime.batches import Loss

_WIDTHS = {"": 1, "unit": 12, "FLOP/B": 6, "roof": 4, "bound": 7}


@dataclass(frozen=True)
class Survey:
    """What was found: the profile, the units (nearest the loss first), a row of the roofline for each, the device's peaks."""

    profile: Profile
    units: tuple[Unit, ...]
    rows: tuple[RooflineRow, ...]
    peaks: Peaks

    def alone(self, unit: Unit) -> tuple[float, float]:
        """Shares of a full step's seconds and bytes that a step with this unit alone takes."""
        cost, full = self.profile.cost([unit]), self.profile.full
        return cost.seconds / full.seconds, cost.bytes / full.bytes if full.bytes else 0.0

    def table(self) -> Table:
        """A line per unit: its own milliseconds, and a step with it alone as shares of a full step's time and bytes."""
        out = Table(title=self.heading(), title_justify="left", show_edge=False, pad_edge=False)
        for column in ("", "unit", "ms", "alone", "bytes", "MMAC", "FLOP/B", "roof", "bound"):
            justify: Literal["left", "right"] = "left" if column in ("", "unit", "bound") else "right"
            out.add_column(column, justify=justify, no_wrap=True, min_width=_WIDTHS.get(column, 5))
        for letter, unit, row in zip(letters(self.rows), self.units, self.rows, strict=True):
            seconds, size = self.alone(unit)
            out.add_row(
                letter,
                unit.name,
                f"{row.seconds * 1e3:.3g}",
                f"{seconds:.3f}",
                f"{size:.3f}",
                f"{row.macs / 1e6:.3g}",
                f"{row.intensity:.3g}",
                f"{row.share(self.peaks):.0%}",
                row.bound(self.peaks),
            )
        return out

    def heading(self) -> str:
        full, base = self.profile.full, self.profile.base
        spread = max((slowest / fastest - 1 for _, fastest, slowest in self.profile.checks), default=0.0)
        miss = max((abs(predicted / fastest - 1) for predicted, fastest, _ in self.profile.checks), default=0.0)
        origin = self.profile.origin
        return (
            f"{origin['device']}, batch {origin['batch']}: a full step takes {full.seconds * 1e3:.4g} ms "
            f"(forward {base.seconds / full.seconds:.0%}) and {full.bytes / 1e6:.4g} MB beyond inference\n"
            f"whole steps are predicted within {miss:.1%}, tries differ by up to {spread:.1%}, "
            f"nodes explain {self.profile.coverage or 0:.0%} of the backward time\n"
            f"peaks {self.peaks.flops / 1e9:.4g} GFLOP/s and {self.peaks.bandwidth / 1e9:.4g} GB/s, "
            f"ridge {self.peaks.ridge:.3g} FLOP/byte\n"
            f"ms: its own backward; alone, bytes: a step with this unit alone, as shares of a full step's"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "pliant.survey/1",
            "origin": dict(self.profile.origin),
            "full": asdict(self.profile.full),
            "forward": asdict(self.profile.base),
            "coverage": self.profile.coverage,
            "checks": [list(check) for check in self.profile.checks],
            "uncounted": list(self.profile.uncounted),
            "peaks": self.peaks.to_json() | {"ridge": self.peaks.ridge},
            "units": [
                {
                    **unit.to_json(),
                    **asdict(row),
                    "alone": asdict(self.profile.cost([unit])),
                    "intensity": row.intensity,
                    "share_of_roof": row.share(self.peaks),
                    "bound": row.bound(self.peaks),
                }
                for unit, row in zip(self.units, self.rows, strict=True)
            ],
        }


def survey(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batch: Any,
    units: kinds.Units | None = None,
    peaks_of: Peaks | None = None,
) -> Survey:
    """Measure a model's step, name its units (layers, unless told otherwise) and hold them against this device's peaks.

    The measurement leaves no trace.
    """
    sketch = Sketch(model, loss, batch, units)
    return sketch.survey(timed(model, optimizer, loss, batch, graph=sketch.graph), peaks_of)


class Sketch:
    """What a survey needs besides a profile: one forward pass of the model as it is now. Leaves no trace."""

    def __init__(self, model: nn.Module, loss: Loss, batch: Any, units: kinds.Units | None = None) -> None:
        self._first = next(model.parameters())
        self.graph = read_graph(model, loss, batch)
        found = (units or kinds.layers())(self.graph)
        self._units = tuple(unit for unit in found if not set(unit.params) <= set(self.graph.unused))

    def survey(self, profile: Profile, peaks_of: Peaks | None = None) -> Survey:
        """With what was measured meanwhile, against the peaks of this device if no others are given."""
        found = peaks_of or peaks(self._first.device, self._first.dtype)
        return Survey(profile, self._units, tuple(rows(self.graph, profile, self._units)), found)
