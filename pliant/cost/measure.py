"""Model, loss and batch → `Profile`: `timed` (seconds, beside bytes and MACs) and `counted` (bytes and MACs from shapes).

Every cost function is called as `cost(model, optimizer, loss, batch, graph=…, update=…, norm=…, around=…, prices=…, ready=…)`;
what it does not need, it ignores.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import torch
from torch import nn

from pliant.core.prices import KernelPrices
from pliant.cost import from_graph as charges
from pliant.cost.charge import ChargeKind
from pliant.cost.mean import mean
from pliant.cost.measurements import Sizes, Times
from pliant.cost.node_timing import NodeTiming
from pliant.cost.optimizer_sizes import optimizer_sizes, state_sizes
from pliant.cost.peaks import Peaks, roof_seconds
from pliant.cost.profile import Profile
from pliant.cost.step_timing import StepTiming
from pliant.graph.backward import Graph, compute_loss, trainable
from pliant.graph.readings import read_all
from pliant.runtime import batches
from pliant.runtime.batches import Around, Loss, Ready
from pliant.runtime.batchnorm import BatchNormModes, NormRule
from pliant.runtime.clock import Watch, device_name, undisturbed
from pliant.runtime.compiled import unjoin_
from pliant.runtime.energy import Meter
from pliant.runtime.memory import LiveBytes, StandIns, inference_peak, storage
from pliant.runtime.optimizer_step import Update
from pliant.runtime.sandbox import sandbox, spare_statistics_

_PYTORCH = KernelPrices()


def read_graph(model: nn.Module, loss: Loss, batch: Any, norm: NormRule = "auto", kernels: bool = False) -> Graph:
    """The backward graph of one real batch, with norms in the modes of a step that trains everything. Leaves no trace.

    It names the units and is what every cost function here prices: read once, it serves both (`graph=`). With `kernels`, its
    bytes are those that the operating system sees: convolutions on the CPU make copies inside, which are no tensors.
    """
    params, rule = trainable(model), _settled(model, loss, batch, norm)
    unjoin_(model)
    with sandbox(model):
        BatchNormModes(model, rule).hold_(params, params)
        return read_all(model, loss, batch, kernels)


def counted(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batch: Any,
    *,
    graph: Graph | None = None,
    update: Update | None = None,
    norm: NormRule = "auto",
    around: Around = nullcontext,
    prices: KernelPrices = _PYTORCH,
    ready: Ready | None = None,
) -> Profile:
    """MACs and bytes of a step from the shapes of one real batch. Knows no seconds.

    A matrix product or a convolution costs as many MACs forward as backward to its input, and as backward to its weight. A
    bias, a norm's weight or an embedding costs one per element of the output. Activations are free.
    """
    return _from_shapes(model, optimizer, loss, batch, lambda graph, _: Times.none(graph), {}, graph, update, norm)


def spared(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, batch: Any, **how: Any) -> Profile:
    """`counted`, with the bytes that the optimizer takes while it steps, which need real tensors to be known."""
    sizes = optimizer_sizes(optimizer, trainable(model))
    return _from_shapes(model, optimizer, loss, batch, lambda graph, _: Times.none(graph), {}, **how, held=sizes)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, batch: Any, **how: Any) -> Profile:
    """`counted`, with the MACs of the backward pass alone: `macs=0.15` is then a share of a full backward pass, as papers on
    tiny devices count it."""
    profile = counted(model, optimizer, loss, batch, **how)
    charges = (replace(c, cost=replace(c.cost, macs=0)) if c.kind is ChargeKind.FORWARD else c for c in profile.charges)
    return replace(profile, base=replace(profile.base, macs=0), charges=tuple(charges))


def timed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batch: Any,
    *,
    graph: Graph | None = None,
    update: Update | None = None,
    norm: NormRule = "auto",
    around: Around = nullcontext,
    prices: KernelPrices = _PYTORCH,
    ready: Ready | None = None,
    repeats: int | None = None,
    samples: int | None = None,
    follow: bool = True,
) -> Profile:
    """Seconds of a step on this device, read with hooks on the nodes of the backward graph. Leaves no trace.

    Takes about seven full steps on a CPU, one or two more where it follows tensors. Each node is timed with all gradients and
    with input gradients alone; the difference is what its parameters cost. If a node has several parameters (weight and bias),
    further passes ask for one at a time. Norms that are not chosen use running statistics (`norm`, as in `Session`), which is
    timed too. Then a few whole steps are taken, and the times of the nodes are scaled so that they add up to them
    (`Profile.checks`).
    Bytes come from a pass that follows every tensor (`follow`), or else from shapes, as in sessions without a memory budget.

    On the CPU the clock is this thread's CPU time if torch uses one thread, else wall time. On CUDA it is events. There the
    time of kernels without waiting for launches is measured too, since that is what captured steps take (`Profile.on`).

    - `graph`: what `read_graph` returned for the same model, loss, batch and `norm`.
    - `update`: clipping, scaling and accumulation.
    - `around`, `ready`, `prices`: nodes and whole steps are timed inside `around()`. The head alone runs its forward pass by
      `ready(batch)` too, which tells what an engine saves before the first trained layer. `prices` says where captured steps
      run custom kernels. The full step that a share refers to is always plain PyTorch.
    - `repeats`: how often nodes and steps are timed.
    - `samples`: measure seconds on so many samples of the batch, scale them, and count bytes from shapes. For use where a full
      step does not fit into memory.
    """
    if repeats is not None and repeats < 1:
        raise ValueError(f"timed(repeats={repeats}): repeats must be at least 1.")
    update = update or Update()
    params = trainable(model)
    on_cpu = next(iter(params.values())).device.type == "cpu"
    repeats = repeats or (1 if on_cpu else 2)  # clocks of a GPU move
    norm = _settled(model, loss, batch, norm)
    graph = graph or read_graph(model, loss, batch, norm)
    some, more = batch, 1.0
    if samples is not None:
        some, more = batches.part(batch, samples), (batches.size(batch) or samples) / samples
    if graph.others:
        how: dict[str, Any] = {"update": update, "norm": norm, "around": around, "prices": prices}
        how |= {"ready": ready, "repeats": repeats, "samples": samples, "follow": follow}
        return mean([timed(model, optimizer, loss, batch, graph=one, **how) for one in graph.readings])
    where = _taken({**origin(model, batch, update, norm), **facts(graph), **({"samples": samples} if samples else {})})
    # In a plain full step norms use batch statistics, and kernels are PyTorch's.
    plain = norm == "frozen" or around is not nullcontext or ready is not None
    with sandbox(model), undisturbed():
        norms = BatchNormModes(model, norm)
        norms.hold_(params, params)
        nodes = NodeTiming(model, loss, some, graph, params, norms, around, prices)
        times, alone = nodes.times(repeats)
        follow = follow and samples is None
        sizes = nodes.sizes() if follow else Sizes.counted(graph, {}, norms_differ=norm == "chosen")
        sizes = replace(sizes, **optimizer_sizes(optimizer, params))
        like = update.apart(), around, not graph.all_trainable, graph.seed, ready
        steps = StepTiming(model, optimizer, loss, some, params, norms, *like)
        stepping, stepping_alone = steps.update_seconds(repeats, alone=not nodes.is_bound_by_gpu)
        times, steady = times.with_update(*stepping), not nodes.is_bound_by_launches
        draft = charges.profile(graph, times, sizes, where)
        rungs, turns = steps.turns(graph, draft, repeats, steady, plain)
    with sandbox(model), undisturbed():  # norms have their statistics back: what an engine makes of them serves the first steps
        head = steps.by_engine(draft.head, repeats)
        profile = steps.calibrated(graph, times, sizes, draft, rungs, turns, head, steady, plain, more)
    if alone is not None:
        captured = charges.profile(graph, alone.with_update(*stepping_alone), sizes, where, update.accumulate)
        profile = replace(profile, other_seconds=captured.seconds)
    return profile


def power(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batch: Any,
    meter: Meter,
    *,
    update: Update | None = None,
    least: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Mean watts of plain full steps on this device, over at least `least` seconds: what `Profile.with_watts` takes.

    Leaves no trace. The meter must cover the device that the model is on (`energy.required`).
    """
    params = trainable(model)
    with sandbox(model), undisturbed():
        steps = StepTiming(model, optimizer, loss, batch, params, BatchNormModes(model, "as-is"), (update or Update()).apart())
        return steps.watts(meter, least, clock)


def sparing(cost: Callable[..., Profile]) -> Callable[..., Profile]:
    """The same measurement in less memory: of large tensors only shapes are saved for backward (`memory.StandIns`). A model
    whose backward pass needs real values is measured with them."""

    def measured(model: nn.Module, *how: Any, **more: Any) -> Profile:
        try:
            with torch.autograd.set_detect_anomaly(False), StandIns(model):
                return cost(model, *how, **more)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # where values were read; an error with another cause comes again below
            pass
        return cost(model, *how, **more)  # outside the handler, which would keep the failed graph alive

    return measured


def modelled(peaks: Peaks, launch: float = 5e-6) -> Callable[..., Profile]:
    """A `cost` for another device, from its peaks: max(FLOPs / peak, bytes / bandwidth) + launch, for each gradient.

    The optimizer reads and writes each chosen parameter, its gradient and its state once.
    """

    def times(graph: Graph, sizes: Sizes) -> Times:
        found = charges.modelled(graph, lambda macs, moved: roof_seconds(macs, moved, peaks, launch))
        held = sum(sizes.state.values()) / max(sum(graph.params.values()), 1)
        return replace(found, per_tensor=launch, per_byte=(3 + 2 * held) / peaks.bandwidth)

    there = {"device": f"modelled: {peaks.device}", "threads": peaks.threads}

    def cost(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, batch: Any, **how: Any) -> Profile:
        return _from_shapes(model, optimizer, loss, batch, times, there, **how)

    return cost


def _from_shapes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batch: Any,
    times: Callable[[Graph, Sizes], Times],
    there: Mapping[str, Any],
    graph: Graph | None = None,
    update: Update | None = None,
    norm: NormRule = "auto",
    around: Around = nullcontext,
    prices: KernelPrices = _PYTORCH,
    ready: Ready | None = None,
    held: Mapping[str, Any] | None = None,
) -> Profile:
    """A profile without a measurement: the graph of one real batch, priced. `there` is what differs from here, and `held` what
    is known of the optimizer's bytes."""
    update = update or Update()
    params = trainable(model)
    norm = _settled(model, loss, batch, norm)
    graph = graph or read_graph(model, loss, batch, norm)
    held = held if held is not None else {"state": state_sizes(optimizer, params)}
    where = _taken({**origin(model, batch, update, norm), **facts(graph), **there})
    several = []
    for one in graph.readings:
        sizes = replace(Sizes.counted(one, {}, norms_differ=norm == "chosen"), **held)
        several.append(charges.profile(one, times(one, sizes), sizes, where, update.accumulate))
    return mean(several)


def origin(model: nn.Module, batch: Any, update: Update | None = None, norm: NormRule = "chosen") -> dict[str, Any]:
    """The conditions that a profile holds for: device, threads, batch, dtype, versions, the shape of the model, the step."""
    update = update or Update()
    params = dict(model.named_parameters())
    first = next(iter(params.values()), None)
    device = first.device if first is not None else torch.device("cpu")
    signature = ";".join(f"{n}{tuple(p.shape)}{int(p.requires_grad)}" for n, p in params.items())
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "batch": ", ".join("×".join(map(str, shape)) for shape in batches.shapes(batch)),
        "dtype": str(first.dtype).removeprefix("torch.") if first is not None else "none",
        "torch": torch.__version__.split("+")[0],
        "model": hashlib.sha256(signature.encode()).hexdigest()[:12],
        "norms": norm,
        "accumulate": update.accumulate,
    }


def facts(graph: Graph) -> dict[str, Any]:
    """What a run must know of a loss: with respect to what it differentiates, and how often it was read, if it may vary."""
    readings = {"readings": 1} if graph.may_vary else {}
    return readings | ({"differentiates": "parameters" if graph.all_trainable else "data"} if graph.differentiates else {})


def _settled(model: nn.Module, loss: Loss, batch: Any, norm: NormRule) -> NormRule:
    """What "auto" comes down to for this batch; any other rule as it is."""
    norms = BatchNormModes(model, norm)
    norms.settle_(lambda: loss(model, batch))
    return norms.priced


def _taken(where: Mapping[str, Any]) -> dict[str, Any]:
    return {**where, "taken": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def kept_bytes(model: nn.Module, loss: Loss, batch: Any, *, around: Around = nullcontext) -> int:
    """Bytes that one real forward pass leaves behind for backward as the model is now, beside the loss. Leaves no trace.

    Every piece of memory counts once; parameters, buffers and the batch itself do not count. The pass runs inside of
    `around()`: `engine.ENGINES["lean"]` for one of the lean engine.
    """
    with sandbox(model):
        with LiveBytes(torch.device("cpu")) as live, around():
            value = compute_loss(model, loss, batch)
        return live.bytes - storage(value)[1]


def inference_bytes(model: nn.Module, loss: Loss, batch: Any, kernels: bool = False) -> int | None:
    """Peak live bytes of the forward pass without gradients, as the model is now; None where the loss differentiates. Leaves
    no trace."""
    with sandbox(model):
        return inference_peak(lambda: loss(model, batch), next(model.parameters()).device, kernels)


def peak_bytes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batch: Any,
    *,
    update: Update | None = None,
    around: Around = nullcontext,
) -> tuple[int, int]:
    """Peak live bytes of a step as the model is now, and of the forward pass alone without gradients. Leaves no trace.

    Parameters, buffers and the batch itself do not count; optimizer state does. The difference of the two is what `memory=`
    limits. On the CPU every tensor is followed; on CUDA the allocator counts.
    """
    update = (update or Update()).apart()
    params = trainable(model)
    with sandbox(model):
        return StepTiming(model, optimizer, loss, batch, params, BatchNormModes(model, "as-is"), update, around).peak()


class FullStep:
    """Times plain full steps beside a run: all of `params` train, with norms in the modes that they have then."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        params: Mapping[str, nn.Parameter],
        watch: Watch,
        *,
        update: Update | None = None,
    ) -> None:
        update = (update or Update()).apart()
        self._timing = StepTiming(model, optimizer, loss, None, params, BatchNormModes(model, "as-is"), update)
        self._timing.watch = watch

    def seconds(self, batch: Any) -> float:
        """Seconds of one. Leaves no trace. The first makes the optimizer's state, so it should not count."""
        timing = self._timing
        with sandbox(timing.model), undisturbed():
            spare_statistics_(timing.model)
            timing.batch = batch
            try:
                return timing.step(timing.params)
            finally:
                timing.batch = None
