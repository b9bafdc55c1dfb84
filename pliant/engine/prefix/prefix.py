"""The prefix engine: the frozen part before the first trained parameter runs as inference, or comes from a cache.

The program of a forward pass is recorded once (`record`) and replayed in later passes, call by call (`replay`). Calls of the
prefix run without autograd modes, channels-last, and with batch norms folded into the convolutions before them; on CUDA a norm
runs in one kernel with the clipping after it. Low-precision weights are not folded. On a hit in the feature cache the prefix
does not run, and placeholders stand for values that nobody reads.

Every other call runs as the user wrote it, on values with the original memory format. Frozen norms between trained layers may
run in fused kernels too. If a pass diverges from its program, it goes on as plain PyTorch.

Modules of torch's own are skipped as a whole, or run as chains (`replaced_modules`). With an inference runtime the prefix
becomes a model of that runtime (`prefix_model`, `runtimes`), perhaps in int8 (`int8`), and is skipped like one that is cached.
"""

from __future__ import annotations

import gc
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from pliant.engine.derived_weights import Derived
from pliant.engine.lean.frozen_batchnorm import norm_kernels
from pliant.engine.prefix.feature_cache import Features
from pliant.engine.prefix.inference import KEPT, PrefixInference
from pliant.engine.prefix.int8 import SAMPLES, Calibration
from pliant.engine.prefix.prefix_model import Export, InferenceRuntime, Models, error_text, why_not
from pliant.engine.prefix.prefix_plan import NEW, PrefixPlan, Weights
from pliant.engine.prefix.program_key import autocast_state, has_hooks_inside, model_state
from pliant.engine.prefix.record import ProgramRecorder, random_state, set_random_state
from pliant.engine.prefix.replaced_modules import entering, find_replaced, forwards
from pliant.engine.prefix.replay import LEAKS, CacheHit, Diverged, Replay
from pliant.runtime import batches
from pliant.runtime.torch_internals import without_function_modes

_PROGRAMS = 8  # kept at a time; for one selection, so many shapes of batches
_MAX_DIVERGED = 3  # passes that may diverge before recording stops, and one more for every 20 that do not


@dataclass(frozen=True)
class CachedRows:
    """The rows of a feature cache for a batch."""

    rows: tuple[torch.Tensor, ...] | None  # the outputs of the prefix; None: a sample is missing
    needed: frozenset[int]  # the tensors of the batch that are read nevertheless


class Prefix:
    """Runs forward passes, and what needs no gradient as inference.

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

    def __init__(
        self,
        model: nn.Module,
        features: Features | None = None,
        dtype: torch.dtype | None = None,
        runtime: InferenceRuntime | None = None,
    ) -> None:
        """`features` caches the outputs of the prefix by sample; `dtype` is that of its convolutions and linear layers.
        `runtime` runs the prefix where it can, but not while memory is limited: what it holds is not counted."""
        self.model, self.features, self.dtype, self._runtime = model, features, dtype, runtime
        self.memory_is_limited = False
        self.runs_chains = False  # whether layers after the prefix may run as chains
        self.reasons: dict[str, str] = {}  # what it does not do, and why
        self.seconds_per_model = 0.0  # what the last rehearsal took, where that made a model of the runtime
        self._weights = Weights()
        self._names: Any = WeakTensorKeyDictionary()  # leaf → a number that no other ever has
        self.forget()

    @property
    def runtime(self) -> InferenceRuntime | None:
        return None if self.memory_is_limited else self._runtime

    @property
    def on_runtime(self) -> bool:
        """Whether the runtime serves, as far as is known."""
        return self.runtime is not None and self.runtime.serves(self.reasons)

    @property
    def is_refused(self) -> bool:
        """Whether the runtime was found not to serve."""
        return "runtime" in self.reasons or (self.runtime is not None and not self.runtime.serves(self.reasons))

    @property
    def asks_int8(self) -> bool:
        return self._runtime is not None and self._runtime.int8 is not None

    def why_not(self, is_on: bool) -> dict[str, str]:
        """What it does not do, and why; while it is off, just why the runtime does not serve."""
        out = {name: why for name, why in self.reasons.items() if is_on or name in ("runtime", "int8")}
        if self._runtime is not None and self.memory_is_limited and (is_on or self.asks_int8):
            out["runtime"] = "the limit on memory does not count what an inference runtime holds"
        if self.asks_int8 and is_on and out.keys().isdisjoint(("prefix", "runtime", "int8")) and not self._has_int8:
            out["int8"] = f"float32 until it is calibrated on the first {SAMPLES} samples"
        return out

    @property
    def _has_int8(self) -> bool:
        models = (plan.on_runtime for plan in self._programs.values())
        return any(model is not None and model.calibration is not None for model in models)

    def forget(self) -> None:
        """Drop programs, folded weights and features."""
        self._programs: OrderedDict[tuple[Any, ...], PrefixPlan] = OrderedDict()
        self._alike: list[PrefixPlan] = []  # the last ones whose results were kept
        self._diverged = self._replayed = 0
        self._weights.clear()
        self.reasons.clear()
        if self.features is not None:
            self.features.begin(None)

    def derived(self, batch: Any, ids: Any = None, choice: Hashable = None) -> list[Derived]:
        """The tensors derived from weights for the program of this batch, up to date."""
        with without_function_modes():
            kept = self.features is not None and ids is not None
            plan = self._programs.get(self._key(list(batches.tensors(batch)), kept, choice))
            derived = list(plan.weights.values()) if plan is not None else []
            for one in derived:
                one.refresh()
            return derived

    def run(
        self,
        forward: Callable[[], torch.Tensor],
        batch: Any,
        ids: Sequence[Hashable] | torch.Tensor | None = None,
        choice: Hashable = None,
        found: CachedRows | None = None,
        fuse_norms: bool = False,
        rehearse: Callable[[], None] | None = None,
        calibrates: bool = True,
        still_pays: Callable[[], bool] | None = None,
    ) -> torch.Tensor:
        """forward() (the user's loss of this batch), and what needs no gradient as inference or from the cache.

        `choice` identifies what is chosen besides whole parameters: each has its own programs. `found` is the result of `find`,
        if that was called before. `fuse_norms`: frozen norms between trained layers run in fused kernels, if there are any.
        `rehearse` is called where the program is not known, and should make it so; `still_pays` where the runtime turns out not
        to serve. A prefix in int8 may be calibrated on this batch (`calibrates`).
        """
        if self._diverged >= _MAX_DIVERGED + self._replayed // 20:
            self.reasons["prefix"] = "the program changes from step to step"
            return forward()
        with without_function_modes():
            tensors = list(batches.tensors(batch))
            if self.runtime is not None and calibrates:
                self.runtime.see(tensors)
            kept = self.features is not None and ids is not None
            samples = len(ids) if kept and ids is not None else None
            key = self._key(tensors, kept, choice)
            plan = self._programs.get(key)
        if plan is None and len(self._programs) >= _PROGRAMS and not self._others(key):
            self.reasons["prefix"] = f"it runs for the first {_PROGRAMS} shapes of batches, and there are more"
            return forward()
        if plan is None and rehearse is not None:
            start = time.monotonic()
            rehearse()
            self.seconds_per_model = time.monotonic() - start if self.runtime is not None else 0.0
            plan = self._programs.get(key)
        if plan is None:
            return self._record(key, forward, tensors, samples)
        self._programs.move_to_end(key)
        self._set_reasons(plan, kept)
        if still_pays is not None and self.is_refused and not still_pays():
            return forward()
        is_cached = kept and plan.program.uncacheable is None
        exports = self._may_export(plan, tensors)
        if (plan.is_idle or not (plan.pays or is_cached or exports)) and not (fuse_norms and plan.frozen_norms):
            return forward()
        rows = found.rows if found is not None else None
        if is_cached and found is None and self.features is not None:
            with without_function_modes():
                rows = self._look_up(self.features, plan, tensors, ids)
        if not (is_cached or exports) and self._is_all_chains(plan):
            with forwards({one.module: one.forward(None, True) for one in plan.replaced}):
                return forward()
        return self._replay(key, plan, forward, tensors, ids if is_cached else None, rows, fuse_norms)

    def _is_all_chains(self, plan: PrefixPlan) -> bool:
        """Whether chains are the fastest way there is: faster than to follow the prefix call by call."""
        return self.runs_chains and self.dtype is None and any(one.links is not None for one in plan.replaced)

    def _may_export(self, plan: PrefixPlan, batch: list[torch.Tensor]) -> bool:
        """Whether the prefix is or may become a model of the runtime. One in int8 waits for its calibration."""
        if self.runtime is None or plan.is_idle or not self.runtime.serves(plan.reasons):
            return False
        calibration = self._calibration(plan, batch)
        return self.runtime.in_float32 or (calibration is not None and calibration.is_complete)

    def _calibration(self, plan: PrefixPlan, batch: list[torch.Tensor]) -> Calibration | None:
        """What the prefix is calibrated on; None: it is in float32."""
        return self.runtime.calibration(batch, plan.reasons) if self.runtime is not None else None

    def find(self, batch: Any, ids: Any, choice: Hashable = None) -> CachedRows | None:
        """The cached rows of a batch, without running anything; None if its program is not known or cannot be cached."""
        with without_function_modes():
            tensors = list(batches.tensors(batch))
            plan = self._programs.get(self._key(tensors, True, choice))
            if plan is None or plan.is_idle or plan.program.uncacheable is not None or self.features is None:
                return None
            return CachedRows(self._look_up(self.features, plan, tensors, ids), plan.needed(tensors))

    def _look_up(self, features: Features, plan: PrefixPlan, batch: list[torch.Tensor], ids: Any) -> Any:
        if plan.like is None:
            plan.like = next((one.like for one in self._alike if plan.keeps_like(one)), next(NEW))
            self._alike = [*self._alike[1 - _PROGRAMS :], plan]
        shapes = tuple((tensor.shape[1:], tensor.dtype) for tensor in batch)
        calibration = self._calibration(plan, batch)
        number = None if calibration is None else calibration.number
        features.begin((autocast_state(), shapes, plan.like, plan.signature(), number))  # whatever is chosen after the prefix
        return features.get(ids, plan.values[plan.frontier[0]].device)

    def models(self, batch: Any = None) -> Models:
        """The models with the weights of now, of programs that passes like those of now run: for such a batch, or for any."""
        key = (False, self._inside(None)) if batch is None else self._key(list(batches.tensors(batch)), False, None)
        found = {one: (plan, plan.on_runtime) for one, plan in self._programs.items() if one[: len(key)] == key}
        return {one: (plan, model) for one, (plan, model) in found.items() if model is not None and model.fits(plan)}

    def run_on(self, models: Models, forward: Callable[[], torch.Tensor], batch: Any) -> torch.Tensor | None:
        """forward() behind what one of these models computes, with the weights that it holds; None if there is none for such a
        batch. One whose program has changed is dropped."""
        with without_function_modes():
            tensors = list(batches.tensors(batch))
            key = self._key(tensors, False, None)
            if key not in models:
                return None
            plan, model = models[key]
            try:
                mode = CacheHit(plan, tensors, self._weights, model.run(plan, tensors), False)
            except Exception:  # PyTorch can run the prefix, or has its own words for what is wrong
                del models[key]
                return None
        out = self._follow(plan, mode, forward)
        if mode.diverged is not None:
            del models[key]
        return out

    def knows(self, batch: Any, ids: Any = None, choice: Hashable = None) -> bool:
        """Whether `run` would replay a program, and not record one."""
        with without_function_modes():
            kept = self.features is not None and ids is not None
            return self._key(list(batches.tensors(batch)), kept, choice) in self._programs

    def _key(self, tensors: list[torch.Tensor], kept: bool, choice: Hashable) -> tuple[Any, ...]:
        """The key of the program."""
        return kept, self._inside(choice), tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)

    def _others(self, key: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """The keys of programs that differ from this one by more than the batch, the longest unused first."""
        return [one for one in self._programs if one[:2] != key[:2]]

    def _inside(self, choice: Hashable) -> Hashable:
        """What decides on the program beside the batch."""
        return choice, model_state(self.model), autocast_state(), torch.is_grad_enabled(), self.runtime is not None

    def _record(
        self, key: tuple[Any, ...], forward: Callable[[], torch.Tensor], batch: list[torch.Tensor], samples: int | None
    ) -> torch.Tensor:
        with without_function_modes():
            recorder = ProgramRecorder(batch, samples, skips=self.runtime is not None)
        if has_hooks_inside(self.model):
            recorder.uncacheable = recorder.uncacheable or "modules have forward hooks"
        with entering(self.model, recorder) as entered, recorder:
            out = forward()
        with without_function_modes():
            plan = PrefixPlan(recorder.program(), self.model, self._names, self.dtype)
            plan.replaced = find_replaced(entered, plan)
            why = why_not(plan) if self.runtime is not None and not plan.is_idle else None
            plan.reasons |= {} if why is None else {"runtime": why}
            for kind in {tensor.device.type for tensor in batch} if plan.folds or plan.frozen_norms else ():
                norm_kernels(kind)
        self._programs[key] = plan
        if len(self._programs) > _PROGRAMS:
            del self._programs[next(iter(self._others(key) or self._programs))]
        self._weights.keep({fold for plan in self._programs.values() for fold in plan.weights})
        self._set_reasons(plan, samples is not None)
        return out

    def _compute(self, plan: PrefixPlan, batch: list[torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
        """The outputs of the prefix from the runtime, if it has a model with these weights."""
        model = plan.on_runtime
        if model is None or not self._may_export(plan, batch) or not model.fits(plan):
            return None
        calibration = self._calibration(plan, batch)
        if calibration is not None and calibration.is_complete and model.calibration != calibration.number:
            return None  # a model in int8 is due
        try:
            return model.run(plan, batch)
        except Exception as error:  # PyTorch can run the prefix, or has its own words for what is wrong
            plan.reasons["runtime"] = self.reasons["runtime"] = f"{model.loaded.title} failed: {error_text(error)}"
            return None

    def _mode(self, plan: PrefixPlan, batch: list[torch.Tensor], found: Any, keeps: bool, fuse_norms: bool) -> Replay:
        """How a pass runs, with the outputs of its prefix if they are there."""
        if found is not None:
            return CacheHit(plan, batch, self._weights, found, fuse_norms)
        if self._may_export(plan, batch):
            before, plan.last_weights = plan.last_weights, plan.signature()
            if before == plan.last_weights:  # weights that change in every step are not worth a model
                return Export(plan, batch, self._weights)
        return PrefixInference(plan, batch, self._weights, keeps, fuse_norms)

    def _replacing(self, plan: PrefixPlan, mode: Replay) -> AbstractContextManager[None]:
        """Skip modules of a prefix whose outputs are there, and run chains after it, where custom kernels serve."""
        if isinstance(mode, Export) or not plan.replaced:
            return nullcontext()
        used = [one for one in plan.replaced if isinstance(mode, CacheHit) or (self.runs_chains and one.links is not None)]
        return forwards({one.module: one.forward(mode, self.runs_chains) for one in used})

    def _build(self, plan: PrefixPlan, export: Export, batch: list[torch.Tensor]) -> None:
        built = self.runtime.build(plan, export, batch) if self.runtime is not None else None
        if isinstance(built, str):
            plan.reasons["runtime"] = self.reasons["runtime"] = built
            return
        if self.asks_int8 and built is not None and built.not_int8 is not None:
            plan.reasons["int8"] = self.reasons["int8"] = built.not_int8
        plan.on_runtime = built if self.runtime is not None and self.runtime.serves(plan.reasons) else None

    def _set_reasons(self, plan: PrefixPlan, kept: bool) -> None:
        """Take over the reasons for what is not done in this program."""
        self.reasons = dict(plan.reasons)
        if kept and plan.program.uncacheable is not None:
            self.reasons["cache"] = plan.program.uncacheable

    def _replay(
        self,
        key: tuple[Any, ...],
        plan: PrefixPlan,
        forward: Callable[[], torch.Tensor],
        batch: list[torch.Tensor],
        ids: Any,
        found: Any,
        fuse_norms: bool,
    ) -> torch.Tensor:
        program = plan.program
        with without_function_modes():
            computed, calibration = self._compute(plan, batch) if found is None else None, self._calibration(plan, batch)
            is_cacheable = calibration is None or (computed is not None and plan.on_runtime.calibration == calibration.number)
            mode = self._mode(plan, batch, computed if found is None else found, ids is not None, fuse_norms)
        out = self._follow(plan, mode, forward)
        if mode.diverged is None:
            self._replayed += 1
            with without_function_modes():
                if isinstance(mode, Export):
                    self._build(plan, mode, batch)
                keeps = found is None and ids is not None and is_cacheable
                if keeps and self.features is not None and mode.is_whole():
                    self.features.put(ids, mode.rows())
        elif mode.diverged == LEAKS:
            program.uncacheable = self.reasons["cache"] = mode.diverged
            plan.reasons |= {} if self.runtime is None else {"runtime": mode.diverged}
        elif mode.diverged == KEPT:
            plan.folds.clear()
            plan.reasons["folding"] = self.reasons["folding"] = mode.diverged
        else:
            self._diverged += 1
            self.reasons["program"] = mode.diverged
            self._programs.pop(key, None)
        return out

    def _follow(self, plan: PrefixPlan, mode: Replay, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """forward() in this mode; if it diverges from the program, as plain PyTorch (`mode.diverged` says why)."""
        captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        drawn = random_state() if isinstance(mode, CacheHit) and not captures else None
        try:
            failed = True
            try:
                with self._replacing(plan, mode), mode:
                    out = forward()
                failed = False
            finally:
                with without_function_modes():
                    mode.close(failed)
            if mode.leaks():
                gc.collect()
                if mode.leaks():
                    raise Diverged(mode.leak)
        except Diverged as why:
            mode.diverged = str(why)
            if drawn is not None:
                set_random_state(drawn)
            out = forward()
        return out
