"""Backward passes over one retained graph, each asking for something else: what every node takes, in seconds and in bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd.graph import GradientEdge

from pliant.core.prices import KernelPrices
from pliant.cost.measurements import Sizes, Times
from pliant.graph.backward import Graph, compute_loss, walk
from pliant.runtime.batches import Around, Loss
from pliant.runtime.batchnorm import BatchNormModes
from pliant.runtime.clock import LaunchWatch, Watch
from pliant.runtime.memory import LiveBytes, inference_peak
from pliant.runtime.rng import seed_
from pliant.runtime.working import told

_MOST_SLOTS = 3
_FAR = 2.0  # times as long: then a step clearly waits for the slower one
_LATE = 1.3  # margin on the time that issuing kernels took before
_MARKING = 2e-5  # seconds that recording a CUDA event takes longer than reading a clock, about


@dataclass
class NodeTiming:
    """Times every node of one graph, by running the model again and again. Runs inside `sandbox`."""

    model: nn.Module
    loss: Loss
    batch: Any
    graph: Graph
    params: Mapping[str, nn.Parameter]
    norms: BatchNormModes
    around: Around = nullcontext
    prices: KernelPrices = field(default_factory=KernelPrices)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.device = next(iter(self.params.values())).device
        self.used = [name for name in self.params if name not in self.graph.unused]
        self.slots = _slots(self.graph)
        self.watch = Watch(self.device)
        self._bound: str | None = None  # on CUDA: what a step waits for
        self._lead: float | None = None  # seconds that a GPU must be kept waiting so that it never waits by itself

    @property
    def is_bound_by_launches(self) -> bool:
        """Whether a GPU spends most of a step waiting for what to do next, as far as is known."""
        return self._bound == "launch"

    @property
    def is_bound_by_gpu(self) -> bool:
        """Whether a GPU always finds more to do, as far as is known."""
        return self._bound == "gpu"

    def _modes_differ(self) -> bool:
        """Whether the mode of some norm depends on the choice."""
        modes = []
        for chosen in ([], list(self.params)):
            self.norms.hold_(self.params, chosen)
            modes.append([module.training for module in self.model.modules()])
        return modes[0] != modes[1]

    # ------------------------------------------------------------ seconds

    def times(self, repeats: int) -> tuple[Times, Times | None]:
        """Seconds of every node and of the forward pass, from `repeats` rounds in which everything takes its turn.

        On CUDA also those of the GPU alone, which is what a captured step takes.
        """
        everything, inputs = (_Fastest(len(self.graph.nodes)) for _ in range(2))
        few = repeats == 1 and not self.watch.cuda  # then biases alone are timed apart
        norms = {name for node in self.graph.nodes if node.is_norm for name in node.params}
        asked = [[name for name in slot if not few or (k and name not in norms)] for k, slot in enumerate(self.slots)]
        slots = [_Fastest(len(self.graph.nodes)) if slot else None for slot in asked]
        differ = self._modes_differ()
        forward: dict[bool, list[float]] = {True: [], False: []}
        for turn in told("timing layers", range(repeats)):
            value, live, seconds = self._run(self.used)
            forward[True].append(seconds)
            if turn == 0 and not self.watch.cuda:  # a first pass makes PyTorch's kernels, and may be disturbed
                self._see(_Fastest(len(live)), value, live, self.used)
                del value, live
                value, live, seconds = self._run(self.used)
                forward[True].append(seconds)
            self._see(everything, value, live, self.used)
            # Where a GPU waits for launches, a node's time is shared evenly, and the GPU alone is timed closely.
            for k, slot in enumerate(asked) if turn <= repeats // 3 else ():  # fine differences: fewer rounds will do
                slots[k] = self._see_slot(slots[k], value, live, slot, roots=not {*slot} <= {*self.graph.head})
            if differ:
                del value, live
                value, live, seconds = self._run([])
                forward[False].append(seconds)
            self._see(inputs, value, live, [], roots=True)
            del value, live
            if self.watch.cuda and not self.is_bound_by_gpu:  # issuing takes roughly so long, however often it is measured
                break

        def times(
            of: Callable[[_Fastest], NDArray[np.float64]],
            on_running_stats: float,
            on_batch_stats: float,
            apart: bool,
            captured: bool = False,
        ) -> Times:
            on_running = of(inputs)
            # Where modes differ, the two come from different graphs, and a norm on batch statistics may be the cheaper one.
            together = of(everything) if differ else np.maximum(of(everything), on_running)
            if captured:
                kernel = self.prices.of_batch * together if differ else self.prices.of_running * on_running
                served = self._served()
                custom = [node.is_batch_norm and node.module in served for node in self.graph.nodes]
                on_running = np.where(custom, np.minimum(on_running, kernel), on_running)
            alone = {
                (i, node.params[k]): max(float(of(seen)[i] - on_running[i]), 0.0)
                for k, (slot, seen) in enumerate(zip(asked, slots, strict=True))
                if seen is not None and apart
                for i, node in enumerate(self.graph.nodes)
                if len(node.params) > max(k, 1) and node.params[k] in slot
            }
            for i, node in enumerate(self.graph.nodes) if few else ():
                if node.is_norm:  # scale and shift come from one pass
                    alone |= {(i, name): max(float(together[i] - on_running[i]), 0.0) for name in node.params}
            return Times(
                together, on_running, alone, self._norm_shares(max(on_batch_stats - on_running_stats, 0.0)), on_running_stats
            )

        taken = {moving: self.watch.typical(forward[moving]) for moving in {not differ, True}}
        steps = times(lambda seen: seen.seconds, taken[not differ], taken[True], apart=not self.is_bound_by_launches)
        if not self.watch.cuda:
            return steps, None
        if not self.is_bound_by_gpu:
            taken = {moving: self._forward_alone(moving, seconds) for moving, seconds in taken.items()}
        return steps, times(lambda seen: seen.alone, taken[not differ], taken[True], apart=True, captured=True)

    def _served(self) -> set[str]:
        """The batch norms that captured steps run in a custom kernel while they use running statistics."""
        if not self.watch.cuda:
            return set()
        found: set[str] = set()

        def check(name: str, given: tuple[Any, ...]) -> None:
            x = given[0] if given else None
            if isinstance(x, torch.Tensor) and self.prices.serves(x):
                found.add(name)

        norms = {name: module for name, module in self.model.named_modules() if isinstance(module, nn.BatchNorm2d)}
        hooks = [one.register_forward_pre_hook(lambda _, given, name=name: check(name, given)) for name, one in norms.items()]
        try:
            with torch.no_grad():
                self.loss(self.model, self.batch)
        except RuntimeError:  # a loss that needs gradients
            return set()
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _forward_alone(self, moving: bool, issued: float) -> float:
        """Seconds of the GPU alone for a forward pass, on batch or running statistics; issuing it takes about `issued`."""
        self.norms.hold_(self.params, self.used if moving else [])
        with torch.no_grad():
            try:
                return min(self.watch.time(lambda: self.loss(self.model, self.batch), lead=_LATE * issued)[0] for _ in range(2))
            except RuntimeError:  # a loss that needs gradients
                return issued

    def _see_slot(
        self, seen: _Fastest | None, value: torch.Tensor, live: Sequence[Any], slot: Sequence[str], roots: bool
    ) -> _Fastest | None:
        """Some kernels cannot be asked for one parameter's gradient while another is trainable: then it stays unknown."""
        if seen is not None:
            try:
                self._see(seen, value, live, slot, roots, issuing=not self.is_bound_by_launches)
            except RuntimeError:
                return None
        return seen

    def _norm_shares(self, extra: float) -> dict[int, float]:
        """What each norm adds to the forward pass on batch statistics, by the size of its output."""
        outputs = {i: n.outputs for i, n in enumerate(self.graph.nodes) if n.is_batch_norm or (n.is_norm and n.params)}
        total = sum(outputs.values())
        return {i: extra * size / total for i, size in outputs.items()} if extra and total else {}

    def _run(self, chosen: Sequence[str]) -> tuple[torch.Tensor, list[Any], float]:
        self.norms.hold_(self.params, chosen)
        self._draw_again()
        torch.clear_autocast_cache()  # else weights that were cast in the pass before are not cast again
        with self.around():
            seconds, value = self.watch.time(lambda: compute_loss(self.model, self.loss, self.batch))
        live = walk(value)
        if not self.graph.is_wired_like(value, self.params):
            raise ValueError(
                f"the model's backward graph changes from run to run ({len(self.graph.nodes)} nodes, then {len(live)}), also "
                f"with the same random numbers: seconds per node would mean nothing. Let the forward pass depend on its batch "
                f"and on random numbers of torch, numpy or random alone, or use "
                f"dataclasses.replace(policy, cost=measure.counted)."
            )
        return value, live, seconds

    def _draw_again(self) -> None:
        """Where random numbers decide which layers run: start from those of this graph."""
        if self.graph.seed is not None:
            seed_(self.graph.seed)

    def _see(
        self,
        seen: _Fastest,
        value: torch.Tensor,
        live: Sequence[Any],
        ask: Sequence[str],
        roots: bool = False,
        issuing: bool = True,
    ) -> None:
        """Time each node in a backward pass to some parameters (and to where input gradients end); 0 if it does not run.

        On CUDA a node takes what the GPU needs for it or what the CPU needs to issue it, whichever is more. The first is
        measured behind a queue of work, so that the GPU never waits; the second where it is asked for and may be the more.
        """
        inputs = self._asked(live, ask, roots)
        if not inputs:
            return
        if not self.watch.cuda:
            seen.see(_by_node(_marked(value, inputs, live, self.watch), len(live)))
            return
        issued, before = dict[int, float](), 0.0
        if issuing and not self.is_bound_by_gpu:
            issued, before = _in_a_row(value, inputs, live, LaunchWatch())
        wait = _lead(issued, {}, before) if self._lead is None else self._lead
        computed, _ = self.watch.time(lambda: _in_a_row(value, inputs, live, self.watch), lead=wait)[1]
        if self._lead is None:
            self._lead = _lead(issued, computed, before)
            gpu, cpu = sum(computed.values()), sum(issued.values())
            self._bound = "launch" if cpu > _FAR * gpu else "gpu" if gpu > _FAR * cpu else None
        alone = _by_node(computed, len(live))
        seen.see(np.maximum(_by_node(issued, len(live)), alone), alone)

    def _asked(self, live: Sequence[Any], ask: Sequence[str], roots: bool) -> list[Any]:
        return [*(_roots(self.graph, live) if roots else ()), *(self.params[name] for name in ask)]

    # ------------------------------------------------------------ bytes

    def sizes(self) -> Sizes:
        """Bytes that live while each node runs, beside what is kept and the gradients of parameters."""
        self._draw_again()
        alone = inference_peak(lambda: self.loss(self.model, self.batch), self.device) or 0  # else as it was read
        value, live, _ = self._run(self.used)
        everything = self._node_bytes(value, live, self.used, roots=False)
        inputs = self._node_bytes(value, live, [], roots=True)
        return Sizes(inputs, everything, {}, inference=alone, norms_differ=self._modes_differ())

    def _node_bytes(self, value: torch.Tensor, live: Sequence[Any], ask: Sequence[str], roots: bool) -> list[int]:
        inputs = self._asked(live, ask, roots)
        rise, gradients, seen = [0] * len(live), 0, set()
        if not inputs:
            return rise
        meter = LiveBytes(self.device)

        def after(i: int) -> None:
            nonlocal gradients
            new = [name for name in self.graph.nodes[i].params if name in ask and name not in seen]
            seen.update(new)
            gradients += sum(self.graph.params[name] for name in new)
            rise[i] = max(meter.peak - gradients, 0)

        with meter:
            _hooked(value, inputs, live, lambda _: meter.forget(), after)
        return rise


class _Fastest:
    """The least seconds of each node over several passes: whatever disturbs a pass only adds to it. And a GPU's own."""

    def __init__(self, nodes: int) -> None:
        self._least, self._alone = np.full(nodes, np.inf), np.full(nodes, np.inf)

    def see(self, seconds: NDArray[np.float64], alone: NDArray[np.float64] | None = None) -> None:
        self._least = np.minimum(self._least, seconds)
        if alone is not None:
            self._alone = np.minimum(self._alone, alone)

    @property
    def seconds(self) -> NDArray[np.float64]:
        return np.where(np.isfinite(self._least), self._least, 0.0)

    @property
    def alone(self) -> NDArray[np.float64]:
        return np.where(np.isfinite(self._alone), self._alone, 0.0)


def _slots(graph: Graph) -> list[list[str]]:
    """The first, second, … parameters of the nodes that have several, so that a pass can ask for one of each node's.

    A tied weight may have different positions at different nodes; a pass would ask for two then, so it is left out.
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


def _marked(value: torch.Tensor, inputs: Sequence[Any], live: Sequence[Any], watch: Watch) -> dict[int, float]:
    """Seconds of the nodes that a backward pass runs, in the order in which it does."""
    begun: dict[int, Any] = {}
    ended: dict[int, Any] = {}
    _hooked(value, inputs, live, lambda i: begun.__setitem__(i, watch.mark()), lambda i: ended.__setitem__(i, watch.mark()))
    watch.settle()
    return {i: watch.seconds(start, ended[i]) for i, start in begun.items() if i in ended}


def _in_a_row(value: torch.Tensor, inputs: Sequence[Any], live: Sequence[Any], watch: Watch) -> tuple[dict[int, float], float]:
    """The same where no time passes between a node and the next: half the marks. And what passes before the first."""
    ended: dict[int, Any] = {}
    marks = [watch.mark()]
    _hooked(value, inputs, live, None, lambda i: ended.__setitem__(i, watch.mark()), lambda: marks.append(watch.mark()))
    watch.settle()
    before, start = watch.seconds(*marks), marks[1]
    out = {}
    for i, end in ended.items():
        out[i], start = watch.seconds(start, end), end
    return out, before


def _by_node(seconds: Mapping[int, float], nodes: int) -> NDArray[np.float64]:
    out = np.zeros(nodes)
    for i, taken in seconds.items():
        out[i] = taken
    return out


def _lead(issued: Mapping[int, float], computed: Mapping[int, float], before: float = 0.0) -> float:
    """How long a GPU must be held back so that every node's work is issued in time, even when half of it is asked for.

    `before`: the CPU's time before it issues the first.
    """
    ready, done, lead = _LATE * before, 0.0, 0.0
    for i, seconds in issued.items():
        ready += _LATE * seconds + _MARKING
        lead = max(lead, ready - done)
        done += computed.get(i, 0.0) / 2
    return lead


def _hooked(
    value: torch.Tensor,
    inputs: Sequence[Any],
    live: Sequence[Any],
    before: Callable[[int], None] | None,
    after: Callable[[int], None],
    begin: Callable[[], None] = lambda: None,
) -> None:
    """One backward pass to `inputs` with something to do when it begins, before and after each node; the graph stays."""
    handles = []
    for i, node in enumerate(live):
        if before is not None:
            handles.append(node.register_prehook(lambda _, i=i: before(i)))
        handles.append(node.register_hook(lambda *_, i=i: after(i)))
    begin()
    try:
        torch.autograd.grad(value, list(inputs), retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
