"""Steps that somebody else takes: the user's own loop, or that of a training framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pliant.graph.backward import compute_loss
from pliant.session.loop import Loop


def before_step(loop: Loop, batch: Any, method: str = "forward", batches: int | None = None) -> None:
    """The caller's own step follows, whose forward passes are run by `method` of the model, on so many `batches`."""
    engine = loop.engine
    loop.stepper.check_not_repeated()
    if not engine.is_settled(own_loop=True, has_ids=False) or engine.mode.prefix:
        loop.settle(own_loop=True, has_ids=False)
    loop.prepare(batch)
    if not loop.freezes and len(loop.selection.params) < len(loop.params):
        loop.laps.drop()
        raise ValueError(
            "the loss differentiates with respect to parameters, so those that are not chosen must stay trainable, and "
            "loss.backward() would train them too. Use session.step."
        )
    if engine.slices is not None and (loop.update.scaler is not None or not loop.ranks.is_alone):
        loop.laps.drop()
        what = "a GradScaler cannot unscale" if loop.ranks.is_alone else "DistributedDataParallel does not average"
        raise ValueError(f"{what} slices of parameters in your own loop: use session.step, or choose layers.")
    loop.stepper.is_whole = batches in (None, loop.update.accumulate)
    looks = loop.norms.has_any or loop.ranks.may_be_wrapped  # else nothing is to be done before a forward pass
    engine.hook_own_step(method, loop.before_forward if looks else None)
    if loop.device.type == "cuda":  # elsewhere every operation of the caller's would have to be followed
        loop.measure_bytes(batch)


def backward(
    loop: Loop,
    batch: Any,
    loss: Callable[[Any], torch.Tensor] | None,
    backward: Callable[..., None] | None,
    first: bool,
) -> torch.Tensor:
    """Forward and backward of one batch; the optimizer's step is the caller's. Returns the loss, detached."""
    if first:
        before_step(loop, batch)
    model = loop.ranks.ddp or loop.model
    value = compute_loss(model, loop.loss if loss is None else lambda _, batch: loss(batch), batch)
    ends = loop.engine.ends_of(value)
    if backward is None:
        loop.update.backward(value, ends)
    else:
        backward(value, **({} if ends is None else {"inputs": ends}))
    return value.detach()
