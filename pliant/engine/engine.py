"""How a chosen step runs. `plain` is ordinary freezing with ordinary autograd: the reference of every comparison.

What the engines do: `lean` keeps for backward only what the choice needs, `prefix` runs what needs no gradient as inference or
takes it from a cache, `graphs` launches a whole step at once. `ways` picks among them; `slices` train channels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from pliant.core.budget import Budget
from pliant.core.types import Part
from pliant.engine.cuda_graphs.graphs import Graphs, Work
from pliant.engine.derived_weights import Derived
from pliant.engine.kernels.arm.switch import Swapped, is_slow_here
from pliant.engine.lean.frozen_batchnorm import frozen_scales, watch_batch_norms
from pliant.engine.lean.lean import Lean
from pliant.engine.modes import Race, Way, allowed
from pliant.engine.own_loop import CallersStep
from pliant.engine.prefix.feature_cache import Features
from pliant.engine.prefix.prefix import CachedRows, Prefix
from pliant.engine.slices.slices import Sliced, Slices, check_elementwise
from pliant.graph.backward import compute_loss
from pliant.runtime.batches import Around, Loss, map_tensors, tensors
from pliant.runtime.sandbox import sandbox


def plain(slices: Slices | None = None) -> AbstractContextManager[Any]:
    """Ordinary autograd, with the slices that train, if any do."""
    return nullcontext() if slices is None else Sliced(slices)


ENGINES: dict[str, Callable[..., AbstractContextManager[Any]]] = {"plain": plain, "lean": Lean}


class Engine:
    """Runs a session's steps: knows the way they go, what their forward passes run inside of, and the slices that train."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        engine: str,
        features: Features | None = None,
        prefix_dtype: torch.dtype | None = None,
    ) -> None:
        self._model, self._loss = model, loss
        self._asked = engine
        self._cuda = next(model.parameters()).device.type == "cuda"
        self._is_slow = not self._cuda and is_slow_here(model)
        self.features = features
        self.slices: Slices | None = None
        self.gave_up_cache = False  # since filling it takes too long
        self.is_tight = False  # whether memory is limited
        self.may_hold = True  # whether choices leave room for what captured steps hold on to, where memory is limited
        self._held: Hashable = None  # the choice and the way of the captured steps that are held
        self.race = Race(self._allowed(Budget()))
        self._prefix = Prefix(model, features, prefix_dtype)
        self._norms = watch_batch_norms(model)
        self._graphs: Graphs | None = None
        self._choice: Hashable = None
        self._told: dict[str, str] = {}
        self._not_lean: set[str] = set()
        self._told_lean: set[str] = set()
        self._callers: CallersStep | None = None
        self._no_ids = self._is_callers = self._is_eager = False
        self.fills = False  # whether the last batch was put into the cache

    # ------------------------------------------------------------ which way

    @property
    def way(self) -> Way:
        """How the coming step runs."""
        return self.race.now

    @property
    def keeps(self) -> str:
        """What the forward pass keeps for backward: "plain" or "lean", which is what bytes hang on."""
        return "lean" if self.way.lean else "plain"

    @property
    def may_capture(self) -> bool:
        """Whether one of the ways that are allowed here makes a step one launch, and nothing is known that forbids it."""
        there = self._graphs is not None and self._graphs.refusal is None and self.slices is None
        return there and any(way.graphs for way in self.race.ways)

    @property
    def captures(self) -> bool:
        """Whether steps are one launch now."""
        graphs = self._graphs
        return self.way.graphs and graphs is not None and graphs.why_not is None and graphs.replays > 0

    @property
    def seconds_per_choice(self) -> float:
        """What it takes to run another choice for the first time, beside its steps, as far as is known."""
        return self._graphs.seconds_per_capture if self._graphs is not None and self.way.graphs else 0.0

    def settle(self, budget: Budget, races: bool, winner: str | None = None, waits: bool = False) -> bool:
        """Pick among the ways that are allowed: the way that won before, else by a race on real steps, or without one the
        first. `waits`: a step that is not captured waits so much for launches that it takes no part. Tells whether it is the
        one that won before."""
        self.is_tight = budget.memory is not None
        ways, behind = self._allowed(budget), self.race.far_behind() if races else set()
        without = {way for way in ways if not way.graphs} if waits else set()
        if len(ways) - len(without) < 2:  # a race tells whether steps can be captured at all
            without = set()
        known = next((way for way in ways if str(way) == winner), None)
        self.race = Race(ways, known if races else known or ways[0], behind, without)
        return known is not None

    def serves(self, budget: Budget) -> bool:
        """Whether the ways that steps may go now are those of this budget."""
        return self._allowed(budget) == self.race.allowed

    def _allowed(self, budget: Budget) -> list[Way]:
        ways = allowed(
            self._asked,
            memory_is_short=budget.memory is not None,
            cuda=self._cuda,
            caches=self.features is not None,
            macs_are_short=budget.macs is not None,
            may_hold=self.may_hold and budget.time is not None,  # else memory is better spent on training
        )
        others = [way for way in ways if not way.cache]
        return others if self.gave_up_cache and others else ways

    @property
    def caches(self) -> bool:
        """Whether what is computed before the choice is kept, as far as is known."""
        return self.way.cache and "cache" not in self._prefix.reasons

    @property
    def around(self) -> Around:
        """What forward passes run inside of as far as prices hang on it, whatever is chosen."""
        return Swapped if any(self._swaps(way) and not way.lean for way in self.race.ways) else nullcontext

    def give_up_cache(self) -> None:
        """Nothing is cached from now on, if there is another way."""
        others = [way for way in self.race.ways if not way.cache]
        if others and self.features is not None:
            self.gave_up_cache, self.race = True, Race(others)
            self.features.clear()

    def see(self, seconds: Callable[[], float]) -> bool:
        """A step of ours took so long; tells whether the fastest way is known now. A cache that is not on it is emptied."""
        over = self.race.see(seconds)
        if over and self.features is not None:
            if self.way.cache and not self.features.hits:  # as fast as the same without, which is what it was
                least, cached = self.race.least, self.way
                self.race.winner = replace(cached, cache=False)
                least.setdefault(self.race.winner, least[cached])
            if not self.way.cache:
                self.features.clear()
        return over

    @property
    def raced(self) -> tuple[float, float | None]:
        """Seconds of a step the way that won, and the same way but for what runs as inference, if that took part."""
        least, way = self.race.least, self.way
        return least[way], least.get(replace(way, prefix=False)) if way.prefix and not way.cache else None

    @property
    def why_not(self) -> dict[str, str]:
        """What the engines that were asked did not do, and why."""
        out = dict(self._prefix.reasons) if any(way.prefix for way in self.race.ways) else {}
        if self.features is not None and not any(way.cache for way in self.race.ways):
            out["cache"] = "filling it takes more than it can save" if self.gave_up_cache else "the prefix engine is off"
        elif self.features is not None and not self.way.cache and not self.race.is_on:
            out.setdefault("cache", "steps without it are faster here")
        if self._no_ids and self.features is not None and not self.features.hits:  # nor did anybody else find something
            out["cache"] = "the batch says not which samples it holds: give ids, or wrap the dataset in data.with_ids"
        if any(way.graphs for way in self.race.ways):
            why = "there is no CUDA device" if self._graphs is None else self._graphs.why_not
            if why is not None:
                out["graphs"] = why
        if self._is_callers:  # only forced ones: "auto" does not count on them here
            forced = [name for name in ("prefix", "graphs") if getattr(self.way, name)]
            out.update(dict.fromkeys(forced, "the step is the caller's own: session.step takes it that way"))
        if self._not_lean:
            out["lean"] = _as_plain(self._not_lean)
        return out

    def news(self) -> list[str]:
        """What is not done, told once."""
        now, names = self.why_not, self._not_lean - self._told_lean
        self._told_lean |= names
        fresh = [f"not {name}: {why}" for name, why in now.items() if name != "lean" and self._told.get(name) != why]
        self._told.update(now)
        return [*fresh, f"not lean: {_as_plain(names)}"] if names else fresh

    # ------------------------------------------------------------ what trains

    def check(self, parts: Iterable[Part], optimizer: torch.optim.Optimizer) -> None:
        """Whether this can train, before anything is changed."""
        if any(part.dim is not None for part in parts):
            check_elementwise(optimizer)

    def choose_(self, parts: Iterable[Part], params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> set[str]:
        """From now on these parts train; gives the names of the parameters of which only a slice does."""
        parts = tuple(parts)
        self._choice = frozenset(parts)
        old, self.slices = self.slices, Slices(params, parts)
        if not len(self.slices):
            self.slices = None
            return set()
        if old is not None:
            self.slices.carry_over(old, optimizer)
        return set(self.slices.parts)

    @property
    def _sliced(self) -> Hashable:
        """The choice as far as trainable flags do not tell it."""
        return self._choice if self.slices is not None else None

    def forget(self) -> None:
        """Weights or optimizer state were replaced: slices start with a fresh one, and nothing that was prepared counts."""
        if self.slices is not None:
            self.slices.forget()
        self._prefix.forget()
        if self._graphs is not None:
            self._graphs.forget()

    def step_with(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer, with the hooks that it has now, takes the steps from now on."""
        self.forget()
        if self._cuda:
            self._graphs = Graphs(self._model, self._loss, optimizer)

    def make_room(self) -> None:
        """Where memory is limited: let go of what captured steps hold on to, which are captured anew, and of what is cached."""
        if self.is_tight and self._graphs is not None:
            self._graphs.make_room()
            if self._cuda:
                torch.cuda.empty_cache()

    def leaves(self) -> dict[str, torch.Tensor]:
        """What stands for each slice where gradients gather, by the name of its parameter."""
        return self.slices.leaves() if self.slices is not None else {}

    # ------------------------------------------------------------ a step of ours

    def zero_grad(self) -> None:
        if self.slices is not None:
            self.slices.zero_grad()

    def take(
        self,
        batch: Any,
        ids: Any,
        finish: Callable[[torch.Tensor], torch.Tensor],
        part: tuple[bool, bool] = (True, True),
        eager: str | None = None,
    ) -> torch.Tensor:
        """One batch: the user's loss, then `finish` (backward and, where due, the optimizer's step).

        `part` says whether this is the first and whether it is the last batch of a step; `eager`, why every operation must be
        run from Python, if it must.
        """
        way, stored = self.way, self.features.stored if self.features is not None else 0
        self._no_ids, self._is_callers = self.features is not None and ids is None, False
        ids = ids if way.cache else None
        graphs = self._graphs if way.graphs else None
        if graphs is not None and self.slices is not None:
            eager = "channels are chosen"
        if graphs is not None and self.is_tight and not self.may_hold:
            eager = "memory is limited, and leaves no room for what a captured step holds on to"
        self._is_eager = graphs is None or eager is not None
        if graphs is None or eager is not None:
            if self._graphs is not None:
                self._graphs.why_not = eager
                if self.is_tight:
                    self._graphs.make_room()
            value = finish(self._loss_of(batch, ids))
        elif ids is not None:
            value = self._take_cached(graphs, batch, ids, finish, part)
        else:
            prepare = partial(self._prepare, batch, None)
            value = self._captured(graphs, batch, lambda batch: finish(self._loss_of(batch, None)), part, prepare)
        self.fills = self.features is not None and self.features.stored > stored
        return value

    def _captured(
        self,
        graphs: Graphs,
        batch: Any,
        work: Work,
        part: tuple[bool, bool],
        prepare: Callable[[], Sequence[Derived]],
        needed: Hashable = None,
    ) -> torch.Tensor:
        choice = self._choice, str(self.way), part, needed
        if self.is_tight and self._held != choice[:2]:
            self._held = choice[:2]
            graphs.make_room()
        return graphs.step(batch, work, choice=choice, first=part[0], prepare=prepare, is_tight=self.is_tight)

    def _prepare(self, batch: Any, ids: Any) -> list[Derived]:
        """Do whatever is done once per choice, so that a capture does not hold it; gives what it will hold on to."""
        made = frozen_scales(self._norms) if self.way.lean else []
        if self.way.prefix:
            if not self._prefix.knows(batch, ids, self._sliced):
                with self._inside():
                    self._rehearse(batch, ids)
                    self._rehearse(batch, ids)  # the first pass records a program, and the next makes what it needs
            made += self._prefix.derived(batch, ids, self._sliced)
        if self.is_tight and self._cuda:
            torch.cuda.empty_cache()  # a capture takes its memory from elsewhere than eager steps do
        return made

    def _take_cached(
        self, graphs: Graphs, batch: Any, ids: Any, finish: Callable[[torch.Tensor], torch.Tensor], part: tuple[bool, bool]
    ) -> torch.Tensor:
        """A step from the cache reads the features and what else of the batch is needed; what fills the cache runs eagerly."""
        if not self._prefix.knows(batch, ids, self._sliced):
            with self._inside():
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

    def _loss_of(self, batch: Any, ids: Any, found: CachedRows | None = None) -> torch.Tensor:
        with self.forward() as inside:
            value = self._forward(batch, ids, found)
        self.after(inside)
        return value

    def compute(self, function: Loss, batch: Any, ids: Any) -> torch.Tensor:
        """function(model, batch), with what needs no gradient from the cache: the same features as steps use."""
        choice = self._sliced, function  # another program than that of the loss
        with torch.enable_grad(), self._inside():  # what needs a gradient tells where the cached part ends
            return self._prefix.run(lambda: function(self._model, batch), batch, ids, choice).detach()

    def _forward(self, batch: Any, ids: Any, found: CachedRows | None) -> torch.Tensor:
        def forward() -> torch.Tensor:
            return compute_loss(self._model, self._loss, batch)

        if not self.way.prefix:
            return forward()
        if not self._prefix.knows(batch, ids, self._sliced):
            self._rehearse(batch, ids)
        return self._prefix.run(forward, batch, ids, self._sliced, found, self._rests)

    def _rehearse(self, batch: Any, ids: Any) -> None:
        """One pass that leaves no trace, so that the program is known and every step of a choice runs the same way."""
        spare = map_tensors(batch, torch.clone)
        with sandbox(self._model):
            self._prefix.run(
                lambda: compute_loss(self._model, self._loss, spare), spare, ids, self._sliced, fuse_norms=self._rests
            )

    @property
    def _rests(self) -> bool:
        """Whether norms at rest have kernels of ours: where a step is one launch, so that Python costs nothing, and where
        nobody packs what is kept."""
        return self.way.graphs and not self.way.lean and not self._is_eager

    def forward(self) -> AbstractContextManager[Any]:
        """What a forward pass runs inside of; tell `after` of it when it is done."""
        return self._inside()

    def _inside(self) -> AbstractContextManager[Any]:
        """What a forward pass of the coming step runs inside of, whichever pass it is."""
        engine = ENGINES[self.keeps](self.slices)
        return _swapping(engine) if self._swaps(self.way) else engine

    def _swaps(self, way: Way) -> bool:
        """Whether slow convolutions are swapped for ours. Gradients of "plain" and "lean" are PyTorch's to the last bit, and
        slices see to it themselves."""
        return way.prefix and self.slices is None and self._is_slow

    def after(self, inside: Any) -> None:
        """Remember what it could not do."""
        self._not_lean |= set(getattr(inside, "not_lean", ()))

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Clipping and the optimizer's step go inside of this."""
        return self.slices.swapped_in(optimizer) if self.slices is not None else nullcontext()

    # ------------------------------------------------------------ a step of the caller's

    def hang_on(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Until `let_go`, the caller's forward passes and the optimizer's step run as ours would, where hooks can make them."""
        self._is_callers = True
        self.let_go()
        self.zero_grad()
        if self.way.lean or self.slices is not None:
            self._callers = CallersStep(model, optimizer, self)

    def let_go(self) -> None:
        if self._callers is not None:
            self._callers.close()
            self._callers = None


@contextmanager
def _swapping(inside: AbstractContextManager[Any]) -> Iterator[Any]:
    with Swapped(), inside as engine:
        yield engine


def _as_plain(functions: set[str]) -> str:
    return f"{', '.join(sorted(functions))} keep what plain autograd keeps"
