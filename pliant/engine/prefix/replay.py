"""Replay a recorded program while a forward pass runs. On a cache hit its prefix does not run (`CacheHit`).

Otherwise the prefix runs as inference: see `inference`.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch.overrides import TorchFunctionMode

from pliant.engine.lean import frozen_batchnorm
from pliant.engine.lean.frozen_batchnorm import fused_norm
from pliant.engine.prefix.call_arguments import split
from pliant.engine.prefix.prefix_plan import PrefixPlan, Weights
from pliant.engine.prefix.record import FORM, LAYOUT, Call, Value, name_of
from pliant.engine.slices.sliced_gradients import placeholder
from pliant.runtime.torch_internals import saved_tensor_hooks, version, without_function_modes

LEAKS = "values of the prefix are still alive after the forward pass"


Cast = tuple[bool, torch.dtype]  # whether autocast is on, and its type


def autocast(kind: str) -> Cast:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


class Diverged(BaseException):
    """A pass no longer follows its program, and values are missing. `except Exception` of the user must not catch it."""


def norm_settings(
    input: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False, momentum: Any = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, ...]:  # fmt: skip
    return mean, var, weight, bias, eps


class Replay(TorchFunctionMode):
    """Replays a program while a forward pass runs."""

    leak = LEAKS

    def __init__(self, plan: PrefixPlan, batch: list[torch.Tensor], weights: Weights, checks: bool, fuse_norms: bool) -> None:
        """`checks`: whether every call must read what it read in the recorded program. `fuse_norms`: whether frozen norms
        outside of the prefix run in fused kernels, if there are any, which takes more Python."""
        super().__init__()
        self.plan = plan
        self.diverged: str | None = None
        self.outputs: dict[int, tuple[torch.Tensor, int]] = {}  # of the prefix, each with its version
        self._at = 0
        self._checks, self._weights = checks, weights
        self._fuse_norms = fuse_norms and bool(plan.frozen_norms)
        self._outer_hooks = saved_tensor_hooks()  # inside of others, such as a checkpoint's, those decide what is saved
        self._clipped: tuple[int, torch.Tensor] | None = None  # where the next clipping is, and what is clipped already
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
        input, kernels = tensors[0], frozen_batchnorm.norm_kernels(tensors[0].device.type)
        is_allowed = input.requires_grad and torch.is_grad_enabled() and saved_tensor_hooks() == self._outer_hooks
        if kernels is None or not is_allowed or plain != plan.calls[at].plain or not kernels.serves(input):
            return None
        norm = norm_settings(*args, **kwargs)
        norm = *norm, plan.counter(norm[0])
        if not self._weights.has_scale_and_shift(norm) and input.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # derived tensors are not computed in a captured step
        due, low, high = plan.frozen_norms[at]
        out = fused_norm(kernels, input, *self._weights.scale_and_shift(plan, norm), (low, high) if due >= 0 else None)
        if due >= 0:
            self._clipped = due, out
        return out

    @property
    def is_past_prefix(self) -> bool:
        """Whether no call has to be followed any more."""
        return self.diverged is None and not self._checks and self._at >= self.plan.end and self._clipped is None

    def diverge(self, why: str) -> None:
        self.diverged = why

    def close(self, failed: bool = False) -> None:
        """The forward pass is over, or has failed."""
        if self._clipped is not None and not failed:
            raise Diverged("the program changed: a clipping is missing")

    def leaks(self) -> bool:
        """Whether placeholders are still alive."""
        return False

    def is_whole(self) -> bool:
        """Whether all outputs of the prefix are there and unchanged."""
        handed = [self.outputs.get(number) for number in self.plan.frontier]
        return all(one is not None and version(one[0]) == one[1] for one in handed)

    def rows(self) -> tuple[torch.Tensor, ...]:
        """The outputs of the prefix, when they are whole."""
        return tuple(self.outputs[number][0].detach() for number in self.plan.frontier)

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


class CacheHit(Replay):
    """The prefix does not run: its outputs come from the cache."""

    def __init__(
        self, plan: PrefixPlan, batch: list[torch.Tensor], weights: Weights, found: tuple[torch.Tensor, ...], fuse_norms: bool
    ) -> None:
        super().__init__(plan, batch, weights, checks=True, fuse_norms=fuse_norms)
        self._found = [as_recorded(tensor, plan.values[number]) for tensor, number in zip(found, plan.frontier, strict=True)]
        self._empty: list[ref[torch.Tensor]] = []
        self.outputs = {number: (one, version(one)) for number, one in zip(plan.frontier, self._found, strict=True)}

    def diverge(self, why: str) -> None:
        raise Diverged(why)

    def leaks(self) -> bool:
        return any(tensor() is not None for tensor in self._empty)

    def close(self, failed: bool = False) -> None:
        self._found = []
        super().close(failed)

    def call(self, at: int, call: Call, args: Any, kwargs: Any) -> Any:
        if at >= self.plan.end and not self.leaks():
            self._checks = False  # nothing that comes can read a placeholder
            return self.outside(at, call.func, args, kwargs)
        with without_function_modes():
            if call.kind == "form":
                return call.func(*args, **kwargs)
            given, plain = split(args, kwargs)
            if not self.is_as_recorded(call, given, plain):
                self.diverge(f"the program changed: {name_of(call.func)} takes something else")
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

    @property
    def at(self) -> int:
        """The position in the program; -1 after its prefix."""
        return self._at if self._checks else -1

    @property
    def is_past_prefix(self) -> bool:
        if self._checks and self._at >= self.plan.end:
            self._checks = self.leaks()  # where nothing that comes can read a placeholder
        return super().is_past_prefix

    def was_given(self, tensor: torch.Tensor, number: int) -> bool:
        """Whether a tensor is this value now."""
        return self._is(tensor, number)

    def skip(self, to: int, number: int) -> torch.Tensor:
        """Go on at this position. Returns what stands for this value, which was made before it."""
        return self.go_on(to, number, self._stand_in(self.plan.values[number].first))

    def go_on(self, to: int, number: int, out: torch.Tensor) -> torch.Tensor:
        """Go on at this position with this tensor as that value."""
        self._known[id(out)] = ref(out), number
        self._at = to
        return out

    def _stand_in(self, number: int) -> torch.Tensor:
        found = self.plan.gives.get(number)
        if found is not None:
            return self._found[found]
        value = self.plan.values[number]
        out = placeholder(value.shape, value.dtype, value.device).detach()
        self._empty.append(ref(out))
        return out


def as_recorded(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """A tensor with the dtype and memory format of the recorded value."""
    if tensor.stride() == value.stride and tensor.dtype == value.dtype and tensor.device == value.device:
        return tensor
    if tensor.shape != value.shape or 0 in value.stride:  # expanded tensors need not be expanded again
        return tensor.to(value.device, value.dtype).contiguous()
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device).copy_(tensor)
