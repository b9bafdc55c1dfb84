"""How much memory a joint graph will take, before it is lowered, and frozen layers that are computed in pieces to take less.

An inverted residual block widens its input, filters each channel of that, and narrows it again. The wide tensor is often the
largest of a network. Its channels do not meet until the block narrows: a part of them is widened and filtered at a time.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from pliant.export.device.arena import IN_PLACE, Buffer, Lives, busiest
from pliant.export.device.graphs import Node, call, calls, forward_nodes, shape_of

aten = torch.ops.aten
_ALIGNMENT = 16  # of tensors in a program
_VIEWS = (aten.view.default, operator.getitem)
_ACTIVATIONS = (aten.hardtanh.default, aten.relu.default, aten.clamp.default)
_MOST_PIECES = 8


def footprint(program: Any) -> int:
    """Bytes at the fullest moment, weights that change and gradients included. The planner needs this, or a little more."""
    return busiest(list(_buffers(program).values()))[1]


def _buffers(program: Any) -> dict[Node, Buffer]:
    nodes = list(program.graph.nodes)
    last = len(nodes) - 1
    signature = program.graph_signature
    trained = {spec.target for spec in signature.output_specs if spec.kind.name == "GRADIENT_TO_PARAMETER"}
    whole = {name for name, target in signature.inputs_to_parameters.items() if target in trained}
    inputs = set(signature.user_inputs)
    lives = Lives()
    base: dict[Node, Node] = {}
    for moment, node in enumerate(nodes):
        base[node] = base[node.args[0]] if node.target in _VIEWS else node
        if node.op == "placeholder" and node.name in whole:
            lives.add(node, _bytes(node.meta["val"]), 0, last)
        elif (node.op == "placeholder" and node.name in inputs) or (node.op == "call_function" and base[node] is node):
            lives.add(node, _bytes(node.meta.get("val")), moment if node.op != "placeholder" else 0, moment)
        for source in node.all_input_nodes:
            if base[source] in lives.of:
                lives.of[base[source]][2] = max(moment, lives.of[base[source]][2])
    for moment, node in enumerate(nodes):
        if node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "name", None) in IN_PLACE:
            for source in node.all_input_nodes:
                same = source.op == "call_function" and _alike(source.meta.get("val"), node.meta.get("val"))
                if same and lives.share_(node, base[source], moment):
                    break
    return lives.buffers()


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT
    return sum(map(_bytes, value)) if isinstance(value, (tuple, list)) else 0


def _alike(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return both and a.shape == b.shape and a.dtype == b.dtype


# ---------------------------------------------------------------- pieces


def split_(program: Any, limit: float) -> dict[str, int]:
    """Compute wide frozen layers in pieces until the graph fits into these bytes, or no split helps. Returns the pieces."""
    graph: fx.Graph = program.graph_module.graph
    pieces: dict[str, int] = {}
    while True:
        moment, held = busiest(list(_buffers(program).values()))
        if held <= limit:
            break
        found = _chain_at(program, moment)
        if found is None:
            break
        wide, filtered = found
        pieces[wide.name] = _split_one_(graph, wide, filtered)
    graph.lint()
    program.graph_module.recompile()
    return pieces


def _chain_at(program: Any, moment: int) -> tuple[Node, Node] | None:
    """A frozen convolution that widens, and the depthwise one that alone reads its result, around this moment."""
    forward = forward_nodes(program)
    place = {node: i for i, node in enumerate(program.graph.nodes)}
    for filtered in calls(program.graph, aten.convolution.default):
        if filtered not in forward or shape_of(filtered.args[1])[1] != 1 or filtered.args[8] != shape_of(filtered)[1]:
            continue
        source = filtered.args[0]
        wide = source.args[0] if source.target in _ACTIVATIONS else source
        chain = {wide, source, filtered}
        if wide.target is not aten.convolution.default or wide.args[8] != 1 or wide.args[6] or wide.meta.get("piece"):
            continue
        alone = all(len(node.users) == 1 for node in chain - {filtered}) and all(user in forward for user in filtered.users)
        if alone and place[wide] <= moment <= place[filtered]:
            return wide, filtered
    return None


def _split_one_(graph: fx.Graph, wide: Node, filtered: Node) -> int:
    channels = shape_of(wide)[1]
    count = next(n for n in range(min(_MOST_PIECES, channels), 0, -1) if channels % n == 0)
    size = channels // count
    act = filtered.args[0] if filtered.args[0] is not wide else None
    done = []
    with graph.inserting_before(filtered):
        for begin in range(0, channels, size):
            x = call(graph, wide.target, wide.args[0], *_rows(graph, wide, begin, begin + size), *wide.args[3:])
            x.meta["piece"] = True
            x = x if act is None else call(graph, act.target, x, *act.args[1:])
            how = (*filtered.args[3:8], size)
            done.append(call(graph, filtered.target, x, *_rows(graph, filtered, begin, begin + size), *how))
        whole = call(graph, aten.cat.default, done, 1)
    filtered.replace_all_uses_with(whole)
    for node in (filtered, act, wide):
        if node is not None:
            graph.erase_node(node)
    return count


def _rows(graph: fx.Graph, convolution: Node, begin: int, end: int) -> list[Node | None]:
    """Some rows of a convolution's weight and bias."""
    both = convolution.args[1:3]
    return [None if one is None else call(graph, aten.slice.Tensor, one, 0, begin, end) for one in both]
