"""How a chosen step runs. `plain` is ordinary freezing with ordinary autograd: the reference of every comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import nn

from pliant.engine.lean import Lean
from pliant.engine.slices import Sliced, Slices, check_elementwise
from pliant.types import Part


def plain(slices: Slices | None = None) -> AbstractContextManager[Any]:
    """Ordinary autograd, with the slices that train, if any do."""
    return nullcontext() if slices is None else Sliced(slices)


ENGINES: dict[str, Callable[..., AbstractContextManager[Any]]] = {"plain": plain, "lean": Lean}


def pick(name: str, memory_is_short: bool) -> str:
    """The engine by name; "auto" takes the lean one where memory is limited, else the plain one."""
    chosen = ("lean" if memory_is_short else "plain") if name == "auto" else name
    if chosen not in ENGINES:
        raise ValueError(f"engine={name!r} is not there; choose 'auto' or one of: {', '.join(ENGINES)}.")
    return chosen


class Engine:
    """Runs a session's steps: knows what their forward passes run inside of, and the slices that train."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.slices: Slices | None = None
        self._told: set[str] = set()
        self._untold: set[str] = set()
        self._callers: _CallersStep | None = None

    # ------------------------------------------------------------ what trains

    def check(self, parts: Iterable[Part], optimizer: torch.optim.Optimizer) -> None:
        """Whether this can train, before anything is changed."""
        if any(part.dim is not None for part in parts):
            check_elementwise(optimizer)

    def choose_(self, parts: Iterable[Part], params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> set[str]:
        """From now on these parts train; gives the names of the parameters of which only a slice does."""
        old, self.slices = self.slices, Slices(params, parts)
        if not len(self.slices):
            self.slices = None
            return set()
        if old is not None:
            self.slices.carry_over(old, optimizer)
        return set(self.slices.parts)

    def forget(self) -> None:
        """The slices start with a fresh optimizer state."""
        if self.slices is not None:
            self.slices.forget()

    def leaves(self) -> dict[str, torch.Tensor]:
        """What stands for each slice where gradients gather, by the name of its parameter."""
        return self.slices.leaves() if self.slices is not None else {}

    # ------------------------------------------------------------ a step of ours

    def zero_grad(self) -> None:
        if self.slices is not None:
            self.slices.zero_grad()

    def forward(self) -> AbstractContextManager[Any]:
        """What the forward pass runs inside of; tell `after` of it when it is done."""
        return ENGINES[self.name](self.slices)

    def after(self, inside: Any) -> None:
        """Remember what it could not do."""
        self._untold |= set(getattr(inside, "not_lean", ())) - self._told

    def news(self) -> str | None:
        """What could not be done, told once."""
        untold, self._untold = sorted(self._untold), set()
        self._told.update(untold)
        return f"not lean: {', '.join(untold)} keep what plain autograd keeps" if untold else None

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Clipping and the optimizer's step go inside of this."""
        return self.slices.standing_in(optimizer) if self.slices is not None else nullcontext()

    # ------------------------------------------------------------ a step of the caller's

    def hang_on(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Until `let_go`, the caller's forward passes and the optimizer's step run as ours would."""
        self.let_go()
        self.zero_grad()
        if self.name != "plain" or self.slices is not None:
            self._callers = _CallersStep(model, optimizer, self)

    def let_go(self) -> None:
        if self._callers is not None:
            self._callers.close()
            self._callers = None


class _CallersStep:
    """Hooks on the model and its optimizer for one step. A copy of the model does not take the engine along."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        self._inside: list[Any] = []
        self._standing = standing = ExitStack()
        inside, mine, ran, has_slices = self._inside, ref(model), list[bool](), engine.slices is not None
        forward, after, stepping = WeakMethod(engine.forward), WeakMethod(engine.after), WeakMethod(engine.stepping)

        def enter(module: nn.Module, *_: Any) -> None:
            call = forward() if module is mine() else None  # a copy of the model has these hooks too
            if call is not None:
                ran.append(True)
                inside.append(call() if torch.is_grad_enabled() else nullcontext())
                inside[-1].__enter__()

        def leave(module: nn.Module, *_: Any) -> None:
            if inside and module is mine():
                was, call = inside.pop(), after()
                was.__exit__(None, None, None)
                if call is not None:
                    call(was)

        def stand_in(*_: Any) -> None:
            call = stepping()
            if has_slices and not ran:
                raise RuntimeError(
                    "slices of parameters were chosen, and this step ran no forward pass of the model: call model(…) itself "
                    "between before_step and the optimizer's step, or let session.step do it."
                )
            if call is not None:
                standing.enter_context(call(optimizer))

        self._handles = [
            model.register_forward_pre_hook(enter, prepend=True),
            model.register_forward_hook(leave, always_call=True),
            optimizer.register_step_pre_hook(stand_in),
        ]

    def close(self) -> None:
        """After the optimizer's step, or where none came."""
        while self._inside:  # a forward pass that was interrupted: hooks do not see that
            self._inside.pop().__exit__(None, None, None)
        self._standing.close()
        for handle in self._handles:
            handle.remove()
