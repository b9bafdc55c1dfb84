"""What is done at each call of a recorded program: which norms are folded, what is clipped, what is handed on."""

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

from pliant.engine.derived_weights import Made
from pliant.engine.prefix.record import Call, Program, Value, name_of

_CONVOLUTIONS: tuple[Any, ...] = (torch.conv1d, torch.conv2d, torch.conv3d)
# Functions that give the same whatever way their input lies in memory.
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


class Plan:
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
        self.resting = self._find_resting()
        self.channels_last = not program.is_blind and self._is_last_worth_it()
        leaves = [leaf for leaf in (one() for one in self.leaves) if leaf is not None]
        names_of_leaves = tuple([names[leaf] if leaf in names else names.setdefault(leaf, next(NEW)) for leaf in leaves])
        self.rows = tuple((n, self.values[n].shape[1:], self.values[n].dtype) for n in self.frontier), names_of_leaves
        self.pays = bool(self.folds) or self.channels_last or dtype is not None  # also where nothing is kept
        self.weights: dict[Hashable, Made] = {}  # what was made for it
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

    def keeps_like(self, other: Plan) -> bool:
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
            value, weight = self.values[call.makes[0]], self.program.leaves[~call.reads[1]]()
            after = next((i for i in range(at + 1, len(self.calls)) if self.calls[i].kind not in ("form", "layout")), -1)
            if value.readers != [after] or call.makes[0] in self.program.kept:
                continue
            if weight is None or weight.dim() != len(value.shape):  # of one sample: what comes first is no batch
                continue
            norm = self.calls[after]
            is_norm = norm.func is F.batch_norm and norm.kind == "part" and norm.reads[:1] == call.makes and not norm.changes
            if is_norm and all(number < 0 for number in norm.reads[1:]) and True not in [one is True for one in norm.plain]:
                folds[at] = after
        return folds

    def _find_clips(self) -> dict[int, tuple[int, float, float]]:
        """Norms behind a convolution after which nothing but a clipping comes: position → its position, and its limits."""
        clips = {at: self._clipping(at) for at in self.norms if self.calls[at].makes[0] not in self.program.kept}
        return {at: clip for at, clip in clips.items() if clip[0] >= 0 and self.calls[clip[0]].kind == "part"}

    def _clipping(self, at: int) -> tuple[int, float, float]:
        """Where what a call gives is clipped, before anything else is done with it, and its limits; -1: nowhere."""
        number = self.calls[at].makes[0]
        after = next((i for i in range(at + 1, len(self.calls)) if self.calls[i].kind not in ("form", "layout")), -1)
        call, nowhere = self.calls[after], (-1, 0.0, 0.0)
        limits = _CLIPS.get(call.func)
        if limits is None or self.values[number].readers != [after] or call.reads != (number,):
            return nowhere
        numbers = [one for one in call.plain if isinstance(one, float)]
        low, high = numbers if call.func in _WITH_LIMITS and len(numbers) == 2 else limits
        return (after, low, high) if low < high and (call.func not in _WITH_LIMITS or len(numbers) == 2) else nowhere

    def _find_resting(self) -> dict[int, tuple[int, float, float]]:
        """Norms at rest that are not in the part, whose parameters are not chosen and which gradients go through: position →
        that of the clipping in place after it, or -1, and its limits."""
        found = {}
        for at, call in enumerate(self.calls):
            is_norm = call.func is F.batch_norm and call.kind == "outside" and not call.changes and len(call.makes) == 1
            leaves = [self.program.leaves[~number]() for number in call.reads[1:] if number < 0]
            if not is_norm or len(leaves) != len(call.reads) - 1 or True in [one is True for one in call.plain]:
                continue
            if all(leaf is not None and not leaf.requires_grad for leaf in leaves):
                due, low, high = self._clipping(at)
                # In place, what the norm gives is what is clipped: nobody can hold on to anything else.
                found[at] = (due, low, high) if due >= 0 and self.calls[due].same == (0,) else (-1, 0.0, 0.0)
        return found

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
            elif call.kind == "part" and name_of(call.func) in ANY_LAYOUT:
                if last.intersection(reads):
                    last.update(call.makes)
            elif call.kind in ("part", "outside"):
                changes += len(last.intersection(reads))
                last.difference_update(reads)
        return convolutions > changes

    def _wants_last(self, value: Value) -> bool:
        """On GPUs the other layout is as fast, except in half precision."""
        is_last = len(value.stride) == 4 and value.stride[1] == 1 and value.shape[1] > 1
        return not is_last and (value.device.type == "cpu" or (self.dtype or value.dtype) in HALF)


def _is_like(one: Any, other: Any, samples: int, others: int) -> bool:
    return bool(one == other) or (type(one) is int and type(other) is int and one * others == other * samples)


def _counts(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None and getattr(module, "num_batches_tracked", None) is not None


class Weights:
    """Weights as inference wants them: folded, cast, channels-last. Made again when what they are made of was written to."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Made] = {}

    def clear(self) -> None:
        self._made.clear()

    def keep(self, keys: set[Hashable]) -> None:
        self._made = {key: made for key, made in self._made.items() if key in keys}

    def get(
        self, plan: Plan, weight: Any, bias: Any, norm: tuple[Any, ...] | None, dtype: torch.dtype, last: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`norm`: running mean and variance, weight, bias, eps, and what counts their changes."""
        keep = partial(_laid_out, dtype, last)
        return self._get(plan, _folded, (weight, bias, *(norm or ())), (dtype, last), keep)  # type: ignore[return-value]

    def line(self, plan: Plan, norm: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """What a norm multiplies each channel with, and what it adds."""
        return self._get(plan, _line, norm, ("line",), lambda tensor: tensor)  # type: ignore[return-value]

    def has_line(self, norm: tuple[Any, ...]) -> bool:
        """Whether that was made already."""
        made = self._made.get(_key(norm, ("line",)))
        return made is not None and made.is_of([one for one in norm if isinstance(one, torch.Tensor)])

    def _get(self, plan: Plan, make: Any, sources: tuple[Any, ...], how: tuple[Any, ...], keep: Any) -> Any:
        key = _key(sources, how)
        tensors = [one for one in sources if isinstance(one, torch.Tensor)]
        made = self._made.get(key)
        if made is None or not made.is_of(tensors):
            made = self._made[key] = Made(partial(make, _places(sources)), tensors, keep)
        else:
            made.refresh()
        plan.weights[key] = made
        return made.tensors


def _key(sources: tuple[Any, ...], how: tuple[Any, ...]) -> Hashable:
    return *[id(one) if isinstance(one, torch.Tensor) else one for one in sources], *how


def _places(sources: Sequence[Any]) -> tuple[Any, ...]:
    """The sources without their tensors, which may go while what was made of them stays."""
    return tuple(_TENSOR if isinstance(one, torch.Tensor) else one for one in sources)


_TENSOR = object()


_Into = tuple[torch.Tensor | None, ...]


@torch.no_grad()
def _folded(
    places: tuple[Any, ...], *tensors: torch.Tensor, into: _Into = (None, None)
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A convolution's weight and bias, the norm after it folded in if there is one."""
    weight, bias, *norm = _given(places, tensors)
    if not norm:
        return weight, bias
    scale, shift = _scale_and_shift(torch.promote_types(weight.dtype, torch.float32), bias, *norm, into=into[1])
    return torch.mul(weight, scale.view(-1, *[1] * (weight.dim() - 1)), out=into[0]), shift


@torch.no_grad()
def _line(places: tuple[Any, ...], *tensors: torch.Tensor, into: _Into = (None, None)) -> tuple[torch.Tensor, torch.Tensor]:
    """What a norm multiplies with, and what it adds."""
    norm = _given(places, tensors)
    return _scale_and_shift(torch.promote_types(norm[1].dtype, torch.float32), None, *norm, into=into[1])


def _given(places: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> list[Any]:
    given = iter(tensors)
    return [next(given).detach() if place is _TENSOR else place for place in places]


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
