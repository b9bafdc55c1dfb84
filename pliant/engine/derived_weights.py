"""Tensors that are computed from weights once and used in many steps: folded weights, the scales of frozen batch norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any
from weakref import ref

import torch

_VERSION, _ADDRESS = attrgetter("_version"), torch.Tensor.data_ptr


class Derived:
    """Tensors derived from others. `refresh` computes them again, in the same memory, if one of the sources was written to.

    A captured step reads them by address: it holds references to them, and refreshes them before each replay.
    """

    def __init__(
        self,
        make: Callable[..., tuple[torch.Tensor | None, ...]],
        sources: Sequence[torch.Tensor],
        keep: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        """`make` computes the tensors from the sources; with `into=` it may write its results there. `keep` converts each
        result: to another dtype, or to another memory format."""
        self._make, self._keep, self._sources, self._state = make, keep, [ref(one) for one in sources], _state(sources)
        self.tensors = tuple([None if one is None else keep(one) for one in make(*sources)])
        self._is_source = self._are_sources(sources)

    def is_from(self, sources: Sequence[torch.Tensor]) -> bool:
        """Whether these very tensors are the sources."""
        return all(was() is one for was, one in zip(self._sources, sources, strict=True))

    @property
    def is_current(self) -> bool:
        return _state(self.living()) == self._state

    @torch.no_grad()
    def refresh(self) -> None:
        sources = self.living()
        state = _state(sources)
        if len(sources) < len(self._sources) or state == self._state:
            return
        into = tuple([None if same else one for one, same in zip(self.tensors, self._is_source, strict=True)])
        tensors = list(self.tensors)
        for i, (old, new) in enumerate(zip(into, self._make(*sources, into=into), strict=True)):
            if old is None and new is not None:  # the source itself, which has moved: its old memory is not to be written
                tensors[i] = self._keep(new)
            elif old is not None and new is not None and old.data_ptr() != new.data_ptr():
                old.copy_(new)
        self.tensors, self._state = tuple(tensors), state
        self._is_source = self._are_sources(sources)

    def _are_sources(self, sources: Sequence[torch.Tensor]) -> list[bool]:
        """Which of the tensors are no copies, but a source itself."""
        addresses = {one.data_ptr() for one in sources}
        return [one is not None and one.data_ptr() in addresses for one in self.tensors]

    def living(self) -> list[torch.Tensor]:
        """The sources that still exist."""
        return [one for one in (source() for source in self._sources) if one is not None]


class AllDerived:
    """Several of them, refreshed after one cheap check of all sources."""

    def __init__(self, derived: Sequence[Derived]) -> None:
        """They must be up to date now."""
        self._derived = derived
        self._sources = list({id(source): ref(source) for one in derived for source in one.living()}.values())
        self._seen = self._current()

    def refresh(self) -> None:
        seen = self._current()
        if seen != self._seen:
            for one in self._derived:
                one.refresh()
            self._seen = seen

    def _current(self) -> tuple[list[int], list[int]]:
        living = [one for one in [source() for source in self._sources] if one is not None]
        return list(map(_VERSION, living)), list(map(_ADDRESS, living))


def _state(sources: Sequence[Any]) -> list[tuple[int, int]]:
    return [(one.data_ptr(), one._version) for one in sources]
