"""What changed since the start, and the way back. Parameters are copied when they are first chosen, not before."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pliant.runtime.sandbox import is_expanded


class Undo:
    """Copies of what has changed since the start, so that it can be put back."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._params: dict[str, torch.Tensor] = {}
        self._state: dict[str, Any] = {}
        self.keep_buffers()

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """This one takes the steps from now on. It starts afresh where everything is put back."""
        self._optimizer, self._state = optimizer, dict.fromkeys(self._state)

    def keep_buffers(self) -> None:
        """Copy all buffers."""
        self._buffers = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}

    def keep(self, params: Mapping[str, nn.Parameter]) -> None:
        """Copy parameters that are about to train for the first time, with what the optimizer knows of them."""
        for name, param in params.items():
            if name not in self._params:
                self._params[name] = param.detach().clone()
                self._state.setdefault(name, copy.deepcopy(self._optimizer.state.get(param)))

    @property
    def params(self) -> Collection[str]:
        """The names of the parameters that are kept here."""
        return self._params.keys()

    def keep_dropped(self, params: Mapping[str, nn.Parameter]) -> None:
        """Remember the optimizer state from before the run that is about to be dropped."""
        for name, param in params.items():
            if name not in self._params and name not in self._state and self._optimizer.state.get(param):
                self._state[name] = self._optimizer.state[param]

    def changed(self) -> dict[str, torch.Tensor]:
        """Parameters and saved buffers that differ from the start: copies of their values of now."""
        saved = self._model.state_dict(keep_vars=True)
        now = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        then = {**self._params, **{name: b for name, b in self._buffers.items() if name in saved}}
        return {name: now[name].detach().clone() for name, was in then.items() if not _same(now[name], was)}

    def rollback_(self) -> None:
        """Put everything back as it was. An optimizer that came later starts afresh."""
        optimizer = self._optimizer
        params, buffers = dict(self._model.named_parameters()), dict(self._model.named_buffers())
        with torch.no_grad():
            for name, was in self._params.items():
                params[name].copy_(was)
            for buffer, was in self._kept(buffers):
                buffer.copy_(was)
        if isinstance(optimizer, torch.optim.LBFGS):  # one history of all parameters
            optimizer.state.clear()
        for name in {**self._params, **self._state}:
            optimizer.state.pop(params[name], None)
            if self._state.get(name):
                optimizer.state[params[name]] = copy.deepcopy(self._state[name])

    @contextmanager
    def as_it_was(self, instead: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside, everything has the values of the start; some parameters have others `instead`. Enter it inside `sandbox`,
        which puts buffers back."""
        params, buffers = dict(self._model.named_parameters()), dict(self._model.named_buffers())
        now = {name: params[name].data for name in {**self._params, **instead}}
        try:
            for name, was in {**self._params, **instead}.items():
                params[name].data = was
            for buffer, was in self._kept(buffers):
                buffer.data.copy_(was)
            yield
        finally:
            for name, value in now.items():
                params[name].data = value

    def _kept(self, now: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The buffers of now and their values of the start. One that the model has replaced by another shape is its own matter,
        and into one that is expanded nothing can be written."""
        for name, was in self._buffers.items():
            buffer = now.get(name)
            if buffer is not None and buffer.shape == was.shape and not is_expanded(buffer):
                yield buffer, was

    def state(self) -> dict[str, Any]:
        return {"params": dict(self._params), "buffers": dict(self._buffers), "state": dict(self._state)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over the start of the run that is resumed."""
        params, buffers = dict(self._model.named_parameters()), dict(self._model.named_buffers())
        self._params = {name: t.to(params[name].device, copy=True) for name, t in state["params"].items()}
        self._buffers = {name: t.to(buffers[name].device, copy=True) for name, t in state["buffers"].items()}
        self._state = {name: on(params[name].device, held) for name, held in state["state"].items()}


def on(device: torch.device, held: Any) -> Any:
    """Optimizer state of one parameter on its device; single numbers (step counts) stay where they are."""
    if not held:
        return held
    return {key: v.to(device) if isinstance(v, torch.Tensor) and v.dim() else v for key, v in held.items()}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a = a.detach()
    return torch.equal(a, b) or bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))
