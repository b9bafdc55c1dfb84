"""A step that the caller takes, with forward, backward and optimizer of their own: hooks make it run as ours would."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol
from weakref import WeakMethod, ref

import torch
from torch import nn

from pliant.runtime.compiled import eager
from pliant.runtime.optimizer_step import even_out_


class Runs(Protocol):
    """What a step needs of the engine."""

    slices: Any

    def forward(self) -> AbstractContextManager[Any]:
        """What a forward pass runs inside of."""

    def after(self, inside: Any) -> None:
        """A forward pass is over."""

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """What the optimizer's step runs inside of."""


class CallersStep:
    """Hooks on the model and its optimizer for one step. A copy of the model does not take the engine along.

    Compiled code runs eagerly meanwhile: a model that was compiled in place has these hooks in what is compiled.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, engine: Runs) -> None:
        self._inside: list[tuple[Any, Any]] = []  # contexts, and what was entered
        self._standing = standing = ExitStack()
        standing.enter_context(eager())
        inside, mine, ran, has_slices = self._inside, ref(model), list[bool](), engine.slices is not None
        forward, after, stepping = WeakMethod(engine.forward), WeakMethod(engine.after), WeakMethod(engine.stepping)

        def enter(module: nn.Module, *_: Any) -> None:
            call = forward() if module is mine() else None  # a copy of the model has these hooks too
            if call is not None:
                ran.append(True)
                context = call() if torch.is_grad_enabled() else nullcontext()
                inside.append((context, context.__enter__()))

        def leave(module: nn.Module, *_: Any) -> None:
            if inside and module is mine():
                (was, engine), call = inside.pop(), after()
                was.__exit__(*sys.exc_info())  # hooks are told nothing of an error, but run while it is handled
                if call is not None:
                    call(engine)

        def stand_in(*_: Any) -> None:
            call = stepping()
            if has_slices and not ran:
                raise RuntimeError(
                    "slices of parameters were chosen, and this step ran no forward pass of the model: call model(…) itself "
                    "between before_step and the optimizer's step, or let session.step do it."
                )
            if call is not None:
                standing.enter_context(call(optimizer))
                even_out_(optimizer)  # slices stand in its groups only now

        self._handles = [
            model.register_forward_pre_hook(enter, prepend=True),
            model.register_forward_hook(leave, always_call=True),
            optimizer.register_step_pre_hook(stand_in),
        ]

    def close(self) -> None:
        """After the optimizer's step, or where none came."""
        while self._inside:  # a forward pass that was interrupted: hooks do not see that
            self._inside.pop()[0].__exit__(RuntimeError, None, None)
        self._standing.close()
        for handle in self._handles:
            handle.remove()
