"""Rewrites of the joint graph that compute the same in less memory.

Autograd keeps what its formulas read. A program whose memory is planned in advance can do better:

| rewrite | what it saves |
|---|---|
| a ReLU6 or Hardtanh is differentiated by its output | its input, so that it runs in place |
| an activation that only a comparison reads again | three of four bytes: the comparison is made at once and kept |
| input gradient of a frozen convolution | the convolution's input, of which only the shape is needed |
| weight gradient of chosen channels | the gradient of the others, and the input channels that are not chosen |
| a transpose of a transpose, of a linear layer's weight and its gradient | a copy of both |
| a weight that is computed (int8, slices) | its float copy between forward and backward pass |
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from pliant.export.device.graphs import Node, call, calls, forward_nodes, shape_of
from pliant.export.device.kernels import avoid_missing_

aten = torch.ops.aten
_COMPARISONS = (aten.le.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.gt.Scalar, aten.eq.Scalar, aten.ne.Scalar)


def shrink_(program: Any) -> None:
    """All rewrites, on the joint program in place."""
    graph: fx.Graph = program.graph_module.graph
    avoid_missing_(graph)
    _transpose_once_(graph)
    _differentiate_by_output_(graph)
    _slice_weight_gradients_(graph)
    _input_gradients_without_input_(graph)
    _recompute_weights_(graph, forward_nodes(program))
    _compare_at_once_(graph, forward_nodes(program))
    graph.eliminate_dead_code()
    graph.lint()
    program.graph_module.recompile()


def _transpose_once_(graph: fx.Graph) -> None:
    """Two permutations in a row that undo each other are none."""
    for node in calls(graph, aten.permute.default):
        source = node.args[0]
        if source.target is aten.permute.default and [source.args[1][i] for i in node.args[1]] == list(
            range(len(node.args[1]))
        ):
            node.replace_all_uses_with(source.args[0])
    graph.eliminate_dead_code()


def _differentiate_by_output_(graph: fx.Graph) -> None:
    """`hardtanh(x) <= low` is `x <= low`, and the same for `high`."""
    for node in calls(graph, aten.hardtanh.default):
        args: list[Any] = list(node.args)
        x, low, high = args + [-1.0, 1.0][len(args) - 1 :]
        for user in list(x.users):
            if (user.target, user.args[1:]) in ((aten.le.Scalar, (low,)), (aten.ge.Scalar, (high,))):
                user.replace_input_with(x, node)


def _output_padding(x: torch.Size, out: torch.Size, kernel: torch.Size, node: Node) -> list[int]:
    """What a transposed convolution adds so that its output has the shape of x."""
    stride, padding, dilation = node.args[4:7]
    each = zip(x[2:], out[2:], kernel[2:], stride, padding, dilation, strict=True)
    return [n - ((o - 1) * s - 2 * p + d * (k - 1) + 1) for n, o, k, s, p, d in each]


def _input_gradients_without_input_(graph: fx.Graph) -> None:
    """The input gradient of a convolution is a transposed convolution of the output's gradient with the same weight."""
    for node in calls(graph, aten.convolution_backward.default):
        grad, x, weight, _, *how, mask = node.args
        transposed = how[3]
        if transposed or not mask[0] or len(shape_of(x)) != 4 or mask[1]:
            continue  # with a weight gradient the input is kept anyway
        with graph.inserting_before(node):
            extra = _output_padding(shape_of(x), shape_of(grad), shape_of(weight), node)
            new = call(graph, aten.convolution.default, grad, weight, None, *how[:3], True, extra, how[5])
        _replace_output_(node, 0, new)
        if mask[2]:
            with graph.inserting_before(node):
                _replace_output_(node, 2, call(graph, aten.sum.dim_IntList, grad, [0, 2, 3]))
        graph.eliminate_dead_code()


def _replace_output_(node: Node, which: int, new: Node) -> None:
    for user in list(node.users):
        if user.target is operator.getitem and user.args[1] == which:
            user.replace_all_uses_with(new)
            node.graph.erase_node(user)


def _slice_weight_gradients_(graph: fx.Graph) -> None:
    """Where only a slice of a weight gradient is read, compute the slice: from those channels of the output's gradient, or
    of the input. Channels of the input are picked in the forward pass, so that the others are not kept."""
    for node in calls(graph, aten.convolution_backward.default):
        grad, x, weight, sizes, *how, mask = node.args
        whole = next((user for user in node.users if user.target is operator.getitem and user.args[1] == 1), None)
        if whole is None or how[3] or how[5] != 1 or len(whole.users) != 1:
            continue
        (picked,) = whole.users
        if picked.target is not aten.index.Tensor or len([i for i in picked.args[1] if i is not None]) != 1:
            continue
        dim = len(picked.args[1]) - 1
        index = picked.args[1][dim]
        if dim == 0:
            with graph.inserting_before(node):
                source, kept = call(graph, aten.index_select.default, grad, 1, index), x
        else:
            with graph.inserting_after(x if index.op == "placeholder" and x.op != "placeholder" else node.prev):
                source, kept = grad, call(graph, aten.index_select.default, x, 1, index)
        with graph.inserting_before(node):
            like = _slice_of(graph, weight, dim, index)
            own = [False, True, False]
            sliced = call(graph, aten.convolution_backward.default, source, kept, like, None, *how, own)
            result = call(graph, operator.getitem, sliced, 1)
            rest = call(graph, aten.convolution_backward.default, grad, x, weight, sizes, *how, [mask[0], False, mask[2]])
            others = {which: call(graph, operator.getitem, rest, which) for which in (0, 2) if mask[which]}
        picked.replace_all_uses_with(result)
        for which, other in others.items():
            _replace_output_(node, which, other)
        graph.eliminate_dead_code()


def _slice_of(graph: fx.Graph, weight: Node, dim: int, index: Node) -> Node:
    """The slice of a weight; where it was put together from a slice and the rest, that slice."""
    if weight.target is aten.index_put.default and len(weight.args[1]) == dim + 1 and weight.args[1][dim] is index:
        return weight.args[2]
    return call(graph, aten.index_select.default, weight, dim, index)


_WEIGHT_OPERATORS = (aten.index_put.default, aten.mul.Tensor, aten._to_copy.default, aten.view.default)


def _recompute_weights_(graph: fx.Graph, forward: set[Node]) -> None:
    """A weight that is computed from parameters alone is computed again for the backward pass."""
    fixed: set[Node] = {node for node in graph.nodes if node.op == "placeholder" and not node.name.startswith("inputs")}
    for node in list(graph.nodes):
        if node.target in _WEIGHT_OPERATORS and set(node.all_input_nodes) <= fixed and node in forward:
            fixed.add(node)
    computed = [node for node in graph.nodes if node in fixed and node.op == "call_function"]
    for node in reversed(computed):
        later = [user for user in node.users if user not in forward and user not in fixed]
        if not later:
            continue
        for user in later:
            with graph.inserting_before(user):
                user.replace_input_with(node, _copied(graph, node, fixed))


def _copied(graph: fx.Graph, node: Node, fixed: set[Node]) -> Node:
    inputs = {source: _copied(graph, source, fixed) for source in node.all_input_nodes if source.op == "call_function"}
    return graph.node_copy(node, lambda source: inputs.get(source, source))


def _compare_at_once_(graph: fx.Graph, forward: set[Node]) -> None:
    """Keep one byte per element, the result of a comparison, instead of the activation that only comparisons read again."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    moved: set[Node] = set()
    for node in list(graph.nodes):
        if node not in forward or node.op != "call_function":
            continue
        later = [user for user in node.users if user not in forward]
        if not later or any(user.target not in _COMPARISONS for user in later):
            continue
        for user in sorted(later, key=place.__getitem__, reverse=True):
            node.append(user)
            moved.add(user)
    for node in list(graph.nodes):
        if node.target is aten.bitwise_or.Tensor and node not in forward and _all_in(node.all_input_nodes, moved):
            place = {other: i for i, other in enumerate(graph.nodes)}
            max(node.all_input_nodes, key=place.__getitem__).append(node)


def _all_in(nodes: Iterable[Node], known: set[Node]) -> bool:
    return all(node in known for node in nodes)
