"""Whatever lies before the first chosen parameter is inference: run it as such, or not at all where its results are kept.

The program of a forward pass is recorded once (see `program`) and followed in later passes, call by call. Calls of the part
that needs no gradient run without other modes, with batch norms folded into the convolutions before them and channels-last;
on a hit in the feature cache they do not run, and tensors without memory stand for what nobody reads. Every other call runs as
the user wrote it, on values that lie in memory as they would have. Where a pass strays from its program, it goes on plainly.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as _globals
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from pliant import batches
from pliant.engine import depthwise
from pliant.engine.channels import nothing
from pliant.engine.features import Features
from pliant.engine.program import (
    Call,
    Program,
    Recorder,
    Value,
    name_of,
    random_state,
    set_random_state,
    split,
    unwatched,
    version,
)

_PROGRAMS = 8  # kept at a time
_STRAYED = 3  # so often a pass may leave its program before we stop recording them, and once more in twenty that do not

_CONVOLUTIONS: tuple[Any, ...] = (torch.conv1d, torch.conv2d, torch.conv3d)
# Functions that give the same whatever way their input lies in memory.
# fmt: off
_ANY_LAYOUT = frozenset((
    "conv2d", "batch_norm", "relu", "relu_", "relu6", "hardtanh", "hardtanh_", "leaky_relu", "leaky_relu_", "elu", "elu_",
    "selu", "silu", "gelu", "mish", "hardswish", "hardsigmoid", "sigmoid", "tanh", "softplus", "clamp", "clamp_", "add", "add_",
    "__add__", "__iadd__", "__radd__", "sub", "sub_", "mul", "mul_", "__mul__", "__imul__", "__rmul__", "div", "div_",
    "dropout", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "cat", "mean", "interpolate",
))
# fmt: on
_HALF = (torch.float16, torch.bfloat16)
_WITH_LIMITS: tuple[Any, ...] = (F.hardtanh, F.hardtanh_)
_CLIPS: dict[Any, tuple[float, float]] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_), (0.0, math.inf)),
    F.relu6: (0.0, 6.0),
    **dict.fromkeys(_WITH_LIMITS, (-1.0, 1.0)),
}


@dataclass(frozen=True)
class Found:
    """What a cache holds for a batch."""

    rows: tuple[torch.Tensor, ...] | None  # what the part gives; None: a sample is missing
    needed: frozenset[int]  # which of the batch's tensors are read besides


class Prefix:
    """Runs forward passes with what needs no gradient as inference.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3))
    >>> for param in model.eval()[:2].parameters():
    ...     _ = param.requires_grad_(False)
    >>> prefix, batch = Prefix(model), torch.randn(4, 3, 8, 8)
    >>> first, later = (prefix.run(lambda: model(batch).square().mean(), batch) for _ in range(2))
    >>> torch.allclose(first, later), prefix.reasons
    (True, {})
    """

    def __init__(self, model: nn.Module, features: Features | None = None, dtype: torch.dtype | None = None) -> None:
        """`features` keep what the part gives by sample; `dtype` is what its convolutions and linear layers compute in."""
        self.model, self.features, self.dtype = model, features, dtype
        self.reasons: dict[str, str] = {}  # what it does not do, and why
        self._weights = _Weights()
        self._names: Any = WeakTensorKeyDictionary()  # leaf → a number that no other ever has
        self.forget()

    def forget(self) -> None:
        """Drop programs, folded weights and features; then look anew."""
        self._programs: OrderedDict[Hashable, _Plan] = OrderedDict()
        self._alike: list[_Plan] = []  # the last ones whose results were kept
        self._last: _Plan | None = None
        self._strayed = self._followed = 0
        self._weights.clear()
        self.reasons.clear()
        if self.features is not None:
            self.features.begin(None)

    def signature(self) -> Hashable:
        """Changes when a weight of the part was written to."""
        with unwatched():
            return self._last.signature() if self._last is not None else None

    def run(
        self,
        forward: Callable[[], torch.Tensor],
        batch: Any,
        ids: Sequence[Hashable] | torch.Tensor | None = None,
        choice: Hashable = None,
        found: Found | None = None,
    ) -> torch.Tensor:
        """forward() (the user's loss of this batch), what needs no gradient as inference or from the cache.

        `choice` stands for what is chosen besides whole parameters: with another one, other programs apply. `found` is what
        `find` found, if that was asked before: what it gives is then taken from there.
        """
        if self._strayed >= _STRAYED + self._followed // 20:
            self.reasons["prefix"] = "the program changes from step to step"
            return forward()
        with unwatched():
            tensors = list(batches.tensors(batch))
            kept = self.features is not None and ids is not None
            samples = len(ids) if kept and ids is not None else None
            key, is_hooked = self._key(tensors, kept, choice)
            plan = self._programs.get(key)
        if plan is None:
            return self._record(key, forward, tensors, samples, is_hooked)
        self._programs.move_to_end(key)
        self._last = plan
        self._tell(plan, kept)
        is_cached = kept and plan.program.uncacheable is None
        if plan.is_idle or not (plan.pays or is_cached):
            return forward()
        rows = found.rows if found is not None else None
        if is_cached and found is None:
            with unwatched():
                rows = self._look_up(plan, tensors, ids)
        return self._follow(key, plan, forward, tensors, ids if is_cached else None, rows)

    def find(self, batch: Any, ids: Any, choice: Hashable = None) -> Found | None:
        """What the cache holds for a batch, without running anything; None where its program is not known or not kept."""
        with unwatched():
            tensors = list(batches.tensors(batch))
            key, _ = self._key(tensors, True, choice)
            plan = self._programs.get(key)
            if plan is None or plan.is_idle or plan.program.uncacheable is not None or self.features is None:
                return None
            self._last = plan
            return Found(self._look_up(plan, tensors, ids), plan.needed(tensors))

    def _look_up(self, plan: _Plan, batch: list[torch.Tensor], ids: Any) -> Any:
        assert self.features is not None
        if plan.like is None:
            plan.like = next((one.like for one in self._alike if plan.keeps_like(one)), next(_NEW))
            self._alike = [*self._alike[1 - _PROGRAMS :], plan]
        shapes = tuple((tensor.shape[1:], tensor.dtype) for tensor in batch)
        self.features.begin((_autocast(), shapes, plan.like, plan.signature()))  # whatever else is chosen behind it
        return self.features.get(ids, plan.values[plan.frontier[0]].device)

    def knows(self, batch: Any, ids: Any = None, choice: Hashable = None) -> bool:
        """Whether `run` would follow a program, and not record one."""
        with unwatched():
            kept = self.features is not None and ids is not None
            return self._key(list(batches.tensors(batch)), kept, choice)[0] in self._programs

    def _key(self, tensors: list[torch.Tensor], kept: bool, choice: Hashable) -> tuple[tuple[Any, ...], bool]:
        """What says which program runs; and whether modules have hooks."""
        state, is_hooked = _state(self.model)
        inside = choice, state, _autocast(), torch.is_grad_enabled()
        return (kept, inside, tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)), is_hooked

    def _record(
        self,
        key: Hashable,
        forward: Callable[[], torch.Tensor],
        batch: list[torch.Tensor],
        samples: int | None,
        is_hooked: bool,
    ) -> torch.Tensor:
        with unwatched():
            recorder = Recorder(batch, samples)
        if is_hooked:
            recorder.uncacheable = recorder.uncacheable or "modules have forward hooks"
        with recorder:
            out = forward()
        with unwatched():
            plan = _Plan(recorder.program(), self.model, self._names, self.dtype)
        self._programs[key] = self._last = plan
        while len(self._programs) > _PROGRAMS:
            self._programs.popitem(last=False)
        self._weights.keep({fold for plan in self._programs.values() for fold in plan.weights})
        self._tell(plan, samples is not None)
        return out

    def _tell(self, plan: _Plan, kept: bool) -> None:
        """What is not done in this program."""
        self.reasons = dict(plan.reasons)
        if kept and plan.program.uncacheable is not None:
            self.reasons["cache"] = plan.program.uncacheable

    def _follow(
        self, key: Hashable, plan: _Plan, forward: Callable[[], torch.Tensor], batch: list[torch.Tensor], ids: Any, found: Any
    ) -> torch.Tensor:
        program = plan.program
        captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        drawn = random_state() if found is not None and not captures else None
        mode = _Hit(plan, batch, found) if found is not None else _Miss(plan, batch, self._weights, ids is not None)
        try:
            try:
                with mode:
                    out = forward()
            finally:
                with unwatched():
                    mode.close()
            if mode.leaks():
                gc.collect()
                if mode.leaks():
                    raise _Strayed(mode.leak)
        except _Strayed as why:
            mode.strayed = str(why)
            if drawn is not None:
                set_random_state(drawn)
            out = forward()
        if mode.strayed is None:
            self._followed += 1
            if isinstance(mode, _Miss) and ids is not None and self.features is not None:
                with unwatched():
                    if mode.is_whole():
                        self.features.put(ids, tuple(mode.handed_on[number][0].detach() for number in plan.frontier))
        elif mode.strayed == _LEAKS:
            program.uncacheable = self.reasons["cache"] = mode.strayed
        elif mode.strayed == _KEPT:
            plan.folds.clear()
            plan.reasons["folding"] = self.reasons["folding"] = mode.strayed
        else:
            self._strayed += 1
            self.reasons["program"] = mode.strayed
            self._programs.pop(key, None)
        return out


_NEW = itertools.count()
_LEAKS = "values of the part live on after the forward pass"
_KEPT = "what lies between a convolution and its norm lives on after the forward pass"


def _state(model: nn.Module) -> tuple[Hashable, bool]:
    """What in a model says which program runs; and whether a module inside of it has hooks."""
    parts: list[Any] = []
    stack, seen, is_hooked = [model], {id(model)}, bool(_globals._global_forward_hooks or _globals._global_forward_pre_hooks)
    while stack:
        inside = stack.pop()
        parts.append(inside.training)
        for param in inside._parameters.values():
            if param is not None:
                parts.append(param.requires_grad)
        if inside._forward_hooks or inside._forward_pre_hooks:
            parts.append((*inside._forward_hooks, *inside._forward_pre_hooks))
            is_hooked |= inside is not model
        for other in inside._modules.values():
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                stack.append(other)
    return (tuple(parts), is_hooked), is_hooked


def _autocast() -> Hashable:
    return tuple(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda"))


class _Strayed(BaseException):
    """A pass is no longer the program's, and values are missing: not for the user's `except Exception`."""


# ---------------------------------------------------------------- what to do at each call


class _Plan:
    """A program, and what is done at each of its calls."""

    def __init__(self, program: Program, model: nn.Module, names: Any, dtype: torch.dtype | None) -> None:
        self.program, self.dtype = program, dtype
        self.like: int | None = None  # the same number for all that keep the same for a sample
        self.calls, self.values = program.calls, program.values
        self.reasons: dict[str, str] = {}
        self.part = [at for at, call in enumerate(self.calls) if call.kind == "part"]
        self.leaves = self._find_leaves(model)
        self.frontier, self.again = self._find_frontier()
        self.is_idle = not self.part
        self.end = 1 + max((at for at, call in enumerate(self.calls) if self._is_watched(call)), default=-1)
        if not self.frontier:
            program.uncacheable = program.uncacheable or "the part hands nothing on"
        self.keeps = frozenset(self.frontier)
        self.gives = {self.values[number].first: i for i, number in enumerate(self.frontier)}
        self.folds = self._find_folds()
        self.norms = set(self.folds.values())
        self.clips = self._find_clips()
        self.channels_last = not program.is_blind and self._is_last_worth_it()
        leaves = [leaf for leaf in (one() for one in self.leaves) if leaf is not None]
        names_of_leaves = tuple([names[leaf] if leaf in names else names.setdefault(leaf, next(_NEW)) for leaf in leaves])
        self.rows = tuple((n, self.values[n].shape[1:], self.values[n].dtype) for n in self.frontier), names_of_leaves
        self.pays = bool(self.folds) or self.channels_last or dtype is not None  # also where nothing is kept
        self.weights: set[Hashable] = set()
        if any(self.calls[at].func is F.batch_norm and at not in self.norms for at in self.part):
            self.reasons["folding"] = "a batch norm in the part trains its statistics, or does not follow a convolution alone"
        if self.is_idle:
            self.reasons["prefix"] = "nothing of the batch is computed before what is chosen"

    def _is_watched(self, call: Call) -> bool:
        """Whether there is something to do at a call, or to see to."""
        return call.kind == "part" or any(number >= 0 and self.values[number].in_part for number in call.reads)

    def needed(self, batch: list[torch.Tensor]) -> frozenset[int]:
        """Which tensors of a batch are read by other calls than those that a hit leaves out."""
        numbers = {id(tensor): number for number, tensor in enumerate({id(one): one for one in batch}.values())}
        left_out = {at for at in self.part if at not in self.again}
        read = [not left_out.issuperset(self.values[numbers[id(tensor)]].readers) for tensor in batch]
        return frozenset(i for i, is_read in enumerate(read) if is_read)

    def signature(self) -> Hashable:
        return tuple([None if leaf is None else (leaf.data_ptr(), leaf._version) for leaf in (one() for one in self.leaves)])

    def _find_leaves(self, model: nn.Module) -> list[ref[torch.Tensor]]:
        """All that the part hangs on besides the batch. Norms in training mode write to their statistics without saying so,
        but count."""
        counters: dict[int, Any] = {id(m.running_mean): ref(m.num_batches_tracked) for m in model.modules() if _counts(m)}
        self._counters = counters
        used = {number for at in self.part for number in self.calls[at].reads if number < 0}
        wanted = {number for at in self.part for number in self.calls[at].reads if number >= 0}
        for at in range(len(self.calls) - 1, -1, -1):
            call = self.calls[at]
            if call.kind == "constant" and wanted & {*call.makes, *[number for _, number in call.changes]}:
                used |= {number for number in call.reads if number < 0}
                wanted |= {number for number in call.reads if number >= 0}
            elif call.kind == "constant":
                call.kind = "outside"  # the part does not use it
        leaves = [self.program.leaves[~number] for number in sorted(used)]
        tensors = [leaf() for leaf in leaves]
        return leaves + [counters[id(tensor)] for tensor in tensors if id(tensor) in counters]

    def _find_frontier(self) -> tuple[list[int], set[int]]:
        """The values that are kept, and the calls that run again on them: those whose results are not one row per sample, as
        those of transposes are not."""
        program, again = self.program, set[int]()
        found, waiting = set[int](), program.frontier
        while waiting and program.uncacheable is None:
            number = waiting.pop()
            value = self.values[number]
            if value.not_by_sample is None:
                found.add(number)
                continue
            call = self.calls[value.maker]
            if call.changes or None not in call.same or any(read < 0 for read in call.reads):
                program.uncacheable = value.not_by_sample
            if value.maker not in again:
                again.add(value.maker)
                waiting += [read for read in call.reads if read >= 0 and self.values[read].in_part]
        if len({self.values[number].first for number in found}) < len(found):
            program.uncacheable = program.uncacheable or "a value of the part is changed in place after it was used"
        return sorted(found), again

    def keeps_like(self, other: _Plan) -> bool:
        """Whether what one keeps for a sample is what the other keeps: numbers may differ as those of samples do."""
        mine, its = ([call for call in plan.calls if call.kind in ("part", "constant")] for plan in (self, other))
        if self.rows != other.rows or [call.func for call in mine] != [call.func for call in its]:
            return False
        ours, theirs = ([one for call in calls for one in call.plain] for calls in (mine, its))
        n, m = self.program.samples or 1, other.program.samples or 1
        return len(ours) == len(theirs) and all(_is_like(a, b, n, m) for a, b in zip(ours, theirs, strict=True))

    def counter(self, running_mean: torch.Tensor) -> torch.Tensor | None:
        """What counts the changes of a norm's statistics."""
        counter = self._counters.get(id(running_mean))
        return None if counter is None else counter()

    def _find_folds(self) -> dict[int, int]:
        """Convolutions in the part after which nothing but a norm at rest comes: position → position of the norm."""
        folds = {}
        for at in self.part:
            call = self.calls[at]
            if call.func not in _CONVOLUTIONS or len(call.makes) != 1 or any(number >= 0 for number in call.reads[1:]):
                continue
            value = self.values[call.makes[0]]
            after = next((i for i in range(at + 1, len(self.calls)) if self.calls[i].kind not in ("form", "layout")), -1)
            if value.readers != [after] or call.makes[0] in self.program.kept:
                continue
            norm = self.calls[after]
            is_norm = norm.func is F.batch_norm and norm.kind == "part" and norm.reads[:1] == call.makes and not norm.changes
            if is_norm and all(number < 0 for number in norm.reads[1:]) and True not in [one is True for one in norm.plain]:
                folds[at] = after
        return folds

    def _find_clips(self) -> dict[int, tuple[int, float, float]]:
        """Folded norms after which nothing but a clipping comes: position → its position, and between what it clips."""
        clips = {}
        for at in self.norms:
            number = self.calls[at].makes[0]
            after = next((i for i in range(at + 1, len(self.calls)) if self.calls[i].kind not in ("form", "layout")), -1)
            if self.values[number].readers != [after] or number in self.program.kept:
                continue
            call = self.calls[after]
            limits = _CLIPS.get(call.func)
            if limits is not None and call.kind == "part" and call.reads == (number,):
                numbers = [one for one in call.plain if isinstance(one, float)]
                low, high = numbers if call.func in _WITH_LIMITS and len(numbers) == 2 else limits
                if low < high and (call.func not in _WITH_LIMITS or len(numbers) == 2):
                    clips[at] = after, low, high
        return clips

    def _is_last_worth_it(self) -> bool:
        """Whether more convolutions profit than tensors have to be laid out anew."""
        last: set[int] = set()
        convolutions = changes = 0
        for call in self.calls:
            reads = [number for number in call.reads if number >= 0]
            if call.kind == "part" and call.func is torch.conv2d and self._wants_last(self.values[call.makes[0]]):
                convolutions += 1
                changes += call.reads[0] not in last
                last.add(call.makes[0])
            elif call.kind == "part" and name_of(call.func) in _ANY_LAYOUT:
                if last.intersection(reads):
                    last.update(call.makes)
            elif call.kind in ("part", "outside"):
                changes += len(last.intersection(reads))
                last.difference_update(reads)
        return convolutions > changes

    def _wants_last(self, value: Value) -> bool:
        """On GPUs the other layout is as fast, except in half precision."""
        is_last = len(value.stride) == 4 and value.stride[1] == 1 and value.shape[1] > 1
        return not is_last and (value.device.type == "cpu" or (self.dtype or value.dtype) in _HALF)


def _is_like(one: Any, other: Any, samples: int, others: int) -> bool:
    return bool(one == other) or (type(one) is int and type(other) is int and one * others == other * samples)


def _counts(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None and getattr(module, "num_batches_tracked", None) is not None


class _Weights:
    """Weights as inference wants them: folded, cast, channels-last. Made again when what they are made of was written to."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Any, Any, torch.Tensor, torch.Tensor | None]] = {}

    def clear(self) -> None:
        self._made.clear()

    def keep(self, keys: set[Hashable]) -> None:
        self._made = {key: made for key, made in self._made.items() if key in keys}

    def get(
        self, plan: _Plan, weight: Any, bias: Any, norm: tuple[Any, ...] | None, dtype: torch.dtype, last: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`norm`: running mean and variance, weight, bias, eps, and what counts their changes."""
        sources = weight, bias, *(norm or ())
        key = *[id(one) if isinstance(one, torch.Tensor) else one for one in sources], dtype, last
        tensors = [one for one in sources if isinstance(one, torch.Tensor)]
        state = [(one.data_ptr(), one._version) for one in tensors]
        known = self._made.get(key)
        plan.weights.add(key)
        if known is None or known[0] != state or any(was() is not one for was, one in zip(known[1], tensors, strict=True)):
            known = self._made[key] = state, [ref(one) for one in tensors], *_prepared(weight, bias, norm, dtype, last)
        return known[2], known[3]


@torch.no_grad()
def _prepared(weight: Any, bias: Any, norm: Any, dtype: torch.dtype, last: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    if norm is not None:
        exact = torch.promote_types(weight.dtype, torch.float32)
        mean, var, gamma, beta, eps, *_ = norm
        scale = (var.to(exact) + eps).rsqrt()
        scale = scale if gamma is None else scale * gamma
        shift = -mean.to(exact) * scale if bias is None else (bias.to(exact) - mean) * scale
        weight = weight * scale.view(-1, *[1] * (weight.dim() - 1))
        bias = shift if beta is None else shift + beta
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return weight.contiguous(memory_format=torch.channels_last) if last else weight, bias


def _norm_settings(
    input: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False, momentum: Any = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, ...]:  # fmt: skip
    return mean, var, weight, bias, eps


# ---------------------------------------------------------------- following a program


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """A call outside of the part."""
    if func is torch.conv2d and not kwargs:
        with unwatched():
            is_slow = depthwise.serves(*args)
        if is_slow:
            return depthwise.convolve(*args)
    return func(*args, **kwargs)


class _Mode(TorchFunctionMode):
    """Goes along a program while a forward pass runs."""

    leak = _LEAKS

    def __init__(self, plan: _Plan, batch: list[torch.Tensor], checks: bool) -> None:
        super().__init__()
        self.plan = plan
        self.strayed: str | None = None
        self._at = 0
        self._checks = checks  # whether every call has to read what it read when the program was recorded
        self._known: dict[int, tuple[ref[torch.Tensor], int]] = {}  # tensors by id
        number = 0
        for tensor in batch if checks else ():
            if id(tensor) not in self._known:
                self._known[id(tensor)] = ref(tensor), number
                number += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        at, plan = self._at, self.plan
        if self.strayed is not None or (at >= plan.end and not self._checks):
            return _run(func, args, kwargs)
        call = plan.calls[at] if at < len(plan.calls) else None
        if call is None or call.func != func:
            expected = "the end" if call is None else name_of(call.func)
            with unwatched():
                self.stray(f"the program changed: {name_of(func)} came instead of {expected}")
            return func(*args, **kwargs)
        self._at += 1
        return self.call(at, call, args, kwargs)

    def call(self, at: int, call: Call, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def stray(self, why: str) -> None:
        self.strayed = why

    def close(self) -> None:
        """The forward pass is over."""

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


class _Hit(_Mode):
    """The part does not run: what it hands on is there already."""

    def __init__(self, plan: _Plan, batch: list[torch.Tensor], found: tuple[torch.Tensor, ...]) -> None:
        super().__init__(plan, batch, checks=True)
        self._found = [_laid_out(tensor, plan.values[number]) for tensor, number in zip(found, plan.frontier, strict=True)]
        self._empty: list[ref[torch.Tensor]] = []

    def stray(self, why: str) -> None:
        raise _Strayed(why)

    def leaks(self) -> bool:
        return any(tensor() is not None for tensor in self._empty)

    def close(self) -> None:
        self._found = []

    def call(self, at: int, call: Call, args: Any, kwargs: Any) -> Any:
        with unwatched():
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
        out = _run(call.func, args, kwargs)
        with unwatched():
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


class _Miss(_Mode):
    """The part runs as inference."""

    leak = _KEPT

    def __init__(self, plan: _Plan, batch: list[torch.Tensor], weights: _Weights, keeps: bool) -> None:
        super().__init__(plan, batch, checks=keeps)
        self.handed_on: dict[int, tuple[torch.Tensor, int]] = {}
        self._weights = weights
        self._is_odd = plan.channels_last or plan.dtype is not None
        self._odd: dict[int, tuple[ref[torch.Tensor], Value]] = {}  # tensors that lie otherwise than they would have
        self._waiting: tuple[torch.Tensor, int, Any, Any] | None = None  # what stands for a convolution until its norm comes
        self._empty: list[ref[torch.Tensor]] = []
        self._clipped: tuple[int, torch.Tensor] | None = None  # where a clipping is due, and what is clipped already

    def stray(self, why: str) -> None:
        self.strayed = why
        if self._clipped is not None:
            raise _Strayed(why)
        self._make_up()
        self._lay_out_all()
        self.handed_on.clear()

    def close(self) -> None:
        self._make_up()
        self._lay_out_all()

    def leaks(self) -> bool:
        return any(tensor() is not None for tensor in self._empty)

    def is_whole(self) -> bool:
        """Whether everything that the part hands on is there, as it was handed on."""
        handed = [self.handed_on.get(number) for number in self.plan.frontier]
        return all(one is not None and version(one[0]) == one[1] for one in handed)

    def call(self, at: int, call: Call, args: Any, kwargs: Any) -> Any:
        func, checks = call.func, self._checks
        with unwatched():
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
        out = _run(func, args, kwargs)
        if checks and self.strayed is None:
            with unwatched():
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
            self._waiting = empty, at, args, version(args[0])
            self._empty.append(ref(empty))
            return empty
        if at in plan.norms and self._waiting is not None and args[:1] and args[0] is self._waiting[0]:
            tensors, plain = split(args, kwargs)
            if plain == call.plain and self._are_leaves(tensors[1:], call.reads[1:]):
                _, conv_at, conv, _ = self._waiting
                self._waiting = None
                return self._odd_or_not(self._convolve(conv_at, conv, _norm_settings(*args, **kwargs), at), call)
        self._make_up()
        if self._clipped is not None:
            due, clipped = self._clipped
            if at != due or not args or args[0] is not clipped:
                self.stray(f"the program changed: {name_of(func)} came where a clipping was due")
            self._clipped = None
            return self._odd_or_not(clipped, call)
        if name_of(func) not in _ANY_LAYOUT and func is not F.linear:
            self._lay_out(args, kwargs)
            return func(*args, **kwargs)
        if func is torch.conv2d and self._is_odd and not kwargs and self._are_leaves(args[1:3], call.reads[1:]):
            out = self._convolve(at, args, None)
        elif func is F.linear and not kwargs and plan.dtype is not None and self._are_leaves(args[1:3], call.reads[1:]):
            input, weight, bias = (*args, None)[:3]
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
        if plan.dtype is None and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        last = plan.channels_last and input.dim() == 4
        if norm is not None:
            norm = *norm, plan.counter(norm[0])
        weight, bias = self._weights.get(plan, weight, bias, norm, dtype, last)
        if plan.dtype is not None:
            input = input.to(dtype)
        if last:
            input = input.contiguous(memory_format=torch.channels_last)
        shift_ = _shifter() if last and input.is_cuda and dtype in _HALF else None
        if shift_ is None or bias is None:
            return plan.calls[at].func(input, weight, bias, *settings)
        out = plan.calls[at].func(input, weight, None, *settings)
        if not out.is_contiguous(memory_format=torch.channels_last):
            return out.add_(bias.view(1, -1, 1, 1))
        due, low, high = plan.clips.get(norm_at, (-1, 0.0, 0.0))
        if due >= 0:
            self._clipped = due, out
        return shift_(out, bias, (low, high) if due >= 0 else None)

    def _make_up(self) -> None:
        """Something else than the norm came after a convolution: compute it after all."""
        if self._waiting is None:
            return
        empty, at, args, was = self._waiting
        self._waiting = None
        if version(args[0]) != was:
            raise _Strayed(f"the program changed: the input of {name_of(self.plan.calls[at].func)} was written to")
        self._lay_out(args, {})
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


@cache
def _shifter() -> Any:
    """What adds a bias and clips in one kernel, where there is Triton and it works."""
    try:
        from pliant.engine.shift_triton import shift_

        out = shift_(
            torch.zeros(1, 4, 3, 3, device="cuda").contiguous(memory_format=torch.channels_last), torch.ones(4).cuda(), None
        )
        return shift_ if bool((out == 1).all()) else None
    except Exception:  # no compiler, no permission to write, …: PyTorch's own operations do
        return None


def _laid_out(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """A tensor as the value was: its type, and how it lies in memory."""
    if tensor.stride() == value.stride and tensor.dtype == value.dtype and tensor.device == value.device:
        return tensor
    if tensor.shape != value.shape or 0 in value.stride:  # what was spread out over memory need not be
        return tensor.to(value.device, value.dtype).contiguous()
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device).copy_(tensor)
