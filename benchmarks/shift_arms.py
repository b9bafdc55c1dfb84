"""The arms that `shift.py` compares, by name: a part of the network, and a share of a full step where it has a budget.

nothing                    the tuned network as it is
statistics                 batch-norm statistics re-estimated on the labelled images, nothing trained
head, norm, full           fixed parts; norm: scale and shift of every norm, and the head
lora                       rank 8 beside every 1×1 convolution or linear layer, and the head
first 0.75                 layers from the input on, as many as the budget holds, and the head
middle 0.75                layers around the middle one, and the head
last 0.75                  layers from the loss on
random 0.75, redrawn 0.75  random layers; the latter re-drawn every 100 steps
elastic_layers 0.75, elastic_trainer 0.75, pliant 0.75     recipes with this share, chosen again as they say
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import transfer_methods as methods
from torch import nn

from pliant import Budget, Policy, measure, recipes, schedule, score, solve, units

FIXED = ("nothing", "statistics", "head", "norm", "lora", "full")
SHARED = ("first", "middle", "last", "random", "redrawn", "elastic_layers", "elastic_trainer", "pliant")
SHARES = ("0.5", "0.75")
MAIN = (*FIXED, *(f"{arm} {share}" for share in SHARES for arm in SHARED if (arm, share) != ("first", "0.5")))
QUICK = ("nothing", "statistics", "head", "full", "last 0.75", "pliant 0.75")
UNTRAINED = ("nothing", "statistics")


def along(places: str) -> solve.Solver:
    """Units from the input on, or around the middle one, as long as they fit."""

    def solver(problem: solve.Problem) -> solve.Mask:
        many = len(problem.names)
        order = range(many - 1, -1, -1) if places == "first" else sorted(range(many), key=lambda i: abs(i - many // 2))
        chosen = problem.always.copy()
        for unit in order:
            with_it = chosen | (np.arange(many) == unit)
            if not problem.fits(with_it):
                break
            chosen = with_it
        return chosen

    return solver


def policy(arm: str, model: nn.Module, seed: int, by: str, total: int) -> Policy:
    """The recipe of an arm, its share counted in MACs or in measured seconds."""
    name, _, share = arm.partition(" ")
    quarter = schedule.every(steps=max(total // 4, 1))  # as three epochs are in the twelve of the paper
    if name == "lora":
        methods.with_low_rank(model, seed)
        return recipes.only("*parametrizations.weight.0.*", "classifier.*")
    if name in ("head", "norm", "full"):
        return getattr(recipes, name)()
    given: dict[str, Any] = {"time": float(share)}
    if name in ("first", "middle"):
        out = Policy(units.layers(), score.nearness(), measure.timed, along(name), budget=Budget(**given), name=name)
    elif name in ("random", "redrawn"):
        out = recipes.random(**given, seed=seed, when=schedule.once() if name == "random" else None)
    elif name in ("elastic_layers", "elastic_trainer"):
        out = getattr(recipes, name)(**given, seed=seed, when=quarter)
    elif name == "last":
        out = recipes.last(**given)
    elif name == "pliant":
        out = recipes.pliant(**given, seed=seed)
    else:
        raise SystemExit(f"no arm {arm!r}. The arms are {', '.join(MAIN)}.")
    return out if by == "time" else replace(out, cost=measure.counted, budget=Budget(macs=out.budget.time))


def check(arms: Sequence[str]) -> None:
    """Refuse names that are none."""
    for arm in arms:
        name, _, share = arm.partition(" ")
        if not (arm in FIXED or (name in SHARED and share)):
            raise SystemExit(f"no arm {arm!r}. The arms are {', '.join(MAIN)}, with any share.")
