"""A graph and its measurements → the charges of a `Profile`. Arithmetic only: nothing here runs the model."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from pliant.core.types import Cost
from pliant.cost.charge import Charge, ChargeKind
from pliant.cost.measurements import Array, Sizes, Times
from pliant.cost.profile import Profile
from pliant.graph.backward import BIAS, Graph, Node
from pliant.graph.saved_tensors import MASKS, Saves

PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "Linear")  # one kernel per gradient, all of the same size
_ATTENTION = 2.5  # backward of fused attention: dQ, dK, dV, dP and the scores once more, against two products forward


def modelled(graph: Graph, seconds: Callable[[int, int], float]) -> Times:
    """Times of a device that is not at hand: `seconds(MACs, bytes moved)` of every gradient and of the forward pass."""
    inputs, everything, alone = np.zeros(len(graph.nodes)), np.zeros(len(graph.nodes)), {}
    forward = 0.0
    for i, node in enumerate(graph.nodes):
        forward += seconds(node.macs, node.moved)
        if node.carrier:
            continue
        if node.data:
            inputs[i] = seconds(node.macs, node.moved) * (len(node.data) if node.op in PRODUCTS else 1)
        for param in node.params:
            alone[i, param] = seconds(node.macs if _gradient_macs(node, param) == node.macs else 0, node.moved)
        everything[i] = inputs[i] + max([alone[i, param] for param in node.params], default=0.0)
    return Times(everything, inputs, alone, forward=forward)


@dataclass(frozen=True)
class _Timeline:
    """The moments of a step: operations of the forward pass that may be its peak, the nodes of backward, the optimizer.

    Before a node for which a checkpoint recomputes its part: the operations of that part that may be its peak.
    """

    forward: Sequence[int]  # operations, the end of the forward pass last
    nodes: int
    updates: int
    again: Mapping[int, Sequence[int]] = field(default_factory=dict)  # by node

    def forward_since(self, operation: int) -> int:
        return bisect.bisect_left(self.forward, operation)

    def node(self, i: int) -> int:
        return self.begin(i) + len(self.again.get(i, ()))

    def begin(self, i: int, operation: int = 0) -> int:
        """When a node begins; with `operation`, when its recomputation has come that far."""
        return len(self.forward) + i + self._before[i] + bisect.bisect_left(self.again.get(i, ()), operation)

    @cached_property
    def _before(self) -> list[int]:
        """How many moments of recomputation come before each node begins."""
        return np.cumsum([0, *(len(self.again.get(i, ())) for i in range(self.nodes))]).tolist()

    @property
    def update(self) -> int:
        return self.begin(self.nodes)

    @property
    def end(self) -> int:
        return self.update + self.updates


def profile(graph: Graph, times: Times, sizes: Sizes, origin: Mapping[str, Any], accumulate: int = 1) -> Profile:
    """All charges of a step that takes `accumulate` batches."""
    inference = list(graph.inference)
    highest = int(np.argmax(inference))
    inference[highest] = max(inference[highest], sizes.inference)  # some tensors live longer than they are used
    peaks = _suffix_maxima(inference)
    scratch = _scratch_moments(sizes)
    again = {part.node: _suffix_maxima(part.inference) for part in graph.again}
    line = _Timeline([*peaks, len(graph.inference)], len(graph.nodes), len(scratch), again)
    moments = (*(inference[k] for k in peaks), *[0] * (line.end - len(peaks)))
    builder = _Builder(graph, times, sizes, line, accumulate)

    # Kept tensors come first, since a charge may only point to later ones. Nodes are pointed to by their number
    # until it is known where their charges begin.
    first = [*builder.kept(), *builder.again(), *(charge for name in graph.params for charge in builder.param(name, scratch))]
    nodes = [[*builder.node(i), builder.forward(i)] for i in range(len(graph.nodes))]
    at = np.cumsum([len(first), *(len(several) for several in nodes)]).tolist()
    charges = [*first, *(charge for several in nodes for charge in several)]
    charges = [_pointing(c, tuple(sorted({at[i] for i in c.via}))) if c.via else c for c in charges]
    base = Cost(times.forward * accumulate + times.fixed, 0, graph.forward_macs * accumulate)
    found = Profile(tuple(charges), base, graph.head, dict(origin), None, graph.uncounted, moments)
    return replace(found, shapes=dict(graph.shapes), transposed=graph.transposed())


@dataclass(frozen=True)
class _Builder:
    graph: Graph
    times: Times
    sizes: Sizes
    line: _Timeline
    accumulate: int

    def kept(self) -> list[Charge]:
        """For each storage that is kept: what it is kept for, and for how long; with and without the lean engine if they
        differ."""
        plain, lean = self._kept(lean=False), self._kept(lean=True)
        both = set(plain) & set(lean)
        alike = [charge for charge in plain if charge in both]
        apart = [replace(charge, lean=False) for charge in plain if charge not in both]
        apart += [replace(charge, lean=True) for charge in lean if charge not in both]
        return alike + apart + self._unpacked() + self._scales()

    def _kept(self, lean: bool) -> list[Charge]:
        saves = (node.saves if not lean or node.lean is None else node.lean for node in self.graph.nodes)
        out = []
        for storage, (size, params, nodes, last) in self._storages(enumerate(saves), lean).items():
            if any(self.graph.nodes[i].outward for i in nodes):  # kept whatever is chosen
                params = self._used
            live = self.line.forward_since(self.graph.gone.get(storage, 0)), self.line.node(last) + 1
            out.append(Charge(ChargeKind.KEPT, Cost(bytes=size), params, nodes, live))
        return out

    def again(self) -> list[Charge]:
        """Recomputation of checkpoints: bytes that live during its operations that may be its peak, and tensors kept by it.

        As in the forward pass, only operations with something chosen at or behind them keep anything.
        """
        out = []
        for part in self.graph.again:
            kept = self._storages(part.saves.items(), lean=False)
            for storage, (size, params, nodes, last) in kept.items():
                live = self.line.begin(part.node, part.gone.get(storage, 0)), self.line.node(last) + 1
                out.append(Charge(ChargeKind.RECOMPUTED, Cost(bytes=size), params, nodes, live))
            params = tuple(dict.fromkeys(p for _, several, _, _ in kept.values() for p in several))
            nodes = tuple({i for _, _, several, _ in kept.values() for i in several})
            for k in self.line.again[part.node]:
                at = self.line.begin(part.node, k)
                out.append(Charge(ChargeKind.RECOMPUTED, Cost(bytes=part.inference[k]), params, nodes, (at, at + 1)))
        return out

    def _storages(
        self, saves: Iterable[tuple[int, Saves]], lean: bool
    ) -> dict[int, tuple[int, tuple[str, ...], tuple[int, ...], int]]:
        """For each storage: its bytes, the parameters and the nodes that it is kept for, and the last node that holds it."""
        found: dict[int, tuple[int, list[str], list[int], int]] = {}
        for i, several in saves:
            node = self.graph.nodes[i]
            for storage, size, favoured in several:
                size, params, nodes, _ = found.get(storage, (size, [], [], i))
                waiting = i if favoured is None else node.inputs[favoured]
                if self._is_statistics(node, size) or (lean and self._differs_when_chosen(node)):
                    params.extend(node.params)
                elif isinstance(waiting, str):
                    params.append(waiting)
                elif waiting is not None:
                    nodes.append(waiting)
                found[storage] = size, params, nodes, i
        return {
            storage: (size, tuple(dict.fromkeys(params)), tuple(nodes), last)
            for storage, (size, params, nodes, last) in found.items()
            if params or nodes
        }

    def _unpacked(self) -> list[Charge]:
        """Where the lean engine keeps a mask or small indices, they are unpacked for a moment during backward."""
        out = []
        for i, node in enumerate(self.graph.nodes):
            size = node.made if node.op in MASKS else 8 * node.outputs if node.op.startswith("MaxPool") else 0
            if size and node.lean is not None:
                now = self.line.node(i), self.line.node(i) + 1
                out.append(Charge(ChargeKind.NODE, Cost(bytes=size), node.params, node.data, now, True, i, _label(node)))
        return out

    def _scales(self) -> list[Charge]:
        """The lean engine keeps one number per channel of a norm on running statistics that gradients pass through."""
        out = []
        for i, node in enumerate(self.graph.nodes):
            if node.is_batch_norm and node.data:
                size = max((self.graph.params[name] for name in node.params), default=0)
                out.append(Charge(ChargeKind.NODE, Cost(bytes=size), (), node.data, None, True, i, _label(node)))
        return out

    def _differs_when_chosen(self, node: Node) -> bool:
        """Whether a batch norm uses batch statistics, and keeps its input, only when it is chosen."""
        return self.sizes.norms_differ and node.is_batch_norm

    def _is_statistics(self, node: Node, size: int) -> bool:
        """Whether a batch norm keeps this only while it uses batch statistics: one number per channel."""
        own = max((self.graph.params[name] for name in node.params), default=0)
        return self.sizes.norms_differ and node.is_batch_norm and size <= own

    def param(self, name: str, scratch: Sequence[Sequence[str]]) -> list[Charge]:
        """A parameter's own charges: its optimizer state, its gradient, the optimizer's scratch memory."""
        if name in self.graph.unused:
            return [Charge(ChargeKind.OPTIMIZER, Cost(), (name,), name=name)]
        size = self.graph.params[name]
        seconds = self.times.per_tensor + self.times.per_byte * size
        out = [Charge(ChargeKind.OPTIMIZER, Cost(seconds, self.sizes.state.get(name, 0)), (name,), name=name)]
        first = self._first[name]
        # Between the batches of one step gradients stay.
        live = (self.line.node(first), self.line.end) if self.accumulate == 1 else None
        out.append(Charge(ChargeKind.GRADIENT, Cost(bytes=size), (name,), (), live, name=name))
        for k, names in enumerate(scratch):
            if name in names:
                at, held = self.line.update + k, Cost(bytes=self.sizes.scratch[name])
                out.append(Charge(ChargeKind.SCRATCH, held, (name,), (), (at, at + 1), name=name))
        return out

    @cached_property
    def _used(self) -> tuple[str, ...]:
        """The parameters that the loss reaches."""
        return tuple(name for name in self.graph.params if name not in self.graph.unused)

    @cached_property
    def _first(self) -> dict[str, int]:
        """The first node that uses each parameter."""
        return {name: i for i, node in reversed([*enumerate(self.graph.nodes)]) for name in node.params}

    @cached_property
    def _waits_since(self) -> list[int]:
        """For each node, the node since which its incoming gradient waits for it, because a branch runs first.

        A sum hands the same gradient to all its branches: it waits only when the branch before has finished with it.
        """
        since = list(range(len(self.graph.nodes)))
        for i, node in enumerate(self.graph.nodes):
            behind = sorted(node.data)
            for k, branch in enumerate(behind):
                after = behind[k - 1] if k and node.op in ("Add", "Sub") else i
                since[branch] = min(since[branch], after + 1)
        return since

    @cached_property
    def _waiting(self) -> list[int]:
        """Bytes of gradients that wait for other nodes while each node runs, if everything trains."""
        change = np.zeros(len(self.graph.nodes) + 1, np.int64)
        for i, since in enumerate(self._waits_since):
            change[since] += self.graph.nodes[i].made
            change[i] -= self.graph.nodes[i].made
        return [int(held) for held in np.cumsum(change)[:-1]]

    @cached_property
    def _computed_again(self) -> list[int]:
        """Bytes of what checkpoints computed again that live while each node runs, if everything trains."""
        change = np.zeros(len(self.graph.nodes) + 1, np.int64)
        for part in self.graph.again:
            for size, _, _, last in self._storages(part.saves.items(), lean=False).values():
                change[part.node] += size
                change[last + 1] -= size
        return [int(held) for held in np.cumsum(change)[:-1]]

    def _own(self, i: int, measured: int) -> int:
        """What lives while a node runs, without what lives for others: the gradients that flow in and out at the least."""
        node = self.graph.nodes[i]
        least = node.made + sum(self.graph.nodes[k].made for k in node.data)
        return max(measured - self._waiting[i] - self._computed_again[i], min(measured, least))

    @cached_property
    def _forward_shares(self) -> Array:
        """Of the forward pass, how much each node's operation takes: as much as its input gradients do of theirs."""
        work = np.where(self.times.inputs > 0, self.times.inputs, self.times.everything)
        return work / work.sum() if work.sum() > 0 else work

    def forward(self, i: int) -> Charge:
        """A node's part of the forward pass, due with the node where everything before it comes from a cache."""
        node = self.graph.nodes[i]
        cost = Cost(self.times.forward * float(self._forward_shares[i]) * self.accumulate, 0, node.macs * self.accumulate)
        return Charge(ChargeKind.FORWARD, cost, node.params, node.data, node=i, name=_label(node))

    def node(self, i: int) -> list[Charge]:
        """A node's charges: to run at all; its input gradients; each parameter's gradient; what its parameters share."""
        node, times, n = self.graph.nodes[i], self.times, self.accumulate
        here: dict[str, Any] = {"node": i, "name": _label(node)}
        now = self.line.node(i), self.line.node(i) + 1
        upstream = node.data
        everything, inputs = float(times.everything[i]), float(times.inputs[i])
        whole = self._own(i, max(self.sizes.everything[i], self.sizes.inputs[i]))
        if node.carrier:
            return [Charge(ChargeKind.NODE, Cost((everything + times.unseen) * n, whole), node.params, (), now, **here)]
        if node.whole:
            cost = Cost((everything + times.unseen) * n, whole, node.macs * len(node.params + node.data) * n)
            return [Charge(ChargeKind.NODE, cost, node.params, upstream, now, **here)]
        flow = self._own(i, self.sizes.inputs[i]) if node.data else 0
        taken_in = min(node.made, flow or whole)  # the gradient that flows into it
        run = times.unseen
        if node.recomputes:  # whatever is asked of it
            run, everything, inputs = run + inputs, everything - inputs, 0.0
        held = self.line.begin(self._waits_since[i]), now[1]
        out = [Charge(ChargeKind.NODE, Cost(run * n, taken_in), node.params, upstream, held, **here)]
        if node.data and node.op in PRODUCTS:
            for behind in node.data:
                cost = Cost(inputs / len(node.data) * n, 0, _gradient_macs(node, behind) * n)
                out.append(Charge(ChargeKind.INPUT_GRAD, cost, (), (behind,), **here))
        elif node.data:
            macs = int(node.macs * _ATTENTION) or _gradient_macs(node, node.data[0])
            out.append(Charge(ChargeKind.INPUT_GRAD, Cost(inputs * n, 0, macs * n), (), upstream, **here))
        if flow > taken_in:
            out.append(Charge(ChargeKind.INPUT_GRAD, Cost(bytes=flow - taken_in), (), upstream, now, **here))
        if any(node.copies):
            out.append(Charge(ChargeKind.INPUT_GRAD, Cost(bytes=max(node.copies)), node.params, upstream, now, **here))
            out.append(Charge(ChargeKind.WEIGHT_GRAD, Cost(bytes=min(node.copies)), node.params, (), now, **here))
        if node.params:
            alone, shared = split(max(everything - inputs, 0.0), [times.alone.get((i, p)) for p in node.params])
            for param, seconds in zip(node.params, alone, strict=True):
                cost = Cost(seconds * n, 0, _gradient_macs(node, param) * n)
                out.append(Charge(ChargeKind.WEIGHT_GRAD, cost, (param,), **here))
            cost = Cost((shared + times.norms.get(i, 0.0)) * n, whole - max(flow, taken_in))
            out.append(Charge(ChargeKind.WEIGHT_GRAD, cost, node.params, (), now, **here))
        return out


def _pointing(charge: Charge, via: tuple[int, ...]) -> Charge:
    """`replace(charge, via=via)`, of which there are thousands, in a fifth of the time."""
    return Charge(charge.kind, charge.cost, charge.params, via, charge.live, charge.lean, charge.node, charge.name)


def _label(node: Node) -> str:
    return f"{node.op} {node.module}".strip()


def _suffix_maxima(inference: Sequence[int]) -> list[int]:
    """Operations that may be the peak of the forward pass. Kept bytes only grow, so an earlier and lower one cannot be."""
    out: list[int] = []
    for k in range(len(inference) - 1, -1, -1):
        if not out or inference[k] > inference[out[-1]]:
            out.append(k)
    return out[::-1]


def _scratch_moments(sizes: Sizes) -> list[list[str]]:
    """Whose scratch memory lives at the same time, for each moment of the optimizer; tiny ones are left out."""
    named = {name: size for name, size in sizes.scratch.items() if size}
    if sizes.together or not named:
        return [list(named)]
    largest = max(named.values())
    return [[name] for name, size in named.items() if size > largest / 100]


def _gradient_macs(node: Node, waiting: str | int) -> int:
    """MACs of the gradient that one parameter or node behind waits for."""
    if node.macs and node.inputs.index(waiting) != BIAS.get(node.op):
        return node.macs
    return node.outputs if isinstance(waiting, str) or node.is_norm else 0


def split(joint: float, alone: Sequence[float | None]) -> tuple[list[float], float]:
    """What each parameter of a node costs beside what they share, so that one alone and all together are as measured."""
    if len(alone) == 1:
        return [joint], 0.0
    known = [a for a in alone if a is not None]
    rest = max(joint - sum(known), 0.0) / max(len(alone) - len(known), 1)
    each = [min(a if a is not None else rest, joint) for a in alone]
    total = sum(each)
    if total <= joint:
        return [joint * (a / total) if total else joint / len(each) for a in each], 0.0
    shared = min((total - joint) / (len(each) - 1), *each)
    each = [a - shared for a in each]
    left = sum(each)
    return [(joint - shared) * (a / left) if left else 0.0 for a in each], shared
