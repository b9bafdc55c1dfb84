"""Replay a program while a forward pass runs: its prefix runs as inference, or not at all if its outputs are cached."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from pliant.engine.lean.frozen_batchnorm import fused_norm, norm_kernels
from pliant.engine.prefix.prefix_plan import ANY_LAYOUT, HALF, PrefixPlan, Weights
from pliant.engine.prefix.record import FORM, LAYOUT, Call, Value, name_of, split, version
from pliant.engine.slices.sliced_gradients import placeholder
from pliant.runtime.torch_internals import saved_tensor_hooks, without_function_modes

LEAKS = "values of the prefix are still alive after the forward pass"
KEPT = "the value between a convolution and its norm is still alive after the forward pass"


_Cast = tuple[bool, torch.dtype]  # whether autocast is on, and its type
# A convolution that waits for its norm: placeholder, position, arguments, version of the input, and autocast at that time.
_Waiting = tuple[torch.Tensor, int, Any, int, _Cast]


def autocast(kind: str) -> _Cast:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _with_autocast(kind: str, cast: _Cast) -> Any:
    """Autocast with the settings of that time."""
    return nullcontext() if cast == autocast(kind) else torch.autocast(kind, cast[1], enabled=cast[0])


class Diverged(BaseException):
    """A pass no longer follows its program, and values are missing. `except Exception` of the user must not catch it."""


def _norm_settings(
    input: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False, momentum: Any = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, ...]:  # fmt: skip
    return mean, var, weight, bias, eps


class _Mode(TorchFunctionMode):
    """Replays a program while a forward pass runs."""

    leak = LEAKS

    def __init__(self, plan: PrefixPlan, batch: list[torch.Tensor], weights: Weights, checks: bool, fuse_norms: bool) -> None:
        """`checks`: whether every call must read what it read in the recorded program. `fuse_norms`: whether frozen norms
        outside of the prefix run in fused kernels, if there are any, which takes more Python."""
        super().__init__()
        self.plan = plan
        self.diverged: str | None = None
        self._at = 0
        self._checks, self._weights = checks, weights
        self._fuse_norms = fuse_norms and bool(plan.frozen_norms)
        self._outer_hooks = saved_tensor_hooks()  # inside of others, such as a checkpoint's, those decide what is saved
        self._clipped: tuple[int, torch.Tensor] | None = (
            None  # the position of the next clipping, and the tensor that is clipped already
        )
        self._known: dict[int, tuple[ref[torch.Tensor], int]] = {}  # tensors by id
        number = 0
        for tensor in batch if checks else ():
            if id(tensor) not in self._known:
                self._known[id(tensor)] = ref(tensor), number
                number += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        at, plan = self._at, self.plan
        is_after = at >= plan.end and not self._checks
        if self.diverged is not None or (is_after and not self._fuse_norms and self._clipped is None):
            return func(*args, **kwargs)
        call = plan.calls[at] if at < len(plan.calls) else None
        is_other = call is None or call.func != func
        if is_after:
            self._fuse_norms &= not is_other  # after the prefix the program may differ
            self._at += not is_other
            return self.outside(at, func, args, kwargs)
        if call is None or is_other:
            expected = "the end" if call is None else name_of(call.func)
            with without_function_modes():
                self.diverge(f"the program changed: {name_of(func)} came instead of {expected}")
            return func(*args, **kwargs)
        self._at += 1
        return self.call(at, call, args, kwargs)

    def call(self, at: int, call: Call, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def outside(self, at: int, func: Any, args: Any, kwargs: Any) -> Any:
        """A call outside of the prefix."""
        if self._clipped is not None:
            with without_function_modes():
                return self._clipped_result(at, func, args, kwargs)
        if self._fuse_norms and at in self.plan.frozen_norms:
            with without_function_modes():
                out = self._run_fused_norm(at, args, kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs)

    def _clipped_result(self, at: int, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of the clipping, if this is that call: its input is clipped already."""
        if self._clipped is None or name_of(func) in FORM or name_of(func) in LAYOUT:
            return func(*args, **kwargs)
        (due, clipped), self._clipped = self._clipped, None
        call = self.plan.calls[due]
        is_it = at == due and func == call.func and bool(args) and args[0] is clipped
        if not is_it or split(args, kwargs)[1] != call.plain:
            raise Diverged(f"the program changed: {name_of(func)} came instead of a clipping")
        return clipped

    def _run_fused_norm(self, at: int, args: Any, kwargs: Any) -> torch.Tensor | None:
        """A frozen norm that gradients flow through, and the clipping after it."""
        plan, (tensors, plain) = self.plan, split(args, kwargs)
        input, kernels = tensors[0], norm_kernels(tensors[0].device.type)
        is_allowed = input.requires_grad and torch.is_grad_enabled() and saved_tensor_hooks() == self._outer_hooks
        if kernels is None or not is_allowed or plain != plan.calls[at].plain or not kernels.serves(input):
            return None
        norm = _norm_settings(*args, **kwargs)
        norm = *norm, plan.counter(norm[0])
        if not self._weights.has_scale_and_shift(norm) and input.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # derived tensors are not computed in a captured step
        due, low, high = plan.frozen_norms[at]
        out = fused_norm(kernels, input, *self._weights.scale_and_shift(plan, norm), (low, high) if due >= 0 else None)
        if due >= 0:
            self._clipped = due, out
        return out

    def diverge(self, why: str) -> None:
        self.diverged = why

    def close(self, failed: bool = False) -> None:
        """The forward pass is over, or has failed."""
        if self._clipped is not None and not failed:
            raise Diverged("the program changed: a clipping is missing")

    def leaks(self) -> bool:
        """Whether placeholders are still alive."""
        return False

    def is_as_recorded(self, call: Call, given: list[torch.Tensor], plain: list[Any]) -> bool:
        if call.kind in ("prefix", "constant", "layout") and plain != call.plain:
            return False
        if call.kind in ("form", "layout"):
            return True
        return len(given) == len(call.reads) and all(map(self._is, given, call.reads))

    def _is(self, tensor: torch.Tensor, number: int) -> bool:
        if number < 0:
            return self.plan.program.leaves[~number]() is tensor
        known = self._known.get(id(tensor))
        return known is not None and known[0]() is tensor and known[1] == number

    def remember(self, call: Call, given: list[torch.Tensor], out: Any) -> None:
        """Remember the tensors that the call made or changed."""
        for i, number in call.changes:
            self._known[id(given[i])] = ref(given[i]), number
        made, _ = split(out)
        if len(made) != len(call.makes):
            return self.diverge(f"the program changed: {name_of(call.func)} returned another number of tensors")
        for tensor, number in zip(made, call.makes, strict=True):
            if number >= 0:
                self._known[id(tensor)] = ref(tensor), number


class Hit(_Mode):
    """The prefix does not run: its outputs come from the cache."""

    def __init__(
        self, plan: PrefixPlan, batch: list[torch.Tensor], weights: Weights, found: tuple[torch.Tensor, ...], fuse_norms: bool
    ) -> None:
        super().__init__(plan, batch, weights, checks=True, fuse_norms=fuse_norms)
        self._found = [_as_recorded(tensor, plan.values[number]) for tensor, number in zip(found, plan.frontier, strict=True)]
        self._empty: list[ref[torch.Tensor]] = []

    def diverge(self, why: str) -> None:
        raise Diverged(why)

    def leaks(self) -> bool:
        return any(tensor() is not None for tensor in self._empty)

    def close(self, failed: bool = False) -> None:
        self._found = []
        super().close(failed)

    def call(self, at: int, call: Call, args: Any, kwargs: Any) -> Any:
        with without_function_modes():
            given, plain = split(args, kwargs)
            if not self.is_as_recorded(call, given, plain):
                self.diverge(f"the program changed: {name_of(call.func)} takes something else")
            if call.kind == "form":
                return call.func(*args, **kwargs)
            if call.kind == "layout":
                return call.answer
            if call.kind == "prefix" and at not in self.plan.recomputed:
                out = call.give(
                    [self._stand_in(number) if i is None else given[i] for number, i in zip(call.makes, call.same, strict=True)]
                )
                self.remember(call, given, out)
                return out
        out = self.outside(at, call.func, args, kwargs)
        with without_function_modes():
            self.remember(call, given, out)
        return out

    def _stand_in(self, number: int) -> torch.Tensor:
        found = self.plan.gives.get(number)
        if found is not None:
            return self._found[found]
        value = self.plan.values[number]
        out = placeholder(value.shape, value.dtype, value.device).detach()
        self._empty.append(ref(out))
        return out


class Miss(_Mode):
    """The prefix runs as inference."""

    leak = KEPT

    def __init__(self, plan: PrefixPlan, batch: list[torch.Tensor], weights: Weights, keeps: bool, fuse_norms: bool) -> None:
        super().__init__(plan, batch, weights, checks=keeps, fuse_norms=fuse_norms)
        self.outputs: dict[int, tuple[torch.Tensor, int]] = {}
        self._changes_format = plan.channels_last or plan.dtype is not None
        self._reformatted: dict[
            int, tuple[ref[torch.Tensor], Value]
        ] = {}  # tensors with another memory format or dtype than recorded
        self._waiting: _Waiting | None = None
        self._empty: list[ref[torch.Tensor]] = []

    def diverge(self, why: str) -> None:
        self.diverged = why
        if self._clipped is not None:
            raise Diverged(why)
        self._run_waiting()
        self._restore_formats()
        self.outputs.clear()

    def close(self, failed: bool = False) -> None:
        self._run_waiting()
        self._restore_formats()
        super().close(failed)

    def leaks(self) -> bool:
        return any(tensor() is not None for tensor in self._empty)

    def is_whole(self) -> bool:
        """Whether all outputs of the prefix are there and unchanged."""
        handed = [self.outputs.get(number) for number in self.plan.frontier]
        return all(one is not None and version(one[0]) == one[1] for one in handed)

    def call(self, at: int, call: Call, args: Any, kwargs: Any) -> Any:
        func, checks = call.func, self._checks
        with without_function_modes():
            given: list[torch.Tensor] = []
            if checks:
                given, plain = split(args, kwargs)
                if not self.is_as_recorded(call, given, plain):
                    self.diverge(f"the program changed: {name_of(func)} takes something else")
            if self.diverged is None and call.kind == "form":
                return func(*args, **kwargs)
            if self.diverged is None and call.kind == "prefix":
                if checks and at in self.plan.recomputed:
                    self._record_output(call, given)
                out = self._compute(at, call, args, kwargs)
                if checks:
                    self.remember(call, given, out)
                return out
            if self.diverged is None:
                self._run_waiting()
                self._restore_format(args, kwargs)
                self._record_output(call, given)
        out = self.outside(at, func, args, kwargs)
        if checks and self.diverged is None:
            with without_function_modes():
                self.remember(call, given, out)
        return out

    def _record_output(self, call: Call, given: list[torch.Tensor]) -> None:
        for tensor, number in zip(given, call.reads, strict=False):
            if number in self.plan.keeps and number not in self.outputs:
                self._restore_format((tensor,), {})
                self.outputs[number] = tensor, version(tensor)

    # ------------------------------------------------------------ calls of the prefix

    def _compute(self, at: int, call: Call, args: Any, kwargs: Any) -> Any:
        plan, func = self.plan, call.func
        if at in plan.folds and not kwargs and self._are_leaves(args[1:3], call.reads[1:]):
            self._run_waiting()
            value = plan.values[call.makes[0]]
            empty = placeholder(value.shape, value.dtype, value.device).detach()
            self._waiting = empty, at, args, version(args[0]), autocast(args[0].device.type)
            self._empty.append(ref(empty))
            return empty
        if at in plan.norms and self._waiting is not None and args[:1] and args[0] is self._waiting[0]:
            tensors, plain = split(args, kwargs)
            if plain == call.plain and self._are_leaves(tensors[1:], call.reads[1:]):
                _, conv_at, conv, _, cast = self._waiting
                self._waiting = None
                with _with_autocast(conv[0].device.type, cast):
                    out = self._convolve(conv_at, conv, _norm_settings(*args, **kwargs), at)
                return self._remember_format(out, call)
        self._run_waiting()
        if self._clipped is not None:
            return self._remember_format(self._clipped_result(at, func, args, kwargs), call)
        if name_of(func) not in ANY_LAYOUT and func is not F.linear:
            self._restore_format(args, kwargs)
            return func(*args, **kwargs)
        if func is torch.conv2d and self._changes_format and not kwargs and self._are_leaves(args[1:3], call.reads[1:]):
            out = self._convolve(at, args, None)
        elif func is F.linear and not kwargs and plan.dtype is not None and self._are_leaves(args[1:3], call.reads[1:]):
            input, weight, bias = (*args, None)[:3]
            with torch.autocast(input.device.type, enabled=False):
                out = func(input.to(plan.dtype), *self._weights.get(plan, weight, bias, None, plan.dtype, last=False))
        else:
            if func is F.linear:
                self._restore_format(args, kwargs)
            out = func(*args, **kwargs)
        return self._remember_format(out, call)

    def _are_leaves(self, tensors: Any, numbers: Any) -> bool:
        """Whether these tensors are the leaves with these numbers."""
        tensors, leaves = [one for one in tensors if one is not None], self.plan.program.leaves
        return len(tensors) == len(numbers) and all(
            number < 0 and leaves[~number]() is one for one, number in zip(tensors, numbers, strict=True)
        )

    def _convolve(self, at: int, args: Any, norm: tuple[Any, ...] | None, norm_at: int = -1) -> torch.Tensor:
        input, weight, bias, *settings = (*args, None)[: max(3, len(args))]
        plan = self.plan
        dtype = plan.dtype or weight.dtype
        kind = input.device.type
        if plan.dtype is None and torch.is_autocast_enabled(kind) and dtype != torch.float64:  # which autocast ignores
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
        """The output of a convolution after its norm. Low-precision weights are not folded: they would be rounded differently
        from the model's own, and later layers would be trained on features that the model does not give."""
        plan = self.plan
        kernels = norm_kernels(out.device.type)
        if kernels is None or not kernels.serves(out):
            if plan.dtype is not None:  # PyTorch's norm supports only some pairs of dtypes
                exact = torch.promote_types(out.dtype, torch.float32)
                scale, shift = (
                    one.to(exact).view(-1, *[1] * (out.dim() - 2)) for one in self._weights.scale_and_shift(plan, norm)
                )
                return (out.to(exact) * scale + shift).to(out.dtype)
            mean, var, gamma, beta, eps, _ = norm
            return F.batch_norm(out, mean, var, gamma, beta, False, 0.0, eps)
        due, low, high = plan.clips.get(at, (-1, 0.0, 0.0))
        if due >= 0:
            self._clipped = due, out
        normed: torch.Tensor = kernels.norm_(out, *self._weights.scale_and_shift(plan, norm), (low, high) if due >= 0 else None)
        return normed

    def _run_waiting(self) -> None:
        """Something else than the norm follows a convolution: compute the convolution now."""
        if self._waiting is None:
            return
        empty, at, args, was, cast = self._waiting
        self._waiting = None
        if version(args[0]) != was:
            raise Diverged(f"the program changed: the input of {name_of(self.plan.calls[at].func)} was written to")
        self._restore_format(args, {})
        with _with_autocast(args[0].device.type, cast):
            empty.data = self.plan.calls[at].func(*args)
        self._empty.pop()

    # ------------------------------------------------------------ memory format

    def _remember_format(self, out: Any, call: Call) -> Any:
        if self._changes_format and isinstance(out, torch.Tensor) and call.makes[0] >= 0:
            value = self.plan.values[call.makes[0]]
            if out.stride() != value.stride or out.dtype != value.dtype:
                self._reformatted[id(out)] = ref(out), value
        return out

    def _restore_format(self, args: Any, kwargs: Any) -> None:
        """Give the tensors among arguments their recorded memory format and dtype."""
        if self._reformatted:
            for tensor in split(args, kwargs)[0]:
                found = self._reformatted.pop(id(tensor), None)
                if found is not None and found[0]() is tensor:
                    tensor.data = _as_recorded(tensor, found[1])

    def _restore_formats(self) -> None:
        for one, value in self._reformatted.values():
            tensor = one()
            if tensor is not None:
                tensor.data = _as_recorded(tensor, value)
        self._reformatted.clear()


def _as_recorded(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """A tensor with the dtype and memory format of the recorded value."""
    if tensor.stride() == value.stride and tensor.dtype == value.dtype and tensor.device == value.device:
        return tensor
    if tensor.shape != value.shape or 0 in value.stride:  # expanded tensors need not be expanded again
        return tensor.to(value.device, value.dtype).contiguous()
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device).copy_(tensor)
