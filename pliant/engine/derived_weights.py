"""What is made of weights once and used in many steps: folded weights, the scales of norms at rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any
from weakref import ref

import torch

_VERSION, _ADDRESS = attrgetter("_version"), torch.Tensor.data_ptr


class Made:
    """Tensors that were made of others. `refresh` makes them again, where they are, if one of the others was written to.

    A captured step reads them by address: it holds on to them, and refreshes them before it is replayed.
    """

    def __init__(
        self,
        make: Callable[..., tuple[torch.Tensor | None, ...]],
        sources: Sequence[torch.Tensor],
        keep: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        """`keep` is how a tensor that was made is kept: in another type, or in another order in memory. `make(…, into=…)` may
        write what it can right there, and gives what it made in any case."""
        self._make, self._keep, self._sources, self._state = make, keep, [ref(one) for one in sources], _state(sources)
        self.tensors = tuple([None if one is None else keep(one) for one in make(*sources)])
        self._is_source = self._are_sources(sources)

    def is_of(self, sources: Sequence[torch.Tensor]) -> bool:
        """Whether these are what it was made of, and not others in their place."""
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
        for place, (old, new) in enumerate(zip(into, self._make(*sources, into=into), strict=True)):
            if old is None and new is not None:  # a source itself, which lies elsewhere now: what lay there is not ours
                tensors[place] = self._keep(new)
            elif old is not None and new is not None and old.data_ptr() != new.data_ptr():
                old.copy_(new)
        self.tensors, self._state = tuple(tensors), state
        self._is_source = self._are_sources(sources)

    def _are_sources(self, sources: Sequence[torch.Tensor]) -> list[bool]:
        """Which of the tensors are no copies, but what they are made of."""
        places = {one.data_ptr() for one in sources}
        return [one is not None and one.data_ptr() in places for one in self.tensors]

    def living(self) -> list[torch.Tensor]:
        """What it was made of, as far as that is still there."""
        return [one for one in (source() for source in self._sources) if one is not None]


class AllMade:
    """Several of them: fit for use at one look at all that they are made of, as a step that waits for it can afford."""

    def __init__(self, made: Sequence[Made]) -> None:
        """They are fit for use now."""
        self._made = made
        self._sources = list({id(source): ref(source) for one in made for source in one.living()}.values())
        self._seen = self._look()

    def refresh(self) -> None:
        seen = self._look()
        if seen != self._seen:
            for one in self._made:
                one.refresh()
            self._seen = seen

    def _look(self) -> tuple[list[int], list[int]]:
        living = [one for one in [source() for source in self._sources] if one is not None]
        return list(map(_VERSION, living)), list(map(_ADDRESS, living))


def _state(sources: Sequence[Any]) -> list[tuple[int, int]]:
    return [(one.data_ptr(), one._version) for one in sources]
