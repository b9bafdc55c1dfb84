"""One cost that a step pays as soon as something is chosen, and how much of it a slice pays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pliant.core.types import Cost, Part

KEPT = "kept"
AGAIN = "again"
KINDS = (KEPT, AGAIN, "optimizer", "gradient", "scratch", "forward", "dX", "dW")
CACHED = "cached"
# What a step is made of, and the kinds of charges that each pays; everything else a node does counts as its way through (dX).
SPLIT = {
    "forward": (KEPT, AGAIN, "forward"),
    "dX": ("dX", "node"),
    "dW": ("dW", "gradient"),
    "optimizer": ("optimizer", "scratch"),
}

Piece = tuple[int | None, float]  # of a parameter: the dimension it is cut along (None: not at all), and how much it is


@dataclass(frozen=True)
class Charge:
    """A cost that is due once, as soon as any of `params` is chosen or any of the charges `via` is due.

    A weight gradient names its parameter; an input gradient names the charges further from the loss that wait for it;
    a tensor kept for backward names every operation that reads it. So the backward graph, and the union of what
    it keeps, are one list. `via` points to later entries of the list only. `live` says during which moments of a step (see
    `Profile`) its bytes stand, from the first up to the second; None: all along. `engine`: due only where that engine runs the
    step, or, if it is "cached", as far as the forward pass before anything chosen is spared.
    """

    name: str
    cost: Cost
    params: tuple[str, ...] = ()
    via: tuple[int, ...] = ()
    live: tuple[int, int] | None = None
    engine: str | None = None

    def share_of(self, dim: int | None, share: float) -> float:
        """How much of it is due for a slice of its parameter: of a kept input, as much as the slice has of the inputs.

        Beside a slice's gradient a copy of the slice itself stands, for the optimizer.
        """
        if dim is None or (self.kind == KEPT and dim != 1):
            return 1.0
        if self.kind == "gradient":
            return min(2 * share, 1.0)  # and no slice costs more than the whole
        return share if self.kind in (KEPT, "optimizer", "gradient", "scratch") or self.name.startswith("dW ") else 1.0

    def share(self, pieces: Iterable[Piece], behind: bool = False) -> float:
        """How much of it is due for these pieces (dimension and share) of its parameters, and whether it is `behind` them.

        The largest decides, and copies come beside it.
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
        return self.kind == KEPT and dim == 1

    @property
    def kind(self) -> str:
        """What it pays for: one of `KINDS`, or "node", which is to run a node at all."""
        word = self.name.split(" ")[0].rstrip(":")
        return word if word in KINDS else "node"


def pieces_of(parts: Iterable[Part], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Piece]:
    """What parts are together of each of their parameters; all of one that is cut along two dimensions."""
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
        out[param] = (dim, share) if share < 1 else (None, 1.0)
    return out
