"""Sets `requires_grad` of the user's parameters: `apply_` and `restore_`. Probes and measurements do it in `sandbox`."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn


def apply_(
    among: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    chosen: Collection[str],
    state: Literal["keep", "drop"] = "keep",
) -> None:
    """Make just the `chosen` parameters trainable. Checks first and changes then: an error leaves everything as it was.

    What is not chosen loses its gradient (an optimizer moves whatever has one, even of zeros) and, with `state="drop"`, its
    optimizer state, whose memory is freed.
    """
    unknown = sorted(set(chosen) - set(among))
    if unknown:
        raise ValueError(f"cannot choose {unknown[0]!r}: the model has no trainable parameter of that name.")
    check_in_groups(among, optimizer, chosen)
    drops = state == "drop" and not isinstance(optimizer, torch.optim.LBFGS)  # `forget_history_` does it there
    for name, param in among.items():
        param.requires_grad_(name in chosen)
        if name not in chosen:
            param.grad = None
            if drops:
                optimizer.state.pop(param, None)
    torch.clear_autocast_cache()  # it may hold casts of weights made under the old choice


def forget_history_(among: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, chosen: Collection[str]) -> None:
    """Before others are chosen: LBFGS has one history of all parameters, which would go on moving those that freeze."""
    if isinstance(optimizer, torch.optim.LBFGS) and any(param.requires_grad != (n in chosen) for n, param in among.items()):
        optimizer.state.clear()


def in_groups(among: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> set[str]:
    """Names of the parameters that the optimizer holds."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return {name for name, param in among.items() if id(param) in held}


def leave_out_unheld(
    among: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, wanted: Collection[str]
) -> tuple[set[str], str | None]:
    """Names of the parameters that the optimizer holds. Where some are missing of those that are wanted: a warning, and what to
    write into the log. None of them is an error."""
    held = in_groups(among, optimizer)
    missing = [name for name in wanted if name not in held]
    if not missing:
        return held, None
    text = f"{missing[0]!r} is in no param group of the optimizer ({len(missing)} such parameters)"
    if len(missing) == len(wanted):
        raise ValueError(f"nothing can be chosen: {text}. Build the optimizer over the model's parameters.")
    warnings.warn(f"{text}: never chosen. Build the optimizer over all parameters to change that.", stacklevel=2)
    return held, f"never chosen: {text}"


def check_in_groups(among: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, chosen: Collection[str]) -> None:
    """A parameter that is chosen but unknown to the optimizer would be paid for and never move: refuse it."""
    held = in_groups(among, optimizer)
    missing = [name for name in among if name in chosen and name not in held]
    if missing:
        raise ValueError(
            f"{missing[0]!r} was chosen but is in no param group of the optimizer ({len(missing)} of {len(chosen)} chosen are "
            f"not). Build the optimizer over all parameters (what is not chosen costs nothing), or leave it "
            f"out: dataclasses.replace(policy, units=units.layers(exclude=…))."
        )


@dataclass(frozen=True)
class TrainableState:
    """How a model was found: which parameters were trainable, and the mode of each module."""

    requires_grad: Mapping[nn.Parameter, bool]
    training: Mapping[nn.Module, bool]


def found(model: nn.Module) -> TrainableState:
    """Remember how the model is now."""
    return TrainableState({p: p.requires_grad for p in model.parameters()}, {m: m.training for m in model.modules()})


def restore_(was: TrainableState) -> None:
    """Restore which parameters are trainable. `BatchNormModes.release_` restores modes, but for the user's changes."""
    for param, flag in was.requires_grad.items():
        param.requires_grad_(flag)
    torch.clear_autocast_cache()


# Every element's update depends on that element's own gradients and state: a piece moves as it would inside the whole.
# fmt: off
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop,
)
# fmt: on
