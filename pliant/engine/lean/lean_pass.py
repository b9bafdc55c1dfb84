"""One forward pass of the lean engine: runs single functions and packs what autograd saves for them.

The rules (`rules`) decide how each function runs; this is what they have to run it with.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from pliant.engine.lean import packed_tensors
from pliant.engine.lean.packed_tensors import Pack, Packed
from pliant.engine.slices.sliced_gradients import is_cast
from pliant.graph.saved_tensors import MIN_MASK_ELEMENTS, OPERATIONS
from pliant.runtime.torch_internals import pop_saved_tensor_hooks, push_saved_tensor_hooks, saved_tensor_hooks

_LAYERS: frozenset[Any] = frozenset((*OPERATIONS["convolution"].functions, F.linear))


class LeanPass:
    """`outer_hooks` are hooks on saved tensors that others set around the pass, and `not_lean` maps functions without a rule
    to the bytes that they saved."""

    def __init__(self) -> None:
        self.not_lean: dict[str, int] = {}
        self.outer_hooks = saved_tensor_hooks()
        self.undecided: tuple[list[Any], torch.Tensor, Pack] | None = None  # see `decide_later`

    @property
    def is_active(self) -> bool:
        """Whether the engine decides what is saved: in a checkpoint, or under the user's own hooks, it does not."""
        return torch.is_grad_enabled() and saved_tensor_hooks() == self.outer_hooks

    def run(self, pack: Pack, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function, and pack what is saved for it."""
        outer = self.outer_hooks
        push_saved_tensor_hooks(
            pack if outer is None else partial(packed_tensors.pack_inside, outer, pack), packed_tensors.unpack
        )
        try:
            return func(*args, **kwargs)
        finally:
            pop_saved_tensor_hooks()

    def run_and_fill(self, func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, list[Any]]:
        """Run a function that saves one tensor; gives its result and an empty list, to be filled with what is saved."""
        saved: list[Any] = []
        push_saved_tensor_hooks(lambda _: saved, packed_tensors.unpack)
        try:
            return func(*args, **kwargs), saved
        finally:
            pop_saved_tensor_hooks()

    def decide_later(self, saved: list[Any], output: torch.Tensor, pack: Pack) -> None:
        """An activation has saved its output: the next function decides whether that is packed.

        If that function is a layer that saves the same tensor for its weight, there is nothing to gain from packing it.
        """
        self.undecided = saved, output, pack

    def decide(self, func: Any, args: Any) -> None:
        """Before this function runs: pack the output of the activation before it, unless the function saves it anyway."""
        if self.undecided is None:
            return
        (saved, output, pack), self.undecided = self.undecided, None
        if _saves_input(func, args, output) and self.is_active:
            return
        if output._version == saved[2]:
            packed = pack(saved[1])
            if packed[0] is not packed_tensors.unchanged:
                saved[:] = packed

    def count(self, name: str, tensor: torch.Tensor) -> Packed:
        """Save a tensor for a function without a rule, and count its bytes."""
        if tensor.numel() > MIN_MASK_ELEMENTS and not isinstance(tensor, torch.nn.Parameter):
            self.not_lean[name] = self.not_lean.get(name, 0) + tensor.numel() * tensor.element_size()
        return packed_tensors.whole(tensor)


def _saves_input(func: Any, args: Any, tensor: torch.Tensor) -> bool:
    """Whether a function is a layer that saves this tensor, its input, for the gradient of its weight."""
    if func not in _LAYERS or len(args) < 2 or args[0] is not tensor or not args[1].requires_grad:
        return False
    return not is_cast(tensor) and (func is not F.linear or tensor.is_contiguous())
