"""Several readings of a graph that is random: some models leave out layers by chance."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pliant.graph.backward import Graph, compute_loss, read, trainable
from pliant.runtime.batches import Loss
from pliant.runtime.rng import is_same, rng_states, seed_

READINGS = 4  # of a random graph: their mean is about 5 % off where each of 12 layers is left out once in 10 steps


def read_all(model: nn.Module, loss: Loss, batch: Any, kernels: bool = False) -> Graph:
    """`read`; several times where random numbers may decide which layers run. Call it inside of `sandbox`.

    Of graphs that differ, the one that reaches the most parameters comes first, and holds the others.
    """
    seed_(0)
    before = rng_states()
    first = read(model, loss, batch, kernels)
    after = rng_states()
    if is_same(before, after):
        return first
    in_python = not all(is_same(before[kind], after[kind]) for kind in ("python", "numpy"))
    first = replace(first, seed=0, may_vary=in_python or first.reads_values)
    if not first.may_vary or not any(_differs(first, seed, model, loss, batch) for seed in range(1, READINGS)):
        return first
    several = [first]
    for seed in range(1, READINGS):
        seed_(seed)
        several.append(replace(read(model, loss, batch, kernels), seed=seed, may_vary=True))
    fullest, *others = sorted(several, key=lambda one: (len(one.unused), -len(one.nodes)))
    return replace(fullest, others=tuple(others))


def _differs(first: Graph, seed: int, model: nn.Module, loss: Loss, batch: Any) -> bool:
    """Whether other random numbers make another graph. Keeps nothing for backward, unless the loss needs it."""
    seed_(seed)
    with nullcontext() if first.differentiates else saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0)):
        value = compute_loss(model, loss, batch)
    return not first.is_wired_like(value, trainable(model))
