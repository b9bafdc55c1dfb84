"""Probe batch → one value per unit: what training it is worth now.

A signal is one small function: from what a probe saw of a parameter to the worth of its elements. Worths add up: a tensor is
worth the sum of its channels, a layer the sum of its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from pliant.core.errors import ProbeError
from pliant.core.types import Part, Unit
from pliant.graph.backward import walk
from pliant.runtime import torch_internals
from pliant.runtime.batches import Around, Loss, Pieces
from pliant.runtime.heap import give_back, is_held
from pliant.runtime.ranks import Ranks, local
from pliant.runtime.rng import rng_states, set_rng_states
from pliant.runtime.sandbox import sandbox, scratch, scratch_step
from pliant.runtime.trainable import ELEMENTWISE
from pliant.runtime.working import told
from pliant.signals.fisher import potentials
from pliant.signals.signals import Seen, Signal

_Update = Callable[[str, torch.Tensor], torch.Tensor]

_PIECE = {"cpu": 1 << 16}  # elements of a parameter whose updates are computed at a time


def probe(
    signal: Signal,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batch: Any,
    units: Sequence[Unit],
    *,
    scale: float = 1.0,
    seed: int = 0,
    round: int = 0,
    windows: Sequence[Sequence[str]] | None = None,
    around: Around = nullcontext,
    pieces: Pieces | None = None,
    freeze: bool = True,
    ranks: Ranks | None = None,
) -> dict[Unit, float]:
    """The value of every unit on one batch. Leaves no trace.

    With `pieces`, the batch comes in pieces, one after the other, so that a set of any size is scored in the memory of one
    piece. The Fisher potential is that of the whole set; other signals are averaged over the pieces.

    Gradients stream: each is scored and freed as it appears. With `windows`, parameters are scored window by window, each in
    passes of its own, which keep no more than those need; a parameter in no window is worth nothing. Forward passes run inside
    `around()`. Without `freeze`, no parameter is frozen meanwhile. `scale` (a GradScaler's) multiplies the loss and is divided
    out of the gradients again. With `ranks`, gradients are averaged over all processes before they are scored, so that values
    are those of the whole batch. A unit whose gradient is not finite gets NaN; where none is finite, or the loss is not, that
    is a `ProbeError`.
    """
    ranks = ranks or Ranks()
    sliced = any(part.dim is not None for unit in units for part in unit.parts)
    if ranks.shards and (signal.needs == "activation" or sliced or type(optimizer) not in ELEMENTWISE):
        what = "the Fisher potential" if signal.needs == "activation" else "the value of channels"
        what = what if signal.needs == "activation" or sliced else f"the update of {type(optimizer).__name__}"
        raise ValueError(f"{what} cannot be computed from shards of fully_shard. Use another recipe or optimizer, or DDP.")
    params = dict(model.named_parameters())
    names = list(dict.fromkeys(param for unit in units for param in unit.params))
    chances = np.random.default_rng([seed, round]).random(len(names))
    blank = {name: Seen(name, local(params[name].detach()), i, float(chances[i]), round) for i, name in enumerate(names)}
    tally = _Tally(signal, units, ranks)

    if signal.needs == "nothing":
        for seen in blank.values():
            tally.add(seen)
        return tally.values()

    parts: Pieces = [batch] if pieces is None else pieces
    update = _updater(optimizer, params)
    with sandbox(model, train=names if freeze else None):
        start = rng_states()
        for window in told("scoring layers", [names] if windows is None else list(windows)):
            give_back()  # what the last one has freed
            set_rng_states(start)  # every window sees the same dropout
            chosen = {name: params[name] for name in window if name in blank}
            for name in names if freeze else ():
                params[name].requires_grad_(name in chosen)
            stream = _Stream(model, loss, scale, chosen, around, ranks)
            if signal.needs == "activation":
                for name, potential in potentials(model, names, chosen, parts, scale, stream.run).items():
                    tally.add(replace(blank[name], potential=ranks.average_(potential)))
                continue
            for part in parts:
                stream.run(part, lambda name, grad: tally.add(_scored(blank[name], grad, update), 1 / len(parts)))
    values = tally.values()
    if scale == 1.0 and tally.is_spoilt:  # a scale that is too large is the scaler's matter
        raise ProbeError(
            "the loss of the probe batch is finite, but no gradient is: nothing can be learned from it. Check this batch and "
            "the weights, and what the loss divides by or takes the root of."
        )
    return values


def watch(params: Mapping[str, torch.Tensor], units: Sequence[Unit]) -> dict[str, float]:
    """Σ g² of each unit from the gradients that its parameters hold now: nothing runs but one norm over all of them.

    Drift is measured with it between probes; for plain SGD it is the update gain divided by the learning rate. Empty where
    there is no gradient.
    """
    grads = {name: params[name].grad for unit in units for name in unit.params}
    there = {name: grad for name, grad in grads.items() if grad is not None}
    if not there:
        return {}
    norms = torch_internals.norms([grad.coalesce().values() if grad.is_sparse else local(grad) for grad in there.values()])
    squares = torch.stack([norm.float().square().to(norms[0].device) for norm in norms]).tolist()
    square = dict(zip(there, squares, strict=True))
    return {unit.name: sum(square.get(name, 0.0) for name in unit.params) for unit in units}


class _Tally:
    """Adds up worths by unit, on the device, until they are asked for."""

    def __init__(self, signal: Signal, units: Sequence[Unit], ranks: Ranks) -> None:
        self._signal, self._units, self._ranks = signal, units, ranks
        self.is_spoilt = False  # whether nothing that was seen is finite
        self._parts: dict[str, list[tuple[int, Part]]] = {}
        for i, unit in enumerate(units):
            for part in unit.parts:
                self._parts.setdefault(part.param, []).append((i, part))
        self._found: list[tuple[int, torch.Tensor]] = []

    def add(self, seen: Seen, weight: float = 1.0) -> None:
        """Add what a parameter is worth."""
        with torch.no_grad():
            worth = self._signal.worth(seen)
            for i, part in self._parts.get(seen.name, ()):
                self._found.append((i, _of_part(worth, part, seen.weight.shape).double() * weight))

    def values(self) -> dict[Unit, float]:
        """The value of every unit, the same in all processes."""
        device = self._found[0][1].device if self._found else None
        amounts = torch.stack([amount.to(device) for _, amount in self._found]).tolist() if self._found else []
        totals = [0.0] * len(self._units)
        for (i, _), amount in zip(self._found, amounts, strict=True):
            totals[i] += amount
        self.is_spoilt = bool(amounts) and not any(map(math.isfinite, amounts))
        if not self._ranks.is_alone:
            names = [unit.name for unit in self._units]
            totals = list(self._ranks.total(dict(zip(names, totals, strict=True))).values())
            self.is_spoilt = bool(self._found) and not any(map(math.isfinite, totals))
        return dict(zip(self._units, (t if math.isfinite(t) else math.nan for t in totals), strict=True))


def _of_part(worth: torch.Tensor, part: Part, shape: Sequence[int]) -> torch.Tensor:
    """The worth of a slice. A worth without that dimension is spread evenly."""
    if part.dim is None or part.index is None:
        return worth.sum()
    if worth.shape == shape:
        along = worth.sum(dim=[d for d in range(worth.dim()) if d != part.dim]) if worth.dim() > 1 else worth
    elif part.dim == 0 and worth.shape == shape[:1]:
        along = worth
    else:
        return worth.sum() * (len(part.index) / shape[part.dim])
    return along[list(part.index)].sum()


def _scored(blank: Seen, grad: torch.Tensor, update: _Update) -> Seen:
    """What was seen of a parameter: its gradient, and the update that this gradient makes."""
    return replace(blank, grad=grad, update=lambda: update(blank.name, grad))


@dataclass(frozen=True)
class _Stream:
    """Forward and backward passes into some parameters; each gradient is handed over as it appears, then freed."""

    model: nn.Module
    loss: Loss
    scale: float
    params: Mapping[str, nn.Parameter]
    around: Around
    ranks: Ranks

    def run(
        self,
        batch: Any,
        on_grad: Callable[[str, torch.Tensor], None],
        into: Callable[[], list[torch.Tensor]] | None = None,
    ) -> None:
        """One forward and backward pass. Backward goes as far as these parameters, or as `into()`."""

        def hook(name: str) -> Callable[[torch.Tensor], None]:
            def take(param: torch.Tensor) -> None:
                grad, param.grad = param.grad, None
                if grad is not None:
                    grad = grad.to_dense() if grad.is_sparse else grad
                    on_grad(name, grad / self.scale if self.scale != 1.0 else grad)

            return take

        hooked = self.params if self.ranks.is_alone else {}
        handles = [param.register_post_accumulate_grad_hook(hook(name)) for name, param in hooked.items()]
        if is_held():  # memory is limited: what an operation frees goes back before the next one runs
            layers = (one for one in self.model.modules() if not isinstance(one, torch.jit.ScriptModule))
            handles += [layer.register_forward_pre_hook(lambda *_: give_back()) for layer in layers]
        try:
            with self.around():
                value = self.loss(self.model, batch)
            self.ranks.each(partial(_check_finite, value.detach()))
            if not value.requires_grad:
                return
            if is_held():
                for node in walk(value):
                    node.register_prehook(lambda *_: give_back())
            scaled = value * self.scale if self.scale != 1.0 else value
            # Into these parameters alone: the loss may have some of its own.
            ends = into() if into is not None else list(self.params.values())
            if self.ranks.is_alone:
                torch.autograd.backward(scaled, inputs=ends)
            else:
                self._run_together(scaled, ends, on_grad)
        finally:
            for handle in handles:
                handle.remove()

    def _run_together(
        self, loss: torch.Tensor, ends: Sequence[torch.Tensor], on_grad: Callable[[str, torch.Tensor], None]
    ) -> None:
        """Backward in all processes, then their mean gradients in one order, whatever each of their batches has reached."""
        grads: Sequence[torch.Tensor | None]
        if self.ranks.shards:  # which averages by itself, where gradients are accumulated
            torch.autograd.backward(loss)
            grads = [end.grad for end in ends]
        else:  # DDP must not notice
            grads = torch.autograd.grad(loss, ends, allow_unused=True)
        mine = {id(end): grad for end, grad in zip(ends, grads, strict=True)}
        for name, param in self.params.items():
            if id(param) in mine:
                grad, param.grad = mine.pop(id(param)), None
                grad = torch.zeros_like(param) if grad is None else grad.to_dense() if grad.is_sparse else grad
                grad = local(grad) if self.ranks.shards else self.ranks.average_(grad)
                on_grad(name, grad / self.scale if self.scale != 1.0 else grad)


def _check_finite(value: torch.Tensor) -> None:
    if not math.isfinite(loss := value.item()):
        raise ProbeError(
            f"the loss of the probe batch is {loss}: nothing can be learned from it. Check this batch and the weights; "
            f"a lower learning rate or clip=… keeps training from diverging."
        )


def _updater(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> _Update:
    """(name, gradient) → the Δw of the user's optimizer with a fresh state.

    One path for every optimizer: its own `step` on a copy of the parameter. 0.1 ms per tensor, and right by construction. The
    copy has double precision, or a small update would drown in the rounding of a large weight. Where the optimizer treats
    every element by itself, large parameters go piece by piece, which takes up little memory.
    """
    grouped = {id(param) for group in optimizer.param_groups for param in group["params"]}

    def step(param: nn.Parameter, value: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        precise = torch.float32 if param.device.type == "mps" else torch.float64
        precise = precise.to_complex() if param.is_complex() else precise
        like, (copy,) = scratch(optimizer, [param], precise, [value])
        copy.grad = grad.to(precise)
        for group in like.param_groups:  # a warm-up begins with a rate of 0, at which nothing would be worth anything
            if not group.get("lr", 1.0):
                group["lr"] = group.get("initial_lr", group["lr"])
        scratch_step(like)
        return copy.detach().sub_(value)

    def update(name: str, grad: torch.Tensor) -> torch.Tensor:
        param = params[name]
        if id(param) not in grouped:  # the optimizer would not move it
            return torch.zeros_like(grad)
        piece, value = _PIECE.get(param.device.type, 1 << 20), local(param.detach())
        if value.numel() <= piece or type(optimizer) not in ELEMENTWISE:
            return step(param, value, grad)
        flat = zip(value.reshape(-1).split(piece), grad.reshape(-1).split(piece), strict=True)
        return torch.cat([step(param, v, g).to(grad.dtype) for v, g in flat]).view(value.shape)

    return update
