"""`Session.fit`: steps over the batches of a loader, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from pliant.core.budget import Progress
from pliant.session.beginning import add, read
from pliant.session.loop import Loop

Step = Callable[[Any], torch.Tensor]
OnStep = Callable[[Progress, torch.Tensor], None]


def fit(loop: Loop, step: Step, loader: Any, epochs: int, on_step: OnStep | None) -> list[float]:
    """Train up to epoch `epochs` by calling `step` for each batch. Returns the mean loss of each epoch that ran."""
    accumulate = loop.update.accumulate
    if loop.steps_per_epoch is None:
        try:
            length = len(loader)
        except TypeError:
            return _fit_stream(loop, step, loader, epochs, on_step)
        loop.steps_per_epoch = length // accumulate
        if not loop.steps_per_epoch:
            raise ValueError(
                f"the loader has {length} batches, fewer than accumulate={accumulate} needs for one step. Lower accumulate, or "
                f"give more data."
            )
    steps = loop.steps_per_epoch
    if loop.total_steps is None:
        loop.total_steps = epochs * steps
    means = []
    for epoch in range(loop.steps // steps, epochs):
        done = (loop.steps - epoch * steps) * accumulate
        losses = _train(loop, step, islice(loader, done, steps * accumulate), on_step)
        if loop.steps < (epoch + 1) * steps:
            raise ValueError(
                f"the loader ended after {done + len(losses)} batches, but steps_per_epoch={steps} with "
                f"accumulate={accumulate} needs {steps * accumulate}. Lower steps_per_epoch, or leave it out."
            )
        means.append(float(torch.tensor(read(losses)).mean()))
    return means


def _fit_stream(loop: Loop, step: Step, loader: Any, epochs: int, on_step: OnStep | None) -> list[float]:
    """Nobody knows the length of an epoch. Batches at its end that are too few for a step are left out."""
    accumulate = loop.update.accumulate
    if loop.steps:
        raise ValueError(
            f"the loader has no length, so the epoch of step {loop.steps} is unknown: give Session(steps_per_epoch=…)."
        )
    means: list[float] = []
    for _ in range(epochs):
        losses = _train(loop, step, _in_whole_steps(loader, accumulate), on_step)
        if not losses:
            raise ValueError(
                f"the loader gave too few batches in epoch {len(means) + 1}: a step takes {accumulate}. "
                f"A generator can be read only once: give a loader that begins again in every epoch."
            )
        means.append(float(torch.tensor(read(losses)).mean()))
    return means


def _in_whole_steps(loader: Any, accumulate: int) -> Iterator[Any]:
    batches = iter(loader)
    while len(some := list(islice(batches, accumulate))) == accumulate:
        yield from some


def _train(loop: Loop, step: Step, batches: Iterator[Any], on_step: OnStep | None) -> list[torch.Tensor | float]:
    losses: list[torch.Tensor | float] = []
    for batch in batches:
        value = step(batch)
        add(losses, value)
        if on_step is not None:
            on_step(loop.progress, value)
    return losses
