"""The batch norms of a run: which statistics they use, and whether their running statistics are re-estimated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from pliant.core.budget import Budget, Progress
from pliant.cost.profile import Profile
from pliant.runtime.batches import mismatched
from pliant.runtime.batchnorm import BatchNormModes, NormRule
from pliant.runtime.norm_statistics import LOOKS, NormStatistics
from pliant.runtime.ranks import Ranks

Run = Callable[[], Any]  # one forward pass, up to the loss


class Norms:
    """`BatchNormModes` as a run uses them, and `NormStatistics` over its first and its last batches."""

    def __init__(self, modes: BatchNormModes, ranks: Ranks) -> None:
        """With several processes nothing is re-estimated by itself: each sees other batches."""
        self._modes, self._ranks = modes, ranks
        self._statistics = modes.statistics()
        self._last: deque[Any] = deque(maxlen=LOOKS)  # batches

    @property
    def has_any(self) -> bool:
        """Whether there is a norm whose mode is set here."""
        return self._modes.has_any

    @property
    def priced(self) -> NormRule:
        """The rule to price steps by."""
        return self._modes.priced

    @property
    def looks(self) -> bool:
        """Whether something is to be decided from forward passes on the coming batch."""
        return (self._statistics.is_due and self._ranks.is_alone) or not self._modes.is_settled

    def look(self, loss: Callable[[Any], Any], batch: Any, profile: Profile | None) -> tuple[list[str], bool]:
        """Decide, from forward passes on this batch, what is not decided yet. Returns what the log should say, and whether
        running statistics did not fit the data, so that others take their place from now on."""
        notes, were_replaced = [], self._statistics.replaced
        if self._statistics.is_due and self._ranks.is_alone:
            other = mismatched(batch)
            notes.append(self._statistics.see_(partial(loss, batch), None if other is None else partial(loss, other)))
        if not self._modes.is_settled:
            note = self._modes.settle_(partial(loss, batch), profile.origin.get("norms") if profile is not None else None)
            if not self._ranks.is_alone:
                note, frozen = self._ranks.first(lambda: (note, self._modes.state()))
                self._modes.load(frozen)
            notes.append(note)
        return [note for note in notes if note is not None], self._statistics.replaced and not were_replaced

    def keep(self, batch: Any, now: Progress, budget: Budget) -> None:
        """Keep the last batches of a run whose length is known. Where memory is limited none is kept."""
        if now.total_steps is None or now.step < now.total_steps - LOOKS or budget.memory is not None:
            self._last.clear()
        elif self._ranks.is_alone:
            self._last.append(batch)

    def finish_(self, model: nn.Module, loss: Callable[[Any], Any]) -> str | None:
        """After the last step: re-estimate what trained over the last batches, if the first of them says so. Returns what the
        log should say.

        In training a norm uses the statistics of each batch, and its running statistics follow slowly. Weights that still move
        fast leave them behind: then the network of the evaluation is not the one that was trained (arXiv 2105.07576).
        """
        batches, statistics = [*self._last], NormStatistics(model, self._modes.trained())
        self._last.clear()
        if not statistics.norms or len(batches) < LOOKS:
            return None
        return statistics.catch_up_([partial(loss, batch) for batch in batches])

    def estimate(self, runs: Iterable[Run]) -> str:
        """Re-estimate running statistics on given batches. Returns what the log should say."""
        if not self._statistics.norms:
            raise ValueError("this model has no batch norm with statistics from training: there is nothing to re-estimate.")
        return f"norm statistics were re-estimated over {self._statistics.estimate_(runs)} given batches"

    def hold_(self, params: Collection[str], chosen: Collection[str], limited: bool) -> None:
        """Set every norm's mode for this choice."""
        self._modes.hold_(params, chosen, limited)

    def release_(self) -> None:
        """Give every norm the mode that the user wants."""
        self._modes.release_()

    def unsettle_(self) -> None:
        """Forget what was settled, since no step was taken with that batch."""
        self._modes.unsettle_()

    def restart_(self) -> None:
        """The model is as it was before the run: its first batches are to come."""
        self._statistics.restart_()
        self._last.clear()

    def state(self) -> dict[str, Any]:
        return {"frozen": self._modes.state(), "statistics": self._statistics.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._last.clear()
        self._modes.load(state["frozen"])
        self._statistics.load(state["statistics"])
