"""Replay a recorded program with its prefix as inference: folded norms, channels-last, another dtype."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F

from pliant.engine.kernels import channels_last
from pliant.engine.lean import frozen_batchnorm
from pliant.engine.prefix.call_arguments import split
from pliant.engine.prefix.prefix_plan import ANY_LAYOUT, HALF, PrefixPlan, Weights
from pliant.engine.prefix.record import Call, Value, name_of
from pliant.engine.prefix.replay import Cast, Diverged, Replay, as_recorded, autocast, norm_settings
from pliant.engine.slices.sliced_gradients import placeholder
from pliant.runtime.torch_internals import version, without_function_modes

KEPT = "the value between a convolution and its norm is still alive after the forward pass"

# A convolution that waits for its norm: placeholder, position, arguments, version of the input, and autocast at that time.
_Waiting = tuple[torch.Tensor, int, Any, int, Cast]


def _with_autocast(kind: str, cast: Cast) -> Any:
    """Autocast with the settings of that time."""
    return nullcontext() if cast == autocast(kind) else torch.autocast(kind, cast[1], enabled=cast[0])


class PrefixInference(Replay):
    """The prefix runs as inference."""

    leak = KEPT

    def __init__(self, plan: PrefixPlan, batch: list[torch.Tensor], weights: Weights, keeps: bool, fuse_norms: bool) -> None:
        super().__init__(plan, batch, weights, checks=keeps, fuse_norms=fuse_norms)
        self._changes_format = plan.channels_last or plan.dtype is not None
        # Tensors with another memory format or dtype than recorded, by id.
        self._reformatted: dict[int, tuple[ref[torch.Tensor], Value]] = {}
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
                    out = self._convolve(conv_at, conv, norm_settings(*args, **kwargs), at)
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
            convolve = channels_last.convolve if last and channels_last.serves(input, weight) else plan.calls[at].func
            out: torch.Tensor = convolve(input, weight, bias, *settings)
        return out if norm is None or is_folded else self._normed(out, norm, norm_at)

    def _normed(self, out: torch.Tensor, norm: tuple[Any, ...], at: int) -> torch.Tensor:
        """The output of a convolution after its norm. Low-precision weights are not folded: they would be rounded differently
        from the model's own, and later layers would be trained on features that the model does not give."""
        plan = self.plan
        kernels = frozen_batchnorm.norm_kernels(out.device.type)
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
                    tensor.data = as_recorded(tensor, found[1])

    def _restore_formats(self) -> None:
        for one, value in self._reformatted.values():
            tensor = one()
            if tensor is not None:
                tensor.data = as_recorded(tensor, value)
        self._reformatted.clear()
