"""Probe batch → one value per unit: what training it is worth now.

A signal is one small function: from what a probe saw of a parameter to the worth of its elements. Worths add up: a tensor is
worth the sum of its channels, a layer the sum of its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from pliant.core.errors import ProbeError
from pliant.core.types import Part, Unit
from pliant.runtime import batches, torch_internals
from pliant.runtime.batches import Around, Loss, Pieces
from pliant.runtime.rng import rng_states, set_rng_states
from pliant.runtime.sandbox import sandbox, scratch, scratch_step
from pliant.runtime.trainable import ELEMENTWISE
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
) -> dict[Unit, float]:
    """The value of every unit on one batch. Leaves no trace.

    With `pieces`, the batch comes in those, one after the other, so that a set of any size is scored in the memory of a piece:
    the Fisher potential is that of the whole; other signals are averaged over the pieces.

    Gradients stream: each is scored and freed as it appears. With `windows`, parameters get theirs window by window, each in
    passes of its own, which keep no more than those need; a parameter in no window is worth nothing. Forward passes run inside
    of `around()`. `scale` multiplies the loss and is taken out of the gradients again (a GradScaler's). A unit whose gradient
    is not finite gets NaN; a loss that is not finite is a `ProbeError`.
    """
    params = dict(model.named_parameters())
    names = list(dict.fromkeys(param for unit in units for param in unit.params))
    chances = np.random.default_rng([seed, round]).random(len(names))
    blank = {name: Seen(name, params[name].detach(), i, float(chances[i])) for i, name in enumerate(names)}
    tally = _Tally(signal, units)

    if signal.needs == "nothing":
        for seen in blank.values():
            tally.add(seen)
        return tally.values()

    parts: Pieces = [batch] if pieces is None else pieces
    on_cuda = next(iter(params.values())).is_cuda  # where kernels are looked for anew for every other shape: that takes seconds
    with sandbox(model, train=names):
        if windows is None:
            windows = _windows(names, params, signal.hold if signal.cross and signal.needs == "gradient" else None)
        start = rng_states()
        for window in windows:
            set_rng_states(start)  # every window sees the same dropout
            chosen = {name: params[name] for name in window if name in blank}
            for name in names:
                params[name].requires_grad_(name in chosen)
            passes = _Passes(model, loss, scale, chosen, blank, tally, around, 1 / len(parts))
            if signal.needs == "activation":
                passes.activations(parts)
                continue
            for part in parts:
                pair = batches.halves(part, as_whole=on_cuda) if signal.cross else None
                if pair is None:
                    passes.gradients(part, _updater(optimizer, params))
                else:
                    passes.halves(pair, _updater(optimizer, params))
    return tally.values()


def watch(params: Mapping[str, torch.Tensor], units: Sequence[Unit]) -> dict[str, float]:
    """Σ g² of each unit from the gradients that stand on its parameters now: nothing runs but one norm over all of them.

    This is what values are watched by between probes; for plain SGD it is the update gain itself, but for the learning
    rate. Empty where there is no gradient.
    """
    grads = {name: params[name].grad for unit in units for name in unit.params}
    there = {name: grad for name, grad in grads.items() if grad is not None}
    if not there:
        return {}
    norms = torch_internals.norms([grad.coalesce().values() if grad.is_sparse else grad for grad in there.values()])
    squares = torch.stack([norm.float().square().to(norms[0].device) for norm in norms]).tolist()
    square = dict(zip(there, squares, strict=True))
    return {unit.name: sum(square.get(name, 0.0) for name in unit.params) for unit in units}


class _Tally:
    """Adds up worths by unit, on the device, until they are asked for."""

    def __init__(self, signal: Signal, units: Sequence[Unit]) -> None:
        self._signal = signal
        self._units = units
        self._parts: dict[str, list[tuple[int, Part]]] = {}
        for i, unit in enumerate(units):
            for part in unit.parts:
                self._parts.setdefault(part.param, []).append((i, part))
        self._found: list[tuple[int, torch.Tensor]] = []

    def add(self, seen: Seen, weight: float = 1.0) -> None:
        with torch.no_grad():
            worth = self._signal.worth(seen)
            for i, part in self._parts.get(seen.name, ()):
                self._found.append((i, _of_part(worth, part, seen.weight.shape).double() * weight))

    def values(self) -> dict[Unit, float]:
        totals = [0.0] * len(self._units)
        if self._found:
            device = self._found[0][1].device
            amounts = torch.stack([amount.to(device) for _, amount in self._found]).tolist()
            for (i, _), amount in zip(self._found, amounts, strict=True):
                totals[i] += amount
        return dict(zip(self._units, (t if math.isfinite(t) else math.nan for t in totals), strict=True))


def _of_part(worth: torch.Tensor, part: Part, shape: Sequence[int]) -> torch.Tensor:
    """The worth of a slice. What is not told apart along its dimension is spread evenly."""
    if part.dim is None or part.index is None:
        return worth.sum()
    if worth.shape == shape:
        along = worth.sum(dim=[d for d in range(worth.dim()) if d != part.dim]) if worth.dim() > 1 else worth
    elif part.dim == 0 and worth.shape == shape[:1]:
        along = worth
    else:
        return worth.sum() * (len(part.index) / shape[part.dim])
    return along[list(part.index)].sum()


@dataclass(frozen=True)
class _Passes:
    """Forward and backward passes into some parameters; each gradient is scored as it appears, then let go."""

    model: nn.Module
    loss: Loss
    scale: float
    params: Mapping[str, nn.Parameter]
    blank: Mapping[str, Seen]
    tally: _Tally
    around: Around
    share: float  # of each piece in the whole

    def gradients(self, batch: Any, update: _Update) -> None:
        """One pass: every gradient against the update that it makes."""

        def take(name: str, grad: torch.Tensor) -> None:
            self.tally.add(replace(self.blank[name], grad=grad, update=lambda: update(name, grad)), self.share)

        self._stream(batch, take)

    def halves(self, pair: tuple[Any, Any], update: _Update) -> None:
        """Two passes: each half's gradient against the update that the other's makes."""
        first: dict[str, torch.Tensor] = {}
        self._stream(pair[0], first.__setitem__)

        def take(name: str, grad: torch.Tensor) -> None:
            other = first.pop(name, None)
            if other is None:  # this half of the batch did not reach it
                return
            seen = self.blank[name]
            self.tally.add(replace(seen, grad=other, update=lambda: update(name, grad)), 0.5 * self.share)
            self.tally.add(replace(seen, grad=grad, update=lambda: update(name, other)), 0.5 * self.share)

        self._stream(pair[1], take)

    def activations(self, parts: Pieces) -> None:
        """A pass for each piece that squares Σ a·g per sample and channel at the output of every module with parameters of its
        own; g is the gradient of the whole's loss, so pieces of any size add up to the same. The gradients of those parameters
        themselves are not computed: backward goes as far as the smallest one of each module that comes first."""
        name_of = {param: name for name, param in self.model.named_parameters() if name in self.blank}
        layers: list[nn.Module] = [module for module in self.model.modules() if isinstance(module, _LAYERS)]
        own = {module: [name_of[p] for p in module._parameters.values() if p in name_of] for module in layers}
        own = {module: names for module, names in own.items() if any(name in self.params for name in names)}
        sums: dict[nn.Module, torch.Tensor] = {}  # of one piece: (samples, channels), over all uses of the module
        squares: dict[nn.Module, torch.Tensor] = {}  # of all pieces: (channels,)
        counts: dict[nn.Module, int] = {}  # samples in them
        along: dict[str, torch.Tensor] = {}  # w·g, of what no module shows
        through_modules: set[str] = set()
        first: set[str] = set()  # of modules with nothing to learn before them
        samples = 0

        def on_output(module: nn.Module, inputs: Any, output: Any) -> None:
            out = next(batches.tensors(output), None)
            if out is None or not out.requires_grad or out.dim() < 2:
                return
            through_modules.update(own[module])
            if not any(given.requires_grad for given in batches.tensors(inputs)):
                first.add(
                    min((name for name in own[module] if name in self.params), key=lambda name: self.params[name].numel())
                )
            if own[module][0] not in self.params:  # another window's
                return
            activation = out.detach().clone()  # a copy: what follows may work in place

            def on_out_grad(grad: torch.Tensor) -> None:
                product = (activation * grad * (self.share / self.scale)).float().movedim(_channel_dim(module, activation), 1)
                per_channel = product.reshape(product.shape[0], product.shape[1], -1).sum(dim=2)
                sums[module] = sums[module] + per_channel if module in sums else per_channel

            out.register_hook(on_out_grad)

        def on_grad(name: str, grad: torch.Tensor) -> None:
            if name not in through_modules:
                product = (self.blank[name].weight * grad).float().reshape(grad.shape[0] if grad.dim() else 1, -1)
                along[name] = along.get(name, 0) + self.share * product.sum(dim=1)

        def into() -> list[torch.Tensor]:
            return [param for name, param in self.params.items() if name in first or name not in through_modules]

        handles = [module.register_forward_hook(on_output) for module in own]
        try:
            for part in parts:
                samples += batches.size(part) or 1
                self._stream(part, on_grad, into)
                for module, total in sums.items():
                    squares[module] = squares.get(module, 0) + total.square().sum(dim=0)
                    counts[module] = counts.get(module, 0) + total.shape[0]
                sums.clear()
        finally:
            for handle in handles:
                handle.remove()
        for name, product in along.items():
            self.tally.add(replace(self.blank[name], potential=product.square() / (2 * samples**2)))
        for module, square in squares.items():
            self.tally.add(replace(self.blank[own[module][0]], potential=square / (2 * counts[module])))

    def _stream(
        self,
        batch: Any,
        on_grad: Callable[[str, torch.Tensor], None],
        into: Callable[[], list[torch.Tensor]] | None = None,
    ) -> None:
        """One forward and backward pass; every gradient is handed over as it appears, then let go. Backward goes as far as
        these parameters, or what is `into`."""

        def hook(name: str) -> Callable[[torch.Tensor], None]:
            def take(param: torch.Tensor) -> None:
                grad, param.grad = param.grad, None
                if grad is not None:
                    grad = grad.to_dense() if grad.is_sparse else grad
                    on_grad(name, grad / self.scale if self.scale != 1.0 else grad)

            return take

        handles = [param.register_post_accumulate_grad_hook(hook(name)) for name, param in self.params.items()]
        try:
            with self.around():
                value = _finite_loss(self.model, self.loss, batch)
            if value.requires_grad:  # into these parameters alone: the loss may have some of its own
                scaled = value * self.scale if self.scale != 1.0 else value
                torch.autograd.backward(scaled, inputs=into() if into is not None else list(self.params.values()))
        finally:
            for handle in handles:
                handle.remove()


def _finite_loss(model: nn.Module, loss: Loss, batch: Any) -> torch.Tensor:
    value = loss(model, batch)
    if not bool(torch.isfinite(value.detach()).all()):
        raise ProbeError(
            f"the loss of the probe batch is {value.item()}: nothing can be learned from it. Check this batch and the weights; "
            f"a lower learning rate or clip=… keeps training from diverging."
        )
    return value


def _updater(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> _Update:
    """(name, gradient) → the Δw of the user's optimizer with a fresh state.

    One path for every optimizer: its own `step` on a copy of the parameter. 0.1 ms per tensor, and right by construction. The
    copy has double precision, or a small update would drown in the rounding of a large weight. Where the optimizer treats
    every element by itself, large parameters go piece by piece, which takes up little memory.
    """
    grouped = {id(param) for group in optimizer.param_groups for param in group["params"]}

    def step(param: nn.Parameter, value: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        precise = torch.float32 if param.device.type == "mps" else torch.float64
        like, (copy,) = scratch(optimizer, [param], precise, [value])
        copy.grad = grad.to(precise)
        scratch_step(like)
        return copy.detach().sub_(value)

    def update(name: str, grad: torch.Tensor) -> torch.Tensor:
        param = params[name]
        if id(param) not in grouped:  # the optimizer would not move it
            return torch.zeros_like(grad)
        piece = _PIECE.get(param.device.type, 1 << 20)
        if param.numel() <= piece or type(optimizer) not in ELEMENTWISE:
            return step(param, param.detach(), grad)
        value, flat = param.detach().reshape(-1), grad.reshape(-1)
        pieces = [step(param, v, g).to(grad.dtype) for v, g in zip(value.split(piece), flat.split(piece), strict=True)]
        return torch.cat(pieces).view(param.shape)

    return update


def _windows(names: Sequence[str], params: Mapping[str, nn.Parameter], hold: int | None) -> list[list[str]]:
    """Consecutive names whose gradients together need at most `hold` bytes (a larger single one stands alone)."""
    if hold is None:
        return [list(names)]
    out: list[list[str]] = [[]]
    held = 0
    for name in names:
        size = params[name].numel() * params[name].element_size()
        if out[-1] and held + size > hold:
            out.append([])
            held = 0
        out[-1].append(name)
        held += size
    return out


# Modules whose output is their parameters' doing: channels second, or channels last.
_CHANNELS_SECOND = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_LAYERS = (*_CHANNELS_SECOND, nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)


def _channel_dim(module: nn.Module, out: torch.Tensor) -> int:
    return 1 if isinstance(module, _CHANNELS_SECOND) else out.dim() - 1
