"""Reads the backward graph from autograd: nodes in execution order, edges, the parameters of each node, and its module.

No Python is traced and no module types are listed: what ran is what is read. So functional code, residuals, shared modules and
tied weights need no special case.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from pliant.graph.forward_trace import CARRIERS, ForwardTrace, SavedTensorNeeded
from pliant.graph.saved_tensors import Saves, op_name
from pliant.runtime import batches
from pliant.runtime.batches import Loss
from pliant.runtime.rng import rng_states, set_rng_states
from pliant.runtime.sandbox import sandbox
from pliant.runtime.torch_internals import class_name, next_nodes, unsharded

BIAS = {"Convolution": 2, "Addmm": 0, "Baddbmm": 0, "Linear": 2}  # the input that is added, not multiplied
_PARAMETER_LISTS = frozenset(("ParameterList", "ParameterDict"))
_CHEAP = frozenset(("Embedding", "EmbeddingBag", "Add", "Sub", "Mul", "Div", "PreluKernel", "Index", "IndexSelect", "Gather"))


@dataclass(frozen=True)
class Node:
    """One operation of the backward pass.

    `inputs` says, for each input of the forward operation, what receives its gradient: a parameter (by name, also through
    transposes, casts and views), a node further from the loss (by index), or nothing. A `carrier` only passes a parameter's
    gradient on. A `whole` node is a function written in Python: it computes all its gradients, whichever are needed.
    `macs`, `outputs` (elements), `made` (their bytes) and `moved` (bytes read and written) are those of its forward. The first
    node of a checkpoint that runs backward `recomputes` the checkpoint's part of the forward pass. `saves` lists (storage,
    bytes, input for whose gradient it is saved, or None); `lean` is the same under the lean engine, if that differs. From an
    `outward` node gradients would flow to a tensor that is no parameter of the model, such as an input that requires one: the
    forward pass saves for it whatever is chosen. `copies` are the bytes of its input and output that its kernels copy.
    """

    op: str
    module: str
    inputs: tuple[str | int | None, ...] = ()
    carrier: bool = False
    whole: bool = False
    macs: int = 0
    outputs: int = 0
    made: int = 0
    moved: int = 0
    recomputes: bool = False
    saves: Saves = ()
    lean: Saves | None = None
    outward: bool = False
    copies: tuple[int, int] = (0, 0)

    @property
    def is_norm(self) -> bool:
        return "Norm" in self.op

    @property
    def is_batch_norm(self) -> bool:
        return "BatchNorm" in self.op

    @cached_property
    def params(self) -> tuple[str, ...]:
        """The parameters that it computes a gradient for."""
        return tuple(dict.fromkeys(i for i in self.inputs if isinstance(i, str)))

    @cached_property
    def data(self) -> tuple[int, ...]:
        """The nodes further from the loss that receive its input gradient."""
        return tuple(dict.fromkeys(i for i in self.inputs if isinstance(i, int)))


@dataclass(frozen=True)
class Recomputed:
    """A checkpoint's part of the forward pass, which backward computes again before the first of its nodes runs.

    `saves` maps its nodes (by index) to what they then save until they have run. What is in memory anyway has 0 bytes, but
    PyTorch computes everything up to there. `inference` and `gone` are as in `Graph`, for what this part makes itself.
    """

    saves: Mapping[int, Saves]
    inference: tuple[int, ...]
    gone: Mapping[int, int]

    @property
    def node(self) -> int:
        """The first of its nodes that runs backward."""
        return min(self.saves)


@dataclass(frozen=True)
class Graph:
    """A backward graph as plain data, nearest the loss first.

    `forward_macs` also counts operations without a node. `params` maps every trainable parameter to its number of bytes,
    `unused` names those that the loss does not reach, `modules` maps module names to class names, `head` names the parameters
    of the module nearest the loss, tied ones left out. `inference` lists the bytes in memory during each operation of the
    forward pass if nothing is saved for backward; `gone` maps each saved storage to the operation before which it would then
    be freed. `shapes` maps every trainable parameter to its shape. `again` is what checkpoints compute twice.

    `differentiates` says whether the loss itself calls autograd, as a gradient penalty does, and `all_trainable` whether it
    does so with respect to parameters: then it fails where one is frozen.

    `seed` is what random numbers started from, where the pass draws any. Some models leave out layers at random: this one
    `may_vary` if it draws numbers in Python or `reads_values` of tensors. `others` are other graphs, each with a seed.
    """

    nodes: tuple[Node, ...]
    params: dict[str, int]
    unused: tuple[str, ...]
    modules: dict[str, str]
    head: tuple[str, ...]
    uncounted: tuple[str, ...] = ()
    forward_macs: int = 0
    inference: tuple[int, ...] = (0,)
    gone: Mapping[int, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    again: tuple[Recomputed, ...] = ()
    differentiates: bool = False
    all_trainable: bool = False
    seed: int | None = None
    reads_values: bool = False
    may_vary: bool = False
    others: tuple[Graph, ...] = ()

    @property
    def readings(self) -> list[Graph]:
        """This one and the others, each by itself."""
        return [replace(self, others=()), *self.others]

    def is_wired_like(self, loss: torch.Tensor, params: Mapping[str, nn.Parameter]) -> bool:
        """Whether the nodes behind a loss hand their gradients on as those of this graph do.

        Names do not count: while a graph is read, PyTorch records other names for views; a norm has one for each mode, and a
        custom autograd function may replace an operation, with other arguments that get no gradient.
        """
        return [[one for one in node.inputs if one is not None] for node in self.nodes] == receivers(loss, params)

    def order(self) -> dict[str, int]:
        """For each used parameter, the node furthest from the loss that needs it."""
        deepest: dict[str, int] = {}
        for i, node in enumerate(self.nodes):
            if not node.carrier:
                for param in node.params:
                    deepest[param] = i
        return deepest

    def transposed(self) -> tuple[str, ...]:
        """Weights that are stored as (inputs, outputs) and multiplied as they are, as in `Conv1D` of transformers."""
        as_is: set[str] = set()
        otherwise: set[str] = set()
        for node in self.nodes:
            for param in node.params:
                if node.carrier:
                    otherwise |= {param} if node.op != "ToCopy" else set()
                elif node.op in ("Mm", "Addmm") and node.inputs[-1] == param and param not in node.inputs[:-1]:
                    as_is.add(param)
                else:
                    otherwise.add(param)
        return tuple(param for param in self.params if param in as_is - otherwise)


def owner(param: str) -> str:
    """The module that a parameter is registered in."""
    return param.rpartition(".")[0]


def layer_of(param: str, modules: Mapping[str, str]) -> str:
    """The layer that a parameter belongs to: its module. The parameters of the model itself, and those of a ParameterList or
    ParameterDict, are layers of their own."""
    module = owner(param)
    return module if module and modules.get(module) not in _PARAMETER_LISTS else param


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the user left trainable: the only ones that can be chosen. There must be one."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not params:
        raise ValueError("no trainable parameter: none has requires_grad=True. Unfreeze what may train: requires_grad_(True).")
    return params


def compute_loss(model: nn.Module, loss: Loss, batch: Any) -> torch.Tensor:
    """The user's loss, checked: a scalar tensor that gradients can flow from."""
    batches.check_not_empty(batch)
    value = loss(model, batch)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"loss(model, batch) must return a scalar tensor; it returned {given}. Return a mean over the batch.")
    if value.grad_fn is None:
        raise ValueError(
            "no gradient can flow from the loss: it depends on no trainable parameter. Check that the model has parameters "
            "with requires_grad=True, that loss() runs outside torch.no_grad(), and that no chosen layer is left out at random."
            " In a session each batch must reach something that trains: name layers that some batches leave out in `always=`."
        )
    return value


def walk(loss: torch.Tensor) -> list[Any]:
    """The autograd nodes behind a loss in the order in which the engine runs them, gradient accumulation left out.

    Among the nodes that are ready, the engine runs the one created last first.
    """
    root: Any = loss.grad_fn
    waiting: dict[Any, int] = {}
    stack, seen = [root], {root}
    while stack:
        for following in next_nodes(stack.pop()):
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
        for following in next_nodes(node):
            if following is not None:
                waiting[following] -= 1
                if waiting[following] == 0:
                    count += 1
                    heapq.heappush(ready, (-following._sequence_nr(), count, following))
    return out


def wiring(live: Sequence[Any], params: Mapping[str, nn.Parameter]) -> list[tuple[tuple[str | int | None, ...], bool]]:
    """For each node what receives the gradient of each of its inputs (see `Node.inputs`), and whether it is a carrier."""
    names: dict[Any, str] = {param: name for name, param in params.items()}
    index = {node: i for i, node in enumerate(live)}
    carried: dict[Any, str] = {}  # autograd node → the parameter whose gradient it passes on

    def receiver(node: Any) -> str | int | None:
        return carried.get(node) or names.get(getattr(node, "variable", None)) or index.get(node)

    for node in reversed(live):
        after = [receiver(following) for following in next_nodes(node) if following is not None]
        if op_name(node) in CARRIERS and len(after) == 1 and isinstance(after[0], str):
            carried[node] = after[0]
    return [
        (tuple(None if following is None else receiver(following) for following in next_nodes(node)), node in carried)
        for node in live
    ]


def receivers(loss: torch.Tensor, params: Mapping[str, nn.Parameter]) -> list[list[str | int]]:
    """For each node behind a loss, in the order in which the engine runs them: what receives its gradients."""
    return [[one for one in inputs if one is not None] for inputs, _ in wiring(walk(loss), params)]


def read(model: nn.Module, loss: Loss, batch: Any, kernels: bool = False) -> Graph:
    """Run the loss once on a real batch and read its backward graph. Runs no backward.

    The forward pass has its usual side effects: call it inside of `sandbox`. With `kernels`, what these copy inside counts.
    """
    params, start = trainable(model), rng_states()
    for differentiates in (False, True):
        trace = ForwardTrace(model, batch, keep=differentiates, kernels=kernels)
        try:
            with trace:
                value = compute_loss(model, loss, batch)
            break
        except SavedTensorNeeded:
            set_rng_states(start)
    live = walk(value)
    if any(op_name(node) == "CheckpointFunction" for node in live):
        raise ValueError(
            "a reentrant checkpoint hides its part of the backward graph, which then cannot be chosen. "
            "Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )
    trace.assign(live)
    again = tuple(Recomputed(*part) for part in trace.recomputed(live))
    nodes, recomputing, ends = list[Node](), {part.node for part in again}, unsharded(model, params)
    outward = _outward(live, ends)
    for i, (node, (inputs, carrier)) in enumerate(zip(live, wiring(live, ends), strict=True)):
        params_here = [name for name in inputs if isinstance(name, str)]
        work = trace.work(node)
        nodes.append(
            Node(
                op_name(node),
                owner(params_here[0]) if params_here else trace.module(node._sequence_nr()),
                inputs,
                carrier,
                isinstance(node, torch.autograd.function.BackwardCFunction),
                *work,
                i in recomputing,
                trace.saves(node),
                trace.lean(node, work[1]),
                node in outward,
                trace.copies(node),
            )
        )
    reached = {param for node in nodes for param in node.params}
    kinds = {name: class_name(module) for name, module in model.named_modules()}
    return Graph(
        tuple(nodes),
        {name: param.numel() * param.element_size() for name, param in params.items()},
        tuple(name for name in params if name not in reached),
        kinds,
        _head(_last_uses(nodes) if differentiates else nodes, params, kinds),
        tuple(sorted({node.op for node in nodes if _is_uncounted(node, params)})),
        sum(one.macs for several in trace.executed.values() for one in several),
        *trace.memory(),
        shapes={name: tuple(param.shape) for name, param in params.items()},
        again=again,
        differentiates=differentiates,
        all_trainable=differentiates and _needs_all(model, loss, batch),
        reads_values=trace.reads_values,
    )


def _needs_all(model: nn.Module, loss: Loss, batch: Any) -> bool:
    """Whether a loss that differentiates fails where nothing is trainable."""
    with sandbox(model, train=()):
        try:
            loss(model, batch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return True
    return False


def _outward(live: Sequence[Any], params: Mapping[str, nn.Parameter]) -> set[Any]:
    """The nodes from which gradients flow to a tensor that is none of these parameters."""
    own, out = {id(param) for param in params.values()}, set[Any]()
    for node in reversed(live):
        for following in next_nodes(node):
            if following in out or (hasattr(following, "variable") and id(following.variable) not in own):
                out.add(node)
    return out


def _is_uncounted(node: Node, params: dict[str, nn.Parameter]) -> bool:
    """Whether a node has a matrix to train and no MACs, and is not known to have none."""
    cheap = node.carrier or node.macs or node.op in _CHEAP or node.is_norm
    return not cheap and any(params[name].dim() > 1 for name in node.params)


def _last_uses(nodes: Sequence[Node]) -> list[Node]:
    """The nodes behind which a parameter is not used again. Where a loss differentiates, others may belong to its gradient."""
    last = {param: i for i, node in enumerate(nodes) for param in node.params}
    return [nodes[i] for i in sorted(set(last.values()))]


def _head(nodes: Sequence[Node], params: Mapping[str, nn.Parameter], modules: Mapping[str, str]) -> tuple[str, ...]:
    """All parameters of the module nearest the loss, but for tied ones: to train those takes a longer backward pass.

    A parameter of the whole model (a learnable temperature, say) may be nearer, but is no head by itself. It is included, and
    the search goes on to the first module or matrix product.
    """
    layers = {name: layer_of(name, modules) for name in params}
    head: list[str] = []
    for node in nodes:
        found = [param for param in node.params if not _is_tied(nodes, param, layers)]
        if found:
            head += found
            mates = {layers[param] for param in found if layers[param] != param}
            if mates or node.macs or any(owner(owner(param)) for param in found):  # also in a module's list of parameters
                head += [name for name in params if layers[name] in mates and not _is_tied(nodes, name, layers)]
                break
    return tuple(dict.fromkeys(head))


def _is_tied(nodes: Sequence[Node], param: str, layers: Mapping[str, str]) -> bool:
    """Whether a parameter is used again further from the loss, with parameters of other layers in between."""
    behind: dict[int, bool] = {}  # nodes behind a use of it → whether parameters of other layers lie in between
    for i, node in enumerate(nodes):
        uses = param in node.params
        if uses and behind.get(i):
            return True
        if uses or i in behind:
            passed = behind.get(i, False) or (not uses and any(layers[other] != layers[param] for other in node.params))
            for following in node.data:
                behind[following] = behind.get(following, False) or passed
    return False
