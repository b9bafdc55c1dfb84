"""What a unit is worth: one function of what a probe sees of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Seen:
    """What a probe saw of one parameter.

    `grad` is its gradient, `update()` the change that the user's optimizer would make from a fresh state; with a
    cross-batch signal the two come from different halves of the batch. `potential` is the Fisher potential per output
    channel. `depth` counts from the loss (0); `chance` is a number in [0, 1), new each round.
    """

    name: str
    weight: torch.Tensor
    depth: int = 0
    chance: float = 0.0
    grad: torch.Tensor | None = None
    update: Callable[[], torch.Tensor] | None = None
    potential: torch.Tensor | None = None


@dataclass(frozen=True)
class Signal:
    """`worth(seen)` gives the worth of a parameter's elements: its shape, or one number per index of its first dimension.

    `needs` says what must run: nothing, one backward pass, or one that also looks at activations. `cross` takes gradient
    and update from two halves of the batch. `batches` are averaged before each re-selection; `smooth` is the share of the
    old value that is kept from round to round. A cross-batch probe holds one half's gradients; `hold` bounds their bytes,
    at the price of more passes.
    """

    name: str
    worth: Callable[[Seen], torch.Tensor]
    needs: Literal["nothing", "gradient", "activation"] = "gradient"
    cross: bool = False
    batches: int = 1
    smooth: float = 0.0
    hold: int | None = None

    def __post_init__(self) -> None:
        if self.batches < 1 or not 0 <= self.smooth < 1:
            raise ValueError(f"{self.name}: batches must be at least 1 and smooth in [0, 1) ({self.batches=}, {self.smooth=}).")


def update_gain(cross: bool = True, batches: int = 1, smooth: float = 0.0, hold: int | None = None) -> Signal:
    """The first-order drop of the loss from this parameter's own next update: −Σ g·Δw.

    Δw is what the user's optimizer would do, from a fresh state for every unit: with the state as it is, units that were
    long chosen and units that were not could not be compared. On one batch, g and Δw share their noise, which makes noisy
    units look good; with `cross` they come from two halves: −½(g₁·Δw(g₂) + g₂·Δw(g₁)). A batch that
    cannot be cut (fewer than four samples, or tensors that do not agree on their number) is scored whole.

    ElasticTrainer, arXiv 2312.14227.
    """

    def worth(seen: Seen) -> torch.Tensor:
        return -_grad(seen) * _update(seen)

    return Signal("update_gain", worth, cross=cross, batches=batches, smooth=smooth, hold=hold)


def fisher() -> Signal:
    """Fisher potential of each output channel: Δ_o = 1/(2N) Σ_n (Σ_d a·g)², a: a module's output, g: its gradient.

    It stands with the module's first parameter, so a layer's is the sum over its modules. A parameter that no such module owns
    or that is used outside its module's forward gets the same from w·g over the whole batch. TinyTrain, arXiv 2307.09988.
    """
    return Signal("fisher", lambda seen: _nothing(seen) if seen.potential is None else seen.potential, needs="activation")


def grad_norm() -> Signal:
    """Σ g²: the squared gradient norm (squared, so that a layer's is the sum of its tensors')."""
    return Signal("grad_norm", lambda seen: _grad(seen).square())


def weight_norm() -> Signal:
    """Σ w²: the squared norm of the weights. Looks at no data."""
    return Signal("weight_norm", lambda seen: seen.weight.float().square(), needs="nothing")


def nearness() -> Signal:
    """1 / (1 + depth): the nearer to the loss, the more. Looks at no data."""
    return Signal("nearness", lambda seen: torch.tensor([1.0 / (1 + seen.depth)]), needs="nothing")


def random() -> Signal:
    """A random number per parameter, new each round: the control that a signal must beat."""
    return Signal("random", lambda seen: torch.tensor([seen.chance]), needs="nothing")


def _grad(seen: Seen) -> torch.Tensor:
    return _nothing(seen) if seen.grad is None else seen.grad.float()


def _update(seen: Seen) -> torch.Tensor:
    return _nothing(seen) if seen.update is None else seen.update().float()


def _nothing(seen: Seen) -> torch.Tensor:
    return seen.weight.new_zeros(1, dtype=torch.float32)
