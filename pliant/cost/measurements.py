"""The measurements of a graph that a profile is made from: seconds and bytes of every node, and of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pliant.graph.backward import Graph
from pliant.graph.forward_trace import CARRIERS

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Times:
    """Seconds of a step: per node with everything asked for, with input gradients alone, and with one parameter's gradient
    alone; the forward pass with norms on running statistics, what each norm adds on batch statistics; the optimizer."""

    everything: Array
    inputs: Array
    alone: Mapping[tuple[int, str], float] = field(default_factory=dict)
    norms: Mapping[int, float] = field(default_factory=dict)
    forward: float = 0.0
    unseen: float = 0.0  # per node: time outside of the hooks
    fixed: float = 0.0  # optimizer
    per_tensor: float = 0.0
    per_byte: float = 0.0

    def with_update(self, fixed: float, per_tensor: float, per_byte: float) -> Times:
        return replace(self, fixed=fixed, per_tensor=per_tensor, per_byte=per_byte)

    def of_more(self, times: float) -> Times:
        """For so many times as many samples. The optimizer takes what it takes."""
        grown = {key: seconds * times for key, seconds in self.alone.items()}
        norms = {i: seconds * times for i, seconds in self.norms.items()}
        each = self.everything * times, self.inputs * times
        return replace(self, everything=each[0], inputs=each[1], alone=grown, norms=norms, forward=self.forward * times)

    @classmethod
    def none(cls, graph: Graph) -> Times:
        return cls(np.zeros(len(graph.nodes)), np.zeros(len(graph.nodes)))


@dataclass(frozen=True)
class Sizes:
    """Bytes of a step beside kept tensors: those that live while a node runs (with input gradients alone, and with everything
    asked for), the optimizer's state of each parameter, and its scratch memory, for all parameters `together` or one by one.
    """

    inputs: Sequence[int]
    everything: Sequence[int]
    state: Mapping[str, int]
    scratch: Mapping[str, int] = field(default_factory=dict)
    together: bool = False
    inference: int = 0  # the peak of the forward pass alone
    norms_differ: bool = True  # whether a batch norm uses, and keeps, batch statistics only when it is chosen

    @classmethod
    def counted(cls, graph: Graph, state: Mapping[str, int], norms_differ: bool = True) -> Sizes:
        """From shapes: a node's output gradient and its input gradients live while it runs; views take nothing."""
        flow = [
            0 if node.op in CARRIERS else max(node.moved - sum(graph.params[p] for p in node.params), 0) for node in graph.nodes
        ]
        return cls(flow, flow, state, norms_differ=norms_differ)
