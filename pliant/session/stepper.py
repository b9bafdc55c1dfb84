"""The optimizer step under way: its batches, backward, the update; the bytes it takes, and whether it is the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pliant.engine.engine import Engine
from pliant.runtime.clock import Laps
from pliant.runtime.memory import StepPeak, storage
from pliant.runtime.optimizer_step import Update, even_out_


class Stepper:
    """Takes steps on an engine, some batches each, and notices the steps that the caller takes."""

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        params: Collection[nn.Parameter],
        update: Update,
        laps: Laps,
        ended: Callable[[torch.Tensor | None], None],
    ) -> None:
        """`ended` is told of every step that is over: with its loss if it was one of ours."""
        self._engine, self._params, self._update, self._laps, self._ended = engine, params, update, laps, ended
        self.batches = 0  # that are in, of the step under way
        self._peak: StepPeak | None = None  # of that step, where it is measured
        self._ours = False  # whether we take it, and not the caller
        self._hooks: list[RemovableHandle] = []
        self.step_with(optimizer)

    def step_with(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer takes the steps from now on."""
        self.let_go()
        self._hooks = [
            optimizer.register_step_pre_hook(even_out_),
            optimizer.register_step_post_hook(self._on_optimizer_step),
        ]
        self._engine.step_with(optimizer)  # what slices know is of the old one
        self.optimizer = optimizer

    def let_go(self) -> None:
        """Leave the optimizer as it was found."""
        for hook in self._hooks:
            hook.remove()

    def _on_optimizer_step(self, *_: Any) -> None:
        """Sees the end of a step that the caller takes."""
        if self._laps.is_running and not self._ours:
            self._ended(None)

    # ------------------------------------------------------------ a step of ours

    @property
    def begins(self) -> bool:
        """Whether the next batch is the first of a step."""
        return self.batches == 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._engine.zero_grad()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Inside, we take the steps; one that fails does not count."""
        self._ours = True
        try:
            yield
        except BaseException:
            self._peak = None
            if self.begins:
                self._laps.drop()
            raise
        finally:
            self._ours = False

    def take(self, batch: Any, ids: Any) -> torch.Tensor:
        """Forward, backward and, with the last batch of a step, the optimizer's step. Gives the loss, detached."""
        last = self.batches + 1 == self._update.accumulate

        def finish(value: torch.Tensor) -> torch.Tensor:
            self._update.backward(value)
            if last:
                if self._peak is not None:
                    self._peak.updating()
                with self._engine.stepping(self.optimizer):
                    self._update.step(self.optimizer)
            return value.detach()

        eager = "this step's memory is measured" if self._peak is not None else None
        if self._update.scaler is not None:
            eager = "a GradScaler looks at every step's gradients"
        with self._peak or nullcontext():
            value = self._engine.take(batch, ids, finish, (self.begins, last), eager)
        self.batches = 0 if last else self.batches + 1
        if last:
            self._ended(value)
        return value

    def drop(self) -> None:
        """The step under way does not count."""
        self.batches, self._peak = 0, None
        self._laps.drop()

    # ------------------------------------------------------------ bytes

    def follow(self, inference: int | None) -> None:
        """Measure the bytes of the step that comes, beyond these of inference; None: do not."""
        self._peak = None
        if inference is not None:
            before = self._state_bytes() + sum(storage(p.grad)[1] for p in self._params if p.grad is not None)
            self._laps.begin()
            self._peak = StepPeak(next(iter(self._params)).device, inference, before, self._state_bytes)

    @property
    def is_followed(self) -> bool:
        """Whether the bytes of the step under way are measured."""
        return self._peak is not None

    def take_bytes(self) -> int | None:
        """What was measured of the step that ended, if it was; told once."""
        peak, self._peak = self._peak, None
        return peak.bytes if peak is not None else None

    def _state_bytes(self) -> int:
        held = [*self.optimizer.state.values()]
        if self._engine.slices is not None:
            held += [saved["state"] for saved in self._engine.slices.state_dict().values()]
        return sum(storage(t)[1] for state in held for t in state.values() if isinstance(t, torch.Tensor))
