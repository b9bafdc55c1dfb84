"""Whatever lies before the first chosen parameter is inference: run it as such, or not at all where its results are kept.

The program of a forward pass is recorded once (see `program`) and followed in later passes, call by call. Calls of the part
that needs no gradient run without other modes, channels-last, and with batch norms folded into the convolutions before them, or
on CUDA in one kernel with the clipping after them; weights that are rounded are left as they are. On a hit in the feature cache
they do not run, and tensors without memory stand for what nobody reads. Every other call runs as the user wrote it, on values
that lie in memory as they would have; but norms at rest between what is chosen may run in such kernels, too. Where a pass
strays from its program, it goes on plainly.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _globals
from torch.utils.weak import WeakTensorKeyDictionary

from pliant.engine.derived_weights import Made
from pliant.engine.lean.frozen_batchnorm import norm_kernels
from pliant.engine.prefix.feature_cache import Features
from pliant.engine.prefix.prefix_plan import NEW, Plan, Weights
from pliant.engine.prefix.record import Recorder, random_state, set_random_state
from pliant.engine.prefix.replay import KEPT, LEAKS, Hit, Miss, Strayed, autocast
from pliant.runtime import batches
from pliant.runtime.torch_internals import without_function_modes

_PROGRAMS = 8  # kept at a time
_STRAYED = 3  # so often a pass may leave its program before we stop recording them, and once more in twenty that do not


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
        self._weights = Weights()
        self._names: Any = WeakTensorKeyDictionary()  # leaf → a number that no other ever has
        self.forget()

    def forget(self) -> None:
        """Drop programs, folded weights and features; then look anew."""
        self._programs: OrderedDict[Hashable, Plan] = OrderedDict()
        self._alike: list[Plan] = []  # the last ones whose results were kept
        self._strayed = self._followed = 0
        self._weights.clear()
        self.reasons.clear()
        if self.features is not None:
            self.features.begin(None)

    def made(self, batch: Any, ids: Any = None, choice: Hashable = None) -> list[Made]:
        """What was made of weights for the program of this batch, fit for use."""
        with without_function_modes():
            kept = self.features is not None and ids is not None
            plan = self._programs.get(self._key(list(batches.tensors(batch)), kept, choice)[0])
            made = list(plan.weights.values()) if plan is not None else []
            for one in made:
                one.refresh()
            return made

    def run(
        self,
        forward: Callable[[], torch.Tensor],
        batch: Any,
        ids: Sequence[Hashable] | torch.Tensor | None = None,
        choice: Hashable = None,
        found: Found | None = None,
        rests: bool = False,
    ) -> torch.Tensor:
        """forward() (the user's loss of this batch), what needs no gradient as inference or from the cache.

        `choice` stands for what is chosen besides whole parameters: with another one, other programs apply. `found` is what
        `find` found, if that was asked before: what it gives is then taken from there. `rests`: norms at rest between what is
        chosen run in one kernel there and one back, where there are such.
        """
        if self._strayed >= _STRAYED + self._followed // 20:
            self.reasons["prefix"] = "the program changes from step to step"
            return forward()
        with without_function_modes():
            tensors = list(batches.tensors(batch))
            kept = self.features is not None and ids is not None
            samples = len(ids) if kept and ids is not None else None
            key, is_hooked = self._key(tensors, kept, choice)
            plan = self._programs.get(key)
        if plan is None:
            return self._record(key, forward, tensors, samples, is_hooked)
        self._programs.move_to_end(key)
        self._tell(plan, kept)
        is_cached = kept and plan.program.uncacheable is None
        if (plan.is_idle or not (plan.pays or is_cached)) and not (rests and plan.resting):
            return forward()
        rows = found.rows if found is not None else None
        if is_cached and found is None and self.features is not None:
            with without_function_modes():
                rows = self._look_up(self.features, plan, tensors, ids)
        return self._follow(key, plan, forward, tensors, ids if is_cached else None, rows, rests)

    def find(self, batch: Any, ids: Any, choice: Hashable = None) -> Found | None:
        """What the cache holds for a batch, without running anything; None where its program is not known or not kept."""
        with without_function_modes():
            tensors = list(batches.tensors(batch))
            key, _ = self._key(tensors, True, choice)
            plan = self._programs.get(key)
            if plan is None or plan.is_idle or plan.program.uncacheable is not None or self.features is None:
                return None
            return Found(self._look_up(self.features, plan, tensors, ids), plan.needed(tensors))

    def _look_up(self, features: Features, plan: Plan, batch: list[torch.Tensor], ids: Any) -> Any:
        if plan.like is None:
            plan.like = next((one.like for one in self._alike if plan.keeps_like(one)), next(NEW))
            self._alike = [*self._alike[1 - _PROGRAMS :], plan]
        shapes = tuple((tensor.shape[1:], tensor.dtype) for tensor in batch)
        features.begin((_autocast(), shapes, plan.like, plan.signature()))  # whatever else is chosen behind it
        return features.get(ids, plan.values[plan.frontier[0]].device)

    def knows(self, batch: Any, ids: Any = None, choice: Hashable = None) -> bool:
        """Whether `run` would follow a program, and not record one."""
        with without_function_modes():
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
        with without_function_modes():
            recorder = Recorder(batch, samples)
        if is_hooked:
            recorder.uncacheable = recorder.uncacheable or "modules have forward hooks"
        with recorder:
            out = forward()
        with without_function_modes():
            plan = Plan(recorder.program(), self.model, self._names, self.dtype)
            for kind in {tensor.device.type for tensor in batch} if plan.folds or plan.resting else ():
                norm_kernels(kind)
        self._programs[key] = plan
        while len(self._programs) > _PROGRAMS:
            self._programs.popitem(last=False)
        self._weights.keep({fold for plan in self._programs.values() for fold in plan.weights})
        self._tell(plan, samples is not None)
        return out

    def _tell(self, plan: Plan, kept: bool) -> None:
        """What is not done in this program."""
        self.reasons = dict(plan.reasons)
        if kept and plan.program.uncacheable is not None:
            self.reasons["cache"] = plan.program.uncacheable

    def _follow(
        self,
        key: Hashable,
        plan: Plan,
        forward: Callable[[], torch.Tensor],
        batch: list[torch.Tensor],
        ids: Any,
        found: Any,
        rests: bool,
    ) -> torch.Tensor:
        program = plan.program
        captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        drawn = random_state() if found is not None and not captures else None
        if found is not None:
            mode: Hit | Miss = Hit(plan, batch, self._weights, found, rests)
        else:
            mode = Miss(plan, batch, self._weights, ids is not None, rests)
        try:
            failed = True
            try:
                with mode:
                    out = forward()
                failed = False
            finally:
                with without_function_modes():
                    mode.close(failed)
            if mode.leaks():
                gc.collect()
                if mode.leaks():
                    raise Strayed(mode.leak)
        except Strayed as why:
            mode.strayed = str(why)
            if drawn is not None:
                set_random_state(drawn)
            out = forward()
        if mode.strayed is None:
            self._followed += 1
            if isinstance(mode, Miss) and ids is not None and self.features is not None:
                with without_function_modes():
                    if mode.is_whole():
                        self.features.put(ids, tuple(mode.handed_on[number][0].detach() for number in plan.frontier))
        elif mode.strayed == LEAKS:
            program.uncacheable = self.reasons["cache"] = mode.strayed
        elif mode.strayed == KEPT:
            plan.folds.clear()
            plan.reasons["folding"] = self.reasons["folding"] = mode.strayed
        else:
            self._strayed += 1
            self.reasons["program"] = mode.strayed
            self._programs.pop(key, None)
        return out


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
    return autocast("cpu"), autocast("cuda")
