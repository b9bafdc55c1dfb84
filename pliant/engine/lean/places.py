"""Where in a model the lean engine has something to do: from the second pass of a choice on, it watches these modules alone.

To look at a torch function takes Python as long as to launch it, and in most of a model there is nothing to do: what comes
before the choice keeps nothing, and a chosen layer keeps what it needs. So one pass is watched everywhere and notes the modules
in which something was done. In later passes the forward of each of these is called by way of the watcher, or where it does
nothing but call one function, without it; what they call that has nothing to do is called without it again. For the time of the
pass that stands in the module's own `__dict__`, where `forward` of an instance goes before that of its class. The model itself
stands for what runs outside of its modules: its own forward, and the loss.

A pass that takes another way than the one that was watched, and does there what would have to be watched, keeps what plain
autograd keeps. Whether the next layer keeps what a function clips is taken to be as it was in the pass that was watched: with
ReLU6 and the like, where it does not, the result must not be changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import nn

from pliant.engine.lean.direct import INNER, direct_forward, of_class

Lean = Any  # the engine itself, which calls what is here

Forward = Callable[..., Any]
Clip = tuple[nn.Module, int]  # a module, and which of the functions that clip in it
Clips = dict[nn.Module, list[bool]]  # whether the next layer kept what was clipped in a module, one after another

_REMEMBERED = 8  # choices and modes

_push = torch._C._push_on_torch_function_stack
_pop = torch._C._pop_torch_function_stack
_height, _at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at


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


@dataclass(frozen=True, eq=False)
class _Known:
    """What a pass that was watched everywhere says of those that follow."""

    places: list[_Place]
    outside: bool  # whether there is something to do outside of modules too, or in the model's own forward
    clips: Clips


class Places:
    """The modules of one model in which there is something to do, by what trains and by which modules are in training mode."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._can = not any(_is_closed(module) for module in self._modules)
        self._known: dict[Hashable, _Known] = {}
        self._key: Hashable = None  # of a pass that takes notes
        self._inside: list[nn.Module] = []  # that run now, while all is watched
        self._found: dict[nn.Module, None] = {}  # where something was done, in the order of the pass
        self._calls: list[tuple[nn.Module, nn.Module]] = []  # modules, and what called them
        self._clips: Clips = {}
        self._frame = self._modules[0]  # the module whose own functions run now, in a pass that is not watched everywhere
        self._clips_so_far: dict[nn.Module, int] = {}
        self._taken: list[_Place] = []
        self._lean: Lean | None = None
        self._thread = 0

    def enter(self, lean: Lean, choice: Hashable) -> bool:
        """A pass begins. Gives whether its watcher is to be on from the beginning: everywhere, or outside of modules."""
        if not self._can or self._lean is not None:  # or it begins inside of another one
            return True
        key = choice, tuple([module.training for module in self._modules])
        known = self._known.get(key)
        if known is not None and all(place.is_as_it_was for place in known.places):
            self._taken, watches, self._clips = known.places, known.outside, known.clips
            self._frame, self._clips_so_far = self._modules[0], {}
        else:
            self._key, self._found, self._calls, self._clips = key, {}, [], {}
            self._inside = [self._modules[0]]
            self._taken = [self._place(module, self._noting) for module in self._modules[1:]]
            watches = True
        self._lean, self._thread = lean, get_ident()
        for place in self._taken:
            place.take_()
        return watches

    def exit(self, lean: Lean, failed: bool) -> None:
        """The pass is over: every module is as it was found."""
        if self._lean is not lean:
            return
        for place in self._taken:
            place.leave_()
        if self._key is not None and not failed:
            if len(self._known) >= _REMEMBERED and self._key not in self._known:
                del self._known[next(iter(self._known))]
            self._known[self._key] = self._learned()
        self._taken, self._key, self._lean = [], None, None

    def _learned(self) -> _Known:
        """What a pass that was watched everywhere says of later ones."""
        model, found = self._modules[0], self._found
        idle = dict.fromkeys(module for module, caller in self._calls if module not in found and caller in found)
        places = [self._place(module, self._watching) for module in found if module is not model]
        places += [self._place(module, self._resting) for module in idle]
        return _Known(places, model in found, self._clips)

    def note(self, lean: Lean) -> None:
        """Something was done for the function that runs now."""
        if self._takes_notes_for(lean):
            self._found[self._inside[-1]] = None

    def _takes_notes_for(self, lean: Lean) -> bool:
        """Not for a pass inside of another one, nor for one in another thread."""
        return self._key is not None and self._lean is lean

    def next_is_kept(self, lean: Lean, is_exact: bool) -> bool | None:
        """Goes on to the next function that clips in this module: whether the next layer kept what it clips when notes were
        taken; None if this pass does not follow one."""
        if self._lean is not lean or self._key is not None:
            return None
        number, kept = self._clips_so_far.get(self._frame, 0), self._clips.get(self._frame, ())
        self._clips_so_far[self._frame] = number + 1
        if is_exact:  # a wrong answer costs memory at most
            return number < len(kept) and kept[number]
        return number < len(kept) and all(kept)  # by number alone, one that is left out would shift the others

    def new_clip(self, lean: Lean) -> Clip | None:
        """The place of what is clipped now, if notes are taken."""
        if not self._takes_notes_for(lean):
            return None
        module = self._inside[-1]
        self._clips.setdefault(module, []).append(False)
        return module, len(self._clips[module]) - 1

    def settle_clip(self, clip: Clip | None, kept: bool, is_exact: bool) -> None:
        """Whether the layer after it kept what was clipped. If so, and plain autograd keeps only that, nothing is to do."""
        if clip is None or self._key is None:
            return
        module, number = clip
        self._clips[module][number] = kept
        if not (kept and is_exact):
            self._found[module] = None

    def _place(self, module: nn.Module, how: Callable[[nn.Module, Forward], Forward]) -> _Place:
        own = module.__dict__.get("forward")
        return _Place(module, own, of_class(module), _StandIn(module, how(module, module.forward)))

    def _noting(self, module: nn.Module, forward: Forward) -> Forward:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self._thread:
                return forward(*args, **kwargs)
            self._calls.append((module, self._inside[-1]))
            self._inside.append(module)
            try:
                return forward(*args, **kwargs)
            finally:
                self._inside.pop()

        return noted

    def _watching(self, module: nn.Module, forward: Forward) -> Forward:
        direct = direct_forward(module)

        def watched(*args: Any, **kwargs: Any) -> Any:
            lean = self._lean
            if lean is None or get_ident() != self._thread:
                return forward(*args, **kwargs)
            before, frame = lean.is_watching, self._frame
            lean.is_watching, self._frame = True, module
            if not before:
                _push(lean.watcher)
            try:
                return forward(*args, **kwargs)
            finally:
                if not before:
                    _pop()
                lean.is_watching, self._frame = before, frame

        def called(*args: Any, **kwargs: Any) -> Any:
            lean = self._lean
            if lean is None or kwargs or len(args) != 1 or get_ident() != self._thread:
                return watched(*args, **kwargs)
            if lean.is_watching:
                return self._unwatched(lean, called, args, kwargs) if _is_on_top(lean) else watched(*args)
            frame, self._frame = self._frame, module
            try:
                return direct(lean, module, args[0])  # type: ignore[misc]  # there is one where this is called
            finally:
                self._frame = frame

        return watched if direct is None else called

    def _resting(self, module: nn.Module, forward: Forward) -> Forward:
        def rested(*args: Any, **kwargs: Any) -> Any:
            lean = self._lean
            if lean is None or not lean.is_watching or get_ident() != self._thread:
                return forward(*args, **kwargs)
            frame, self._frame = self._frame, module
            try:
                if _is_on_top(lean):
                    return self._unwatched(lean, forward, args, kwargs)
                return forward(*args, **kwargs)
            finally:
                self._frame = frame

        return rested

    @staticmethod
    def _unwatched(lean: Lean, run: Forward, args: Any, kwargs: Any) -> Any:
        lean.is_watching = False
        _pop()
        try:
            return run(*args, **kwargs)
        finally:
            _push(lean.watcher)
            lean.is_watching = True


def _is_closed(module: nn.Module) -> bool:
    """Whether nothing can stand for forwards inside: no Python runs there, or it is compiled, or copies of it run."""
    is_compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    return is_compiled or isinstance(module, (torch.jit.ScriptModule, nn.DataParallel))


def _is_on_top(lean: Lean) -> bool:
    """Whether the watcher is the innermost mode: one that others put inside of it has to stay there."""
    height = _height()
    return height > 0 and _at(height - 1) is lean.watcher
