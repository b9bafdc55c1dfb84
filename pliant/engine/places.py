"""Where in a model the lean engine has something to do: from the second pass of a choice on, it watches these modules alone.

To look at a torch function takes Python as long as to launch it, and in most of a model there is nothing to do: what comes
before the choice keeps nothing, and a chosen layer keeps what it needs. So one pass is watched everywhere and notes the modules
in which something was done. In later passes the forward of each of these, and of no other, is called by way of the watcher, or
where it does nothing but call one function, without it: for the time of the pass that stands in the module's own `__dict__`,
where `forward` of an instance goes before that of its class.

A pass that takes another way than the one that was watched, and does there what would have to be watched, keeps what plain
autograd keeps. What is clipped waits to see whether the next layer keeps it only where it did so in the pass that was watched.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import get_ident
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pliant.engine.direct import INNER, direct_forward, of_class

if TYPE_CHECKING:
    from pliant.engine.lean import Lean

Forward = Callable[..., Any]

_REMEMBERED = 8  # choices and modes

_push = torch._C._push_on_torch_function_stack
_pop = torch._C._pop_torch_function_stack


class _StandIn:
    """Stands for a module's forward. A copy of the module, and a pickled one, have that of their class."""

    def __init__(self, module: nn.Module, run: Forward) -> None:
        self._module, self._run = module, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        copied = memo.get(id(self._module))
        return self._run if copied is None else MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")  # which has nothing of its own yet when that is called


@dataclass(frozen=True, eq=False)
class _Place:
    """A module, the forward that it has, and the one that stands for that while a pass runs."""

    module: nn.Module
    own: Forward | None  # of the instance, if it has one of its own
    kind: tuple[Any, Any]  # the forward of its class, and what it calls if it is a convolution
    stand_in: _StandIn

    @property
    def is_as_it_was(self) -> bool:
        own = self.module.__dict__
        return own.get("forward") is self.own and INNER not in own and of_class(self.module) == self.kind

    def take_(self) -> None:
        self.module.__dict__["forward"] = self.stand_in

    def leave_(self) -> None:
        own = self.module.__dict__
        if own.get("forward") is not self.stand_in:  # somebody set another one meanwhile
            return
        if self.own is not None:
            own["forward"] = self.own
        else:
            del own["forward"]


class Places:
    """The modules of one model in which there is something to do, by what trains and by which modules are in training mode."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        others = (torch.jit.ScriptModule, nn.DataParallel)  # no Python inside; copies of what stands in a module
        self._can = not any(isinstance(module, others) for module in self._modules)
        self._known: dict[Hashable, list[_Place] | None] = {}  # None: everywhere
        self._key: Hashable = None  # of a pass that takes notes
        self._inside: list[nn.Module] = []  # that run now, while all is watched
        self._found: dict[nn.Module, None] | None = None  # in the order of a pass; None: somewhere outside of modules too
        self._clips: dict[nn.Module, bool] = {}  # whether the next layer always kept what it clips
        self._taken: list[_Place] = []
        self._lean: Lean | None = None
        self._thread = 0

    def enter(self, lean: Lean, choice: Hashable) -> bool:
        """A pass begins. Gives whether it is to be watched everywhere."""
        if not self._can or self._lean is not None:  # or it begins inside of another one
            return True
        key = choice, tuple([module.training for module in self._modules])
        known = self._known.get(key, ())
        if known is None:
            return True
        if key in self._known and all(place.is_as_it_was for place in known):
            self._taken = list(known)
        else:
            self._key, self._found, self._inside, self._clips = key, {}, [], {}
            self._taken = [self._place(module, self._noting) for module in self._modules[1:]]
        self._lean, self._thread = lean, get_ident()
        for place in self._taken:
            place.take_()
        return self._key is not None

    def exit(self, lean: Lean, failed: bool) -> None:
        """The pass is over: every module is as it was found."""
        if self._lean is not lean:
            return
        for place in self._taken:
            place.leave_()
        if self._key is not None and not failed:
            found = self._found
            if len(self._known) >= _REMEMBERED and self._key not in self._known:
                del self._known[next(iter(self._known))]
            self._known[self._key] = None if found is None else [self._place(module, self._watching) for module in found]
        self._taken, self._key, self._lean = [], None, None

    def note(self) -> None:
        """Something was done for the function that runs now."""
        if self._key is None or self._found is None:
            return
        if self._inside:
            self._found[self._inside[-1]] = None
        else:
            self._found = None

    def note_clip(self) -> nn.Module | None:
        """The module that clips now, if notes are taken."""
        return self._inside[-1] if self._key is not None and self._inside else None

    def note_kept(self, clipping: nn.Module | None, kept: bool) -> None:
        """Whether the layer after it kept what this module had clipped."""
        if clipping is not None and self._key is not None:
            self._clips[clipping] = self._clips.get(clipping, True) and kept

    def _place(self, module: nn.Module, how: Callable[[nn.Module, Forward], Forward]) -> _Place:
        own = module.__dict__.get("forward")
        return _Place(module, own, of_class(module), _StandIn(module, how(module, module.forward)))

    def _noting(self, module: nn.Module, forward: Forward) -> Forward:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self._thread:
                return forward(*args, **kwargs)
            self._inside.append(module)
            try:
                return forward(*args, **kwargs)
            finally:
                self._inside.pop()

        return noted

    def _watching(self, module: nn.Module, forward: Forward) -> Forward:
        direct, waits = direct_forward(module), self._clips.get(module, False)

        def watched(*args: Any, **kwargs: Any) -> Any:
            lean = self._lean
            if lean is None or lean.is_watching or get_ident() != self._thread:
                return forward(*args, **kwargs)
            lean.is_watching, lean.may_wait = True, waits
            _push(lean.watcher)
            try:
                return forward(*args, **kwargs)
            finally:
                _pop()
                lean.is_watching = False

        def called(*args: Any, **kwargs: Any) -> Any:
            lean = self._lean
            if lean is None or lean.is_watching or kwargs or len(args) != 1 or get_ident() != self._thread:
                return watched(*args, **kwargs)
            lean.may_wait = waits
            return direct(lean, module, args[0])  # type: ignore[misc]  # there is one where this is called

        return watched if direct is None else called
