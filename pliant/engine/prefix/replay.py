"""Go along a program while a forward pass runs: its part as inference, or not at all where what it gives is known."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from pliant.engine.lean.frozen_batchnorm import in_one_kernel, norm_kernels
from pliant.engine.prefix.prefix_plan import ANY_LAYOUT, HALF, Plan, Weights
from pliant.engine.prefix.record import FORM, LAYOUT, Call, Value, name_of, split, version
from pliant.engine.slices.sliced_gradients import nothing
from pliant.runtime.torch_internals import saved_tensor_hooks, without_function_modes

LEAKS = "values of the part live on after the forward pass"
KEPT = "what lies between a convolution and its norm lives on after the forward pass"


_Cast = tuple[bool, torch.dtype]  # whether autocast is on, and its type
# What stands for a convolution until its norm comes: its position, its arguments, the version of its input, and autocast then.
_Waiting = tuple[torch.Tensor, int, Any, int, _Cast]


def autocast(kind: str) -> _Cast:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _as_it_was(kind: str, cast: _Cast) -> Any:
    """Autocast as it was then."""
    return nullcontext() if cast == autocast(kind) else torch.autocast(kind, cast[1], enabled=cast[0])


class Strayed(BaseException):
    """A pass is no longer the program's, and values are missing: not for the user's `except Exception`."""


def _norm_settings(
    input: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False, momentum: Any = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, ...]:  # fmt: skip
    return mean, var, weight, bias, eps


class _Mode(TorchFunctionMode):
    """Goes along a program while a forward pass runs."""

    leak = LEAKS

    def __init__(self, plan: Plan, batch: list[torch.Tensor], weights: Weights, checks: bool, rests: bool) -> None:
        """`checks`: whether every call has to read what it read when the program was recorded. `rests`: whether norms at rest
        that gradients go through run in kernels of ours, where there are such, which costs Python more."""
        super().__init__()
        self.plan = plan
        self.strayed: str | None = None
        self._at = 0
        self._checks, self._weights = checks, weights
        self._rests = rests and bool(plan.resting)
        self._outer_hooks = saved_tensor_hooks()  # inside of others, such as a checkpoint's, those decide what is saved
        self._clipped: tuple[int, torch.Tensor] | None = None  # where a clipping is due, and what is clipped already
        self._known: dict[int, tuple[ref[torch.Tensor], int]] = {}  # tensors by id
        number = 0
        for tensor in batch if checks else ():
            if id(tensor) not in self._known:
                self._known[id(tensor)] = ref(tensor), number
                number += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        at, plan = self._at, self.plan
        is_behind = at >= plan.end and not self._checks
        if self.strayed is not None or (is_behind and not self._rests and self._clipped is None):
            return func(*args, **kwargs)
        call = plan.calls[at] if at < len(plan.calls) else None
        is_other = call is None or call.func != func
        if is_behind:
            self._rests &= not is_other  # there it may be another program
            self._at += not is_other
            return self.outside(at, func, args, kwargs)
        if call is None or is_other:
            expected = "the end" if call is None else name_of(call.func)
            with without_function_modes():
                self.stray(f"the program changed: {name_of(func)} came instead of {expected}")
            return func(*args, **kwargs)
        self._at += 1
        return self.call(at, call, args, kwargs)

    def call(self, at: int, call: Call, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def outside(self, at: int, func: Any, args: Any, kwargs: Any) -> Any:
        """A call that is not of the part."""
        if self._clipped is not None:
            with without_function_modes():
                return self._take_clipped(at, func, args, kwargs)
        if self._rests and at in self.plan.resting:
            with without_function_modes():
                out = self._rested(at, args, kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs)

    def _take_clipped(self, at: int, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call that clips gives, if it is that: its input is clipped already."""
        if self._clipped is None or name_of(func) in FORM or name_of(func) in LAYOUT:
            return func(*args, **kwargs)
        (due, clipped), self._clipped = self._clipped, None
        call = self.plan.calls[due]
        is_it = at == due and func == call.func and bool(args) and args[0] is clipped
        if not is_it or split(args, kwargs)[1] != call.plain:
            raise Strayed(f"the program changed: {name_of(func)} came where a clipping was due")
        return clipped

    def _rested(self, at: int, args: Any, kwargs: Any) -> torch.Tensor | None:
        """A norm at rest that gradients go through, and the clipping after it."""
        plan, (tensors, plain) = self.plan, split(args, kwargs)
        input, kernels = tensors[0], norm_kernels(tensors[0].device.type)
        is_ours = input.requires_grad and torch.is_grad_enabled() and saved_tensor_hooks() == self._outer_hooks
        if kernels is None or not is_ours or plain != plan.calls[at].plain or not kernels.serves(input):
            return None
        norm = _norm_settings(*args, **kwargs)
        norm = *norm, plan.counter(norm[0])
        if not self._weights.has_line(norm) and input.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # what is made once is not made in a captured step
        due, low, high = plan.resting[at]
        out = in_one_kernel(kernels, input, *self._weights.line(plan, norm), (low, high) if due >= 0 else None)
        if due >= 0:
            self._clipped = due, out
        return out

    def stray(self, why: str) -> None:
        self.strayed = why

    def close(self, failed: bool = False) -> None:
        """The forward pass is over, or has failed."""
        if self._clipped is not None and not failed:
            raise Strayed("the program changed: no clipping came where one was due")

    def leaks(self) -> bool:
        """Whether tensors without values live on."""
        return False

    def is_as_recorded(self, call: Call, given: list[torch.Tensor], plain: list[Any]) -> bool:
        if call.kind in ("part", "constant", "layout") and plain != call.plain:
            return False
        if call.kind in ("form", "layout"):
            return True
        return len(given) == len(call.reads) and all(map(self._is, given, call.reads))

    def _is(self, tensor: torch.Tensor, number: int) -> bool:
        if number < 0:
            return self.plan.program.leaves[~number]() is tensor
        known = self._known.get(id(tensor))
        return known is not None and known[0]() is tensor and known[1] == number

    def note(self, call: Call, given: list[torch.Tensor], out: Any) -> None:
        """From now on these tensors are known."""
        for i, number in call.changes:
            self._known[id(given[i])] = ref(given[i]), number
        made, _ = split(out)
        if len(made) != len(call.makes):
            return self.stray(f"the program changed: {name_of(call.func)} gave another number of tensors")
        for tensor, number in zip(made, call.makes, strict=True):
            if number >= 0:
                self._known[id(tensor)] = ref(tensor), number


class Hit(_Mode):
    """The part does not run: what it hands on is there already."""

    def __init__(
        self, plan: Plan, batch: list[torch.Tensor], weights: Weights, found: tuple[torch.Tensor, ...], rests: bool
    ) -> None:
        super().__init__(plan, batch, weights, checks=True, rests=rests)
        self._found = [_laid_out(tensor, plan.values[number]) for tensor, number in zip(found, plan.frontier, strict=True)]
        self._empty: list[ref[torch.Tensor]] = []

    def stray(self, why: str) -> None:
        raise Strayed(why)

    def leaks(self) -> bool:
        return any(tensor() is not None for tensor in self._empty)

    def close(self, failed: bool = False) -> None:
        self._found = []
        super().close(failed)

    def call(self, at: int, call: Call, args: Any, kwargs: Any) -> Any:
        with without_function_modes():
            given, plain = split(args, kwargs)
            if not self.is_as_recorded(call, given, plain):
                self.stray(f"the program changed: {name_of(call.func)} takes something else")
            if call.kind == "form":
                return call.func(*args, **kwargs)
            if call.kind == "layout":
                return call.answer
            if call.kind == "part" and at not in self.plan.again:
                out = call.give(
                    [self._stand_in(number) if i is None else given[i] for number, i in zip(call.makes, call.same, strict=True)]
                )
                self.note(call, given, out)
                return out
        out = self.outside(at, call.func, args, kwargs)
        with without_function_modes():
            self.note(call, given, out)
        return out

    def _stand_in(self, number: int) -> torch.Tensor:
        found = self.plan.gives.get(number)
        if found is not None:
            return self._found[found]
        value = self.plan.values[number]
        out = nothing(value.shape, value.dtype, value.device).detach()
        self._empty.append(ref(out))
        return out


class Miss(_Mode):
    """The part runs as inference."""

    leak = KEPT

    def __init__(self, plan: Plan, batch: list[torch.Tensor], weights: Weights, keeps: bool, rests: bool) -> None:
        super().__init__(plan, batch, weights, checks=keeps, rests=rests)
        self.handed_on: dict[int, tuple[torch.Tensor, int]] = {}
        self._is_odd = plan.channels_last or plan.dtype is not None
        self._odd: dict[int, tuple[ref[torch.Tensor], Value]] = {}  # tensors that lie otherwise than they would have
        self._waiting: _Waiting | None = None
        self._empty: list[ref[torch.Tensor]] = []

    def stray(self, why: str) -> None:
        self.strayed = why
        if self._clipped is not None:
            raise Strayed(why)
        self._make_up()
        self._lay_out_all()
        self.handed_on.clear()

    def close(self, failed: bool = False) -> None:
        self._make_up()
        self._lay_out_all()
        super().close(failed)

    def leaks(self) -> bool:
        return any(tensor() is not None for tensor in self._empty)

    def is_whole(self) -> bool:
        """Whether everything that the part hands on is there, as it was handed on."""
        handed = [self.handed_on.get(number) for number in self.plan.frontier]
        return all(one is not None and version(one[0]) == one[1] for one in handed)

    def call(self, at: int, call: Call, args: Any, kwargs: Any) -> Any:
        func, checks = call.func, self._checks
        with without_function_modes():
            given: list[torch.Tensor] = []
            if checks:
                given, plain = split(args, kwargs)
                if not self.is_as_recorded(call, given, plain):
                    self.stray(f"the program changed: {name_of(func)} takes something else")
            if self.strayed is None and call.kind == "form":
                return func(*args, **kwargs)
            if self.strayed is None and call.kind == "part":
                if checks and at in self.plan.again:
                    self._hand_on(call, given)
                out = self._compute(at, call, args, kwargs)
                if checks:
                    self.note(call, given, out)
                return out
            if self.strayed is None:
                self._make_up()
                self._lay_out(args, kwargs)
                self._hand_on(call, given)
        out = self.outside(at, func, args, kwargs)
        if checks and self.strayed is None:
            with without_function_modes():
                self.note(call, given, out)
        return out

    def _hand_on(self, call: Call, given: list[torch.Tensor]) -> None:
        for tensor, number in zip(given, call.reads, strict=False):
            if number in self.plan.keeps and number not in self.handed_on:
                self._lay_out((tensor,), {})
                self.handed_on[number] = tensor, version(tensor)

    # ------------------------------------------------------------ calls of the part

    def _compute(self, at: int, call: Call, args: Any, kwargs: Any) -> Any:
        plan, func = self.plan, call.func
        if at in plan.folds and not kwargs and self._are_leaves(args[1:3], call.reads[1:]):
            self._make_up()
            value = plan.values[call.makes[0]]
            empty = nothing(value.shape, value.dtype, value.device).detach()
            self._waiting = empty, at, args, version(args[0]), autocast(args[0].device.type)
            self._empty.append(ref(empty))
            return empty
        if at in plan.norms and self._waiting is not None and args[:1] and args[0] is self._waiting[0]:
            tensors, plain = split(args, kwargs)
            if plain == call.plain and self._are_leaves(tensors[1:], call.reads[1:]):
                _, conv_at, conv, _, cast = self._waiting
                self._waiting = None
                with _as_it_was(conv[0].device.type, cast):
                    out = self._convolve(conv_at, conv, _norm_settings(*args, **kwargs), at)
                return self._odd_or_not(out, call)
        self._make_up()
        if self._clipped is not None:
            return self._odd_or_not(self._take_clipped(at, func, args, kwargs), call)
        if name_of(func) not in ANY_LAYOUT and func is not F.linear:
            self._lay_out(args, kwargs)
            return func(*args, **kwargs)
        if func is torch.conv2d and self._is_odd and not kwargs and self._are_leaves(args[1:3], call.reads[1:]):
            out = self._convolve(at, args, None)
        elif func is F.linear and not kwargs and plan.dtype is not None and self._are_leaves(args[1:3], call.reads[1:]):
            input, weight, bias = (*args, None)[:3]
            with torch.autocast(input.device.type, enabled=False):
                out = func(input.to(plan.dtype), *self._weights.get(plan, weight, bias, None, plan.dtype, last=False))
        else:
            if func is F.linear:
                self._lay_out(args, kwargs)
            out = func(*args, **kwargs)
        return self._odd_or_not(out, call)

    def _are_leaves(self, tensors: Any, numbers: Any) -> bool:
        """Whether these are the very leaves that the program knows by these numbers."""
        tensors, leaves = [one for one in tensors if one is not None], self.plan.program.leaves
        return len(tensors) == len(numbers) and all(
            number < 0 and leaves[~number]() is one for one, number in zip(tensors, numbers, strict=True)
        )

    def _convolve(self, at: int, args: Any, norm: tuple[Any, ...] | None, norm_at: int = -1) -> torch.Tensor:
        input, weight, bias, *settings = (*args, None)[: max(3, len(args))]
        plan = self.plan
        dtype = plan.dtype or weight.dtype
        kind = input.device.type
        if plan.dtype is None and torch.is_autocast_enabled(kind) and dtype != torch.float64:  # which autocast leaves alone
            dtype = torch.get_autocast_dtype(kind)
        last = plan.channels_last and input.dim() == 4
        if norm is not None:
            norm = *norm, plan.counter(norm[0])
        is_folded = norm is not None and kind == "cpu" and dtype not in HALF
        weight, bias = self._weights.get(plan, weight, bias, norm if is_folded else None, dtype, last)
        if plan.dtype is not None:
            input = input.to(dtype)
        if last:
            input = input.contiguous(memory_format=torch.channels_last)
        with torch.autocast(kind, enabled=False) if plan.dtype is not None else nullcontext():
            out: torch.Tensor = plan.calls[at].func(input, weight, bias, *settings)
        return out if norm is None or is_folded else self._normed(out, norm, norm_at)

    def _normed(self, out: torch.Tensor, norm: tuple[Any, ...], at: int) -> torch.Tensor:
        """What a convolution gives, after the norm, which is not folded into weights that are rounded: they would be rounded
        otherwise than the model's own, and what trains on these features would not fit those that the model has later."""
        plan = self.plan
        kernels = norm_kernels(out.device.type)
        if kernels is None or not kernels.serves(out):
            if plan.dtype is not None:  # not the type of the norm: PyTorch's own takes but some pairs of types
                exact = torch.promote_types(out.dtype, torch.float32)
                scale, shift = (one.to(exact).view(-1, *[1] * (out.dim() - 2)) for one in self._weights.line(plan, norm))
                return (out.to(exact) * scale + shift).to(out.dtype)
            mean, var, gamma, beta, eps, _ = norm
            return F.batch_norm(out, mean, var, gamma, beta, False, 0.0, eps)
        due, low, high = plan.clips.get(at, (-1, 0.0, 0.0))
        if due >= 0:
            self._clipped = due, out
        normed: torch.Tensor = kernels.norm_(out, *self._weights.line(plan, norm), (low, high) if due >= 0 else None)
        return normed

    def _make_up(self) -> None:
        """Something else than the norm came after a convolution: compute it after all."""
        if self._waiting is None:
            return
        empty, at, args, was, cast = self._waiting
        self._waiting = None
        if version(args[0]) != was:
            raise Strayed(f"the program changed: the input of {name_of(self.plan.calls[at].func)} was written to")
        self._lay_out(args, {})
        with _as_it_was(args[0].device.type, cast):
            empty.data = self.plan.calls[at].func(*args)
        self._empty.pop()

    # ------------------------------------------------------------ how tensors lie in memory

    def _odd_or_not(self, out: Any, call: Call) -> Any:
        if self._is_odd and isinstance(out, torch.Tensor) and call.makes[0] >= 0:
            value = self.plan.values[call.makes[0]]
            if out.stride() != value.stride or out.dtype != value.dtype:
                self._odd[id(out)] = ref(out), value
        return out

    def _lay_out(self, args: Any, kwargs: Any) -> None:
        """Bring the tensors among arguments to where they would have been."""
        if self._odd:
            for tensor in split(args, kwargs)[0]:
                odd = self._odd.pop(id(tensor), None)
                if odd is not None and odd[0]() is tensor:
                    tensor.data = _laid_out(tensor, odd[1])

    def _lay_out_all(self) -> None:
        for one, value in self._odd.values():
            tensor = one()
            if tensor is not None:
                tensor.data = _laid_out(tensor, value)
        self._odd.clear()


def _laid_out(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """A tensor as the value was: its type, and how it lies in memory."""
    if tensor.stride() == value.stride and tensor.dtype == value.dtype and tensor.device == value.device:
        return tensor
    if tensor.shape != value.shape or 0 in value.stride:  # what was spread out over memory need not be
        return tensor.to(value.device, value.dtype).contiguous()
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device).copy_(tensor)
