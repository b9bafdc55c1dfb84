"""How a chosen step runs. `plain` is ordinary freezing with ordinary autograd: the reference of every comparison."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from pliant.engine.lean import Lean

Around = Callable[[], AbstractContextManager[Any]]  # what a forward pass runs inside of

ENGINES: dict[str, Around] = {"plain": nullcontext, "lean": Lean}


def pick(name: str, memory_is_short: bool) -> str:
    """The engine by name; "auto" takes the lean one where memory is limited, else the plain one."""
    chosen = ("lean" if memory_is_short else "plain") if name == "auto" else name
    if chosen not in ENGINES:
        raise ValueError(f"engine={name!r} is not there; choose 'auto' or one of: {', '.join(ENGINES)}.")
    return chosen


class Inside:
    """Hangs on a model: its forward passes run inside of `around()`. A copy of it does not take `after`'s owner along."""

    def __init__(self, model: nn.Module, around: Around, after: Callable[[Any], None]) -> None:
        """`after` is told what each pass ran inside of."""
        entered: list[Any] = []
        tell = WeakMethod(after)

        def enter(*_: Any) -> None:
            entered.append(around() if torch.is_grad_enabled() else nullcontext())
            entered[-1].__enter__()

        def leave(*_: Any) -> None:
            if entered:
                inside, call = entered.pop(), tell()
                inside.__exit__(None, None, None)
                if call is not None:
                    call(inside)

        self._handles = (
            model.register_forward_pre_hook(enter, prepend=True),
            model.register_forward_hook(leave, always_call=True),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
