"""Keep for backward only what this choice needs, around the user's own forward pass.

PyTorch decides what an operation keeps without asking who will want it: a frozen convolution keeps its input, an activation its
whole output. While `Lean` is on, every torch function that runs is looked up in one table (in `rules`), which says what to do
with each tensor that autograd is about to keep on its behalf: keep it, keep its shape alone, or keep one bit per element (see
`kept`). The operations and their backward kernels stay PyTorch's own, so gradients are the same to the last bit. One exception:
a norm at rest is a product with one number per channel, and its backward pass is that of the product. Clipping in place (ReLU6)
makes no copy of its input. An activation whose output the next layer keeps whole, for a chosen weight, has no bits of its own.

Functions without a rule keep what they always keep; those that are not known to need it are listed in `not_lean`.

All this runs in Python once per function, and in small networks Python is what takes the time: the common ways are short, and
from the second pass of a choice on only those modules are watched in which there is something to do (see `places`).
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pliant.engine.lean import packed_tensors as kept
from pliant.engine.lean.packed_tensors import Pack, Packed, hooks_reader
from pliant.engine.lean.places import Clip, Places
from pliant.engine.lean.rules import WAYS, keeps
from pliant.engine.slices.slices import Slices
from pliant.graph.forward_trace import SMALL

# What is kept for a function that clips, its result, how to keep less, and `is_exact` (see `has_clipped`).
_Clipped = tuple[list[Any], torch.Tensor, Pack, bool]

_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks


class Lean:
    """A context for one forward pass; backward may come later, outside of it.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
    >>> for name, param in model.named_parameters():
    ...     _ = param.requires_grad_(name.endswith("bias"))
    >>> with Lean() as lean:
    ...     loss = model(torch.randn(1, 3, 32, 32)).mean()
    >>> loss.backward()
    >>> lean.not_lean
    {}
    """

    def __init__(self, slices: Slices | None = None, places: Places | None = None, choice: Hashable = None) -> None:
        """`slices` of parameters that train, if any do. `places` know where in the model there is something to do for this
        `choice`; without them, every function is looked at."""
        self.slices = slices
        self._places, self._trains = places, choice
        self.not_lean: dict[str, int] = {}  # functions without a rule → bytes that they kept
        self.clipped: _Clipped | None = None  # by the function that ran just now, if it clips
        self.watcher = _Watcher(self)
        self.is_watching = False
        self._clip: Clip | None = None  # the place of it, where notes are taken

    def __enter__(self) -> Lean:
        self._top = hooks_reader()
        self.around = self._top(False)  # of others: what they pack is what is kept
        if self._places is None or self._places.enter(self, self._trains):
            self.watcher.__enter__()
            self.is_watching = True
        return self

    def __exit__(self, *error: Any) -> None:
        if self.is_watching:
            self.watcher.__exit__(*error)
        self.settle(None, ())
        if self._places is not None:
            self._places.exit(self, failed=error[0] is not None)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch function its way."""
        if self.clipped is not None:
            self.settle(func, args)
        way = WAYS[func]
        if way is None or not self.is_on:
            return func(*args, **kwargs)
        return way(self, func, args, kwargs)

    def note(self) -> None:
        """Something is done for the function that runs now."""
        if self._places is not None:
            self._places.note(self)

    def next_is_kept(self, is_exact: bool) -> bool | None:
        """Goes on to the next function that clips: whether the layer after it keeps its result, as it did when notes were made.

        None: nobody knows. `is_exact`: see `has_clipped`.
        """
        return self._places.next_is_kept(self, is_exact) if self._places is not None else None

    @property
    def is_on(self) -> bool:
        """Whether what is kept is ours: in a checkpoint, or in hooks of the user's, it is theirs."""
        return torch.is_grad_enabled() and self._top(False) == self.around

    def run(self, pack: Pack, func: Any, args: Any, kwargs: Any) -> Any:
        """A function, with what is kept for it packed so."""
        self.note()
        _push(pack if self.around is None else partial(kept.inside, self.around, pack), kept.give_back)
        try:
            return func(*args, **kwargs)
        finally:
            _pop()

    def run_clipping(self, func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, list[Any]]:
        """A function that keeps nothing but its result, and what stands for that, which is to be filled in."""
        there: list[Any] = []
        _push(lambda _: there, kept.give_back)
        try:
            return func(*args, **kwargs), there
        finally:
            _pop()

    def settle(self, func: Any, args: Any) -> None:
        """Before this function runs: keep less for the one before it, which clips, unless its result is kept anyway."""
        if self.clipped is None:
            return
        (there, result, pack, is_exact), self.clipped = self.clipped, None
        kept_anyway = keeps(func, args, result) and self.is_on
        if self._places is not None:
            self._places.settle_clip(self._clip, kept_anyway, is_exact)
        if not kept_anyway and result._version == there[2]:
            _pack_(there, pack)

    def has_clipped(
        self, there: list[Any], result: torch.Tensor, pack: Pack, is_kept: bool | None, is_exact: bool = False
    ) -> None:
        """A function that clips has run: what is kept for it is settled now, or when the next one comes if nobody knows yet.

        `is_exact`: plain autograd keeps its result and nothing else, so that there is nothing to do where that is kept anyway.
        """
        if is_kept is None:
            self.clipped = there, result, pack, is_exact
            self._clip = self._places.new_clip(self) if self._places is not None else None
        elif not is_kept:
            _pack_(there, pack)

    def count(self, name: str, tensor: torch.Tensor) -> Packed:
        """Keep a tensor for a function without a rule, and note it."""
        if tensor.numel() > SMALL and not isinstance(tensor, torch.nn.Parameter):
            self.not_lean[name] = self.not_lean.get(name, 0) + tensor.numel() * tensor.element_size()
        return kept.whole(tensor)


class _Watcher(TorchFunctionMode):
    """Tells `Lean` which torch function runs."""

    def __init__(self, lean: Lean) -> None:
        super().__init__()
        self._lean = lean

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lean = self._lean
        if lean.slices is not None:
            if lean.clipped is not None:
                lean.settle(func, args)
            out = lean.slices.call(func, args, kwargs)
            if out is not None:
                return out
        return lean.call(func, args, kwargs or {})


def _pack_(there: list[Any], pack: Pack) -> None:
    """Keep less in place of a tensor, where that is less."""
    packed = pack(there[1])
    if packed[0] is not kept.unchanged:
        there[:] = packed
