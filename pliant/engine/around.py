"""The context of a forward pass: what it keeps for backward, and which kernels run its convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from pliant.core.mode import Mode
from pliant.engine.kernels.switch import Swapped
from pliant.engine.lean.lean import Lean
from pliant.engine.slices.slices import Sliced, Slices
from pliant.runtime.compiled import eager


def around_forward(
    mode: Mode, slices: Slices | None = None, swaps: bool = False, eagerly: bool = False
) -> AbstractContextManager[Any]:
    """The context of a forward pass in this mode; with `swaps`, custom kernels replace slow convolutions.

    Compiled code runs eagerly, since it would hide from the engine what it computes; in plain steps, with `eagerly` alone.
    """
    if mode == Mode() and slices is None and not swaps and not eagerly:
        return nullcontext()
    inside: AbstractContextManager[Any] = nullcontext()
    if mode.lean:
        inside = Lean(slices)
    elif slices is not None:
        inside = Sliced(slices)
    return _eagerly(Swapped() if swaps else nullcontext(), inside)


@contextmanager
def _eagerly(kernels: AbstractContextManager[Any], inside: AbstractContextManager[Any]) -> Iterator[Any]:
    with eager(), kernels, inside as engine:
        yield engine
