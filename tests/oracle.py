"""What the tests hold a session against: the plain PyTorch step, snapshots to the last bit, steady devices."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pliant import Cost, Policy, Profile, Session, measure
from pliant.core.mode import Mode
from pliant.engine.around import around_forward
from pliant.runtime.clock import Watch

Loss = Callable[[nn.Module, Any], torch.Tensor]
ENGINES = {"plain": partial(around_forward, Mode()), "lean": partial(around_forward, Mode(lean=True))}  # around a forward pass


def steady(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, batch: Any, **how: Any) -> Profile:
    """The profile of a device that takes one nanosecond per MAC, whatever the clock says."""

    def priced(cost: Cost) -> Cost:
        return replace(cost, seconds=cost.macs * 1e-9)

    profile = measure.counted(model, optimizer, loss, batch, **how)
    charges = tuple(replace(charge, cost=priced(charge.cost)) for charge in profile.charges)
    return replace(profile, base=priced(profile.base), charges=charges)


def on_steady_device(policy: Policy, **changes: Any) -> Policy:
    """The same policy where no measurement hangs on the clock."""
    return replace(policy, cost=policy.cost if policy.cost is measure.counted else steady, **changes)


class Device:
    """A simulated device: a step takes `speed` times the seconds that its profile predicts, a full step that is measured on
    its own `full_speed` times. Nothing else takes time. `now` is its clock, for steps and for the wall.
    """

    def __init__(self, speed: float = 1.0, full_speed: float = 1.0) -> None:
        self.now, self.speed, self.full_speed = 0.0, speed, full_speed
        self.full_seconds = 0.0
        self.clock = _SimulatedClock(self)

    def runs(self, session: Session) -> Session:
        """From now on the steps of this session are steps of this device."""

        def let_pass(*_: Any) -> None:
            self.full_seconds = self.full_seconds or session.profile.full.seconds
            self.now += self.speed * session.selection.cost.seconds

        session.optimizer.register_step_pre_hook(let_pass)
        return session


class _SimulatedClock(Watch):
    def __init__(self, device: Device) -> None:
        super().__init__(torch.device("cpu"))
        self._device = device
        self._now = self.wall = lambda: device.now

    def time(self, work: Callable[[], Any], lead: float = 0.0) -> tuple[float, Any]:
        return self._device.full_speed * self._device.full_seconds, work()


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, batch: Any, clip: float | None = None
) -> torch.Tensor:
    """What everybody writes."""
    optimizer.zero_grad(set_to_none=True)
    value = loss(model, batch)
    value.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return value.detach()


def freeze_by_hand(model: nn.Module, chosen: Collection[str], was_trainable: Collection[str]) -> None:
    """Ordinary freezing: flags by name; norms with running statistics train if one of their parameters does."""
    for name, param in model.named_parameters():
        param.requires_grad_(name in chosen and name in was_trainable)
        if name not in chosen:
            param.grad = None
    for name, module in model.named_modules():
        if isinstance(module, _NormBase):
            module.training = any(f"{name}.{own}" in chosen for own in ("weight", "bias"))


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Copies of everything that training reads or writes, by name."""
    params = dict(model.named_parameters())
    out: dict[str, Any] = {
        "weights": {name: param.detach().clone() for name, param in params.items()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "grads": {name: None if param.grad is None else param.grad.clone() for name, param in params.items()},
        "flags": {name: param.requires_grad for name, param in params.items()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "random": {"torch": torch.get_rng_state(), "numpy": pickle.dumps(np.random.get_state()), "python": random.getstate()},
    }
    if optimizer is not None:
        names = {param: name for name, param in params.items()}
        out["optimizer"] = {names[param]: copied(state) for param, state in optimizer.state.items()}
        out["groups"] = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return out


def copied(value: Any) -> Any:
    """The same nested value with every tensor copied."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    return value


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """The places where two nested values differ, to the last bit; empty where they are the same."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
        return [] if alike else [at]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = sorted(set(a) | set(b), key=str)
        missing = object()
        return [d for key in keys for d in differences(a.get(key, missing), b.get(key, missing), f"{at}/{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{at}/{i}")]
    return [] if type(a) is type(b) and a == b else [at]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
