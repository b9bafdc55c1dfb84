"""What ExecuTorch has no kernel for, or a wrong one, in terms of operators that it has."""

from __future__ import annotations

import torch
from torch import fx

from pliant.export.device.graphs import call, calls, shape_of

aten = torch.ops.aten


def avoid_missing_(graph: fx.Graph) -> None:
    """All of them, on the joint graph in place."""
    _crop_by_slices_(graph)
    _fill_at_once_(graph)
    _scatter_max_pool_gradients_(graph)
    graph.eliminate_dead_code()


def _crop_by_slices_(graph: fx.Graph) -> None:
    """The gradient of a padding is a padding by less than nothing, which ExecuTorch's kernel refuses."""
    for node in calls(graph, aten.constant_pad_nd.default):
        x, pads = node.args[0], list(node.args[1])
        if all(pad >= 0 for pad in pads):
            continue
        with graph.inserting_before(node):
            for i in range(0, len(pads), 2):
                dim = len(shape_of(x)) - 1 - i // 2
                begin, end = max(-pads[i], 0), shape_of(x)[dim] - max(-pads[i + 1], 0)
                x = call(graph, aten.slice.Tensor, x, dim, begin, end) if min(pads[i : i + 2]) < 0 else x
            if any(pad > 0 for pad in pads):
                x = call(graph, aten.constant_pad_nd.default, x, [max(pad, 0) for pad in pads], *node.args[2:])
        node.replace_all_uses_with(x)
        graph.erase_node(node)


def _fill_at_once_(graph: fx.Graph) -> None:
    """A tensor of ones for SiLU is filled after it was made empty, and nothing makes empty tensors."""
    for node in calls(graph, aten.full_like.default):
        source, value = node.args[:2]
        if source.target is aten.empty_permuted.default:
            with graph.inserting_before(node), source.meta["val"].fake_mode:
                filled = call(graph, aten.full.default, list(shape_of(source)), value, dtype=source.meta["val"].dtype)
            node.replace_all_uses_with(filled)
            graph.erase_node(node)


def _scatter_max_pool_gradients_(graph: fx.Graph) -> None:
    """ExecuTorch's kernel adds to what lay in memory before (executorch #21686). Sums at the kept indices need no input."""
    for node in calls(graph, aten.max_pool2d_with_indices_backward.default):
        grad, x, indices = node.args[0], node.args[1], node.args[-1]
        *outer, height, width = shape_of(x)
        with graph.inserting_before(node), grad.meta["val"].fake_mode:
            zeros = call(graph, aten.full.default, [*outer, height * width], 0.0, dtype=grad.meta["val"].dtype)
            flat = [call(graph, aten.view.default, one, [*outer, -1]) for one in (indices, grad)]
            summed = call(graph, aten.scatter_add.default, zeros, len(outer), *flat)
            node.replace_all_uses_with(call(graph, aten.view.default, summed, [*outer, height, width]))
        graph.erase_node(node)
