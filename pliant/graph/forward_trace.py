"""Records one forward pass: its operations, the modules they ran in, what autograd saves, and when each storage is freed."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pliant.graph.saved_tensors import Saves, lean_saves, mask_key, op_name, plain_saves
from pliant.runtime import batches
from pliant.runtime.memory import kernel_copies, storage, when_freed
from pliant.runtime.torch_internals import CheckpointHooks, TorchDispatchMode, next_sequence_number, tree_leaves

# Backward operations that only pass a weight's gradient on: transposes, casts, views, slices.
# fmt: off
CARRIERS = frozenset((
    "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "ToCopy", "Slice", "Select", "Unsqueeze",
    "Squeeze", "Alias", "Clone", "Split", "SplitWithSizes", "Unbind", "AsStrided", "Repeat",
))
# fmt: on


@dataclass(frozen=True)
class _Executed:
    """One ATen operation: its name as autograd would write it (an in-place one ends in _), and its work."""

    name: str
    macs: int
    outputs: int
    made: int
    moved: int
    copies: tuple[int, int] = (0, 0)


@dataclass
class _Lifetime:
    """When a storage is in memory, in operations of the forward pass: made by `since`, used by `uses`, freed before `until`."""

    number: int
    size: int
    since: int
    uses: list[int] = field(default_factory=list)
    until: int | None = None
    is_copy: bool = False
    saved: bool = False
    ref: Any = None


@dataclass
class _Checkpoint:
    """What ran inside a checkpoint: its operations up to the last that saves something, and what they save, by number.

    `first` is the first sequence number inside; `inputs` are the storages of others among what they save.
    """

    first: int
    since: int
    until: int
    saved: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)


class SavedTensorNeeded(RuntimeError):
    """The forward pass itself differentiates, so it needs back what was saved for backward."""


class ForwardTrace:
    """A context that records a forward pass: operations and saved tensors by autograd sequence number, and modules.

    What autograd saves is recorded and dropped, so that every storage lives exactly as long as the program itself holds it. If
    the forward pass differentiates, set `keep`: then saved tensors are kept. With `kernels`, what kernels copy inside counts.
    """

    def __init__(self, model: nn.Module, batch: Any, keep: bool = False, kernels: bool = False) -> None:
        self.model, self.kernels = model, kernels
        self.executed: dict[int, list[_Executed]] = {}
        self.saved: dict[int, list[tuple[int, int]]] = {}
        self._saved_at: dict[int, int] = {}  # by sequence number: the operation that is over by then
        self._events: list[tuple[int, str]] = [(0, "")]
        self._stack: list[str] = [""]
        self._keep = keep
        permanent = [*model.parameters(), *model.buffers(), *batches.tensors(batch)]
        self._permanent = {storage(tensor)[0] for tensor in permanent}
        self._checkpoints: list[_Checkpoint] = []
        self._inside: dict[int, list[tuple[int, int]]] = {}  # what nodes inside of checkpoints would save, by number
        self._lifetimes: list[_Lifetime] = []
        self._in_memory: dict[int, _Lifetime] = {}  # by the key of the storage
        self.operations = 0  # so far
        self.scratch: dict[int, int] = {}  # bytes inside of kernels, by operation
        self.reads_values = False  # whether Python looks at a number in a tensor, and could decide by it what runs

    def __enter__(self) -> ForwardTrace:
        self._handles: list[Any] = []
        for name, module in self.model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                continue
            self._handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name), prepend=True))
            self._handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._mode = _OperationRecorder(self)
        self._hooks.__enter__()
        self._mode.__enter__()
        enter = self._enter_hooks = saved_tensors_hooks.__enter__
        saved_tensors_hooks.__enter__ = lambda hooks: enter(self._watch_checkpoint(hooks))  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        saved_tensors_hooks.__enter__ = self._enter_hooks  # type: ignore[method-assign]
        self._mode.__exit__(*error)
        self._hooks.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        for lifetime in self._lifetimes:
            lifetime.ref = None

    def _enter(self, name: str) -> None:
        self._stack.append(name)
        self._events.append((next_sequence_number(), name))

    def _leave(self) -> None:
        self._stack.pop()
        self._events.append((next_sequence_number(), self._stack[-1]))

    def _watch_checkpoint(self, hooks: Any) -> Any:
        """Inside a checkpoint its hooks replace the ones of the trace: record what they are given."""
        if isinstance(hooks, CheckpointHooks):
            self._checkpoints.append(_Checkpoint(next_sequence_number(), self.operations, self.operations))
            hooks.pack_hook = partial(self._pack_inside, self._checkpoints[-1], hooks.pack_hook)
        return hooks

    def _pack_inside(self, inside: _Checkpoint, pack: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        lifetime = self._lifetime(tensor)
        entry = (-1, 0)  # in memory anyway
        if lifetime is not None and lifetime.since >= inside.since:
            entry = lifetime.number, lifetime.size
        elif lifetime is not None:
            inside.inputs.add(lifetime.number)
        inside.saved.setdefault(next_sequence_number() - 1, []).append(entry)
        inside.until = self.operations
        return pack(tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        lifetime, sequence = self._lifetime(tensor), next_sequence_number() - 1
        self.saved.setdefault(sequence, []).append((lifetime.number, lifetime.size) if lifetime is not None else (-1, 0))
        self._saved_at.setdefault(sequence, max(self.operations - 1, 0))
        if lifetime is not None:
            lifetime.saved = True
        return tensor.detach() if self._keep else None  # detached: an output saved by its own node would be a cycle

    def used(self, tensors: Iterable[torch.Tensor], is_copy: bool) -> None:
        """The current operation reads or makes these."""
        for tensor in tensors:
            lifetime = self._lifetime(tensor, is_copy)
            if lifetime is not None:
                lifetime.uses.append(self.operations)

    def _lifetime(self, tensor: torch.Tensor, is_copy: bool = False) -> _Lifetime | None:
        """Of the storage behind a tensor; None for parameters, buffers and the batch, which are in memory anyway."""
        key, size = storage(tensor)
        if key in self._permanent:
            return None
        found = self._in_memory.get(key)
        if found is None:
            found = _Lifetime(len(self._lifetimes), size, self.operations, is_copy=is_copy)
            self._in_memory[key] = found
            self._lifetimes.append(found)
            found.ref = when_freed(tensor, partial(self._freed, key, found))
        return found

    def _freed(self, key: int, lifetime: _Lifetime) -> None:
        lifetime.until = self.operations
        if self._in_memory.get(key) is lifetime:
            del self._in_memory[key]

    def memory(self) -> tuple[tuple[int, ...], dict[int, int]]:
        """`Graph.inference` and `Graph.gone`."""
        inference, gone = self._memory_between(0, self.operations + 1)
        gone |= {mask_key(sequence): since for sequence, since in self._saved_at.items()}
        return inference[: max(self.operations, 1)], gone

    def _memory_between(self, start: int, end: int) -> tuple[tuple[int, ...], dict[int, int]]:
        """What operations from `start` up to `end` made: how many bytes of it are in memory during each, and when each storage
        is freed."""
        change, gone = np.zeros(end - start + 1, np.int64), {}
        for one in self._lifetimes:
            if not start <= one.since < end:
                continue
            last = one.uses[-1] if one.uses else one.since
            if one.is_copy and one.saved and last == one.since:  # made for backward: absent without it
                gone[one.number] = one.since - start
                continue
            until = one.until if one.until is not None and not self._keep else last + 1
            until = min(until, end)
            change[one.since - start] += one.size
            change[until - start] -= one.size
            gone[one.number] = until - start
        standing = np.cumsum(change)[:-1].tolist()
        return tuple(held + self.scratch.get(start + k, 0) for k, held in enumerate(standing)), gone

    def recomputed(self, live: Sequence[Any]) -> Iterable[tuple[dict[int, Saves], tuple[int, ...], dict[int, int]]]:
        """For each checkpoint, the fields of `backward.Recomputed`."""
        for inside in self._checkpoints:
            found = {i: inside.saved.get(node._sequence_nr()) for i, node in enumerate(live)}
            saves = {i: plain_saves(live[i], several) for i, several in found.items() if several is not None}
            if saves:
                yield saves, *self._memory_between(inside.since, inside.until)

    def assign(self, live: Sequence[Any]) -> None:
        """Give every node what it saves.

        An in-place operation that saves its input copies it first, under the next number. A checkpoint saves its inputs, which
        stay as long as any node inside for which something will be computed again.
        """
        inputs = [self._inputs(inside) for inside in self._checkpoints]
        for inside, entries in zip(self._checkpoints, inputs, strict=True):
            before = self.saved.get(inside.first - 1, [])  # the checkpoint has just saved them, under this number
            for entry in entries:
                if entry in before:
                    before.reverse()
                    before.remove(entry)
                    before.reverse()
        ops = {node._sequence_nr(): op_name(node).lower() for node in live}
        for sequence, executed in list(self.executed.items()):
            if sequence not in ops and any(one.name == f"{ops.get(sequence - 1)}_" for one in executed):
                self.executed.setdefault(sequence - 1, []).extend(executed)
                for saved in (self.saved, *(inside.saved for inside in self._checkpoints)):
                    if sequence in saved:
                        saved.setdefault(sequence - 1, []).extend(saved.pop(sequence))
                self._saved_at.setdefault(sequence - 1, self._saved_at.pop(sequence, 0))
        self._inside = {number: found for inside in self._checkpoints for number, found in inside.saved.items()}
        for inside, entries in zip(self._checkpoints, inputs, strict=True):
            for sequence in inside.saved:
                self.saved.setdefault(sequence, []).extend(entries)

    def _inputs(self, inside: _Checkpoint) -> list[tuple[int, int]]:
        """The storages that a checkpoint reads and does not make itself."""
        before = [one for one in self._lifetimes if one.since < inside.since]
        read = {one.number for one in before if any(inside.since <= use < inside.until for use in one.uses)}
        return [(one.number, one.size) for one in before if one.number in read | inside.inputs]

    def copies(self, node: Any) -> tuple[int, int]:
        """Bytes of a node's input and output that its kernels copy, where they do."""
        return max((one.copies for one in self.executed.get(node._sequence_nr(), [])), default=(0, 0))

    def work(self, node: Any) -> tuple[int, int, int, int]:
        """MACs, output elements and bytes, and bytes moved of a node's forward.

        Operations without a node (on frozen parts, on counters) run under the number of the node before them. So the operation
        must have the node's name; of a custom function all operations count.
        """
        executed = self.executed.get(node._sequence_nr(), [])
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            largest = max(executed, key=lambda one: one.outputs, default=_Executed("", 0, 0, 0, 0))
            macs, moved = sum(one.macs for one in executed), sum(one.moved for one in executed)
            return macs, largest.outputs, largest.made, moved
        op = op_name(node).lower()
        own = [one for one in executed if one.name.rstrip("_") == op]
        if own:
            return own[0].macs, own[0].outputs, own[0].made, own[0].moved
        return (0, executed[0].outputs, executed[0].made, executed[0].moved) if executed else (0, 0, 0, 0)

    def saves(self, node: Any) -> Saves:
        """What a node saves that would not be in memory anyway."""
        found, inside = self.saved.get(node._sequence_nr(), []), self._inside.get(node._sequence_nr())
        if inside is not None:  # the inputs of a checkpoint, for all that it will compute again
            needed_by = dict.fromkeys(wanted for _, _, wanted in plain_saves(node, inside))
            return tuple((key, size, wanted) for key, size in found if size for wanted in needed_by)
        return tuple(save for save in plain_saves(node, found) if save[1])

    def lean(self, node: Any, outputs: int) -> Saves | None:
        """The same where the lean engine runs the forward pass; None: no difference."""
        return lean_saves(node, [entry for entry in self.saved.get(node._sequence_nr(), []) if entry[1]], outputs)

    def module(self, sequence: int) -> str:
        at = bisect.bisect_right(self._events, sequence, key=lambda event: event[0]) - 1
        return self._events[at][1]


class _OperationRecorder(TorchDispatchMode):
    def __init__(self, trace: ForwardTrace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        touched = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if isinstance(first, torch.Tensor):
            name = func._overloadpacket._qualified_op_name.removeprefix("aten::")
            plain = name.strip("_").replace("_", "") + "_" * name.endswith("_")
            moved = sum(t.numel() * t.element_size() for t in touched)
            made = first.numel() * first.element_size()
            copies = kernel_copies(func, args, first) if self.trace.kernels else (0, 0)
            if any(copies):
                self.trace.scratch[self.trace.operations] = max(copies)
            executed = _Executed(plain, forward_macs(name, args, first), first.numel(), made, moved, copies)
            self.trace.executed.setdefault(next_sequence_number() - 1, []).append(executed)
        self.trace.used(touched, is_copy=func is torch.ops.aten.clone.default)
        self.trace.reads_values |= func is torch.ops.aten._local_scalar_dense.default
        self.trace.operations += 1
        return out


def _unpack(saved: torch.Tensor | None) -> torch.Tensor:
    if saved is None:
        raise SavedTensorNeeded
    return saved


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
