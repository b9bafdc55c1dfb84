"""What units are worth now: the probe of a run."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from pliant import signals
from pliant.core.budget import Progress
from pliant.core.types import Unit
from pliant.engine.around import around_forward
from pliant.engine.engine import Engine
from pliant.runtime.batches import Loss, Pieces
from pliant.runtime.optimizer_step import Update
from pliant.runtime.ranks import Ranks
from pliant.session.controller import Controller


class Probes:
    """Scores the units of a controller, and leaves no trace."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        engine: Engine,
        controller: Controller,
        update: Update,
        ranks: Ranks,
        on: Pieces | None,
    ) -> None:
        """`on` are batches to score on, in place of the one of the coming step."""
        self._model, self._loss, self._engine, self._controller = model, loss, engine, controller
        self._update, self._ranks, self._on = update, ranks, on

    def values(self, batch: Any, round: int, progress: Progress, freeze: bool) -> dict[Unit, float]:
        """The value of every unit on this batch, unless there are others to score `on`."""
        policy, mode, scaler = self._controller.policy, self._engine.mode, self._update.scaler
        self._engine.make_room()
        values = signals.probe(
            policy.signal,
            self._model,
            self._engine.optimizer,
            self._loss,
            batch,
            self._controller.units,
            scale=scaler.get_scale() if scaler is not None else 1.0,
            seed=policy.seed,
            round=round,
            windows=self._controller.windows(progress, mode),
            around=partial(around_forward, mode),
            pieces=self._on,
            freeze=freeze,
            ranks=self._ranks,
        )
        self._engine.make_room()  # what lasts, like optimizer state, should not lie among what a probe has freed
        return values
