"""What is done at each call of a recorded program: which norms are folded, what is clipped, what leaves the prefix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn

from pliant.engine.derived_weights import Derived
from pliant.engine.prefix.record import Call, Program, Value, name_of

_CONVOLUTIONS: tuple[Any, ...] = (torch.conv1d, torch.conv2d, torch.conv3d)
# Functions whose results do not depend on the memory format of their input.
# fmt: off
ANY_LAYOUT = frozenset((
    "conv2d", "batch_norm", "relu", "relu_", "relu6", "hardtanh", "hardtanh_", "leaky_relu", "leaky_relu_", "elu", "elu_",
    "selu", "silu", "gelu", "mish", "hardswish", "hardsigmoid", "sigmoid", "tanh", "softplus", "clamp", "clamp_", "add", "add_",
    "__add__", "__iadd__", "__radd__", "sub", "sub_", "mul", "mul_", "__mul__", "__imul__", "__rmul__", "div", "div_",
    "dropout", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "cat", "mean", "interpolate",
))
# fmt: on
HALF = (torch.float16, torch.bfloat16)
_WITH_LIMITS: tuple[Any, ...] = (F.hardtanh, F.hardtanh_)
_CLIPS: dict[Any, tuple[float, float]] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_), (0.0, math.inf)),
    F.relu6: (0.0, 6.0),
    **dict.fromkeys(_WITH_LIMITS, (-1.0, 1.0)),
}
NEW = itertools.count()


class PrefixPlan:
    """A program, and what is done at each of its calls."""

    def __init__(self, program: Program, model: nn.Module, names: Any, dtype: torch.dtype | None) -> None:
        self.program, self.dtype = program, dtype
        self.like: int | None = None  # equal for plans that cache the same rows
        self.calls, self.values = program.calls, program.values
        self.reasons: dict[str, str] = {}
        self.prefix_calls = [at for at, call in enumerate(self.calls) if call.kind == "prefix"]
        self.leaves = self._find_leaves(model)
        self.frontier, self.recomputed = self._find_frontier()
        self.is_idle = not self.prefix_calls
        self.end = 1 + max((at for at, call in enumerate(self.calls) if self._is_watched(call)), default=-1)
        if not self.frontier:
            program.uncacheable = program.uncacheable or "nothing leaves the prefix"
        self.keeps = frozenset(self.frontier)
        self.gives = {self.values[number].first: i for i, number in enumerate(self.frontier)}
        self.folds = self._find_folds()
        self.norms = set(self.folds.values())
        self.clips = self._find_clips()
        self.frozen_norms = self._find_frozen_norms()
        self.channels_last = not program.is_blind and (self._is_recorded_last() or self._is_last_worth_it())
        leaves = [leaf for leaf in (one() for one in self.leaves) if leaf is not None]
        names_of_leaves = tuple([names[leaf] if leaf in names else names.setdefault(leaf, next(NEW)) for leaf in leaves])
        self.rows = tuple((n, self.values[n].shape[1:], self.values[n].dtype) for n in self.frontier), names_of_leaves
        self.pays = bool(self.folds) or self.channels_last or dtype is not None  # also without a cache
        self.weights: dict[Hashable, Derived] = {}  # derived for it
        self.replaced: Any = []  # modules that run another way (`replaced_modules`)
        self.on_runtime: Any = None  # its prefix as a model of an inference runtime
        self.last_weights: Hashable = self.signature()
        if any(self.calls[at].func is F.batch_norm and at not in self.norms for at in self.prefix_calls):
            self.reasons["folding"] = (
                "a batch norm in the prefix uses batch statistics, or does not directly follow a convolution"
            )
        if self.is_idle:
            self.reasons["prefix"] = "nothing of the batch is computed before the first trained parameter"

    def _is_watched(self, call: Call) -> bool:
        """Whether a call belongs to the prefix or reads from it."""
        return call.kind == "prefix" or any(number >= 0 and self.values[number].in_prefix for number in call.reads)

    def needed(self, batch: list[torch.Tensor]) -> frozenset[int]:
        """Which tensors of a batch are read by calls that run even on a cache hit."""
        numbers = {id(tensor): number for number, tensor in enumerate({id(one): one for one in batch}.values())}
        left_out = {at for at in self.prefix_calls if at not in self.recomputed}
        read = [not left_out.issuperset(self.values[numbers[id(tensor)]].readers) for tensor in batch]
        return frozenset(i for i, is_read in enumerate(read) if is_read)

    def signature(self) -> Hashable:
        return tuple([None if leaf is None else (leaf.data_ptr(), leaf._version) for leaf in (one() for one in self.leaves)])

    def _find_leaves(self, model: nn.Module) -> list[ref[torch.Tensor]]:
        """Everything that the prefix depends on besides the batch. Norms in training mode update their statistics without a
        new version, but they count batches."""
        counters: dict[int, Any] = {id(m.running_mean): ref(m.num_batches_tracked) for m in model.modules() if _counts(m)}
        self._counters = counters
        used = {number for at in self.prefix_calls for number in self.calls[at].reads if number < 0}
        wanted = {number for at in self.prefix_calls for number in self.calls[at].reads if number >= 0}
        for at in range(len(self.calls) - 1, -1, -1):
            call = self.calls[at]
            if call.kind == "constant" and wanted & {*call.makes, *[number for _, number in call.changes]}:
                used |= {number for number in call.reads if number < 0}
                wanted |= {number for number in call.reads if number >= 0}
            elif call.kind == "constant":
                call.kind = "outside"  # the prefix does not use it
        leaves = [self.program.leaves[~number] for number in sorted(used)]
        tensors = [leaf() for leaf in leaves]
        return leaves + [counters[id(tensor)] for tensor in tensors if id(tensor) in counters]

    def _find_frontier(self) -> tuple[list[int], set[int]]:
        """The values to cache, and the calls that run again on them: those whose results are not one row per sample, such as
        transposes."""
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
                waiting += [read for read in call.reads if read >= 0 and self.values[read].in_prefix]
        for number, why in program.random.items():
            if self.values[number].maker not in again:  # nobody reads it, but it must be drawn
                program.uncacheable = program.uncacheable or why
        if len({self.values[number].first for number in found}) < len(found):
            program.uncacheable = program.uncacheable or "a value of the prefix is changed in entry after it was used"
        return sorted(found), again

    def keeps_like(self, other: PrefixPlan) -> bool:
        """Whether two plans cache the same for a sample: integers may differ in proportion to the batch size."""
        mine, its = ([call for call in plan.calls if call.kind in ("prefix", "constant")] for plan in (self, other))
        if self.rows != other.rows or [call.func for call in mine] != [call.func for call in its]:
            return False
        ours, theirs = ([one for call in calls for one in call.plain] for calls in (mine, its))
        n, m = self.program.samples or 1, other.program.samples or 1
        return len(ours) == len(theirs) and all(_is_like(a, b, n, m) for a, b in zip(ours, theirs, strict=True))

    def counter(self, running_mean: torch.Tensor) -> torch.Tensor | None:
        """The counter of updates of a norm's statistics."""
        counter = self._counters.get(id(running_mean))
        return None if counter is None else counter()

    def _find_folds(self) -> dict[int, int]:
        """Convolutions of the prefix whose output goes to a frozen norm alone: position → position of the norm."""
        folds = {}
        for at in self.prefix_calls:
            call = self.calls[at]
            if call.func not in _CONVOLUTIONS or len(call.makes) != 1 or any(number >= 0 for number in call.reads[1:]):
                continue
            value, weight = self.values[call.makes[0]], self.program.leaves[~call.reads[1]]()
            after = next((i for i in range(at + 1, len(self.calls)) if self.calls[i].kind not in ("form", "layout")), -1)
            if value.readers != [after] or call.makes[0] in self.program.kept:
                continue
            if weight is None or weight.dim() != len(value.shape):  # a single sample without a batch dimension
                continue
            norm = self.calls[after]
            is_norm = norm.func is F.batch_norm and norm.kind == "prefix" and norm.reads[:1] == call.makes and not norm.changes
            if is_norm and all(number < 0 for number in norm.reads[1:]) and True not in [one is True for one in norm.plain]:
                folds[at] = after
        return folds

    def _find_clips(self) -> dict[int, tuple[int, float, float]]:
        """Folded norms whose output goes to a clipping alone: position → its position, and its limits."""
        clips = {at: self._clipping(at) for at in self.norms if self.calls[at].makes[0] not in self.program.kept}
        return {at: clip for at, clip in clips.items() if clip[0] >= 0 and self.calls[clip[0]].kind == "prefix"}

    def _clipping(self, at: int) -> tuple[int, float, float]:
        """The position of the clipping that alone reads a call's result, and its limits; -1: none."""
        number = self.calls[at].makes[0]
        after = next((i for i in range(at + 1, len(self.calls)) if self.calls[i].kind not in ("form", "layout")), -1)
        call, nowhere = self.calls[after], (-1, 0.0, 0.0)
        limits = _CLIPS.get(call.func)
        if limits is None or self.values[number].readers != [after] or call.reads != (number,):
            return nowhere
        numbers = [one for one in call.plain if isinstance(one, float)]
        low, high = numbers if call.func in _WITH_LIMITS and len(numbers) == 2 else limits
        return (after, low, high) if low < high and (call.func not in _WITH_LIMITS or len(numbers) == 2) else nowhere

    def _find_frozen_norms(self) -> dict[int, tuple[int, float, float]]:
        """Frozen norms outside of the prefix, through which gradients flow: position → that of the in-entry clipping after it,
        or -1, and its limits."""
        found = {}
        for at, call in enumerate(self.calls):
            is_norm = call.func is F.batch_norm and call.kind == "outside" and not call.changes and len(call.makes) == 1
            leaves = [self.program.leaves[~number]() for number in call.reads[1:] if number < 0]
            if not is_norm or len(leaves) != len(call.reads) - 1 or True in [one is True for one in call.plain]:
                continue
            if all(leaf is not None and not leaf.requires_grad for leaf in leaves):
                due, low, high = self._clipping(at)
                # In entry, norm and clipping share one tensor: nobody can hold the norm's own result.
                found[at] = (due, low, high) if due >= 0 and self.calls[due].same == (0,) else (-1, 0.0, 0.0)
        return found

    def _is_recorded_last(self) -> bool:
        """Whether convolutions gave channels-last results when they were recorded, as with custom kernels for x86-64."""
        made = [self.values[self.calls[at].makes[0]] for at in self.prefix_calls if self.calls[at].func is torch.conv2d]
        return any(value.device.type == "cpu" and _is_last(value) for value in made)

    def _is_last_worth_it(self) -> bool:
        """Whether more convolutions become faster than tensors have to be converted."""
        last: set[int] = set()
        convolutions = changes = 0
        for call in self.calls:
            reads = [number for number in call.reads if number >= 0]
            if call.kind == "prefix" and call.func is torch.conv2d and self._wants_last(self.values[call.makes[0]]):
                convolutions += 1
                changes += call.reads[0] not in last
                last.add(call.makes[0])
            elif call.kind == "prefix" and name_of(call.func) in ANY_LAYOUT:
                if last.intersection(reads):
                    last.update(call.makes)
            elif call.kind in ("prefix", "outside"):
                changes += len(last.intersection(reads))
                last.difference_update(reads)
        return convolutions > changes

    def _wants_last(self, value: Value) -> bool:
        """On GPUs both memory formats are equally fast, except in half precision."""
        return not _is_last(value) and (value.device.type == "cpu" or (self.dtype or value.dtype) in HALF)


def _is_last(value: Value) -> bool:
    return len(value.stride) == 4 and value.stride[1] == 1 and value.shape[1] > 1


def _is_like(one: Any, other: Any, samples: int, others: int) -> bool:
    return bool(one == other) or (type(one) is int and type(other) is int and one * others == other * samples)


def _counts(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None and getattr(module, "num_batches_tracked", None) is not None


class Weights:
    """Weights for inference: folded, cast, channels-last. They are derived again when a source was written to."""

    def __init__(self) -> None:
        self._derived: dict[Hashable, Derived] = {}

    def clear(self) -> None:
        self._derived.clear()

    def keep(self, keys: set[Hashable]) -> None:
        self._derived = {key: one for key, one in self._derived.items() if key in keys}

    def get(
        self, plan: PrefixPlan, weight: Any, bias: Any, norm: tuple[Any, ...] | None, dtype: torch.dtype, last: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`norm`: running mean and variance, weight, bias, eps, and the counter of updates."""
        keep = partial(_laid_out, dtype, last)
        return self._get(plan, _folded, (weight, bias, *(norm or ())), (dtype, last), keep)  # type: ignore[return-value]

    def scale_and_shift(self, plan: PrefixPlan, norm: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale and shift of a norm for each channel."""
        return self._get(plan, _norm_scale_and_shift, norm, ("scale and shift",), lambda tensor: tensor)  # type: ignore[return-value]

    def has_scale_and_shift(self, norm: tuple[Any, ...]) -> bool:
        """Whether these were derived already."""
        found = self._derived.get(_key(norm, ("scale and shift",)))
        return found is not None and found.is_from([one for one in norm if isinstance(one, torch.Tensor)])

    def _get(self, plan: PrefixPlan, make: Any, sources: tuple[Any, ...], how: tuple[Any, ...], keep: Any) -> Any:
        key = _key(sources, how)
        tensors = [one for one in sources if isinstance(one, torch.Tensor)]
        derived = self._derived.get(key)
        if derived is None or not derived.is_from(tensors):
            derived = self._derived[key] = Derived(partial(make, _without_tensors(sources)), tensors, keep)
        else:
            derived.refresh()
        plan.weights[key] = derived
        return derived.tensors


def _key(sources: tuple[Any, ...], how: tuple[Any, ...]) -> Hashable:
    return *[id(one) if isinstance(one, torch.Tensor) else one for one in sources], *how


def _without_tensors(sources: Sequence[Any]) -> tuple[Any, ...]:
    """The sources without their tensors, which may be freed while the derived tensors stay."""
    return tuple(_TENSOR if isinstance(one, torch.Tensor) else one for one in sources)


_TENSOR = object()


_Into = tuple[torch.Tensor | None, ...]


@torch.no_grad()
def _folded(
    template: tuple[Any, ...], *tensors: torch.Tensor, into: _Into = (None, None)
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight and bias of a convolution, with the norm after it folded in, if there is one."""
    weight, bias, *norm = _filled_in(template, tensors)
    if not norm:
        return weight, bias
    scale, shift = _scale_and_shift(torch.promote_types(weight.dtype, torch.float32), bias, *norm, into=into[1])
    return torch.mul(weight, scale.view(-1, *[1] * (weight.dim() - 1)), out=into[0]), shift


@torch.no_grad()
def _norm_scale_and_shift(
    template: tuple[Any, ...], *tensors: torch.Tensor, into: _Into = (None, None)
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and shift of a norm."""
    norm = _filled_in(template, tensors)
    return _scale_and_shift(torch.promote_types(norm[1].dtype, torch.float32), None, *norm, into=into[1])


def _filled_in(template: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> list[Any]:
    given = iter(tensors)
    return [next(given).detach() if entry is _TENSOR else entry for entry in template]


def _scale_and_shift(
    exact: torch.dtype, bias: Any, mean: Any, var: Any, gamma: Any, beta: Any, eps: float, *_: Any, into: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (var.to(exact) + eps).rsqrt_()
    scale = scale if gamma is None else scale.mul_(gamma)
    mean = mean.to(exact) if bias is None else mean.to(exact) - bias
    if beta is None:
        return scale, torch.mul(mean, scale, out=into).neg_()
    return scale, torch.addcmul(beta.to(exact), mean, scale, value=-1, out=into)


def _laid_out(dtype: torch.dtype, last: bool, tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to(dtype)
    return tensor.contiguous(memory_format=torch.channels_last) if last and tensor.dim() == 4 else tensor
