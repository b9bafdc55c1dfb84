"""Full steps that the run's own steps take turns with, to learn what a full step takes now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pliant.cost.measure import FullStep
from pliant.cost.profile import Profile
from pliant.engine.engine import Engine
from pliant.runtime import batches
from pliant.runtime.batches import Loss
from pliant.runtime.clock import Watch
from pliant.runtime.optimizer_step import Update
from pliant.session.norms import Norms


class FullSteps:
    """One `FullStep`, made when it is first needed and kept until the turns end."""

    def __init__(
        self, model: nn.Module, loss: Loss, params: Mapping[str, nn.Parameter], update: Update, norms: Norms, watch: Watch
    ) -> None:
        self._model, self._loss, self._params = model, loss, params
        self._update, self._norms, self._watch = update, norms, watch
        self._step: FullStep | None = None

    def seconds(self, batch: Any, engine: Engine, profile: Profile) -> float:
        """Seconds of a full step now; 0 where this batch is not like the one that costs were measured with."""
        shapes = ", ".join("×".join(map(str, shape)) for shape in batches.shapes(batch))
        if self._update.accumulate > 1 or profile.origin.get("batch", shapes) != shapes:
            return 0.0
        self._norms.release_()
        if self._step is None:
            what = self._model, engine.optimizer, self._loss, dict(self._params), self._watch
            self._step = FullStep(*what, update=self._update, around=engine.around)
        return self._step.seconds(batch)

    def end(self) -> None:
        """The turns are over."""
        self._step = None
