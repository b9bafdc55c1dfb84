"""Reading and writing the graph of an exported program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

Node = Any  # a torch.fx.Node, whose arguments are typed so widely that every use would need a cast


def forward_nodes(program: Any) -> set[Node]:
    """What loss and predictions depend on. Everything else is backward pass."""
    outputs = program.graph.output_node().args[0]
    kinds = [spec.kind.name for spec in program.graph_signature.output_specs]
    return behind(node for node, kind in zip(outputs, kinds, strict=True) if kind in ("LOSS_OUTPUT", "USER_OUTPUT"))


def behind(nodes: Iterable[Node]) -> set[Node]:
    """These nodes, and all that they depend on."""
    todo, seen = [*nodes], set[Node]()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return seen


def calls(graph: fx.Graph, target: Any) -> list[Node]:
    """The calls of an operator, in their order."""
    return list(graph.find_nodes(op="call_function", target=target))


def shape_of(node: Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def call(graph: fx.Graph, target: Callable[..., Any], *args: Any, **options: Any) -> Node:
    """A new call at the place where the graph inserts, with the shape of its result."""
    node = graph.call_function(target, args, options)
    values = fx.node.map_arg(args, lambda arg: arg.meta["val"])
    with torch.no_grad():
        node.meta["val"] = target(*values, **options)
    return node
