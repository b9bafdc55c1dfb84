"""What a unit is worth: one function of what a probe sees of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Seen:
    """What a probe saw of one parameter.

    `grad` is its gradient, `update()` the change that the user's optimizer would make from a fresh state. `potential` is
    the Fisher potential per output channel. `depth` counts from the loss (0); `chance` is random in [0, 1), new each round.
    """

    name: str
    weight: torch.Tensor
    depth: int = 0
    chance: float = 0.0
    round: int = 0
    grad: torch.Tensor | None = None
    update: Callable[[], torch.Tensor] | None = None
    potential: torch.Tensor | None = None


@dataclass(frozen=True)
class Signal:
    """`worth(seen)` gives the worth of a parameter's elements: its shape, or one number per index of its first dimension.

    `needs` says what must run: nothing, a backward pass, or one that also reads activations.
    """

    name: str
    worth: Callable[[Seen], torch.Tensor]
    needs: Literal["nothing", "gradient", "activation"] = "gradient"


def update_gain() -> Signal:
    """The first-order drop of the loss from this parameter's own next update: −Σ g·Δw (of complex numbers, Re(ḡ·Δw)).

    Δw is the update of the user's optimizer from a fresh state. With its current state, units that have trained for long could
    not be compared with others. ElasticTrainer, arXiv 2312.14227.
    """

    def worth(seen: Seen) -> torch.Tensor:
        return -(_grad(seen).conj() * _update(seen)).real

    return Signal("update_gain", worth)


def fisher() -> Signal:
    """Fisher potential of each output channel: Δ_o = 1/(2N) Σ_n (Σ_d a·g)², a: a module's output, g: its gradient.

    It is attributed to the module's first parameter, so a layer's is the sum over its modules. A parameter that no such module
    owns, or that is used outside its module's forward, gets the same from w·g over the batch. TinyTrain, arXiv 2307.09988.
    """
    return Signal("fisher", lambda seen: _nothing(seen) if seen.potential is None else seen.potential, needs="activation")


def grad_norm() -> Signal:
    """Σ g²: the squared gradient norm (squared, so that a layer's is the sum of its tensors')."""
    return Signal("grad_norm", lambda seen: _squares(_grad(seen)))


def alignment(window: int = 20) -> Signal:
    """The cosine between the negative gradient of a tensor and its change since the window began; 0 at the beginning.

    A window lasts for `window` probes. It is not saved: a resumed run begins a new one. GALA, arXiv 2404.03784.
    """
    if window < 2:
        raise ValueError(f"alignment(window={window}): a window needs at least 2 steps.")
    anchors: dict[str, torch.Tensor] = {}

    def worth(seen: Seen) -> torch.Tensor:
        anchor = anchors.get(seen.name)
        if seen.round % window == 0 or anchor is None or anchor.shape != seen.weight.shape:
            anchors[seen.name] = seen.weight.clone()
            return _nothing(seen)
        way, grad = _single(seen.weight - anchor), _grad(seen)
        lengths = way.norm() * grad.norm()
        return (-(grad.conj() * way).real.sum() / lengths.clamp(min=1e-30)).reshape(1)

    return Signal("alignment", worth)


def weight_norm() -> Signal:
    """Σ w²: the squared norm of the weights. Reads no data."""
    return Signal("weight_norm", lambda seen: _squares(_single(seen.weight)), needs="nothing")


def nearness() -> Signal:
    """1 / (1 + depth): units near the loss are worth more. Reads no data."""
    return Signal("nearness", lambda seen: torch.tensor([1.0 / (1 + seen.depth)]), needs="nothing")


def random() -> Signal:
    """A random number per parameter, new each round: the baseline that a signal must beat."""
    return Signal("random", lambda seen: torch.tensor([seen.chance]), needs="nothing")


def _grad(seen: Seen) -> torch.Tensor:
    return _nothing(seen) if seen.grad is None else _single(seen.grad)


def _update(seen: Seen) -> torch.Tensor:
    return _nothing(seen) if seen.update is None else _single(seen.update())


def _single(tensor: torch.Tensor) -> torch.Tensor:
    """In single precision, real or complex as it is."""
    return tensor.to(torch.complex64) if tensor.is_complex() else tensor.float()


def _squares(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.conj() * tensor).real


def _nothing(seen: Seen) -> torch.Tensor:
    return seen.weight.new_zeros(1, dtype=torch.float32)
