"""Record the program of a forward pass: the torch functions that it calls, in order, and what each reads and makes.

Python is not traced: the forward pass runs as usual, and a `TorchFunctionMode` records its calls. What depends on the batch and
on no trained parameter is the *prefix*; autograd itself tells what depends on trained parameters. Tensors are held by weak
references, so recording does not extend their life.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from types import EllipsisType, NoneType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from pliant.engine.prefix.call_arguments import arranged, split, swap
from pliant.runtime.torch_internals import version, without_function_modes

# fmt: off
# What may be asked of a tensor without reading its values. The second set also depends on its memory format and dtype.
FORM = frozenset((
    "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "device", "get_device", "is_cuda", "is_cpu",
    "is_floating_point", "is_complex", "is_sparse", "is_quantized", "is_meta", "is_nested", "is_mkldnn", "is_mps", "is_xla",
    "layout", "names", "requires_grad", "is_leaf", "grad_fn", "grad", "retains_grad", "is_inference", "is_same_size",
))
LAYOUT = frozenset((
    "dtype", "stride", "is_contiguous", "storage_offset", "element_size", "itemsize", "nbytes", "is_signed", "_version",
))
# Functions whose results have a shape that depends on values.
_COUNTS = frozenset((
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave",
))
# fmt: on
_PLAIN = (Number, str, bytes, NoneType, EllipsisType, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(eq=False)
class Value:
    """A tensor as one call left it, or as the batch has it. After a change in place, the same tensor is another value."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    first: int  # the value of this tensor when it was made
    in_prefix: bool = False
    depends: bool = False  # on the batch
    chosen: bool = False  # depends on a trained parameter
    is_output: bool = False  # is read outside of the prefix
    readers: list[int] = field(default_factory=list)  # positions of calls that read its values
    maker: int = -1  # the position of the call that made it
    not_by_sample: str | None = None  # why it cannot be cached as one row for each sample


@dataclass(eq=False)
class Call:
    """One call of a torch function. `reads` holds numbers of values, and ~number for leaves."""

    func: Any
    kind: str  # "prefix", "constant" (depends neither on the batch nor on a trained parameter), "form", "layout" or "outside"
    reads: tuple[int, ...]
    plain: list[Any]  # its arguments without the tensors
    makes: tuple[int, ...] = ()
    same: tuple[int | None, ...] = ()  # for each result: the index of the argument that it is, or None
    changes: tuple[tuple[int, int], ...] = ()  # (index of an argument that was changed in place, its new value)
    form: Any = None  # the type of the container of its results; None: one tensor, or nothing
    holes: tuple[bool, ...] = ()  # where in it there is a tensor, not None
    answer: Any = None  # to a question about the memory format

    def give(self, tensors: list[torch.Tensor]) -> Any:
        """The tensors in the container that the call returns."""
        if self.form is None:
            return tensors[0] if tensors else None
        ones = iter(tensors)
        return arranged(self.form, [next(ones) if is_one else None for is_one in self.holes])


@dataclass(eq=False)
class Program:
    """The calls of one forward pass."""

    calls: list[Call]
    values: list[Value]
    leaves: list[ref[torch.Tensor]]  # tensors neither of the batch nor made by a call: parameters, buffers
    uncacheable: str | None  # why its results cannot be cached
    is_blind: bool  # some tensors were made by something else than a torch function
    samples: int | None  # of its batch, if known
    kept: frozenset[int]  # values of the prefix that are still alive after the forward pass
    random: Mapping[int, str]  # values of the prefix that differ from pass to pass, and why

    @property
    def frontier(self) -> list[int]:
        """The outputs of the prefix."""
        return [number for number, value in enumerate(self.values) if value.in_prefix and value.is_output]


def name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name


def random_state() -> list[torch.Tensor]:
    """The random states of torch, on all devices in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states


def set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


def _python_state() -> Any:
    return random.getstate(), str(np.random.get_state(legacy=False))


class ProgramRecorder(TorchFunctionMode):
    """Records one forward pass.

    `samples`: the batch size, if results are to be cached by sample. Then each call of the prefix runs a second time, on a
    batch that holds the first half of the samples twice. A row that differs there depends on the other samples. `skips`:
    whether the prefix may be skipped without that, because something else computes its outputs.
    """

    def __init__(self, batch: Sequence[torch.Tensor], samples: int | None, skips: bool = False) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.uncacheable: str | None = None if skips or samples is not None else "no ids of samples were given"
        self._samples = samples
        self._known: Any = WeakTensorKeyDictionary()  # tensor → the number of its value, or ~number of its leaf
        self._leaves: list[ref[torch.Tensor]] = []
        self._live: list[tuple[ref[torch.Tensor], int]] = []  # tensors of the prefix
        self._unseen = any(type(tensor) is not torch.Tensor for tensor in batch)
        self._doubts: dict[int, str] = {}  # constants that may differ from pass to pass, and why
        self._random: dict[int, str] = {}  # values of the prefix that differ from pass to pass, and why
        self._second_run: Any = WeakTensorKeyDictionary()  # tensor of the prefix → the same of the second run
        self._by_memory: dict[int, list[ref[torch.Tensor]]] = {}
        self._stale: Any = WeakTensorKeyDictionary()  # tensors that changed together with another one
        half = max(1, (samples or 0) // 2)
        self._second_samples = torch.tensor([i % half for i in range(samples or 0)], dtype=torch.long)
        for tensor in batch:
            if tensor not in self._known:
                self._known[tensor] = self._add(tensor, depends=True, chosen=tensor.requires_grad)
                if samples is not None and tensor.dim() and len(tensor) == samples:
                    self._second_run[tensor] = tensor.detach()[self._second_samples.to(tensor.device)]
        self._python = _python_state() if self.uncacheable is None else None

    def number(self, given: Any) -> int | None:
        """The number of the value that a tensor has now; None for anything else."""
        with without_function_modes():
            return self._known.get(given) if isinstance(given, torch.Tensor) else None

    def program(self) -> Program:
        """What was recorded, after the forward pass."""
        if self._python is not None and self._python != _python_state():
            self._block("the forward pass draws random numbers in Python")
        if any(leaf() is None for leaf in self._leaves):
            self._unseen = True
        if self._unseen:
            self._block("a tensor comes from code that calls no torch function")
        kept = frozenset(number for tensor, number in self._live if tensor() is not None)
        return Program(self.calls, self.values, self._leaves, self.uncacheable, self._unseen, self._samples, kept, self._random)

    def _block(self, why: str) -> None:
        self.uncacheable = self.uncacheable or why

    def _doubt(self, call: Call, why: str) -> None:
        """The result of the call may differ from pass to pass. That matters in the prefix, and where the prefix uses it."""
        if call.kind == "prefix":
            return self._block(why)
        self._doubts.update(dict.fromkeys((*call.makes, *[number for _, number in call.changes]), why))

    def _mark_random(self, call: Call, why: str) -> None:
        """The call draws random numbers, or reads what comes of them. At the end of the prefix such calls run in each pass, as
        dropout before a head does."""
        if call.kind != "prefix":
            return self._doubt(call, why)
        for number in (*call.makes, *[new for _, new in call.changes]):
            if number >= 0:
                self.values[number].not_by_sample = self._random[number] = why

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_function_modes():
            given, plain = split(args, kwargs)
            reads = tuple([self._number(tensor) for tensor in given])
            before = [version(tensor) for tensor in given]
            checks = self.uncacheable is None
            drawn = random_state() if checks else []
            # A norm in training mode changes its statistics without a new version.
            statistics = [tensor.clone() if "norm" in name_of(func) else None for tensor in given[1:]] if checks else []
        out = func(*args, **kwargs)
        with without_function_modes():
            call = Call(func, "outside", reads, plain)
            changed = [i for i, tensor in enumerate(given) if version(tensor) != before[i]]
            for i, was in enumerate(statistics, 1):
                if was is not None and i not in changed and not torch.equal(was, given[i]):
                    changed.append(i)
            self._record(call, given, changed, out)
            if call.kind in ("prefix", "constant") and self.uncacheable is None:
                if any(not torch.equal(a, b) for a, b in zip(drawn, random_state(), strict=False)):
                    self._mark_random(call, f"{name_of(func)} draws random numbers in the prefix")
                for number in call.reads:
                    if number in self._random:
                        self._mark_random(call, self._random[number])
                    if number in self._doubts:
                        self._doubt(call, self._doubts[number])
                is_random = any(number in self._random for number in call.makes)
                if call.kind == "prefix" and self.uncacheable is None and self._samples is not None and not is_random:
                    self._run_second(call, given, out, args, kwargs)
        return out

    # ------------------------------------------------------------ what a call did

    def _number(self, tensor: torch.Tensor) -> int:
        number = self._known.get(tensor)
        if number is None:
            number = self._known[tensor] = ~len(self._leaves)
            self._leaves.append(ref(tensor))
            self._unseen |= tensor.grad_fn is not None or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        return int(number)

    def _add(
        self,
        tensor: torch.Tensor,
        first: int | None = None,
        in_prefix: bool = False,
        depends: bool = False,
        chosen: bool = False,
    ) -> int:
        number = len(self.values)
        stride = tensor.stride() if tensor.layout == torch.strided else ()
        first_one = number if first is None else first
        what = tensor.shape, stride, tensor.dtype, tensor.device, first_one, in_prefix, depends, chosen
        self.values.append(Value(*what, maker=len(self.calls) - 1))
        if self.uncacheable is None and first is None and tensor.layout == torch.strided:
            self._by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append(ref(tensor))
        return number

    def _record(self, call: Call, given: list[torch.Tensor], changed: list[int], out: Any) -> None:
        name, at, read = name_of(call.func), len(self.calls), [self.values[number] for number in call.reads if number >= 0]
        self.calls.append(call)
        made, _ = split(out)
        if not made and not changed and (name in FORM or name in LAYOUT) and getattr(call.func, "__name__", "") != "__set__":
            call.kind = "form" if name in FORM else "layout"
            call.answer = out if call.kind == "layout" else None  # the value of `grad_fn` would keep everything alive
            return
        if any(tensor in self._stale for tensor in given):
            self._block("values are changed in place through views")
        chosen = any(tensor.requires_grad for tensor in (*given, *made)) or any(value.chosen for value in read)
        depends = any(value.depends for value in read)
        if (made or changed) and not chosen:
            call.kind = "prefix" if depends else "constant"
        for value in read:
            value.readers.append(at)
        for number in call.reads:
            if number >= 0 and self.values[number].in_prefix and call.kind != "prefix":
                self.values[number].is_output = True
                if not made and not changed:
                    self._block(f"{name} reads a value in the prefix")
        self._record_made(call, given, changed, made, depends, chosen)
        if call.kind != "outside":
            self._check_form(call, name, given, out)

    def _check_form(self, call: Call, name: str, given: list[torch.Tensor], out: Any) -> None:
        """Whether the arguments and results of the call allow to skip it."""
        opaque = next((one for one in call.plain if not isinstance(one, (*_PLAIN, tuple))), None)
        if opaque is not None:
            self._doubt(call, f"{name} takes a {type(opaque).__name__}, which may change unnoticed")
        is_masked = name in ("__getitem__", "__setitem__") and any(t.dtype in (torch.bool, torch.uint8) for t in given[1:])
        if call.kind == "prefix" and (name in _COUNTS or is_masked):
            self._block(f"the shape of the result of {name} depends on values")
        if isinstance(out, (tuple, list)):
            call.form, call.holes = type(out), tuple(isinstance(one, torch.Tensor) for one in out)
        flat = out if isinstance(out, (tuple, list)) else (out,)
        if call.kind == "prefix" and not all(one is None or isinstance(one, torch.Tensor) for one in flat):
            self._block(f"{name} returns more than tensors")

    def _record_made(
        self, call: Call, given: list[torch.Tensor], changed: list[int], made: list[torch.Tensor], depends: bool, chosen: bool
    ) -> None:
        in_prefix = call.kind == "prefix"
        changes: list[tuple[int, int]] = []
        for i in changed:
            tensor, number = given[i], call.reads[i]
            self._check_change(call, tensor, number)
            if number >= 0:
                self._known[tensor] = self._add(tensor, self.values[number].first, in_prefix, depends, chosen)
                changes.append((i, self._known[tensor]))
        makes, same = [], []
        for tensor in made:
            place = next((i for i, one in enumerate(given) if one is tensor), None)
            same.append(place)
            if place is None:
                self._known[tensor] = self._add(tensor, in_prefix=in_prefix, depends=depends, chosen=chosen)
                if in_prefix:
                    self._live.append((ref(tensor), self._known[tensor]))
            makes.append(self._known[tensor])
        call.makes, call.same, call.changes = tuple(makes), tuple(same), tuple(changes)

    def _check_change(self, call: Call, tensor: torch.Tensor, number: int) -> None:
        """Whether the change in place of this tensor may be skipped."""
        in_prefix = call.kind == "prefix"
        if in_prefix and (number < 0 or not self.values[self.values[number].first].in_prefix):
            self._block(f"{name_of(call.func)} writes to a tensor that was not made in the prefix")
        if self.uncacheable is not None:
            return
        others = self._by_memory.get(tensor.untyped_storage().data_ptr(), []) if tensor.layout == torch.strided else []
        for other in [found for found in (one() for one in others) if found is not None]:
            if other is not tensor:
                self._stale[other] = True
            known = self._known.get(other)
            if known is not None and known >= 0 and self.values[known].in_prefix and self.values[known].is_output:
                self._block("a value of the prefix is changed in place after it was used outside")

    # ------------------------------------------------------------ whether samples depend on each other

    def _run_second(self, call: Call, given: list[torch.Tensor], out: Any, args: Any, kwargs: Any) -> None:
        others = iter([self._second_run.get(tensor, tensor) for tensor in given])
        try:
            with torch.no_grad():
                other = call.func(*swap(args, others), **swap(kwargs, others))
        except Exception as error:
            return self._block(f"{name_of(call.func)} fails on other samples: {type(error).__name__}")
        for tensor, second, place in zip(split(out)[0], split(other)[0], call.same, strict=False):
            if place is None:
                self._second_run[tensor] = second
        for number, tensor in (*zip(call.makes, split(out)[0], strict=True), *[(new, given[i]) for i, new in call.changes]):
            second = self._second_run.get(tensor)
            if number < 0 or second is None:
                continue
            if not tensor.dim() or len(tensor) != self._samples:
                self.values[number].not_by_sample = f"a value of shape {tuple(tensor.shape)} is not one row for each sample"
            elif not _same(second, tensor[self._second_samples.to(tensor.device)]):
                self.values[number].not_by_sample = "rows of a sample depend on the other samples of its batch"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = other.abs().nan_to_num(0, 0, 0).amax().item() if other.numel() else 0.0
    return torch.allclose(one.float(), other.float(), rtol=1e-3, atol=1e-3 * largest, equal_nan=True)
