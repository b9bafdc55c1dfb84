"""What a user changes while a session is open: the budget, and the optimizer."""

from __future__ import annotations

from copy import deepcopy

import torch

from pliant.core.budget import Budget
from pliant.runtime.optimizer_step import needs_closure
from pliant.runtime.ranks import Ranks
from pliant.runtime.trainable import check_in_groups
from pliant.session.loop import Loop


def check_cost_is_known(optimizer: torch.optim.Optimizer, budget: Budget) -> None:
    """Refuse a budget for steps that evaluate the loss as often as the optimizer likes."""
    if needs_closure(optimizer) and budget != Budget():
        raise ValueError(
            f"{type(optimizer).__name__} takes a closure, which it evaluates several times in a step: what a step costs is "
            f"unknown, and no budget can be kept. Use a recipe without one (full, head, lisa, badam), or another optimizer."
        )


def check_processes(ranks: Ranks, budget: Budget, measures: bool = False) -> None:
    """Refuse budgets that several processes cannot keep together, and seconds that one of them cannot measure (`measures`)."""
    if not ranks.is_alone and budget.energy is not None:
        raise ValueError("energy= is measured for one process: with several, limit time= or macs=.")
    if ranks.shards and budget.memory is not None:
        raise ValueError(
            "memory= is not predicted for parameters that fully_shard has spread over processes: limit time= or macs=, or use "
            "DistributedDataParallel."
        )
    if ranks.shards and measures:
        raise ValueError(
            "seconds cannot be measured where fully_shard has spread the parameters: measure before you shard, with "
            "profile = measure.timed(model, optimizer, loss, batch), and give Session profile=profile."
        )


def change_budget(loop: Loop, budget: Budget) -> None:
    """A budget that cannot be kept is refused, and the old one stays."""
    check_cost_is_known(loop.engine.optimizer, budget)
    check_processes(loop.ranks, budget)
    loop.read_steps()  # they ran under the old one
    old, controller = loop.budget, loop.controller
    feedback, selection = deepcopy(controller.feedback), controller.selection
    try:
        loop.settle(budget)
        controller.change_budget(budget, loop.progress, loop.engine.mode)
    except BaseException:
        loop.settle(old)
        controller.feedback, controller.selection = feedback, selection
        raise
    if budget.memory is not None:  # it has no room for one
        loop.beginning.drop_second_head()


def use_optimizer(loop: Loop, optimizer: torch.optim.Optimizer) -> None:
    """Another optimizer takes the steps; values are probed again."""
    check_cost_is_known(optimizer, loop.budget)
    if loop.controller.selection is not None:
        check_in_groups(loop.params, optimizer, loop.selection.params)
        loop.engine.check(loop.selection.parts, optimizer)
        loop.controller.asks_anyway = True
    before = loop.engine.mode
    loop.stepper.use_optimizer(optimizer)
    loop.beginning.use_optimizer(optimizer)
    if loop.undo is not None:
        loop.undo.use_optimizer(optimizer)
    unheld = loop.leave_out_unheld()
    loop.follow_engine(before)
    loop.note("the optimizer was replaced" if unheld is None else f"the optimizer was replaced; {unheld}")


def forget(loop: Loop) -> None:
    """Weights, buffers and optimizer state are those from before the run."""
    loop.engine.forget()
    loop.norms.restart_()
    loop.beginning.end()
    loop.settle()
    loop.stepper.drop()
    loop.note("rolled back to the start")
