"""A layer report: what each unit of a model costs on this device, and how close its backward pass comes to the roofline."""

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
from pliant.graph.units import Units, layers
from pliant.runtime.batches import Loss

_WIDTHS = {"": 1, "unit": 12, "FLOP/B": 6, "roof": 4, "bound": 7}


@dataclass(frozen=True)
class LayerReport:
    """The profile, the units (nearest the loss first) with a row of the roofline for each, and the device's peaks."""

    profile: Profile
    units: tuple[Unit, ...]
    rows: tuple[RooflineRow, ...]
    peaks: Peaks

    def alone(self, unit: Unit) -> tuple[float, float]:
        """Seconds and bytes of a step that trains this unit alone, as shares of a full step."""
        cost, full = self.profile.cost([unit]), self.profile.full
        return cost.seconds / full.seconds, cost.bytes / full.bytes if full.bytes else 0.0

    def table(self) -> Table:
        """One line per unit: the time of its backward pass, and a step with it alone as shares of a full step."""
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
            f"{origin['device']}, batch {origin['batch']}\n"
            f"a full step takes {full.seconds * 1e3:.4g} ms (forward {base.seconds / full.seconds:.0%}) and "
            f"{full.bytes / 1e6:.4g} MB beyond inference\n"
            f"predictions of whole steps are off by at most {miss:.1%}; repeated measurements differ by up to {spread:.1%}; "
            f"timed nodes cover {self.profile.coverage or 0:.0%} of the backward pass\n"
            f"peaks {self.peaks.flops / 1e9:.4g} GFLOP/s and {self.peaks.bandwidth / 1e9:.4g} GB/s, "
            f"ridge {self.peaks.ridge:.3g} FLOP/byte\n"
            f"ms: backward pass of the unit; alone, bytes: a step with this unit alone, as shares of a full step"
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


def layer_report(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batch: Any,
    units: Units | None = None,
    peaks_of: Peaks | None = None,
) -> LayerReport:
    """Measure a training step of a model and compare its units (layers by default) with the peaks of this device.

    The measurement leaves no trace.
    """
    pending = PendingReport(model, loss, batch, units)
    return pending.finish(timed(model, optimizer, loss, batch, graph=pending.graph), peaks_of)


class PendingReport:
    """A layer report that still needs a profile. It reads the graph from one forward pass of the model as it is now, and
    leaves no trace."""

    def __init__(self, model: nn.Module, loss: Loss, batch: Any, units: Units | None = None) -> None:
        self._first = next(model.parameters())
        self.graph = read_graph(model, loss, batch)
        found = (units or layers())(self.graph)
        self._units = tuple(unit for unit in found if not set(unit.params) <= set(self.graph.unused))

    def finish(self, profile: Profile, peaks_of: Peaks | None = None) -> LayerReport:
        """The report with this profile, against the given peaks or those of this device."""
        found = peaks_of or peaks(self._first.device, self._first.dtype)
        return LayerReport(profile, self._units, tuple(rows(self.graph, profile, self._units)), found)
