"""The beginning of a run: the head trains first, then the first selection, which is judged by how the loss falls.

A head that does not fit its data sends gradients through the network that say more about the head than about the layers. So
the head trains alone first ("linear probing, then fine-tuning", arXiv 2202.10054), and layers are chosen by what they can add
to it. What they add shows in the loss: it must come below where the head's own learning curve leads. Where it does not, the
rate is too high for so large a part, or nothing but the head needed to change: the run goes back to where that part was chosen,
and tries a smaller one.

The loss may rise at first, as features change under the head. On samples that are new in every batch it is honest, and a loss
that falls is given time, and accepted in the end. On samples that come again it falls anyway: they are learned by heart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pliant.runtime.batches import tensors
from pliant.session.delta import Undo

UNKNOWN = 20  # steps of the head alone, where the length of the run is unknown
SMALLER = 0.25  # of the units, in the second try; the third is the head alone
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
        self._met: list[torch.Tensor | list[float]] = []  # a number for each sample of each batch

    def meet(self, batch: Any) -> None:
        """A step with this batch comes."""
        if not self.over:
            self._met.append(_numbers(batch))

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
        fall on new samples, put everything back as it was when the selection came into force. Returns what to say of that, and
        the share of the units to try next."""
        if self.over or self._undo is None or not self._after:
            return None
        span = len(self._losses) // 2
        spans, rest = divmod(len(self._after), span)
        if rest or spans < 2:
            return None
        before, after = _read(self._losses), _read(self._after)
        reached, aim = _mean(after[-span:]), expected(before, spans + 1)
        falls = reached < _mean(after[-2 * span : -span]) and self._are_new(span)
        if reached <= aim or (falls and spans >= 4):
            self.end()
        if reached <= aim or falls:
            return None
        self._undo.rollback_(optimizer)
        share, what = (0.0, "the head alone trains") if self.tries else (SMALLER, "a quarter of it is tried")
        self.tries, self._after = self.tries + 1, []
        if not share:
            self.end()
        return f"the selection was taken back: the loss is {reached:.4g}, the head's own curve led to {aim:.4g}; {what}", share

    def _are_new(self, steps: int) -> bool:
        """Whether most samples of the last steps were in no batch before."""
        self._met = _lists(self._met)
        met = [[f"{float(sample):.6g}" for sample in batch] for batch in self._met]  # sums differ in rounding
        known = {sample for batch in met[:-steps] for sample in batch}
        last = [sample for batch in met[-steps:] for sample in batch]
        return 2 * sum(sample in known for sample in last) < len(last)

    def end(self) -> None:
        """No further selection is judged."""
        self.over, self._losses, self._after, self._undo, self._met = True, [], None, None, []

    def state(self) -> dict[str, Any]:
        """In plain types."""
        after = None if self._after is None else _read(self._after)
        undo = None if self._undo is None else self._undo.state()
        judged = {"tries": self.tries, "over": self.over, "losses": _read(self._losses), "after": after, "undo": undo}
        return {**judged, "met": _lists(self._met)}

    def load(self, state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.tries, self.over = state["tries"], state["over"]
        self._losses, self._met = list(state["losses"]), list(state["met"])
        self._after = None if state["after"] is None else list(state["after"])
        self._undo = None
        if state["undo"] is not None:
            self._undo = Undo(model, optimizer)
            self._undo.load(state["undo"])


def _numbers(batch: Any) -> torch.Tensor:
    """A number for each sample, which the same sample gives again: a weighted sum of its values in the first tensor."""
    first = next(tensors(batch), None)
    if first is None or first.dim() == 0:
        return torch.zeros(0)
    values = first.detach().flatten(1) if first.dim() > 1 else first.detach()[:, None]
    values = values.abs().float() if values.is_complex() else values.float()
    return (values * torch.linspace(1, 2, values.shape[1], device=values.device)).sum(1)


def _lists(met: list[torch.Tensor | list[float]]) -> list[torch.Tensor | list[float]]:
    """As numbers; reading them off a GPU waits for it."""
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in met]


def _read(losses: list[torch.Tensor | float]) -> list[Any]:
    """As numbers; reading them off a GPU waits for it once."""
    there = [loss for loss in losses if isinstance(loss, torch.Tensor)]
    values = iter(torch.stack([loss.float() for loss in there]).tolist() if there else [])
    return [next(values) if isinstance(loss, torch.Tensor) else loss for loss in losses]


def _mean(losses: list[Any]) -> float:
    return float(sum(losses)) / len(losses)
