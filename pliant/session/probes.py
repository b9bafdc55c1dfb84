"""The probes of a run: what units are worth now, the loss of a head that says nothing, and the bytes of inference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from pliant import signals
from pliant.core.budget import Progress
from pliant.core.types import Unit
from pliant.cost.measure import inference_bytes
from pliant.engine.around import around_forward
from pliant.engine.engine import Engine
from pliant.runtime.batches import Loss, Pieces, tensors
from pliant.runtime.optimizer_step import Update
from pliant.runtime.ranks import Ranks
from pliant.runtime.sandbox import sandbox
from pliant.session.controller import Controller


class Probes:
    """Scores units, tries a head of zeros, measures inference, and leaves no trace."""

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
        self.elements = 0  # of the batch whose step is measured

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

    def silent(self, batch: Any, head: Mapping[str, nn.Parameter]) -> float:
        """The loss on this batch if all weights of the head were zero: for a classifier, that of a guess. NaN where such a loss
        cannot be computed."""
        copies = {param: param.detach().clone() for param in head.values()}
        with sandbox(self._model, ()), torch.no_grad():
            try:
                for param in copies:
                    param.zero_()
                return float(self._engine.loss_alone(batch))
            except Exception:  # the loss needs gradients, or fails on such outputs
                return math.nan
            finally:
                for param, copy in copies.items():
                    param.copy_(copy)

    def inference_bytes(self, batch: Any) -> int | None:
        """What inference takes, if the bytes beyond it are to be measured in the coming step: the first of a selection whose
        memory is limited, and of a larger batch."""
        if self._controller.policy.budget.memory is None or not self._controller.correct:
            return None
        self.elements = self._ranks.largest(sum(tensor.numel() for tensor in tensors(batch)))
        if not self._controller.feedback.wants_bytes(self.elements):
            return None
        self._engine.make_room()
        measured = inference_bytes(self._model, self._loss, batch, True)
        return self._controller.prices(self._engine.mode).inference if measured is None else measured
