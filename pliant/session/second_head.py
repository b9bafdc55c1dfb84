"""A second head, which keeps training alone beside a selection: it shows what the head would have learned without it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pliant.engine.engine import Engine
from pliant.engine.prefix.prefix_model import Models
from pliant.runtime import batches
from pliant.runtime.batches import Loss
from pliant.runtime.clock import Laps, RunTime
from pliant.runtime.optimizer_step import Update
from pliant.runtime.sandbox import hide_step_, sandbox, scratch
from pliant.runtime.torch_internals import version
from pliant.session.delta import Undo, on
from pliant.session.norms import Norms


class SecondHead:
    """A copy of the head and of its optimizer state. It trains on every batch that the selection trains on, on the features of
    the network as it was when the selection came into force.

    Each batch costs a forward pass, and the head's backward pass. What ran on an inference runtime while the head was alone
    still does: the runtime's model holds the weights as they were. Weights, buffers, gradients, the optimizer and random states
    are left as they are; side effects of the loss happen once more.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        among: Mapping[str, nn.Parameter],
        engine: Engine,
        norms: Norms,
        update: Update,
        laps: Laps,
        time: RunTime,
        optimizer: torch.optim.Optimizer,
        head: Collection[str],
        was: Undo,
    ) -> None:
        """`head` names its parameters `among` all that are trainable; `was` holds the network as it was."""
        self._model, self._loss, self._among, self._engine, self._norms = model, loss, among, engine, norms
        self._laps, self._time, self._was = laps, time, was
        self._scaler = update.scaler
        self._update = replace(update, scaler=None, on_nan="skip" if update.reads_gradients else update.on_nan)
        self._params = {name: param for name, param in among.items() if name in head}
        self._models = engine.prefix_models  # of an inference runtime, with the weights as they were
        self._missing: list[Any] = []  # shapes of batches for which there was one before the run was stopped
        self._versions = {name: version(param) for name, param in model.named_parameters()}
        self._copies: dict[str, nn.Parameter] = {}
        self._follow(optimizer, {name: param.detach() for name, param in self._params.items()})
        for name, param in self._params.items():
            self._keep_state(name, optimizer.state.get(param))

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Train on with an optimizer like this one, which knows nothing of the past."""
        self._follow(optimizer, self._copies)

    def _follow(self, optimizer: torch.optim.Optimizer, values: Mapping[str, torch.Tensor]) -> None:
        """Train these values with an optimizer like this one."""
        self._optimizer = optimizer
        self._like, copies = scratch(optimizer, [*self._params.values()], values=[values[name] for name in self._params])
        hide_step_(self._like)
        self._copies = dict(zip(self._params, copies, strict=True))

    def _keep_state(self, name: str, state: Mapping[str, Any] | None) -> None:
        if state:
            self._like.state[self._copies[name]] = copy.deepcopy(dict(state))

    def _take_settings(self) -> None:
        """A scheduler may have changed the user's groups."""
        groups = {id(param): group for group in self._optimizer.param_groups for param in group["params"]}
        own = {id(self._copies[name]): param for name, param in self._params.items()}
        for group in self._like.param_groups:
            group.update({**groups[id(own[id(group["params"][0])])], "params": group["params"]})

    def train(self, batch: Any, first: bool, last: bool) -> torch.Tensor:
        """One batch, and a step if it is the `last` of one. Returns its loss, detached."""
        for own in self._copies.values() if first else ():  # the step before may have failed on its way
            own.grad = None
        with self._time.not_training("choosing"), self._laps.paused():
            self._norms.hold_(self._among, self._params.keys(), limited=True)
            return self._train(batch, last)

    def _train(self, batch: Any, last: bool) -> torch.Tensor:
        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        train = None if self._engine.origin.get("differentiates") == "parameters" else self._params
        with sandbox(self._model, train), self._was.as_it_was({name: own.detach() for name, own in self._copies.items()}):
            value = self._engine.loss_on(self._models_for(batch), batch)
            scaled = value if self._scaler is None else self._scaler.scale(value)
            grads = self._update.gradients(scaled, [*self._params.values()])
        for own, grad in zip(self._copies.values(), grads, strict=True):
            if grad is not None:
                own.grad = grad / scale if own.grad is None else own.grad + grad / scale
        if last:
            self._take_settings()
            self._update.step(self._like)
            for own in self._copies.values():
                own.grad = None
        return value.detach()

    def _models_for(self, batch: Any) -> Models:
        """The models as they hold now. A parameter that somebody else has changed is in none of them."""
        params = self._model.named_parameters()
        if any(version(param) != self._versions.get(name) for name, param in params if name not in self._was.params):
            self._models, self._missing = {}, []
        if (shapes := batches.shapes(batch)) in self._missing:
            self._missing.remove(shapes)
            self._models |= self._engine.make_prefix_model(batch)
        return self._models

    def stop(self) -> None:
        """Train no further. What made training quick is freed."""
        self._models, self._missing = {}, []

    def take_over_(self) -> None:
        """The head goes on from here, but for what the user has frozen meanwhile."""
        for name, param in self._params.items():
            if param.requires_grad:
                with torch.no_grad():
                    param.copy_(self._copies[name])
                if state := self._like.state.get(self._copies[name]):
                    self._optimizer.state[param] = copy.deepcopy(dict(state))

    def state(self) -> dict[str, Any]:
        """In plain types."""
        params = {name: own.detach().clone() for name, own in self._copies.items()}
        state = {name: copy.deepcopy(self._like.state.get(own)) for name, own in self._copies.items()}
        shapes = [[list(shape) for shape, *_ in given] for *_, given in self._models]
        return {"params": params, "state": state, "models": [*shapes, *self._missing]}

    def load(self, state: Mapping[str, Any]) -> None:
        device = next(iter(self._params.values())).device
        self._follow(self._optimizer, {name: value.to(device) for name, value in state["params"].items()})
        for name, held in state["state"].items():
            self._keep_state(name, on(device, held))
        self._models, self._missing = {}, [*state["models"]]
