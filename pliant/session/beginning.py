"""The beginning of a run: the head trains first, then the first selection, which is judged by how the loss falls.

A head that does not fit its data sends gradients through the network that say more about the head than about the layers. So
the head trains alone first ("linear probing, then fine-tuning", arXiv 2202.10054), and layers are chosen by what they can add
to it. What they add shows in the loss: it must come below where the head's own learning curve leads. Where it does not, the
rate is too high for so large a part, or nothing but the head needed to change: the run goes back to where that part was chosen,
and tries a smaller one.

The loss may rise at first, as features change under the head. One that falls fast enough to be back where the head had it is
given that time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pliant.session.delta import Undo

UNKNOWN = 20  # steps of the head alone, where the length of the run is unknown
SMALLER = 0.25  # of the units, in the second try; the third is the head alone
SPANS = 4  # of half as many steps as the head had: then a selection is judged for the last time
_LEAST = 10  # steps of the head alone, if that is no more than a quarter of the run
_FEW = 8  # steps of the head alone: fewer make no learning curve


def length(share: float, total: int | None) -> int:
    """The steps in which the head trains alone: this share of the run, but at least ten, or a quarter of a short run."""
    if not share:
        return 0
    return UNKNOWN if total is None else max(round(share * total), min(_LEAST, total // 4), 1)


def expected(losses: list[float], span: int) -> float:
    """Where the head's own curve leads: its mean loss in a later span of half as many steps as these, on a power law of steps.

    With L(t) = a·t^(q−1) the means over equal spans are as 1 : 2^q − 1 : 3^q − 2^q : … These losses are spans 0 and 1: they
    give q.
    """
    half = len(losses) // 2
    early, late = (_mean(part) for part in (losses[:half], losses[half:]))
    if not 0 < late < early:
        return late
    q = math.log2(1 + late / early)
    return float(early * ((span + 1) ** q - span**q))


class Beginning:
    """Losses of a run's first steps, and a copy of what the first selection may spoil."""

    def __init__(self) -> None:
        self.tries = 0  # selections that were taken back
        self.over = False
        self._losses: list[torch.Tensor | float] = []  # of the head alone
        self._after: list[torch.Tensor | float] | None = None  # of the selection that is judged
        self._undo: Undo | None = None

    def see(self, loss: torch.Tensor | None) -> None:
        """A step is over."""
        if not self.over and loss is not None:
            (self._losses if self._after is None else self._after).append(loss)

    def chose(self, model: nn.Module, optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter], may: bool) -> None:
        """The first selection comes into force. It is judged if the head's steps were enough, and there `may` be a copy."""
        if not may or len(self._losses) < _FEW:
            return self.end()
        self._after, self._undo = [], Undo(model, optimizer)
        self._undo.keep(params)

    def judge_(self, optimizer: torch.optim.Optimizer) -> tuple[str, float] | None:
        """After as many steps as the head had, and up to twice as many: if the loss is above the head's curve, and does not
        come down to where the head had it, put everything back as it was when the selection came into force. Returns what to
        say of that, and the share of the units to try next."""
        if self.over or self._undo is None or not self._after:
            return None
        span = len(self._losses) // 2
        spans, rest = divmod(len(self._after), span)
        if rest or spans < 2:
            return None
        before, after = _read(self._losses), _read(self._after)
        reached, aim = _mean(after[-span:]), expected(before, spans + 1)
        falls = _mean(after[-2 * span : -span]) - reached  # in a span
        comes_down = reached - (SPANS - spans) * falls <= _mean(before[span:])
        if reached <= aim or (comes_down and spans == SPANS):
            self.end()
        if reached <= aim or comes_down:
            return None
        self._undo.rollback_(optimizer)
        share, what = (0.0, "the head alone trains") if self.tries else (SMALLER, "a quarter of it is tried")
        self.tries, self._after = self.tries + 1, []
        if not share:
            self.end()
        return f"the selection was taken back: the loss is {reached:.4g}, the head's own curve led to {aim:.4g}; {what}", share

    def end(self) -> None:
        """No further selection is judged."""
        self.over, self._losses, self._after, self._undo = True, [], None, None

    def state(self) -> dict[str, Any]:
        """In plain types."""
        after = None if self._after is None else _read(self._after)
        undo = None if self._undo is None else self._undo.state()
        return {"tries": self.tries, "over": self.over, "losses": _read(self._losses), "after": after, "undo": undo}

    def load(self, state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.tries, self.over = state["tries"], state["over"]
        self._losses = list(state["losses"])
        self._after = None if state["after"] is None else list(state["after"])
        self._undo = None
        if state["undo"] is not None:
            self._undo = Undo(model, optimizer)
            self._undo.load(state["undo"])


def _read(losses: list[torch.Tensor | float]) -> list[Any]:
    """As numbers; reading them off a GPU waits for it once."""
    there = [loss for loss in losses if isinstance(loss, torch.Tensor)]
    values = iter(torch.stack([loss.float() for loss in there]).tolist() if there else [])
    return [next(values) if isinstance(loss, torch.Tensor) else loss for loss in losses]


def _mean(losses: list[Any]) -> float:
    return float(sum(losses)) / len(losses)
