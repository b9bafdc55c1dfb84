"""Full steps that take turns with those of a run, so that a share of the time is one of the device as it is now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pliant.cost.measure import FullStep
from pliant.engine.engine import Engine
from pliant.runtime import batches
from pliant.runtime.batches import Loss
from pliant.runtime.clock import Laps
from pliant.runtime.optimizer_step import Update
from pliant.runtime.ranks import Ranks
from pliant.session.norms import Norms


class FullSteps:
    """Times full steps of one model, and leaves no trace."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        params: Mapping[str, nn.Parameter],
        engine: Engine,
        norms: Norms,
        update: Update,
        laps: Laps,
        ranks: Ranks,
    ) -> None:
        self._what = model, loss, params
        self._engine, self._norms, self._update, self._laps, self._ranks = engine, norms, update, laps, ranks
        self._step: FullStep | None = None  # while steps take turns

    def end(self) -> None:
        """No more of them for now: free what they hold."""
        self._step = None

    def seconds(self, batch: Any, origin: Mapping[str, Any]) -> float:
        """Seconds of one now; 0 where this batch is not like that of `origin`, or where a step needs all processes."""
        return 0.0 if self._ranks.shards else self._ranks.first(lambda: self._seconds(batch, origin))

    def _seconds(self, batch: Any, origin: Mapping[str, Any]) -> float:
        shapes = ", ".join("×".join(map(str, shape)) for shape in batches.shapes(batch))
        if self._update.accumulate > 1 or origin.get("batch", shapes) != shapes:
            return 0.0
        self._norms.release_()
        if self._step is None:
            model, loss, params = self._what
            what = model, self._engine.optimizer, loss, params, self._laps.watch
            self._step = FullStep(*what, update=self._update)
        return self._step.seconds(batch)
