"""What a forward pass tells while it runs: its operations, the modules they ran in, what autograd keeps, what lives when."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pliant.runtime import batches
from pliant.runtime.memory import storage, when_freed

# What a node keeps for backward: (storage, bytes, the input for whose gradient it is kept, or None).
Saves = tuple[tuple[int, int, int | None], ...]

# Backward operations that hand a weight's gradient on without being its layer: transposes, casts, views, slices.
# fmt: off
CARRIERS = frozenset((
    "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "ToCopy", "Slice", "Select", "Unsqueeze",
    "Squeeze", "Alias", "Clone", "Split", "SplitWithSizes", "Unbind", "AsStrided", "Repeat",
))
# fmt: on

# Products keep each factor for the gradient of the other: the inputs in whose favour they keep, in the order of keeping.
KEPT_FOR = {"Mm": (0, 1), "Bmm": (0, 1), "Mul": (0, 1), "Addmm": (2, 1), "Baddbmm": (2, 1)}


# What the lean engine makes of it. Masks: one bit per element. Shapes: nothing is kept of the input but its shape.
MASKS = frozenset(("Relu", "Hardtanh", "LeakyRelu", "Hardsigmoid", "NativeDropout"))
SHAPES = ("AvgPool", "AdaptiveAvgPool")
SMALL = 256  # elements: below this a mask is not worth its while


def op_name(node: Any) -> str:
    """An autograd node's name without namespace, 'Backward' and version: 'ConvolutionBackward0' → 'Convolution'."""
    name: str = node.name().rpartition("::")[2].rstrip("0123456789")
    return name.removesuffix("Backward")


@dataclass(frozen=True)
class _Ran:
    """One ATen operation: its name as autograd would write it (an in-place one ends in _), and its work."""

    name: str
    macs: int
    outputs: int
    made: int
    moved: int


@dataclass
class _Life:
    """When a storage lives, in operations of the forward pass: made by `since`, last seen by `seen`, freed before `until`."""

    number: int
    size: int
    since: int
    seen: int
    until: int | None = None
    is_copy: bool = False
    saved: bool = False
    ref: Any = None


@dataclass
class _Region:
    """What ran inside a checkpoint: its operations up to the last that saves something, and what they save, by number."""

    since: int
    until: int
    saved: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


class NothingKept(RuntimeError):
    """The forward pass itself wants back what was saved for backward."""


class Recorder:
    """What a forward pass tells while it runs: operations and saved tensors by autograd sequence number, and modules.

    What autograd saves is noted and let go, so that everything lives just as long as the program itself holds it: also where
    that is longer than it is used, as with what a caller's variable still names. `keep`: it is kept, for a forward pass that
    differentiates.
    """

    def __init__(self, model: nn.Module, batch: Any, keep: bool = False) -> None:
        self.model = model
        self.ran: dict[int, list[_Ran]] = {}
        self.saved: dict[int, list[tuple[int, int]]] = {}
        self._saved_at: dict[int, int] = {}  # by sequence number: the operation that is over by then
        self._events: list[tuple[int, str]] = [(0, "")]
        self._stack: list[str] = [""]
        self._keep = keep
        standing = [*model.parameters(), *model.buffers(), *batches.tensors(batch)]
        self._standing = {storage(tensor)[0] for tensor in standing}
        self._kept_inputs: list[tuple[int, int, int]] = []  # of checkpoints: (first number, storage, bytes)
        self._regions: list[_Region] = []
        self._inside: dict[int, list[tuple[int, int]]] = {}  # what nodes inside of checkpoints would save, by number
        self._lives: list[_Life] = []
        self._now: dict[int, _Life] = {}  # by the name of a storage that lives now
        self.tick = 0  # operations so far

    def __enter__(self) -> Recorder:
        self._handles: list[Any] = []
        for name, module in self.model.named_modules():
            self._handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name), prepend=True))
            self._handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._mode = _Counter(self)
        self._hooks.__enter__()
        self._mode.__enter__()
        enter = self._enter_hooks = saved_tensors_hooks.__enter__
        saved_tensors_hooks.__enter__ = lambda hooks: enter(self._watched(hooks))  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        saved_tensors_hooks.__enter__ = self._enter_hooks  # type: ignore[method-assign]
        self._mode.__exit__(*error)
        self._hooks.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        for life in self._lives:
            life.ref = None

    def _enter(self, name: str) -> None:
        self._stack.append(name)
        self._events.append((_sequence(), name))

    def _leave(self) -> None:
        self._stack.pop()
        self._events.append((_sequence(), self._stack[-1]))

    def _watched(self, hooks: Any) -> Any:
        """Inside a checkpoint its hooks take the place of ours: what they are given is noted."""
        if isinstance(hooks, checkpoint._checkpoint_hook):
            self._regions.append(_Region(self.tick, self.tick))
            hooks.pack_hook = partial(self._pack_inside, self._regions[-1], hooks.pack_hook)
        return hooks

    def _pack_inside(self, region: _Region, pack: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        life = self._life(tensor)
        is_own = life is not None and life.since >= region.since  # its inputs are there anyway
        region.saved.setdefault(_sequence() - 1, []).append((life.number, life.size) if life and is_own else (-1, 0))
        region.until = self.tick
        return pack(tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        life = self._life(tensor)
        key, size = (life.number, life.size) if life is not None else (-1, 0)
        if _is_checkpoints_own():
            self._kept_inputs.append((_sequence(), key, size))
        else:
            self.saved.setdefault(_sequence() - 1, []).append((key, size))
            self._saved_at.setdefault(_sequence() - 1, max(self.tick - 1, 0))
        if life is not None:
            life.saved = True
        return tensor.detach() if self._keep else None  # detached: an output that its own node keeps would be a cycle

    def saw(self, tensors: Iterable[torch.Tensor], is_copy: bool) -> None:
        """The current operation reads or makes these."""
        for tensor in tensors:
            life = self._life(tensor, is_copy)
            if life is not None:
                life.seen = self.tick

    def _life(self, tensor: torch.Tensor, is_copy: bool = False) -> _Life | None:
        """Of the memory behind a tensor; None for what is there anyway."""
        key, size = storage(tensor)
        if key in self._standing:
            return None
        life = self._now.get(key)
        if life is None:
            life = self._now[key] = _Life(len(self._lives), size, self.tick, self.tick, is_copy=is_copy)
            self._lives.append(life)
            life.ref = when_freed(tensor, partial(self._freed, key, life))
        return life

    def _freed(self, key: int, life: _Life) -> None:
        life.until = self.tick
        if self._now.get(key) is life:
            del self._now[key]

    def lives(self) -> tuple[tuple[int, ...], dict[int, int]]:
        """`Graph.inference` and `Graph.gone`."""
        inference, gone = self._lives_of(0, self.tick + 1)
        gone |= {_mask(sequence): since for sequence, since in self._saved_at.items()}
        return inference[: max(self.tick, 1)], gone

    def _lives_of(self, start: int, end: int) -> tuple[tuple[int, ...], dict[int, int]]:
        """What operations from `start` up to `end` made: the bytes of it that live during each, and when each is gone."""
        change, gone = np.zeros(end - start + 1, np.int64), {}
        for life in self._lives:
            if not start <= life.since < end:
                continue
            if life.is_copy and life.saved and life.seen == life.since:  # made for backward: without it, it is not there
                gone[life.number] = life.since - start
                continue
            until = life.until if life.until is not None and not self._keep else life.seen + 1
            until = min(until, end)
            change[life.since - start] += life.size
            change[until - start] -= life.size
            gone[life.number] = until - start
        return tuple(np.cumsum(change)[:-1].tolist()), gone

    def again(self, live: Sequence[Any]) -> Iterable[tuple[dict[int, Saves], tuple[int, ...], dict[int, int]]]:
        """For each checkpoint, what `graph.Again` holds."""
        for region in self._regions:
            found = {i: region.saved.get(node._sequence_nr()) for i, node in enumerate(live)}
            saves = {i: _with_favoured(live[i], several) for i, several in found.items() if several is not None}
            if saves:
                yield saves, *self._lives_of(region.since, region.until)

    def settle(self, live: Sequence[Any]) -> None:
        """Give every node what it keeps.

        An in-place operation that keeps its input copies it first, under the next number. What a checkpoint keeps (its inputs)
        stays as long as any node of its region for which it will compute something again.
        """
        ops = {node._sequence_nr(): op_name(node).lower() for node in live}
        for sequence, ran in list(self.ran.items()):
            if sequence not in ops and any(one.name == f"{ops.get(sequence - 1)}_" for one in ran):
                self.ran.setdefault(sequence - 1, []).extend(ran)
                for saved in (self.saved, *(region.saved for region in self._regions)):
                    if sequence in saved:
                        saved.setdefault(sequence - 1, []).extend(saved.pop(sequence))
                self._saved_at.setdefault(sequence - 1, self._saved_at.pop(sequence, 0))
        self._inside = {n: found for region in self._regions for n, found in region.saved.items()}
        starts = sorted({start for start, _, _ in self._kept_inputs})
        for start, key, size in self._kept_inputs:
            end = next((later for later in starts if later > start), None)
            for sequence in self._inside:
                if start <= sequence and (end is None or sequence < end):
                    self.saved.setdefault(sequence, []).append((key, size))

    def work(self, node: Any) -> tuple[int, int, int, int]:
        """MACs, output elements and bytes, and bytes moved of a node's forward.

        Operations that made no node (on frozen parts, on counters) ran under the number of the node before them, so the
        operation must bear the node's name; a custom function's own operations all count.
        """
        ran = self.ran.get(node._sequence_nr(), [])
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            largest = max(ran, key=lambda r: r.outputs, default=_Ran("", 0, 0, 0, 0))
            return sum(r.macs for r in ran), largest.outputs, largest.made, sum(r.moved for r in ran)
        op = op_name(node).lower()
        mine = [r for r in ran if r.name.rstrip("_") == op]
        if mine:
            return mine[0].macs, mine[0].outputs, mine[0].made, mine[0].moved
        return (0, ran[0].outputs, ran[0].made, ran[0].moved) if ran else (0, 0, 0, 0)

    def saves(self, node: Any) -> Saves:
        """What a node keeps that would not be there anyway."""
        found, inside = self.saved.get(node._sequence_nr(), []), self._inside.get(node._sequence_nr())
        if inside is not None:  # a checkpoint's inputs, for all that it will compute again
            favoured = dict.fromkeys(waiting for _, _, waiting in _with_favoured(node, inside))
            return tuple((key, size, waiting) for key, size in found if size for waiting in favoured)
        return tuple(save for save in _with_favoured(node, found) if save[1])

    def lean(self, node: Any, outputs: int) -> Saves | None:
        """The same where the lean engine runs the forward pass; None: just the same."""
        op, found = op_name(node), [(key, size) for key, size in self.saved.get(node._sequence_nr(), []) if size]
        if op == "Convolution" or ("BatchNorm" in op and not getattr(node, "_saved_training", True)):
            return tuple((key, size, 1) for key, size in found)  # for the weight alone
        if op in MASKS and outputs >= SMALL:
            return ((_mask(node._sequence_nr()), (outputs + 7) // 8, None),)
        if op.startswith(SHAPES):
            return ()
        if op.startswith("MaxPool") and found:  # which element was the largest: eight bytes, or less
            return ((found[-1][0], outputs * (2 if found[-1][1] == outputs * 8 else 8), None),)
        return None

    def module(self, sequence: int) -> str:
        at = bisect.bisect_right(self._events, sequence, key=lambda event: event[0]) - 1
        return self._events[at][1]


class _Counter(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        touched = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if isinstance(first, torch.Tensor):
            name = func._overloadpacket._qualified_op_name.removeprefix("aten::")
            plain = name.strip("_").replace("_", "") + "_" * name.endswith("_")
            moved = sum(t.numel() * t.element_size() for t in touched)
            made = first.numel() * first.element_size()
            ran = _Ran(plain, forward_macs(name, args, first), first.numel(), made, moved)
            self.recorder.ran.setdefault(_sequence() - 1, []).append(ran)
        self.recorder.saw(touched, is_copy=func is torch.ops.aten.clone.default)
        self.recorder.tick += 1
        return out


def _unpack(kept: torch.Tensor | None) -> torch.Tensor:
    if kept is None:
        raise NothingKept
    return kept


def _with_favoured(node: Any, found: Sequence[tuple[int, int]]) -> Saves:
    """What a node keeps, each with the input for whose gradient it is kept."""
    behind = node.next_functions  # a product with a number has one
    favoured = [i for i in KEPT_FOR.get(op_name(node), ()) if i < len(behind) and behind[i][0] is not None]
    known = len(favoured) == len(found)
    return tuple((key, size, favoured[k] if known else None) for k, (key, size) in enumerate(found))


def _mask(sequence: int) -> int:
    """A number for what the lean engine keeps in place of what this node would: that of no storage."""
    return -sequence - 2


def forward_macs(name: str, args: Sequence[Any], out: torch.Tensor) -> int:
    """Multiply-accumulates of one ATen operation; 0 for whatever does not multiply matrices."""
    if name in ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"):
        transposed = name in ("convolution", "_convolution") and args[6]
        return int((args[0] if transposed else out).numel() * args[1][0].numel())
    if name in ("mm", "bmm"):
        return int(args[0].numel() * args[1].shape[-1])
    if name in ("addmm", "baddbmm"):
        return int(args[1].numel() * args[2].shape[-1])
    if name == "linear":
        return int(args[0].numel() * args[1].shape[0])
    if name.startswith("_scaled_dot_product"):
        query, key, value = args[:3]
        return int(query.numel() * key.shape[-2] + query.numel() // query.shape[-1] * key.shape[-2] * value.shape[-1])
    return 0


def _is_checkpoints_own() -> bool:
    """Whether a checkpoint is saving its inputs: that alone calls from its own file, two or three frames up."""
    frame: Any = sys._getframe(2)
    for _ in range(3):
        if frame is None:
            return False
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def _sequence() -> int:
    """The number that the next autograd node of this thread will get."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined,no-any-return]
