"""Backward passes over one retained graph, each asking for something else: what every node takes, in seconds and in bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd.graph import GradientEdge

from pliant.cost.from_graph import Sizes, Times
from pliant.graph.backward import Graph, compute_loss, walk, wiring
from pliant.graph.saved_tensors import op_name
from pliant.runtime.batches import Around, Loss
from pliant.runtime.batchnorm import Norms, in_eights
from pliant.runtime.clock import LaunchWatch, Watch
from pliant.runtime.memory import Live

_MOST_SLOTS = 3
_FAR = 2.0  # times as long: what a step waits for is clear
_LATE = 1.3  # times as long as it took before: what issuing may take
_ONE_KERNEL = 0.25  # of the way back through a norm that moves: through one at rest, where a captured step runs our own kernel
_AT_REST = 0.16  # of PyTorch's way back through a norm at rest: the same
_MARKING = 2e-5  # seconds that a mark of a GPU takes more than one of the clock: about


@dataclass
class Passes:
    """One graph, and the model that makes it again and again. Runs inside `apply.sandbox`."""

    model: nn.Module
    loss: Loss
    batch: Any
    graph: Graph
    params: Mapping[str, nn.Parameter]
    norms: Norms
    around: Around = nullcontext
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

    def _norms_move(self) -> bool:
        """Whether the mode of some norm hangs on the choice."""
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
        slots: list[_Fastest | None] = [_Fastest(len(self.graph.nodes)) for _ in self.slots]
        moves = self._norms_move()
        forward: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(repeats):
            value, live, seconds = self._run(self.used)
            forward[True].append(seconds)
            self._see(everything, value, live, self.used)
            # Where a GPU waits for launches, a node's are shared out evenly, and the GPU alone is looked at closely.
            for k, slot in enumerate(self.slots) if turn <= repeats // 3 else ():  # fine differences: a rough look will do
                slots[k] = self._see_slot(slots[k], value, live, slot)
            if moves:
                del value, live
                value, live, seconds = self._run([])
                forward[False].append(seconds)
            self._see(inputs, value, live, [], roots=True)
            del value, live
            if self.watch.cuda and not self.is_bound_by_gpu:  # issuing takes roughly so long, however often it is measured
                break

        def times(
            of: Callable[[_Fastest], NDArray[np.float64]], resting: float, moving: float, apart: bool, captured: bool = False
        ) -> Times:
            at_rest = of(inputs)
            # Where norms move, the two come from graphs of different modes, and a moving norm may be the cheaper one.
            together = of(everything) if moves else np.maximum(of(everything), at_rest)
            if captured:
                kernel, served = _ONE_KERNEL * together if moves else _AT_REST * at_rest, self._served()
                ours = [node.is_batch_norm and node.module in served for node in self.graph.nodes]
                at_rest = np.where(ours, np.minimum(at_rest, kernel), at_rest)
            alone = {
                (i, node.params[k]): max(float(of(seen)[i] - at_rest[i]), 0.0)
                for k, (slot, seen) in enumerate(zip(self.slots, slots, strict=True))
                if seen is not None and apart
                for i, node in enumerate(self.graph.nodes)
                if len(node.params) > max(k, 1) and node.params[k] in slot
            }
            return Times(together, at_rest, alone, self._norm_shares(max(moving - resting, 0.0)), resting)

        taken = {moving: self.watch.typical(forward[moving]) for moving in {not moves, True}}
        steps = times(lambda seen: seen.seconds, taken[not moves], taken[True], apart=not self.is_bound_by_launches)
        if not self.watch.cuda:
            return steps, None
        if not self.is_bound_by_gpu:
            taken = {moving: self._forward_alone(moving, seconds) for moving, seconds in taken.items()}
        return steps, times(lambda seen: seen.alone, taken[not moves], taken[True], apart=True, captured=True)

    def _served(self) -> set[str]:
        """The modules whose norms at rest captured steps run in one kernel: channels-last, where there is Triton."""
        if not self.watch.cuda or find_spec("triton") is None:
            return set()
        found: set[str] = set()

        def look(name: str, given: tuple[Any, ...]) -> None:
            x = given[0] if given else None
            if isinstance(x, torch.Tensor) and in_eights(x):
                found.add(name)

        norms = {name: module for name, module in self.model.named_modules() if isinstance(module, nn.BatchNorm2d)}
        hooks = [one.register_forward_pre_hook(lambda _, given, name=name: look(name, given)) for name, one in norms.items()]
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
        """Seconds of a GPU for a forward pass (norms moving or at rest) that it finds issued, which takes about so long."""
        self.norms.hold_(self.params, self.used if moving else [])
        with torch.no_grad():
            try:
                return min(self.watch.time(lambda: self.loss(self.model, self.batch), lead=_LATE * issued)[0] for _ in range(2))
            except RuntimeError:  # a loss that needs gradients
                return issued

    def _see_slot(
        self, seen: _Fastest | None, value: torch.Tensor, live: Sequence[Any], slot: Sequence[str]
    ) -> _Fastest | None:
        """Some kernels cannot be asked for one parameter's gradient while another is trainable: then it stays unknown."""
        if seen is not None:
            try:
                self._see(seen, value, live, slot, roots=True, issuing=not self.is_bound_by_launches)
            except RuntimeError:
                return None
        return seen

    def _norm_shares(self, extra: float) -> dict[int, float]:
        """What each norm with statistics adds to the forward pass when it moves them, by the size of its output."""
        outputs = {i: n.outputs for i, n in enumerate(self.graph.nodes) if n.is_batch_norm or (n.is_norm and n.params)}
        total = sum(outputs.values())
        return {i: extra * size / total for i, size in outputs.items()} if extra and total else {}

    def _run(self, chosen: Sequence[str]) -> tuple[torch.Tensor, list[Any], float]:
        self.norms.hold_(self.params, chosen)
        with self.around():
            seconds, value = self.watch.time(lambda: compute_loss(self.model, self.loss, self.batch))
        live = walk(value)
        _check_same(self.graph, live, self.params)
        return value, live, seconds

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
        meter = Live(self.device)
        meter.forget()
        with meter, torch.no_grad():
            self.loss(self.model, self.batch)
        alone = meter.peak
        value, live, _ = self._run(self.used)
        everything = self._node_bytes(value, live, self.used, roots=False)
        inputs = self._node_bytes(value, live, [], roots=True)
        return Sizes(inputs, everything, {}, inference=alone, norms_move=self._norms_move())

    def _node_bytes(self, value: torch.Tensor, live: Sequence[Any], ask: Sequence[str], roots: bool) -> list[int]:
        inputs = self._asked(live, ask, roots)
        rise, gradients, seen = [0] * len(live), 0, set()
        if not inputs:
            return rise
        meter = Live(self.device)

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
    """How long a GPU must be held back so that it finds every node's work issued, even when it is asked for half of it.

    `before`: what the CPU does before it issues the first.
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


def _check_same(graph: Graph, live: Sequence[Any], params: Mapping[str, nn.Parameter]) -> None:
    """A norm may be another operation in another mode, and a convolution one of ours; all else must be as it was read."""
    now = [_alike(op_name(node), inputs) for node, (inputs, _) in zip(live, wiring(live, params), strict=True)]
    if [_alike(node.op, node.inputs) for node in graph.nodes] != now:
        raise ValueError(
            f"the model's backward graph changes from run to run ({len(graph.nodes)} nodes, then {len(live)}): seconds per "
            f"node would mean nothing. Use dataclasses.replace(policy, cost=measure.counted), or make "
            f"the forward pass repeat for the same batch and seed."
        )


def _alike(op: str, inputs: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    if op in ("Convolution", "_Depthwise", "_Pointwise"):
        return "Convolution", tuple(one for one in inputs if one is not None)
    return "BatchNorm" if "BatchNorm" in op else op, inputs
