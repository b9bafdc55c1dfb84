"""`Engine`: runs a session's steps. It alone decides and holds the mode that they run in.

`lean/` keeps for backward only what the selection needs. `prefix/` runs what needs no gradient as inference, or takes it from a
cache. `cuda_graphs/` launches a whole step at once. `slices/` train channels. Plain autograd is the reference of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from pliant.core.budget import Budget
from pliant.core.mode import Mode
from pliant.core.types import Part
from pliant.engine.compiled_parts import CompiledParts
from pliant.engine.cuda_graphs.graphs import Graphs, Work, why_no_capture
from pliant.engine.derived_weights import Derived
from pliant.engine.ends import Ends
from pliant.engine.forward_passes import ForwardPasses
from pliant.engine.kernels.switch import CustomKernels
from pliant.engine.lean.frozen_batchnorm import frozen_scales, watch_batch_norms
from pliant.engine.modes import parse, pick
from pliant.engine.own_loop import CallersStep
from pliant.engine.prefix.feature_cache import Features
from pliant.engine.prefix.prefix import CachedRows, Prefix
from pliant.engine.prefix.prefix_model import runtime_for
from pliant.engine.slices.checks import check_can_train
from pliant.engine.slices.slices import Slices
from pliant.engine.why_not import News, reasons
from pliant.runtime.batches import Loss, map_tensors, tensors
from pliant.runtime.memory import StepPeak
from pliant.runtime.optimizer_step import Update, needs_closure
from pliant.runtime.ranks import Ranks

_Changed = bool | None  # None: as it was
_Prepare = Callable[[], Sequence[Derived]]


class Engine(ForwardPasses):
    """Runs the steps of one model in one mode at a time, and says why a mode that was asked for does not serve."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        update: Update,
        engine: str = "auto",
        features: Features | None = None,
        prefix_dtype: torch.dtype | None = None,
        ranks: Ranks | None = None,
        in_int8: bool = False,
    ) -> None:
        self._model, self._loss, self._update, self._ranks = model, loss, update, ranks or Ranks()
        self._asked, self._cuda = parse(engine), next(model.parameters()).device.type == "cuda"
        self._kernels, self._may_be_plain = CustomKernels(model), False
        self.slices: Slices | None = None
        self.features, self.units_are_sliced = features, False  # the latter: whether channels may be chosen
        self.origin: Mapping[str, Any] = {}  # what was found about the loss when its cost was measured (`Profile.origin`)
        self._chosen: Hashable = None
        self._prefix = Prefix(model, features, prefix_dtype, runtime_for(model, in_int8))
        self._compiled, self._norms = CompiledParts(model, loss), watch_batch_norms(model)
        self._graphs: Graphs | None = None
        self._held: Hashable = None  # the selection and mode of the captured steps that are held
        self._own_loop: CallersStep | None = None
        self._memory_is_limited, self._captures_pay, self._room = False, True, True  # see `settle`
        self._is_callers = self._no_ids = self._is_eager = False
        self.not_captured: str | None = None  # why "auto" has given up on captures
        self.mode, self._news, self._ends = Mode(), News(), Ends()
        self.fills = self.skipped = False  # whether the last batch was put into the cache, and its step left out
        self.use_optimizer(optimizer)

    # ------------------------------------------------------------ the mode

    def settle(
        self, budget: Budget | None = None, *, room: _Changed = None, own_loop: _Changed = None, has_ids: _Changed = None
    ) -> None:
        """Pick the mode of the coming steps anew, after what changed.

        `room`: whether what captured steps hold fits into the limit on memory. `own_loop`: whether the caller takes the steps.
        `has_ids`: whether batches name their samples, which a cache needs.
        """
        if budget is not None:
            self._memory_is_limited, self._may_be_plain = budget.memory is not None, self._asked.is_auto and budget == Budget()
            fast = budget.time is not None or budget.energy is not None
            self._captures_pay = budget.memory is None or fast  # else memory is better spent on training
        self._room = self._room if room is None else room
        self._is_callers = self._is_callers if own_loop is None else own_loop
        self._no_ids = self._no_ids if has_ids is None else not has_ids
        self._prefix.memory_is_limited = self._memory_is_limited
        self.mode = self._pick()

    def is_settled(self, own_loop: bool, has_ids: bool) -> bool:
        """Whether the mode is the right one for such steps."""
        return (own_loop, not has_ids) == (self._is_callers, self._no_ids)

    def _pick(self) -> Mode:
        pays = self._captures_pay or not self._asked.is_auto
        has_room = not self._memory_is_limited or (self._room and pays)
        mode = pick(
            self._asked,
            cuda=self._cuda,
            caches=self.caches and not self._no_ids,
            memory_is_limited=self._memory_is_limited,
            captures=has_room and (self.not_captured or self.why_no_capture) is None,
            custom_kernels=self._kernels.serve,
            runtime=self._prefix.on_runtime,
        )
        mode = replace(mode, lean=mode.lean and "differentiates" not in self.origin)
        if self._ranks.shards or not self._is_callers:
            return Mode() if self._ranks.shards else mode
        prefix = mode.prefix and (not self._cuda or not self._asked.is_auto) and self.slices is None
        return Mode(lean=mode.lean and not self._compiled.is_scripted, prefix=prefix)

    @property
    def why_no_capture(self) -> str | None:
        """Why no step can be captured, as far as is known before one is tried."""
        if not self._ranks.is_alone:
            return "several processes train the model"
        is_random, is_sliced = "readings" in self.origin, self.units_are_sliced or self.slices is not None
        return why_no_capture(self._graphs, self._update, is_random, is_sliced)

    @property
    def could_capture(self) -> bool:
        """Whether captured steps come into question at all."""
        return self._cuda and self._asked.may("graphs") and self._ranks.is_alone

    @property
    def seconds_per_capture(self) -> float:
        """What another selection costs beside its steps, as far as is known."""
        captured = self._graphs.seconds_per_capture if self._graphs is not None and self.mode.graphs else 0.0
        return captured + (self._prefix.seconds_per_model if self.mode.prefix else 0.0)

    @property
    def caches(self) -> bool:
        """Whether the results of the prefix are kept by sample, as far as is known."""
        return self.features is not None and self._asked.may("prefix") and "cache" not in self._prefix.reasons

    @property
    def trains_alike(self) -> bool:
        """Whether a plain step trains whole parameters as this engine does: on features that are computed in each step, in the
        precision of the model."""
        exact = self.features is None and self._prefix.dtype is None and not self._prefix.asks_int8
        return exact and not self.units_are_sliced

    @property
    def why_not(self) -> dict[str, str]:
        """What the engine does not do here, and why."""
        no_graphs = self._graphs.why_not if self.mode.graphs and self._graphs is not None else self.not_captured
        no_graphs = no_graphs or (None if self.mode.graphs else self.why_no_capture)
        flags = self._cuda, self._memory_is_limited, self._is_callers, self._no_ids, self._ranks.shards
        out = reasons(
            self._asked, self.mode, self._prefix, no_graphs, self._news.not_lean, "differentiates" in self.origin, *flags
        )
        if self._ends.left_out:
            out["input gradients"] = "session.step leaves .grad of inputs empty; loss.backward() in your own loop fills it"
        return out | self._compiled.why_not(self.mode, self.slices is not None) | self._kernels.reasons

    @property
    def not_inferred(self) -> dict[str, str]:
        """Why the prefix of this selection is not cached, or not run by a runtime, as far as is known."""
        return dict(self._prefix.reasons)

    @not_inferred.setter
    def not_inferred(self, reasons: Mapping[str, str]) -> None:
        self._prefix.reasons.update(reasons)
        self.settle()

    def news(self) -> list[str]:
        """What the engine does not do, each reason once."""
        return self._news.tell(self.why_not)

    # ------------------------------------------------------------ what trains

    def check(self, parts: Iterable[Part], optimizer: torch.optim.Optimizer) -> None:
        """Raise if these parts cannot be trained with this optimizer, before anything is changed."""
        if any(part.dim is not None for part in parts):
            check_can_train(optimizer, "differentiates" in self.origin)

    def check_kernels(self, batch: Any) -> None:
        """Whether custom kernels serve this model: they are tried once, before anything is measured with them."""
        if self._swaps and not self._kernels.are_right(self._model, self._loss, batch):
            self.settle()

    def choose_(self, parts: Iterable[Part], params: Mapping[str, nn.Parameter]) -> set[str]:
        """From now on these parts train. Returns the names of the parameters of which only a slice does."""
        parts = tuple(parts)
        self._chosen = frozenset(parts)
        self._prefix.reasons.clear()  # another boundary may be cached, or run elsewhere
        old, slices = self.slices, Slices(params, parts)
        self.slices = slices if len(slices) else None
        self._kernels.is_off = self._may_be_plain and not len(slices) and params.keys() <= {part.param for part in parts}
        self._ends = Ends((params[part.param] for part in parts if part.param not in slices.parts), params.values())
        self.settle()
        if self.slices is not None and old is not None:
            self.slices.carry_over(old, self.optimizer)
        return set(slices.parts)

    def forget(self) -> None:
        """Weights or optimizer state were replaced: slices get fresh state, and nothing that was prepared counts."""
        if self.slices is not None:
            self.slices.forget()
        self._prefix.forget()
        self.not_captured = None
        if self._graphs is not None:
            self._graphs.forget()

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer, with the hooks that it has now, takes the steps from now on."""
        self.optimizer = optimizer
        self.forget()
        if self._cuda:
            self._graphs = Graphs(self._model, self._loss, optimizer)
        self.settle()

    def make_room(self) -> None:
        """Where memory is limited: release captured steps, which are captured again when needed, and the allocator's cache."""
        if self._memory_is_limited and self._graphs is not None:
            self._graphs.make_room()
            if self._cuda:
                torch.cuda.empty_cache()

    def leaves(self) -> dict[str, torch.Tensor]:
        """The tensor that collects the gradient of each slice, by the name of its parameter."""
        return self.slices.leaves() if self.slices is not None else {}

    def ends_of(self, loss: torch.Tensor) -> list[torch.Tensor] | None:
        """What the backward pass of a loss is to reach; None: all that it would."""
        return self._ends.of(loss, self.leaves().values(), self.optimizer)

    # ------------------------------------------------------------ a step

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.slices is not None:
            self.slices.zero_grad()

    def run(
        self, batch: Any, ids: Any = None, *, first: bool = True, last: bool = True, peak: StepPeak | None = None
    ) -> torch.Tensor:
        """Forward, backward and, after the `last` batch of a step, the optimizer's step. Returns the loss, detached.

        `peak` measures the bytes of the step, which then runs eagerly.
        """

        def finish(value: torch.Tensor) -> torch.Tensor:
            self._update.backward(value, self.ends_of(value))
            value = value.detach()  # frees what backward did not need
            if last:
                if peak is not None:
                    peak.updating()
                with self.stepping(self.optimizer):
                    self.skipped = not self._update.step(self.optimizer, fuse=self.mode.prefix)
            return value

        if needs_closure(self.optimizer):
            value, self.skipped = self._update.step_with(self.optimizer, partial(self._loss_of, batch, None), self.ends_of)
            return value
        stored = self.features.stored if self.features is not None else 0
        graphs = self._graphs if self.mode.graphs and peak is None and self.slices is None else None
        self._is_eager = graphs is None
        self._compiled.run(self._chosen)
        ids = ids if self.mode.cached else None
        if graphs is None:
            if self._graphs is not None and self._memory_is_limited:
                self._graphs.make_room()
            with self._ranks.syncing(last):
                value = finish(self._loss_of(batch, ids))
        elif ids is not None:
            value = self._run_cached(graphs, batch, ids, finish, (first, last))
        else:
            prepare = partial(self._prepare, batch, None)
            value = self._captured(graphs, batch, lambda batch: finish(self._loss_of(batch, None)), (first, last), prepare)
        if graphs is not None and graphs.why_not is not None and not graphs.replays and self._asked.is_auto:
            self.not_captured = graphs.why_not
            self.settle()
        elif (self.mode.cached and not self.caches) or (self.mode.prefix and self._prefix.is_refused):
            self.settle()
        self.fills = self.features is not None and self.features.stored > stored
        return value

    def _captured(
        self, graphs: Graphs, batch: Any, work: Work, part: tuple[bool, bool], prepare: _Prepare, needed: Hashable = None
    ) -> torch.Tensor:
        choice = self._chosen, str(self.mode), part, needed
        if self._memory_is_limited and self._held != choice[:2]:
            self._held = choice[:2]
            graphs.make_room()
        return graphs.step(batch, work, choice=choice, first=part[0], prepare=prepare, is_tight=self._memory_is_limited)

    def _prepare(self, batch: Any, ids: Any) -> list[Derived]:
        """Do what is done once per selection, so that a capture does not contain it. Returns the weights that it will use."""
        derived = frozen_scales(self._norms) if self.mode.lean else []
        if self.mode.prefix:
            if not self._prefix.knows(batch, ids, self._sliced):
                with self.forward():
                    self._rehearse(batch, ids, passes=2)
            derived += self._prefix.derived(batch, ids, self._sliced)
        if self._memory_is_limited and self._cuda:
            torch.cuda.empty_cache()  # a capture takes its memory from another pool than eager steps
        return derived

    def _run_cached(
        self, graphs: Graphs, batch: Any, ids: Any, finish: Callable[[torch.Tensor], torch.Tensor], part: tuple[bool, bool]
    ) -> torch.Tensor:
        """A captured step reads cached features and whatever else of the batch it needs; one that fills the cache is eager."""
        if not self._prefix.knows(batch, ids, self._sliced):
            with self.forward():
                self._rehearse(batch, ids)
        found = self._prefix.find(batch, ids, self._sliced)
        if found is None or found.rows is None:
            return finish(self._loss_of(batch, ids, found))
        needed = found.needed
        own = [tensor for i, tensor in enumerate(tensors(batch)) if i in needed]
        bare = map_tensors(batch, lambda tensor: None)

        def work(given: Any) -> torch.Tensor:
            rows, own, _ = given
            ones, places = iter(own), count()
            there = map_tensors(batch, lambda tensor: next(ones) if next(places) in needed else tensor)
            return finish(self._loss_of(there, ids, CachedRows(rows, needed)))

        return self._captured(graphs, (found.rows, own, bare), work, part, partial(self._prepare, batch, ids), needed)

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """The context of clipping and of the optimizer's step."""
        self._ranks.average_gradients_(self.leaves().values())  # of which DDP knows nothing
        return self.slices.swapped_in(optimizer) if self.slices is not None else nullcontext()

    # ------------------------------------------------------------ the caller's own loop

    def hook_own_step(self, method: str, before: Callable[[], None] | None) -> None:
        """Until `release`, the caller's forward passes (by `method`, `before()` first) and optimizer step run as ours would."""
        self.release()
        if self.slices is not None:
            self.slices.zero_grad()
        if self.mode != Mode() or self.slices is not None or self._compiled.goes_stale or before is not None:
            self._own_loop = CallersStep(self._model, self.optimizer, self, method, before)

    def call(self, forward: Callable[[], Any], given: Any) -> Any:
        """A forward pass of the caller's on these arguments."""
        return self._prefix.run(forward, given, None, self._sliced) if self.mode.prefix else forward()

    def release(self) -> None:
        """Leave the caller's model and optimizer as they were found."""
        step, self._own_loop = self._own_loop, None
        if step is not None:
            step.close()
