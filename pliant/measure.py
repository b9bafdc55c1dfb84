"""Graph on this device → `Profile`: `timed` (seconds, beside bytes and MACs) and `counted` (bytes and MACs from shapes)."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd.graph import GradientEdge

from pliant import batches
from pliant.apply import sandbox, scratch, scratch_step
from pliant.graph import BIAS, Graph, Loss, Node, compute_loss, op_name, read, trainable, walk, wiring
from pliant.types import Charge, Cost, Profile

_PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "Linear")  # one kernel per gradient, all of the same size
_ATTENTION = 2.5  # backward of fused attention: dQ, dK, dV, dP and the scores once more, against two products forward
_MOST_SLOTS = 3


def counted(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, batch: Any) -> Profile:
    """MACs and bytes of a step from the shapes of one real batch. Knows no seconds.

    A product of matrices and a convolution cost as many MACs backward to the input, and again to the weight, as forward;
    grouped and depthwise ones too. A bias, a norm's scale or an embedding costs one per element of the output; activations
    are free.
    """
    params = trainable(model)
    with sandbox(model):
        graph = read(model, loss, batch)
    state = _state_bytes(optimizer, params)
    return _profile(graph, state, origin(model, batch), _Times.none(graph))


def timed(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, batch: Any, *, repeats: int = 3) -> Profile:
    """Seconds of a step on this device, read with hooks on the nodes of the backward graph. Leaves no trace.

    Each node is timed with everything asked for and with input gradients alone; the difference is what its parameters cost.
    Where a node has several parameters (weight and bias, γ and β), further passes ask for one at a time. What no hook sees
    (the engine's own work) is the whole backward pass less the sum of its nodes, spread evenly. Minima of `repeats` passes.
    On the CPU the clock is this thread's CPU time if torch uses one thread, else the wall; on CUDA it is events.
    """
    if repeats < 1:
        raise ValueError(f"timed(repeats={repeats}): at least one.")
    params = trainable(model)
    watch = Watch(next(iter(params.values())).device)
    with sandbox(model):
        graph = read(model, loss, batch)
        times = _time_passes(model, loss, batch, graph, params, watch, repeats)
    times = times.with_optimizer(*_time_optimizer(optimizer, params, watch, repeats))
    return _profile(graph, _state_bytes(optimizer, params), origin(model, batch), times)


def origin(model: nn.Module, batch: Any) -> dict[str, Any]:
    """The conditions that a profile holds for: device, threads, batch, dtype, versions, and the shape of the model."""
    params = dict(model.named_parameters())
    first = next(iter(params.values()), None)
    device = first.device if first is not None else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    signature = ";".join(f"{n}{tuple(p.shape)}{int(p.requires_grad)}" for n, p in params.items())
    return {
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads(),
        "batch": ", ".join("×".join(map(str, shape)) for shape in batches.shapes(batch)),
        "dtype": str(first.dtype).removeprefix("torch.") if first is not None else "none",
        "torch": torch.__version__.split("+")[0],
        "model": hashlib.sha256(signature.encode()).hexdigest()[:12],
    }


def kept_bytes(model: nn.Module, loss: Loss, batch: Any) -> int:
    """Bytes that autograd keeps for backward as the model is now, seen with hooks on one real forward pass.

    Every piece of memory counts once; parameters, buffers and the batch itself do not count. Leaves no trace.
    """
    with sandbox(model):
        graph = read(model, loss, batch)
    return sum({storage: size for node in graph.nodes for storage, size, _ in node.saves}.values())


# ---------------------------------------------------------------- graph + times → charges


@dataclass(frozen=True)
class _Times:
    """Seconds per node: everything asked for, input gradients alone, and each parameter at it alone; forward; optimizer."""

    everything: NDArray[np.float64]
    inputs: NDArray[np.float64]
    alone: Mapping[tuple[int, str], float]
    forward: float = 0.0
    unseen: float = 0.0  # per node
    coverage: float | None = None
    per_tensor: float = 0.0  # optimizer
    per_byte: float = 0.0

    @classmethod
    def none(cls, graph: Graph) -> _Times:
        return cls(np.zeros(len(graph.nodes)), np.zeros(len(graph.nodes)), {})

    def with_optimizer(self, per_tensor: float, per_byte: float) -> _Times:
        return _Times(self.everything, self.inputs, self.alone, self.forward, self.unseen, self.coverage, per_tensor, per_byte)


def _profile(graph: Graph, state: Mapping[str, int], where: dict[str, Any], times: _Times) -> Profile:
    charges: list[Charge] = []

    # What is kept for backward stands first, since a charge may only point to later ones.
    keepers: dict[int, tuple[int, list[int], list[str]]] = {}
    for i, node in enumerate(graph.nodes):
        for storage, size, favoured in node.saves:
            _, nodes, params = keepers.setdefault(storage, (size, [], []))
            waiting = i if favoured is None else node.inputs[favoured]
            if isinstance(waiting, str):
                params.append(waiting)
            elif waiting is not None:
                nodes.append(waiting)
    after_params = len(keepers) + len(graph.params)
    at = [after_params + n for n in _first_charges(graph, times)]
    for size, nodes, params in keepers.values():
        via = tuple(sorted({at[i] for i in nodes}))
        charges.append(Charge("kept", Cost(bytes=size), tuple(dict.fromkeys(params)), via))
    for name, size in graph.params.items():
        seconds = times.per_tensor + times.per_byte * size if name not in graph.unused else 0.0
        held = size + state.get(name, 0) if name not in graph.unused else 0
        charges.append(Charge(f"optimizer: {name}", Cost(seconds, held), (name,)))
    for i in range(len(graph.nodes)):
        charges += _node_charges(graph, i, times, at)
    forward = Cost(times.forward, 0, graph.forward_macs)
    taken = {**where, "taken": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    return Profile(tuple(charges), forward, graph.head, taken, times.coverage, graph.uncounted)


def _first_charges(graph: Graph, times: _Times) -> list[int]:
    """Where the charges of each node begin, counted from the first node's."""
    at, n = [], 0
    for i in range(len(graph.nodes)):
        at.append(n)
        n += len(_node_charges(graph, i, times, [0] * len(graph.nodes)))
    return at


def _node_charges(graph: Graph, i: int, times: _Times, at: Sequence[int]) -> list[Charge]:
    """A node's charges: to run at all; its input gradients; each parameter's gradient; what its parameters share."""
    node = graph.nodes[i]
    name = f"{node.op} {node.module}".strip()
    upstream = tuple(at[j] for j in node.data)
    if node.carrier:
        return [Charge(name, Cost(float(times.everything[i]) + times.unseen), node.params)]
    if node.whole:
        macs = node.macs * len(node.params + node.data)
        return [Charge(name, Cost(float(times.everything[i]) + times.unseen, 0, macs), node.params, upstream)]
    out = [Charge(name, Cost(times.unseen), node.params, upstream)]
    if node.data and node.op in _PRODUCTS:
        for behind in node.data:
            seconds = float(times.inputs[i]) / len(node.data)
            out.append(Charge(f"dX {name}", Cost(seconds, 0, _gradient_macs(node, behind)), (), (at[behind],)))
    elif node.data:
        attention = int(node.macs * _ATTENTION)
        macs = attention or _gradient_macs(node, node.data[0])
        out.append(Charge(f"dX {name}", Cost(float(times.inputs[i]), 0, macs), (), upstream))
    if node.params:
        joint = max(float(times.everything[i] - times.inputs[i]), 0.0)
        alone, shared = _split(joint, [times.alone.get((i, p)) for p in node.params])
        for param, seconds in zip(node.params, alone, strict=True):
            out.append(Charge(f"dW {param}", Cost(seconds, 0, _gradient_macs(node, param)), (param,)))
        if len(node.params) > 1:
            out.append(Charge(f"dW shared {name}", Cost(shared), node.params))
    return out


def _gradient_macs(node: Node, waiting: str | int) -> int:
    """MACs of the gradient that one parameter or node behind waits for."""
    if node.macs and node.inputs.index(waiting) != BIAS.get(node.op):
        return node.macs
    return node.outputs if isinstance(waiting, str) or "Norm" in node.op else 0


def _split(joint: float, alone: Sequence[float | None]) -> tuple[list[float], float]:
    """What each parameter of a node costs beside what they share, so that one alone and all together are as measured."""
    if len(alone) == 1:
        return [joint], 0.0
    known = [a for a in alone if a is not None]
    rest = max(joint - sum(known), 0.0) / max(len(alone) - len(known), 1)
    each = [min(a if a is not None else rest, joint) for a in alone]
    total = sum(each)
    if total <= joint:
        return [a * joint / total if total else joint / len(each) for a in each], 0.0
    shared = min((total - joint) / (len(each) - 1), *each)
    each = [a - shared for a in each]
    left = sum(each)
    return [a * (joint - shared) / left if left else 0.0 for a in each], shared


# ---------------------------------------------------------------- clocks


class Watch:
    """Marks moments and tells the seconds between them: this thread's CPU time, the wall, or CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def mark(self) -> Any:
        if not self.cuda:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self.cuda else end - start

    def time(self, work: Callable[[], Any]) -> tuple[float, Any]:
        self.settle()
        start = self.mark()
        result = work()
        end = self.mark()
        self.settle()
        return self.seconds(start, end), result


def _time_passes(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    graph: Graph,
    params: Mapping[str, nn.Parameter],
    watch: Watch,
    repeats: int,
) -> _Times:
    used = [name for name in params if name not in graph.unused]
    slots = _slots(graph)
    asks: list[list[str]] = [[], used, *slots]  # none: input gradients alone
    best = np.full((len(asks), len(graph.nodes)), np.inf)
    forward = backward = np.inf
    compute_loss(model, loss, batch)  # warm up
    for _ in range(repeats):
        seconds, value = watch.time(lambda: compute_loss(model, loss, batch))
        forward = min(forward, seconds)
        live = walk(value)
        _check_same(graph, live, params)
        roots = _roots(graph, live)
        for k, ask in enumerate(asks):
            inputs = [*roots, *(params[name] for name in ask)]
            if inputs:
                best[k] = np.minimum(best[k], _node_seconds(value, inputs, live, watch))
        whole = partial(torch.autograd.backward, value, inputs=[params[name] for name in used])
        seconds, _ = watch.time(whole)
        backward = min(backward, seconds)
        for param in params.values():
            param.grad = None
        del value, live, roots
    best[~np.isfinite(best)] = 0.0
    inputs_alone, everything = np.minimum(best[0], best[1]), best[1]
    alone = {}
    for k, slot in enumerate(slots):
        for i, node in enumerate(graph.nodes):
            if len(node.params) > k and len(node.params) > 1 and node.params[k] in slot:
                alone[i, node.params[k]] = max(float(best[2 + k][i] - inputs_alone[i]), 0.0)
    unseen = max(backward - float(everything.sum()), 0.0)
    coverage = min(float(everything.sum()) / backward, 1.0) if backward > 0 else None
    return _Times(everything, inputs_alone, alone, float(forward), unseen / max(len(graph.nodes), 1), coverage)


def _slots(graph: Graph) -> list[list[str]]:
    """The first, second, … parameters of the nodes that have several, so that a pass can ask for one of each node's.

    A parameter that stands elsewhere at another place (a tied weight) would ask for two: it is left out.
    """
    several = [node for node in graph.nodes if len(node.params) > 1]
    places: dict[str, set[int]] = {}
    for node in several:
        for k, param in enumerate(node.params):
            places.setdefault(param, set()).add(k)
    slots = [[param for param, at in places.items() if at == {k}] for k in range(_MOST_SLOTS)]
    return slots[: max((k + 1 for k, slot in enumerate(slots) if slot), default=0)]


def _roots(graph: Graph, live: Sequence[Any]) -> list[GradientEdge]:
    """Where input gradients end: the nodes with nothing but parameters behind them.

    Asking for what flows into them makes every other node compute its input gradient and no parameter's.
    """
    ends = {live[i] for i, node in enumerate(graph.nodes) if not node.data and not node.carrier}
    edges = {(f, k): None for node in live for f, k in node.next_functions if f in ends}
    return [GradientEdge(node, k) for node, k in edges]


def _node_seconds(value: torch.Tensor, inputs: Sequence[Any], live: Sequence[Any], watch: Watch) -> NDArray[np.float64]:
    """Seconds that each node takes in one backward pass to `inputs`; 0 for nodes that do not run."""
    begun: dict[int, Any] = {}
    ended: dict[int, Any] = {}

    def before(i: int) -> Callable[[Any], None]:
        def hook(_: Any) -> None:
            begun[i] = watch.mark()

        return hook

    def after(i: int) -> Callable[[Any, Any], None]:
        def hook(*_: Any) -> None:
            ended[i] = watch.mark()

        return hook

    handles = []
    for i, node in enumerate(live):
        handles += [node.register_prehook(before(i)), node.register_hook(after(i))]
    try:
        torch.autograd.grad(value, list(inputs), retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    watch.settle()
    out = np.zeros(len(live))
    for i, end in ended.items():
        out[i] = watch.seconds(begun[i], end)
    return out


def _check_same(graph: Graph, live: Sequence[Any], params: Mapping[str, nn.Parameter]) -> None:
    now = [(op_name(node), inputs) for node, (inputs, _) in zip(live, wiring(live, params), strict=True)]
    if [(node.op, node.inputs) for node in graph.nodes] != now:
        raise ValueError(
            f"the model's backward graph changes from run to run ({len(graph.nodes)} nodes, then {len(live)}): seconds per "
            f"node would mean nothing. Use dataclasses.replace(policy, cost=measure.counted), or make "
            f"the forward pass repeat for the same batch and seed."
        )


def _time_optimizer(
    optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter], watch: Watch, repeats: int
) -> tuple[float, float]:
    """Seconds per tensor and per byte of an optimizer step: two sets of parameters, two equations."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    mine = sorted((p for p in params.values() if id(p) in held), key=lambda p: p.numel())
    if not mine:
        return 0.0, 0.0

    def step_seconds(some: Sequence[nn.Parameter]) -> float:
        like, copies = scratch(optimizer, some)
        for copy in copies:
            copy.grad = torch.zeros_like(copy)
        scratch_step(like)  # makes the state
        return min(watch.time(lambda: scratch_step(like))[0] for _ in range(repeats + 1))

    small = mine[: max(len(mine) // 2, 1)]
    counts = np.array([[len(s), sum(p.numel() * p.element_size() for p in s)] for s in (mine, small)], float)
    seconds = np.array([step_seconds(mine), step_seconds(small)])
    if len(mine) == 1:
        return 0.0, float(seconds[0] / max(counts[0, 1], 1.0))
    per_tensor, per_byte = np.linalg.lstsq(counts, seconds, rcond=None)[0]
    if per_tensor < 0 or per_byte < 0:  # noise: let bytes or tensors explain all of it
        return (float(seconds[0] / counts[0, 0]), 0.0) if per_byte < 0 else (0.0, float(seconds[0] / counts[0, 1]))
    return float(per_tensor), float(per_byte)


def _state_bytes(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Bytes of optimizer state per parameter, read off the state that a fresh step makes."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    out = {}
    for name, param in params.items():
        if id(param) in held:
            like, (copy,) = scratch(optimizer, [param])
            copy.grad = torch.zeros_like(copy)
            scratch_step(like)
            tensors = (t for t in like.state[copy].values() if isinstance(t, torch.Tensor))
            out[name] = sum(t.numel() * t.element_size() for t in tensors)
    return out
