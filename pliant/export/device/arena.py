"""Where every tensor of a program lies in memory: the planner that ExecuTorch is given, and a report of its result.

Tensors with disjoint lifetimes share memory. An operator that works element by element writes onto the input that it reads for
the last time. Tensors are placed one by one, each into the smallest gap that holds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

# Element by element: the output may be the memory of an input. Held against the kernels by the gradient check of every export.
IN_PLACE = frozenset(
    f"aten::{name}"
    for name in [
        "abs",
        "add",
        "bitwise_or",
        "clamp",
        "div",
        "exp",
        "hardtanh",
        "leaky_relu",
        "mul",
        "neg",
        "relu",
        "sigmoid",
        "sub",
        "tanh",
        "where",
    ]
)

_TURNS = 12  # attempts for each order; the three backbones of TinyTrain need at most five to leave no gap


@dataclass(frozen=True)
class Buffer:
    """Memory that is held from one node of the program to another, both included."""

    size: int
    start: int
    end: int


def place(buffers: Sequence[Buffer]) -> tuple[list[int], int]:
    """An offset for each buffer, and the bytes of all of them together: the best of a few orders.

    >>> place([Buffer(8, 0, 1), Buffer(4, 1, 2), Buffer(8, 2, 3)])
    ([0, 8, 0], 12)
    """
    orders: tuple[Callable[[Buffer], tuple[int, ...]], ...] = (
        lambda one: (-one.size, one.start),
        lambda one: (one.start - one.end, -one.size),  # what lives longest leaves no gaps if it lies first
        lambda one: (-one.size * (one.end - one.start + 1), one.start),
    )
    least = busiest(buffers)[1]
    found = []
    for key in orders:
        order = sorted(range(len(buffers)), key=lambda i: key(buffers[i]))  # used at once
        for _ in range(_TURNS):
            offsets, total = _placed(buffers, order)
            found.append((offsets, total))
            if total <= least:
                return offsets, total
            top = max(range(len(buffers)), key=lambda i: offsets[i] + buffers[i].size)
            order = [top, *(i for i in order if i != top)]  # what lies highest is placed first next time
    return min(found, key=lambda result: result[1])


def _placed(buffers: Sequence[Buffer], order: Sequence[int]) -> tuple[list[int], int]:
    """Each in its turn into the smallest gap that holds it, or behind all that it meets."""
    offsets = [0] * len(buffers)
    placed: list[int] = []
    for i in order:
        one = buffers[i]
        busy = sorted(
            (offsets[j], offsets[j] + buffers[j].size)
            for j in placed
            if buffers[j].start <= one.end and one.start <= buffers[j].end
        )
        gaps: list[tuple[int, int]] = []
        free = 0
        for begin, end in busy:
            if begin - free >= one.size:
                gaps.append((begin - free, free))
            free = max(free, end)
        offsets[i] = min(gaps)[1] if gaps else free
        placed.append(i)
    return offsets, max((offset + buffer.size for offset, buffer in zip(offsets, buffers, strict=True)), default=0)


def busiest(buffers: Sequence[Buffer]) -> tuple[int, int]:
    """The moment at which most bytes are held, and how many."""
    held: Counter[int] = Counter()
    for buffer in buffers:
        held[buffer.start] += buffer.size
        held[buffer.end + 1] -= buffer.size
    now, best = 0, (0, 0)
    for moment in sorted(held):
        now += held[moment]
        best = max(best, (now, -moment))
    return -best[1], best[0]


class Lives:
    """Lifetimes of tensors by key; those that share memory are one."""

    def __init__(self) -> None:
        self.of: dict[Any, list[int]] = {}  # size, start, end
        self._same: dict[Any, Any] = {}

    def add(self, key: Any, size: int, start: int, end: int) -> None:
        self.of[key] = [size, start, end]

    def root(self, key: Any) -> Any:
        while key in self._same:
            key = self._same[key]
        return key

    def share_(self, out: Any, source: Any, moment: int) -> bool:
        """Let `out`, written at this moment, take the memory of `source` if nobody reads that afterwards."""
        out, source = self.root(out), self.root(source)
        if out is source or source not in self.of or out not in self.of:
            return False
        (size, start, end), (held, since, until) = self.of[out], self.of[source]
        if size != held or until > moment:
            return False
        self.of[source] = [held, min(since, start), max(until, end)]
        del self.of[out]
        self._same[out] = source
        return True

    def buffers(self) -> dict[Any, Buffer]:
        return {key: Buffer(*life) for key, life in self.of.items()}


@dataclass(frozen=True)
class Report:
    """Bytes of a program's memory at its fullest moment, by what they hold, and the operator that runs then."""

    planned: int
    operator: str
    held: dict[str, int]
    largest: tuple[tuple[str, int], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "planned": self.planned,
            "operator": self.operator,
            "held": self.held,
            "largest": [list(x) for x in self.largest],
        }


class Planner:
    """A memory-planning algorithm of ExecuTorch. `report` says what it found."""

    def __init__(self) -> None:
        self.report: Report | None = None

    __name__ = "pliant"  # ExecuTorch names algorithms in its log

    def __call__(
        self, alignment: int, specs: Iterable[Any], graph_module: fx.GraphModule, signature: Any, extra_padding: int
    ) -> Any:
        from executorch.exir.memory_planning import MemoryAlgoResult, SpecAllocResult, _is_out_var_node, get_node_tensor_specs

        wanted = list(dict.fromkeys(specs))
        for spec in wanted:
            spec.realign(alignment)
        nodes = list(graph_module.graph.nodes)
        lives = Lives()
        for spec in wanted:
            lives.add(spec, spec.allocated_memory, *spec.lifetime)
        fixed = {spec for node in nodes if node.op == "placeholder" for spec in get_node_tensor_specs(node)}
        for moment, node in enumerate(nodes):
            if _is_out_var_node(node) and node.target._schema.name in IN_PLACE:
                out = node.meta["spec"]
                for source in _sources(node, get_node_tensor_specs):
                    if source not in fixed and _alike(source, out) and lives.share_(out, source, moment):
                        break
        buffers = lives.buffers()
        offsets, total = place(list(buffers.values()))
        at = dict(zip(buffers, offsets, strict=True))
        result = MemoryAlgoResult({}, [0, total + extra_padding])
        for spec in wanted:
            result.spec_dict[spec] = SpecAllocResult(1, 0, at[lives.root(spec)])
        if total:
            self.report = _report(total, buffers, nodes, _roles(graph_module, signature, get_node_tensor_specs), lives)
        return result


def _sources(node: fx.Node, specs_of: Callable[[fx.Node], Sequence[Any]]) -> list[Any]:
    return [spec for arg in node.args if isinstance(arg, fx.Node) for spec in specs_of(arg)[:1]]


def _alike(source: Any, out: Any) -> bool:
    return not source.const and source.dtype == out.dtype and tuple(source.shape) == tuple(out.shape)


def _roles(module: fx.GraphModule, signature: Any, specs_of: Callable[[fx.Node], Sequence[Any]]) -> dict[Any, str]:
    """What a tensor is, where it is more than a value on the way."""
    roles: dict[Any, str] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            kind = "weights that change" if node.meta.get("weight_has_gradient") else "inputs"
            roles.update(dict.fromkeys(specs_of(node), kind))
    gradients = [spec.kind.name == "GRADIENT_TO_PARAMETER" for spec in signature.output_specs] if signature else []
    outputs: Any = module.graph.output_node().args[0]
    for node, is_gradient in zip(outputs, gradients, strict=False):
        if is_gradient and isinstance(node, fx.Node):
            roles.update(dict.fromkeys(specs_of(node), "gradients"))
    return roles


def _report(total: int, buffers: dict[Any, Buffer], nodes: Sequence[fx.Node], roles: dict[Any, str], lives: Lives) -> Report:
    moment, _ = busiest(list(buffers.values()))
    named = {lives.root(spec): kind for spec, kind in roles.items()}
    held: Counter[str] = Counter()
    largest = []
    for spec, buffer in buffers.items():
        if buffer.start <= moment <= buffer.end:
            kind = named.get(spec, "activations")
            held[kind] += buffer.size
            what = f"{kind}, {'×'.join(map(str, spec.shape))} {str(spec.dtype).removeprefix('torch.')}"
            largest.append((what, buffer.size))
    held["gaps"] = total - sum(held.values())
    running = next((node for node in nodes[moment:] if isinstance(node.target, torch._ops.OpOverload)), nodes[-1])
    return Report(total, str(running.target), dict(held), tuple(sorted(largest, key=lambda item: -item[1])[:8]))
