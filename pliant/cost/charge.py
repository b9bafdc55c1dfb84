"""One cost that a step pays as soon as something is chosen, and how much of it a slice pays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from pliant.core.types import Cost, Part


class ChargeKind(Enum):
    """What a charge pays for."""

    KEPT = "kept"  # a tensor that the forward pass keeps for backward
    RECOMPUTED = "recomputed"  # what an activation checkpoint computes again during backward
    FORWARD = "forward"  # a node's share of the forward pass; due only where the prefix is spared
    NODE = "node"  # to run a node of the backward graph at all, whatever is asked of it
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    GRADIENT = "gradient"  # the memory that a parameter's gradient takes
    OPTIMIZER = "optimizer"  # the update of a parameter, and its state
    SCRATCH = "scratch"  # what the optimizer needs besides while it steps


# What a step is made of, and the kinds of charges that each part pays. To run a node counts as its input gradient.
SPLIT = {
    "forward": (ChargeKind.KEPT, ChargeKind.RECOMPUTED, ChargeKind.FORWARD),
    "dX": (ChargeKind.INPUT_GRAD, ChargeKind.NODE),
    "dW": (ChargeKind.WEIGHT_GRAD, ChargeKind.GRADIENT),
    "optimizer": (ChargeKind.OPTIMIZER, ChargeKind.SCRATCH),
}
_BY_SLICE = (  # kinds of which a slice of a parameter pays its share
    ChargeKind.KEPT,
    ChargeKind.OPTIMIZER,
    ChargeKind.GRADIENT,
    ChargeKind.SCRATCH,
    ChargeKind.WEIGHT_GRAD,
)

Piece = tuple[int | None, float]  # of a parameter: the dimension it is cut along (None: not at all), and how much it is


@dataclass(frozen=True)
class Charge:
    """A cost that is due once, as soon as any of `params` is chosen or any of the charges `via` is due.

    A weight gradient names its parameter. An input gradient names the charges further from the loss that wait for it. A
    tensor kept for backward names every operation that reads it. So one list holds the backward graph and the union of what
    it keeps. `via` points to later entries of the list only.

    `live` says during which moments of a step (see `Profile`) its bytes are held, from the first up to the second; None: all
    of them. `lean` restricts it to steps that run with the lean engine (True) or without it (False). `node` is the position
    of its node in the backward graph, where it has one. `name` is for people who read a profile.
    """

    kind: ChargeKind
    cost: Cost
    params: tuple[str, ...] = ()
    via: tuple[int, ...] = ()
    live: tuple[int, int] | None = None
    lean: bool | None = None
    node: int | None = None
    name: str = ""

    def share_of(self, dim: int | None, share: float) -> float:
        """How much of it is due for a slice of its parameter: of a kept input, as much as the slice has of the inputs.

        Beside a slice's gradient, a copy of the slice itself is held for the optimizer.
        """
        if dim is None or (self.kind is ChargeKind.KEPT and dim != 1) or self.kind not in _BY_SLICE:
            return 1.0
        return min(2 * share, 1.0) if self.kind is ChargeKind.GRADIENT else share  # no slice costs more than the whole

    def share(self, pieces: Iterable[Piece], behind: bool = False) -> float:
        """How much of it is due for these pieces (dimension and share) of its parameters, and whether it is `behind` them.

        The largest piece decides; copies are added to it.
        """
        most, copies = float(behind), 0.0
        for dim, share in pieces:
            if self.is_copied(dim):
                copies += share
            else:
                most = max(most, self.share_of(dim, share))
        return most + copies

    def is_copied(self, dim: int | None) -> bool:
        """Whether a slice along this dimension keeps a copy of its own: its channels of a layer's input."""
        return self.kind is ChargeKind.KEPT and dim == 1


def pieces_of(
    parts: Iterable[Part], shapes: Mapping[str, tuple[int, ...]], transposed: Collection[str] = ()
) -> dict[str, Piece]:
    """What parts are together of each of their parameters; all of one that is cut along two dimensions.

    Dimension 0 is that of outputs and 1 that of inputs, also for weights that are stored the other way round (`transposed`).
    """
    cut: dict[str, tuple[int | None, set[int]]] = {}
    for part in parts:
        dim, index = cut.get(part.param, (part.dim, set()))
        if part.dim is None or part.index is None or dim != part.dim:
            cut[part.param] = None, set()
        elif dim is not None:
            cut[part.param] = dim, index.union(part.index)
    out: dict[str, Piece] = {}
    for param, (dim, index) in cut.items():
        share = len(index) / shapes[param][dim] if dim is not None and param in shapes else 1.0
        way = 1 - dim if dim is not None and param in transposed else dim
        out[param] = (way, share) if share < 1 else (None, 1.0)
    return out
