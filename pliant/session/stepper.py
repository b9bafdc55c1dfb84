"""The optimizer step under way: how many of its batches are in, how long it takes, and the bytes it takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pliant.engine.engine import Engine
from pliant.runtime.clock import Laps
from pliant.runtime.memory import StepPeak, storage
from pliant.runtime.optimizer_step import even_out_


@dataclass(frozen=True)
class StepResult:
    """One optimizer step that is over."""

    loss: torch.Tensor | None  # None: the caller took the step
    seconds: Callable[[], float]  # reads the clock, and waits for the device if it must
    bytes: int | None  # its peak, where that was measured


class Stepper:
    """Runs batches on an engine and says when a step is over; notices the steps that the caller takes."""

    def __init__(
        self,
        engine: Engine,
        params: Collection[nn.Parameter],
        accumulate: int,
        laps: Laps,
        on_own_step: Callable[[StepResult], None],
        before_update: Callable[[], None],
    ) -> None:
        """`on_own_step` gets the result of every step that the caller takes. `before_update()` comes before every update."""
        self._engine, self._params, self._accumulate, self._laps = engine, params, accumulate, laps
        self._on_own_step, self._before_update = on_own_step, before_update
        self.batches = 0  # of the step under way that are in
        self.is_whole = True  # whether the caller's step takes as many batches as were priced
        self._peak: StepPeak | None = None  # of that step, where it is measured
        self._is_ours = False
        self._told: set[str] = set()
        self._hooks: list[RemovableHandle] = []
        self.use_optimizer(engine.optimizer)

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer takes the steps from now on."""
        self.release()
        self._hooks = [
            optimizer.register_step_pre_hook(even_out_),
            optimizer.register_step_pre_hook(lambda *_: self._before_update()),
            optimizer.register_step_post_hook(self._after_optimizer_step),
        ]
        self._engine.use_optimizer(optimizer)

    def release(self) -> None:
        """Leave the optimizer as it was found."""
        for hook in self._hooks:
            hook.remove()

    def _after_optimizer_step(self, *_: Any) -> None:
        if self._is_ours:
            return
        if self._laps.is_running:
            self._on_own_step(self.end())
        else:
            self.warn_once(
                "the optimizer took a step that the session knows nothing of: it is not measured, and nothing is chosen for "
                "it. Call session.before_step(batch) before every step of your own, or let session.step(batch) take it."
            )

    def warn_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, stacklevel=2)

    def check_not_repeated(self) -> None:
        """A step of the caller's own is under way and another begins: warn, unless a GradScaler may have skipped the first."""
        grads = [param.grad for param in self._params if param.grad is not None]
        if not self._laps.is_running or (not grads and self._params and next(iter(self._params)).is_cuda):
            return
        if all(bool(grad.isfinite().all()) for grad in grads if not grad.is_sparse):
            self.warn_once(
                "session.before_step was called twice without a step of the optimizer between: each call counts as a step. "
                "Call it once per optimizer step, also where gradients of several batches add up."
            )

    @property
    def begins(self) -> bool:
        """Whether the next batch is the first of a step."""
        return self.batches == 0

    @property
    def ends(self) -> bool:
        """Whether the next batch is the last of a step."""
        return self.batches + 1 == self._accumulate

    def run(self, batch: Any, ids: Any) -> tuple[torch.Tensor, StepResult | None]:
        """One batch: its loss, detached, and the result of the step if this was its last batch."""
        first, last = self.begins, self.ends
        self._is_ours = True
        try:
            with self._peak or nullcontext():
                value = self._engine.run(batch, ids, first=first, last=last, peak=self._peak)
        except BaseException as error:
            self._peak = None
            if self.begins or isinstance(error, FloatingPointError):  # all its batches are spoilt
                self.drop()
            raise
        finally:
            self._is_ours = False
        self.batches = 0 if last else self.batches + 1
        return value, self.end(value.clone()) if last else None  # the caller may add others to it in place

    def end(self, loss: torch.Tensor | None = None) -> StepResult:
        """The step under way is over."""
        peak, self._peak = self._peak, None
        fills = loss is not None and self._engine.fills  # filling a cache is paid once
        counts = peak is None and not fills and (loss is not None or self.is_whole)
        return StepResult(loss, self._laps.end(counts), peak.bytes if peak is not None else None)

    def drop(self) -> None:
        """The step under way does not count."""
        self.batches, self._peak = 0, None
        self._laps.drop()

    def measure_bytes(self, inference: int | None) -> None:
        """Measure the bytes of the coming step beyond these of inference; None: do not."""
        self._peak = None
        if inference is not None:
            gradients = sum(storage(p.grad)[1] for p in self._params if p.grad is not None)
            self._laps.begin()
            state = self._state_bytes
            self._peak = StepPeak(next(iter(self._params)).device, inference, state() + gradients, state)

    def _state_bytes(self) -> int:
        """Bytes of optimizer state, that of slices included."""
        held = [*self._engine.optimizer.state.values()]
        if self._engine.slices is not None:
            held += [saved["state"] for saved in self._engine.slices.state_dict().values()]
        return sum(storage(t)[1] for state in held for t in state.values() if isinstance(t, torch.Tensor))
