"""Whole steps on copies of the parameters: the time of the optimizer, and whether the parts of a profile add up."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from pliant.core.mode import Mode
from pliant.core.types import Part, Unit
from pliant.cost import from_graph as charges
from pliant.cost.charge import ChargeKind
from pliant.cost.measurements import Array, Sizes, Times
from pliant.cost.profile import Profile
from pliant.graph.backward import Graph, compute_loss, read
from pliant.runtime.batches import Around, Loss, Ready
from pliant.runtime.batchnorm import BatchNormModes
from pliant.runtime.clock import Watch
from pliant.runtime.energy import Meter, MeterError
from pliant.runtime.memory import LiveBytes, inference_peak
from pliant.runtime.optimizer_step import Update
from pliant.runtime.rng import seed_
from pliant.runtime.sandbox import hide_step_, scratch
from pliant.runtime.working import told

_NOISE = 0.01  # relative, of a whole step
_TRUST = 0.1, 0.5  # how far the parts may be off; and where they are not those that run: by hooks on CUDA, or by the engine
_READ_EVERY, _MOST_AT_ONCE = 0.02, 1000  # seconds, and steps, that run before an energy meter is read again
_PATIENCE = 10.0  # seconds that an energy meter may stand still
_UNSEEN = 5e-6, 2e-5  # seconds per node that no hook sees, and how far off that may be


@dataclass
class StepTiming:
    """Times steps like the user's, on a scratch optimizer over copies. Runs inside `sandbox`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    batch: Any
    params: Mapping[str, nn.Parameter]
    norms: BatchNormModes
    update: Update
    around: Around = nullcontext
    freeze: bool = True  # whether a step freezes what it does not train
    seed: int | None = None  # of the random numbers that each step starts from; None: they go on
    ready: Ready | None = None  # how the engine runs forward passes, if it does more than `around()`
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(next(iter(self.params.values())).device)
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self.mine = {name: param for name, param in self.params.items() if id(param) in held}
        self._like: torch.optim.Optimizer | None = None
        copies: list[nn.Parameter] = []
        if self.mine:
            self._like, copies = scratch(self.optimizer, list(self.mine.values()))
            hide_step_(self._like)
        self._copies = dict(zip(self.mine, copies, strict=True))

    def step(self, chosen: Collection[str], ready: Ready | None = None) -> float:
        """Seconds of one whole step that trains these parameters. `ready` makes its forward pass; None: PyTorch does, inside of
        `around()`."""
        for name, param in self.params.items():
            param.requires_grad_(name in chosen or not self.freeze)
            param.grad = None
        self.norms.hold_(self.params, chosen)
        for copy in self._copies.values():
            copy.grad = None
        self._trained = [name for name in self.params if name in chosen]
        self._forward = self._as_written if ready is None else ready(self.batch)
        if self.seed is not None:
            seed_(self.seed)
        torch.clear_autocast_cache()
        seconds, _ = self.watch.time(self._step)
        return seconds

    def _as_written(self) -> torch.Tensor:
        with self.around():
            return compute_loss(self.model, self.loss, self.batch)

    def _step(self) -> None:
        value = self._forward()
        grads = self.update.gradients(value, [self.params[name] for name in self._trained])
        for name, grad in zip(self._trained, grads, strict=True):
            if name in self._copies:
                self._copies[name].grad = grad
        del grads
        if self._like is not None:
            self.update.step(self._like)

    def peak(self) -> tuple[int, int]:
        """Peak live bytes of a step that trains what is trainable now, and of the forward pass alone."""
        chosen = [name for name, param in self.params.items() if param.requires_grad]
        device = next(iter(self.params.values())).device
        alone = inference_peak(lambda: self.loss(self.model, self.batch), device)
        if alone is None:
            alone = max(read(self.model, self.loss, self.batch).inference)
        with LiveBytes(device) as live:
            self.step(chosen)  # makes the optimizer's state
            live.forget()
            self.step(chosen)
            return live.peak, alone

    def watts(self, meter: Meter, least: float, clock: Callable[[], float]) -> float:
        """Mean power of full steps, one after the other, over at least `least` seconds between two jumps of the meter.

        A GPU waits while its meter is read (4 ms on an H200), so the meter is read at both ends alone. Before that, steps run
        for half as long: clocks rise under load.
        """
        self.step(self.params)  # sets what trains, and makes the optimizer's state
        start = clock()
        self.step(self.params)
        steps = min(math.ceil(_READ_EVERY / max(clock() - start, 1e-6)), _MOST_AT_ONCE)

        def train() -> float:
            for _ in range(steps):
                self._step()
            self.watch.settle()
            return clock()

        def jump() -> tuple[float, float]:
            before, now = meter.joules(), clock()
            patience = now + _PATIENCE
            while now < patience:
                now, joules = train(), meter.joules()
                if joules > before:
                    return now, joules
            raise MeterError(f"{meter.name} has not moved in {_PATIENCE:.0f} s of training: energy= needs one that does.")

        until = clock() + least / 2
        while train() < until:
            pass
        begun, first = jump()
        while train() < begun + least:
            pass
        ended, last = jump()
        return (last - first) / (ended - begun)

    # ------------------------------------------------------------ the optimizer

    def update_seconds(self, repeats: int, alone: bool) -> tuple[list[float], list[float]]:
        """Seconds of clipping and stepping: fixed, per tensor and per byte, from steps over three sets of parameters; and those
        of a GPU that finds them issued, where they are asked for (`alone`).

        The first step of each, which makes the optimizer's state, does not count.
        """
        by_size = sorted(self.mine, key=lambda name: self.mine[name].numel())
        if self._like is None:
            return [0.0] * 3, [0.0] * 3
        rows, seconds, queued = [], [], []
        for names in (by_size, by_size[: (len(by_size) + 1) // 2], by_size[:1]):
            tries = [self._update_once(names) for _ in range(repeats + 1)]
            rows.append([1.0, len(names), sum(self.mine[n].numel() * self.mine[n].element_size() for n in names)])
            seconds.append(self.watch.typical(tries[1:]))
            held_back = alone and self.watch.cuda
            queued.append(self._update_once(names, lead=2 * max(tries[1:])) if held_back else seconds[-1])
        first, second = (_least_squares(np.array(rows), np.array(values)).tolist() for values in (seconds, queued))
        return first, second

    def _update_once(self, names: Collection[str], lead: float = 0.0) -> float:
        for name, copy in self._copies.items():
            copy.grad = torch.zeros_like(copy) if name in names else None
        if self._like is None:
            return 0.0
        if self.update.scaler is not None:  # a scaler steps only after a loss went through it
            self.update.scaler.scale(torch.zeros((), device=next(iter(self.mine.values())).device))
        return self.watch.time(partial(self.update.step, self._like), lead)[0]

    # ------------------------------------------------------------ whole steps

    def turns(self, graph: Graph, draft: Profile, repeats: int, steady: bool, plain: bool) -> tuple[list[set[str]], Array]:
        """What whole steps train, from little to everything, and what they take: a row for each turn.

        The last of each turn is its full step: other work slows all of them alike. With `plain`, that is a step of plain
        training: PyTorch's own kernels, and every mode as it is found. A GPU's clock is `steady` unless it waits for the CPU.
        """
        few = repeats == 1 and not self.watch.cuda
        rungs = _rungs(graph, draft, head=not few and self.ready is None, deepest=not few, everything=not (few and plain))
        *steps, full_step = [partial(self.step, rung) for rung in rungs] + [self._plain_step] * plain

        def turn() -> list[float]:  # a first full step makes PyTorch's kernels; the others have run on the nodes
            return [*(step() for step in steps), min(full_step() for _ in range(2 if few else 1))]

        some = range(1 if self.watch.cuda and steady else repeats)  # a steady clock needs one
        turns = np.array([turn() for _ in told("timing steps", some)])
        if (_shares(turns).max(0) > 1.2 * _shares(turns).min(0)).any():  # one of them was much disturbed
            turns = np.array([*turns, turn()])
        return rungs, turns

    def by_engine(self, chosen: Collection[str], repeats: int) -> list[float]:
        """What a step takes whose forward pass the engine runs, if it does. The first makes what the engine needs."""
        return [self.step(chosen, self.ready) for _ in range(repeats + 1)] if self.ready is not None else []

    def calibrated(
        self,
        graph: Graph,
        times: Times,
        sizes: Sizes,
        draft: Profile,
        rungs: Sequence[Collection[str]],
        turns: Array,
        head: Sequence[float],
        steady: bool,
        plain: bool,
        times_more: float,
    ) -> Profile:
        """The `draft` of a profile, with parts scaled to add up to whole steps: `turns` over these `rungs`, and steps of
        the `head` alone by the engine, which tell what it saves before the first trained layer.

        `steady` and `plain` are those of the turns. The profile is one of batches with so many `times_more` samples.
        """
        full = turns[:, -1]
        measured = np.median(_shares(turns), axis=0) * (self.watch.typical(full.tolist()) if steady else full.min())
        parts = np.array([[*_parts(graph, draft, times, rung)[:6], 0.0] for rung in rungs])
        steps = [*turns.T[: len(rungs)]]
        if head:
            parts = np.array([_parts(graph, draft, times, draft.head), *parts])
            steps, measured = [np.array(head), *steps], np.array([min(head), *measured])
        parts = parts[:, : 6 + bool(head)]
        scales = _scales(parts, measured[: len(parts)], _TRUST[self.watch.cuda or bool(head)])
        better = _rescaled(graph, times, scales)
        whole = np.array(_parts(graph, draft, times, self.params))[: len(scales)] * scales
        backward = whole.sum() - whole[[0, 3]].sum()
        profile = replace(
            charges.profile(graph, better.of_more(times_more), sizes, draft.origin, self.update.accumulate),
            coverage=1 - float(whole[5] / backward) if backward > 0 else None,
            checks=tuple(
                (float(p @ scales) * times_more, float(t.min()) * times_more, float(t.max()) * times_more)
                for p, t in zip(parts, steps, strict=True)
            ),
        )
        if head:
            profile = replace(profile, prefix_saves=min(float(scales[6] / max(scales[0], 1e-12)), 1.0))
        if not plain:
            return profile
        batches = max(float(measured[-1] - whole[3]), 0.0) * times_more * self.update.accumulate
        return replace(profile, plain=replace(profile.cost([profile.everything]), seconds=batches + float(whole[3])))

    def _plain_step(self) -> float:
        """Seconds of a step of plain training."""
        self.norms.release_()
        held = self.norms, self.around
        self.norms, self.around = BatchNormModes(self.model, "as-is"), nullcontext
        try:
            return self.step(self.params)
        finally:
            self.norms, self.around = held


def _unit(names: Collection[str]) -> Unit:
    return Unit("*", tuple(Part(name) for name in names))


def _rungs(graph: Graph, draft: Profile, head: bool, deepest: bool, everything: bool) -> list[set[str]]:
    """What the whole steps train: the layers nearest the loss, up to half of the cost; and, if asked for, the head, the head
    with the deepest weight, everything.

    The deepest parameter of a step is none of a norm, if there is another: norms train with the layer before them. PyTorch
    ends the process where a group norm is the first that trains, channels-last on a CPU.
    """
    order = graph.order()
    near = sorted(order, key=lambda name: order[name])
    begins = [not graph.nodes[order[name]].is_norm for name in near]
    least = set(draft.head)
    low, high = draft.cost([_unit(least)]).seconds, draft.cost([_unit(near)]).seconds
    middle = bisect.bisect_left(
        range(len(near)), (low + high) / 2, key=lambda n: draft.cost([_unit(least | set(near[: n + 1]))]).seconds
    )
    middle = begins.index(True, middle) if any(begins[middle:]) else len(near) - 1
    half = least | set(near[: middle + 1])
    last = next((name for name, one in zip(reversed(near), reversed(begins), strict=True) if one), near[-1])
    asked = (least, head), (least | {last}, deepest), (half, True), (set(near), everything)
    rungs: list[set[str]] = []
    for rung, wanted in asked:
        if wanted and rung and rung not in rungs:
            rungs.append(rung)
    return rungs


def _shares(turns: Array) -> Array:
    """Each step over the full step of its turn, which is the last. A coarse clock may not see a small step."""
    return turns / np.maximum(turns[:, [-1]], 1e-12)


def _parts(graph: Graph, profile: Profile, times: Times, rung: Collection[str]) -> list[float]:
    """Seconds of a step by part: forward, input gradients, parameters' gradients, optimizer, norms; the nodes that run; and
    what can be saved of the forward pass, before the first layer that trains."""
    norms = {name for node in graph.nodes if node.is_norm for name in node.params}
    parts = [times.forward, 0.0, 0.0, times.fixed, 0.0, 0.0, -times.forward]
    for charge in profile.on(Mode(cached=True)).due([_unit(rung)]):
        of_norms = norms.issuperset(charge.params)
        of_kind = {ChargeKind.WEIGHT_GRAD: 4 if of_norms else 2, ChargeKind.OPTIMIZER: 3, ChargeKind.FORWARD: 6}
        parts[of_kind.get(charge.kind, 1)] += charge.cost.seconds
        parts[5] += charge.kind is ChargeKind.NODE
    return parts


def _scales(parts: Array, measured: Array, trust: float) -> Array:
    """Factors for the parts, and seconds per node, that explain whole steps best and stay near what was measured apart.

    Least squares: a whole step is known up to `_NOISE`, a part up to `trust`.
    """
    start = np.array([1.0, 1.0, 1.0, 1.0, 1.0, _UNSEEN[0], 0.0])[: parts.shape[1]]
    width = np.array([trust, trust, trust, trust, trust, _UNSEEN[1], 1.0])[: parts.shape[1]]
    rows = parts / (np.maximum(measured, 1e-12)[:, None] * _NOISE)  # a coarse clock may not see a small step
    return _least_squares(
        np.concatenate([rows, np.diag(1 / width)]), np.concatenate([np.full(len(measured), 1 / _NOISE), start / width])
    )


def _least_squares(rows: Array, values: Array) -> Array:
    """x ≥ 0 that makes rows · x most like the values: with so few unknowns, the best over all sets of those that are not 0.

    (`scipy.optimize.nnls` does the same; importing it takes longer than several steps of training.)
    """
    size = np.linalg.norm(rows, axis=0)
    size[size == 0] = 1.0
    best, least = np.zeros(rows.shape[1]), float(values @ values)
    for free in itertools.product((False, True), repeat=rows.shape[1]):
        found = np.zeros(rows.shape[1])
        found[list(free)] = np.linalg.lstsq((rows / size)[:, list(free)], values, rcond=None)[0]
        miss = values - rows / size @ found
        if (found >= 0).all() and miss @ miss < least:
            best, least = found, float(miss @ miss)
    return best / size


def _rescaled(graph: Graph, times: Times, scales: Array) -> Times:
    forward, inputs, params, update, norms, unseen = (float(scale) for scale in scales[:6])
    by_node = np.array([norms if node.is_norm else params for node in graph.nodes])
    return Times(
        np.maximum(times.inputs * inputs + (times.everything - times.inputs) * by_node, 0.0),  # noise may make it negative
        times.inputs * inputs,
        {(i, name): float(seconds * by_node[i]) for (i, name), seconds in times.alone.items()},  # plain types: these are saved
        {i: seconds * norms for i, seconds in times.norms.items()},
        times.forward * forward,
        unseen,
        times.fixed * update,
        times.per_tensor * update,
        times.per_byte * update,
    )
