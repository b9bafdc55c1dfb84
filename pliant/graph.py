"""Reads one backward graph off autograd: nodes in execution order, edges, the parameters at each node, the module it is from.

No tracing of Python, no module zoo: whatever ran is what is read, so functional code, residuals, shared modules and tied
weights need no care of their own.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pliant import batches

Loss = Callable[[nn.Module, Any], torch.Tensor]

# Backward operations that hand a weight's gradient on without being its layer: transposes, casts, views, slices.
# fmt: off
CARRIERS = frozenset((
    "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "ToCopy", "Slice", "Select", "Unsqueeze",
    "Squeeze", "Alias", "Clone", "Split", "SplitWithSizes", "Unbind", "AsStrided", "Repeat",
))
# fmt: on


# Products keep each factor for the gradient of the other: the inputs in whose favour they keep, in the order of keeping.
KEPT_FOR = {"Mm": (0, 1), "Bmm": (0, 1), "Mul": (0, 1), "Addmm": (2, 1), "Baddbmm": (2, 1)}
BIAS = {"Convolution": 2, "Addmm": 0, "Baddbmm": 0, "Linear": 2}  # the input that is added, not multiplied
_CHEAP = frozenset(("Embedding", "EmbeddingBag", "Add", "Sub", "Mul", "Div", "PreluKernel", "Index", "IndexSelect", "Gather"))


@dataclass(frozen=True)
class Node:
    """One operation of the backward pass.

    `inputs` says, for each input of the forward operation, what waits for its gradient: a parameter (by name, also through
    transposes, casts and views), a node further from the loss (by index), or nothing. A `carrier` only hands a parameter's
    gradient on. A function written in Python computes all its gradients whatever is asked for: `whole`. `macs` and `outputs`
    (elements) are its forward's. `saves` lists (storage, bytes, input for whose gradient it is kept, or None) for backward.
    """

    op: str
    module: str
    inputs: tuple[str | int | None, ...] = ()
    carrier: bool = False
    whole: bool = False
    macs: int = 0
    outputs: int = 0
    saves: tuple[tuple[int, int, int | None], ...] = ()

    @cached_property
    def params(self) -> tuple[str, ...]:
        """The parameters that it computes a gradient for."""
        return tuple(dict.fromkeys(i for i in self.inputs if isinstance(i, str)))

    @cached_property
    def data(self) -> tuple[int, ...]:
        """The nodes further from the loss that wait for its input gradient."""
        return tuple(dict.fromkeys(i for i in self.inputs if isinstance(i, int)))


@dataclass(frozen=True)
class Graph:
    """A backward graph as plain data, nearest the loss first.

    `forward_macs` counts what made no node too. `params` maps every trainable parameter to its number of bytes, `unused`
    names those that the loss does not reach, `modules` maps module names to class names, `head` names the parameters of the
    module nearest the loss.
    """

    nodes: tuple[Node, ...]
    params: dict[str, int]
    unused: tuple[str, ...]
    modules: dict[str, str]
    head: tuple[str, ...]
    uncounted: tuple[str, ...] = ()
    forward_macs: int = 0

    def order(self) -> dict[str, int]:
        """For each used parameter, the node furthest from the loss that needs it."""
        deepest: dict[str, int] = {}
        for i, node in enumerate(self.nodes):
            if not node.carrier:
                for param in node.params:
                    deepest[param] = i
        return deepest


def owner(param: str) -> str:
    """The module that a parameter is registered in."""
    return param.rpartition(".")[0]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the user left trainable: the only ones that can be chosen. There must be one."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not params:
        raise ValueError("no trainable parameter: every parameter has requires_grad=False (or there is none).")
    return params


def compute_loss(model: nn.Module, loss: Loss, batch: Any) -> torch.Tensor:
    """The user's loss, checked: a scalar tensor that gradients can flow from."""
    batches.check_not_empty(batch)
    value = loss(model, batch)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"loss(model, batch) must return a scalar tensor; it returned {given}.")
    if value.grad_fn is None:
        raise ValueError(
            "no gradient can flow from the loss: it depends on no trainable parameter. Check that the model has parameters "
            "with requires_grad=True and that loss() runs outside torch.no_grad()."
        )
    return value


def walk(loss: torch.Tensor) -> list[Any]:
    """The autograd nodes behind a loss in the order in which the engine runs them, gradient accumulation left out.

    The engine takes, among the nodes that are ready, the one created last; so do we.
    """
    root: Any = loss.grad_fn
    waiting: dict[Any, int] = {}
    stack, seen = [root], {root}
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None:
                waiting[following] = waiting.get(following, 0) + 1
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
    ready, out, count = [(0, 0, root)], [], 0
    while ready:
        node = heapq.heappop(ready)[2]
        if hasattr(node, "variable"):
            continue
        out.append(node)
        for following, _ in node.next_functions:
            if following is not None:
                waiting[following] -= 1
                if waiting[following] == 0:
                    count += 1
                    heapq.heappush(ready, (-following._sequence_nr(), count, following))
    return out


def wiring(live: Sequence[Any], params: Mapping[str, nn.Parameter]) -> list[tuple[tuple[str | int | None, ...], bool]]:
    """For each node what waits for the gradient of each of its inputs (see `Node.inputs`), and whether it is a carrier."""
    names: dict[Any, str] = {param: name for name, param in params.items()}
    index = {node: i for i, node in enumerate(live)}
    carried: dict[Any, str] = {}  # autograd node → the parameter whose gradient it hands on

    def waiting(node: Any) -> str | int | None:
        return carried.get(node) or names.get(getattr(node, "variable", None)) or index.get(node)

    for node in reversed(live):
        after = [waiting(following) for following, _ in node.next_functions if following is not None]
        if op_name(node) in CARRIERS and len(after) == 1 and isinstance(after[0], str):
            carried[node] = after[0]
    return [
        (tuple(None if following is None else waiting(following) for following, _ in node.next_functions), node in carried)
        for node in live
    ]


def read(model: nn.Module, loss: Loss, batch: Any) -> Graph:
    """Run the loss once on a real batch and read its backward graph. Runs no backward.

    The forward pass has its usual side effects (batch-norm statistics, random state): wrap it in `apply.sandbox`.
    """
    params = trainable(model)
    recorder = _Recorder(model, batch)
    with recorder:
        value = compute_loss(model, loss, batch)
    live = walk(value)
    if any(op_name(node) == "CheckpointFunction" for node in live):
        raise ValueError(
            "a reentrant checkpoint hides its part of the backward graph, which then cannot be chosen. "
            "Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )
    recorder.settle(live)
    nodes = []
    for node, (inputs, carrier) in zip(live, wiring(live, params), strict=True):
        params_here = [i for i in inputs if isinstance(i, str)]
        nodes.append(
            Node(
                op_name(node),
                owner(params_here[0]) if params_here else recorder.module(node._sequence_nr()),
                inputs,
                carrier,
                isinstance(node, torch.autograd.function.BackwardCFunction),
                *recorder.work(node),
                recorder.saves(node, inputs),
            )
        )
    reached = {param for node in nodes for param in node.params}
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    return Graph(
        tuple(nodes),
        {name: param.numel() * param.element_size() for name, param in params.items()},
        tuple(name for name in params if name not in reached),
        kinds,
        _head(nodes, params),
        tuple(sorted({node.op for node in nodes if _is_uncounted(node, params)})),
        sum(macs for ran in recorder.ran.values() for _, macs, _ in ran),
    )


def _is_uncounted(node: Node, params: dict[str, nn.Parameter]) -> bool:
    """Whether a node has a matrix to train and no MACs, and is not known to have none."""
    cheap = node.carrier or node.macs or node.op in _CHEAP or "Norm" in node.op
    return not cheap and any(params[name].dim() > 1 for name in node.params)


def op_name(node: Any) -> str:
    """An autograd node's name without namespace, 'Backward' and version: 'ConvolutionBackward0' → 'Convolution'."""
    name: str = node.name().rpartition("::")[2].rstrip("0123456789")
    return name.removesuffix("Backward")


def _head(nodes: Sequence[Node], params: dict[str, nn.Parameter]) -> tuple[str, ...]:
    """All parameters of the module nearest the loss.

    A number that hangs on the whole model (a learnable temperature, say) is nearer, but is not a head by itself: it counts,
    and the search goes on to the first module or product of matrices.
    """
    head: list[str] = []
    for node in nodes:
        if node.params:
            head += node.params
            mates = {owner(param) for param in node.params} - {""}
            if mates or node.macs:
                head += [name for name in params if owner(name) in mates]
                break
    return tuple(dict.fromkeys(head))


class _Recorder:
    """What a forward pass tells while it runs: operations and saved tensors by autograd sequence number, and modules."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.model = model
        self.ran: dict[int, list[tuple[str, int, int]]] = {}  # (operation, MACs, output elements)
        self.saved: dict[int, list[tuple[int, int]]] = {}
        self._events: list[tuple[int, str]] = [(0, "")]
        self._stack: list[str] = [""]
        self._alive: list[torch.Tensor] = []  # a saved storage must not be freed and its address used again
        standing = [*model.parameters(), *model.buffers(), *batches.tensors(batch)]
        self._standing = {_storage(tensor)[0] for tensor in standing}

    def __enter__(self) -> _Recorder:
        self._handles: list[Any] = []
        for name, module in self.model.named_modules():
            self._handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name), prepend=True))
            self._handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._mode = _Counter(self)
        self._hooks.__enter__()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._hooks.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._alive.clear()

    def _enter(self, name: str) -> None:
        self._stack.append(name)
        self._events.append((_sequence(), name))

    def _leave(self) -> None:
        self._stack.pop()
        self._events.append((_sequence(), self._stack[-1]))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key, size = _storage(tensor)
        self.saved.setdefault(_sequence() - 1, []).append((key, 0 if key in self._standing else size))
        kept = tensor.detach()  # detached: an output that its own node keeps would be a cycle
        self._alive.append(kept)
        return kept

    def settle(self, live: Sequence[Any]) -> None:
        """An in-place operation that keeps its input copies it first, under the next number: bring that home."""
        ops = {node._sequence_nr(): op_name(node).lower() for node in live}
        for sequence, ran in list(self.ran.items()):
            if sequence not in ops and any(name == f"{ops.get(sequence - 1)}_" for name, _, _ in ran):
                self.ran.setdefault(sequence - 1, []).extend(ran)
                self.saved.setdefault(sequence - 1, []).extend(self.saved.pop(sequence, []))

    def work(self, node: Any) -> tuple[int, int]:
        """MACs and output elements of a node's forward.

        Operations that made no node (on frozen parts, on counters) ran under the number of the node before them, so the
        operation must bear the node's name; a custom function's own operations all count.
        """
        ran = self.ran.get(node._sequence_nr(), [])
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return sum(macs for _, macs, _ in ran), max((outputs for _, _, outputs in ran), default=0)
        op = op_name(node).lower()
        mine = [(macs, outputs) for name, macs, outputs in ran if name.rstrip("_") == op] or [
            (0, outputs) for _, _, outputs in ran
        ]
        return mine[0] if mine else (0, 0)

    def saves(self, node: Any, inputs: Sequence[Any]) -> tuple[tuple[int, int, int | None], ...]:
        """What a node keeps that would not be there anyway, each with the input for whose gradient it is kept."""
        found = self.saved.get(node._sequence_nr(), [])
        favoured = [i for i in KEPT_FOR.get(op_name(node), ()) if node.next_functions[i][0] is not None]
        known = len(favoured) == len(found)
        return tuple((key, size, favoured[k] if known else None) for k, (key, size) in enumerate(found) if size)

    def module(self, sequence: int) -> str:
        at = bisect.bisect_right(self._events, sequence, key=lambda event: event[0]) - 1
        return self._events[at][1]


class _Counter(TorchDispatchMode):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if isinstance(first, torch.Tensor):
            name = func._overloadpacket._qualified_op_name.removeprefix("aten::")
            plain = name.strip("_").replace("_", "") + "_" * name.endswith("_")  # as in autograd; in-place ones end in _
            work = (plain, forward_macs(name, args, first), first.numel())
            self.recorder.ran.setdefault(_sequence() - 1, []).append(work)
        return out


def forward_macs(name: str, args: Sequence[Any], out: torch.Tensor) -> int:
    """Multiply-accumulates of one ATen operation; 0 for whatever does not multiply matrices."""
    if name in ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"):
        transposed = name in ("convolution", "_convolution") and args[6]
        return int((args[0] if transposed else out).numel() * args[1][0].numel())
    if name in ("mm", "bmm"):
        return int(args[0].numel() * args[1].shape[-1])
    if name in ("addmm", "baddbmm"):
        return int(args[1].numel() * args[2].shape[-1])
    if name == "linear":
        return int(args[0].numel() * args[1].shape[0])
    if name.startswith("_scaled_dot_product"):
        query, key, value = args[:3]
        return int(query.numel() * key.shape[-2] + query.numel() // query.shape[-1] * key.shape[-2] * value.shape[-1])
    return 0


def _sequence() -> int:
    """The number that the next autograd node of this thread will get."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined,no-any-return]


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """A name for the memory behind a tensor, and its bytes."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors and other subclasses have no single storage
        return id(tensor), tensor.numel() * tensor.element_size()
    return storage._cdata, storage.nbytes()
