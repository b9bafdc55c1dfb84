"""Where a backward pass ends: at what trains, and not at other tensors that require a gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn


class Ends:
    """What the backward passes of one selection give a gradient to.

    Some models make their input require a gradient (for checkpoints, say). Backward would run through all frozen layers for it,
    and nobody would read it. So passes go to parameters alone: those that are chosen, and those that are not the model's.
    """

    def __init__(self, chosen: Iterable[torch.Tensor] = (), among: Iterable[nn.Parameter] = ()) -> None:
        """`chosen` of the parameters `among` train."""
        self._chosen, self._among = list(chosen), {id(param) for param in among}
        self._others: list[torch.Tensor] | None = None  # of the loss, say; None: not known yet
        self._stops = False
        self.left_out = False  # whether some tensor that is no parameter requires a gradient and gets none

    def of(
        self, loss: torch.Tensor, slices: Collection[torch.Tensor], optimizer: torch.optim.Optimizer
    ) -> list[torch.Tensor] | None:
        """The tensors that backward is to reach, slices included; None where that is all that it would reach.

        Found in the first step of a selection, and again in each step while something is left out: a loss may use parameters of
        its own in some steps alone. Whatever the optimizer holds counts as a parameter.
        """
        if self._others is None or self._stops:
            mine = {id(tensor) for tensor in (*self._chosen, *slices)}
            held = {id(param) for group in optimizer.param_groups for param in group["params"]}
            reached = [leaf for leaf in leaves(loss) if id(leaf) not in mine]
            others = [leaf for leaf in reached if id(leaf) not in self._among]
            self._others = [leaf for leaf in others if isinstance(leaf, nn.Parameter) or id(leaf) in held]
            self.left_out = len(self._others) < len(others)
            self._stops = len(self._others) < len(reached)
        if not self._stops:
            return None
        return [tensor for tensor in (*self._chosen, *slices, *self._others) if tensor.requires_grad]


def leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a backward pass would give a gradient to."""
    stack: list[Any] = [loss.grad_fn]
    seen, found = {loss.grad_fn}, []
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found
