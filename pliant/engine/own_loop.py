"""A step that the caller takes, with forward, backward and optimizer of their own: it runs as ours would."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from types import MethodType
from typing import Any, Protocol
from weakref import WeakMethod, ref

import torch
from torch import nn

from pliant.core.mode import Mode
from pliant.runtime.compiled import eager
from pliant.runtime.optimizer_step import even_out_


class Runs(Protocol):
    """What a step needs of the engine."""

    slices: Any
    mode: Mode

    def forward(self) -> AbstractContextManager[Any]:
        """What a forward pass runs inside of."""

    def call(self, forward: Callable[[], Any], given: Any) -> Any:
        """A forward pass on these arguments."""

    def after(self, inside: Any) -> None:
        """A forward pass is over."""

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """What the optimizer's step runs inside of."""


class CallersStep:
    """Hooks on the model and its optimizer for one step. A copy of the model does not take the engine along.

    Where hooks are not enough, a method of the model runs inside the engine for the time of the step: `forward` if the prefix
    runs as inference, or another one that runs the forward pass. Compiled code runs eagerly meanwhile: a model that was
    compiled in place has these hooks in what is compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        engine: Runs,
        method: str = "forward",
        before: Callable[[], None] | None = None,
    ) -> None:
        self._inside: list[tuple[Any, Any]] = []  # contexts, and what was entered
        self._standing = standing = ExitStack()
        standing.enter_context(eager())
        inside, mine, ran, has_slices = self._inside, ref(model), list[bool](), engine.slices is not None
        forward, after, stepping = WeakMethod(engine.forward), WeakMethod(engine.after), WeakMethod(engine.stepping)

        def enter(module: nn.Module, *_: Any) -> None:
            call = forward() if module is mine() else None  # a shallow copy of the model has these hooks too
            if call is not None:
                ran.append(True)
                if before is not None and torch.is_grad_enabled():
                    before()
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

        self._handles = [optimizer.register_step_pre_hook(stand_in)]
        if method == "forward" and not engine.mode.prefix:
            self._handles += [
                model.register_forward_pre_hook(_Hook(enter), prepend=True),
                model.register_forward_hook(_Hook(leave), always_call=True),
            ]
        else:
            standing.callback(_replace_(model, method, _Inside(model, method, engine, before, ran)))

    def close(self) -> None:
        """After the optimizer's step, or where none came."""
        while self._inside:  # a forward pass that was interrupted: hooks do not see that
            self._inside.pop()[0].__exit__(RuntimeError, None, None)
        self._standing.close()
        for handle in self._handles:
            handle.remove()


def _replace_(model: nn.Module, method: str, by: Any) -> Callable[[], None]:
    """Set a method of this one model; the result puts back what was there."""
    had = model.__dict__.get(method)
    object.__setattr__(model, method, by)

    def back() -> None:
        if model.__dict__.get(method) is by:
            if had is None:
                object.__delattr__(model, method)
            else:
                object.__setattr__(model, method, had)

    return back


class _Hook:
    """A hook on the model. What a copy of the model has in its place does nothing."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, *given: Any) -> None:
        self._run(*given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return partial(_do_nothing)

    def __reduce__(self) -> Any:
        return partial, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    pass


def _itself(given: Any) -> Any:
    return given


class _Inside:
    """A method of a model that runs inside the engine. A copy of the model gets the method itself."""

    def __init__(self, model: nn.Module, method: str, engine: Runs, before: Callable[[], None] | None, ran: list[bool]) -> None:
        self._model, self._method, self._had = ref(model), method, model.__dict__.get(method)
        self._engine, self._before, self._ran, self._is_in = ref(engine), before, ran, False
        self.__wrapped__ = getattr(model, method)  # who asks for its arguments sees those of the method itself

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine()
        if engine is None or not torch.is_grad_enabled() or self._is_in:
            return self.__wrapped__(*args, **kwargs)
        self._ran.append(True)
        if self._before is not None:
            self._before()
        self._is_in = True
        try:
            with engine.forward() as inside:
                out = engine.call(lambda: self.__wrapped__(*args, **kwargs), (args, kwargs))
        finally:
            self._is_in = False
        engine.after(inside)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._had is not None:
            return copy.deepcopy(self._had, memo)
        model = self._model()
        return MethodType(getattr(type(model), self._method), memo.get(id(model), model))

    def __reduce__(self) -> Any:
        return (_itself, (self._had,)) if self._had is not None else (getattr, (self._model(), self._method))
