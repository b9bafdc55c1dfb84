"""Wrong use that frameworks let pass: refused before the first step."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pliant.planning.policy import Policy
from pliant.runtime.ranks import unwrapped


def check_policy(policy: object) -> None:
    if not isinstance(policy, Policy):
        raise TypeError(f"policy={policy!r} is not a Policy: give what a recipe returns, like recipes.pliant(time=0.5).")


def check_not_wrapped(model: nn.Module) -> None:
    """The framework wraps the model; one that is wrapped already has names that are not its own."""
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel already: give the trainer the model itself, which it wraps."
        )
    unwrapped(model)


def check_holds(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that was made before the model was changed holds other parameters, which nobody trains."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    missing = [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in held]
    if missing:
        raise ValueError(
            f"the optimizer does not hold {missing[0]!r} ({len(missing)} such parameters): it was made before the model was "
            f"wrapped, changed or unfrozen. Make it afterwards, over all parameters."
        )
