"""The beginning of a run: the head trains first, then the first selection, which is judged by its loss.

A head that does not fit its data sends gradients through the network that say more about the head than about the layers. So
the head trains alone first ("linear probing, then fine-tuning", arXiv 2202.10054), and layers are chosen by what they can add
to it. While the loss halves, the head goes on alone: what it learns by itself, other layers need not learn.

The loss may rise at first, as features change under the head. After as many steps as were planned for the head, it must be
back where the head left it. Where it is not, the rate is too high for so large a part: the run goes back to where that part was
chosen, and tries a smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch
from torch import nn

from pliant.session.delta import Undo

FAST = 0.5  # of the loss before, in half as many steps as the head has at least: then it goes on alone
UNKNOWN = 20  # steps of the head alone, where the length of the run is unknown
SMALLER = 0.25  # of the units, in the second try; the third is the head alone
_LEAST = 10  # steps of the head alone, if that is no more than a quarter of the run
_FEW = 8  # steps of the head alone: the losses of fewer say little


def length(share: float, total: int | None) -> int:
    """The steps in which the head trains alone: this share of the run, but at least ten, or a quarter of a short run."""
    if not share:
        return 0
    return UNKNOWN if total is None else max(round(share * total), min(_LEAST, total // 4), 1)


class Beginning:
    """Losses of a run's first steps, and a copy of what the first selection may spoil."""

    def __init__(self, scaler: torch.amp.GradScaler | None = None) -> None:
        self._scaler = scaler
        self._scale: dict[str, Any] | None = None  # the state of the scaler when the selection came into force
        self.tries = 0  # selections that were taken back
        self.over = False
        self._losses: list[torch.Tensor | float] = []  # of the head alone
        self._after: list[torch.Tensor | float] | None = None  # of the selection that is judged
        self._undo: Undo | None = None
        self._seen = 0, False  # spans of the head alone, and whether its loss halved in the last one

    def see(self, loss: torch.Tensor | None) -> None:
        """A step is over."""
        if not self.over and loss is not None:
            (self._losses if self._after is None else self._after).append(loss)

    def goes_on(self, length: int) -> bool:
        """Whether the head trains on alone, after `length` steps: whether its loss halved in the last whole half of so many."""
        span = max(length // 2, 1)
        spans = len(self._losses) // span
        if spans < 2 or length < _FEW:
            return False
        if spans != self._seen[0]:  # once per span: reading numbers off a GPU waits for it
            early, late = (_mean(_read(self._losses[k * span : (k + 1) * span])) for k in (spans - 2, spans - 1))
            self._seen = spans, 0 < late < FAST * early
        return self._seen[1]

    def chose(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter], length: int, may: bool
    ) -> None:
        """The first selection comes into force. It is judged by the head's last `length` steps if they were enough, and there
        `may` be a copy."""
        self._losses = self._losses[-length:] if length else []
        if not may or len(self._losses) < _FEW:
            return self.end()
        self._after, self._undo = [], Undo(model, optimizer)
        self._scale = self._scaler.state_dict() if self._scaler is not None else None
        self._undo.keep(params)

    def keep(self, params: Mapping[str, nn.Parameter]) -> None:
        """These train from now on, as the selection changed: they may have to be put back too."""
        if self._undo is not None:
            self._undo.keep(params)

    def keep_buffers(self) -> None:
        """Buffers were changed from outside: as they are now they are put back."""
        if self._undo is not None:
            self._undo.keep_buffers()

    def judge_(self, optimizer: torch.optim.Optimizer) -> tuple[str, float] | None:
        """After as many steps as were planned for the head: if the loss is above where the head left it, put everything back as
        it was when the selection came into force. Returns why, and the share of the units to try next."""
        if self.over or self._undo is None or self._after is None or len(self._after) < len(self._losses):
            return None
        half = len(self._losses) // 2
        before, after = (_mean(_read(losses[-half:])) for losses in (self._losses, self._after))
        if after <= before or not math.isfinite(before):
            self.end()
            return None
        self._undo.rollback_(optimizer)
        if self._scaler is not None and self._scale is not None:
            self._scaler.load_state_dict(self._scale)
        share = 0.0 if self.tries else SMALLER
        self.tries, self._after = self.tries + 1, []
        if not share:
            self.end()
        return f"the loss is {after:.4g}, the head left it at {before:.4g}", share

    def end(self) -> None:
        """No further selection is judged."""
        self.over, self._losses, self._after, self._undo, self._scale = True, [], None, None, None

    def state(self) -> dict[str, Any]:
        """In plain types."""
        after = None if self._after is None else _read(self._after)
        undo = None if self._undo is None else self._undo.state()
        begun = {"tries": self.tries, "over": self.over, "losses": _read(self._losses), "after": after}
        return {**begun, "undo": undo, "scale": self._scale}

    def load(self, state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.tries, self.over, self._seen = state["tries"], state["over"], (0, False)
        self._losses, self._scale = list(state["losses"]), state["scale"]
        self._after = None if state["after"] is None else list(state["after"])
        self._undo = None
        if state["undo"] is not None:
            self._undo = Undo(model, optimizer)
            self._undo.load(state["undo"])


def _read(losses: list[torch.Tensor | float]) -> list[Any]:
    """As numbers; reading them off a GPU waits for it once."""
    there = [loss for loss in losses if isinstance(loss, torch.Tensor)]
    values = iter(torch.stack([loss.float().reshape(()) for loss in there]).tolist() if there else [])
    return [next(values) if isinstance(loss, torch.Tensor) else loss for loss in losses]


def _mean(losses: list[Any]) -> float:
    """Of those that are finite, if most are: a single bad batch says nothing."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return fmean(finite) if 2 * len(finite) > len(losses) else math.nan
