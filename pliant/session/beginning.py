"""The beginning of a run: the head trains first, then the first selection, which is judged by its loss.

A head that does not fit its data sends gradients through the network that say more about the head than about the layers. So
the head trains alone first ("linear probing, then fine-tuning", arXiv 2202.10054), and layers are chosen by what they can add
to it. While the loss halves, the head goes on alone: what it learns by itself, other layers need not learn. While the loss is
above that of the first steps, it goes on too: it has not begun to learn. The same holds while it is worse than a `silent` head,
whose weights are all zero: what it knows is wrong, as when labels have changed, and other layers cannot mend that.

A second head, a copy, keeps training alone during the test, on the features as they were. The loss of the selection may rise at
first, as features change under its head. The test takes as many steps as were planned for the head. Two conditions must hold.
The mean loss of the selection, over the whole test and over the last half, must not exceed that of the first steps of the run,
where a network guesses. Over the last half it must also not be clearly above that of the second head. If the head alone has
learned most by then, or hardly anything, it must be clearly below: more layers soon memorise the same samples, and being as
good as a guess proves nothing. If a selection fails, it does not help, or the rate is too high for so many layers. Then the run
goes on as if the head had trained alone, and tries fewer layers. A selection that passes is watched for twice as many steps,
without the second head: its loss must not rise above that of the first steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

from pliant.runtime.optimizer_step import needs_closure
from pliant.session.delta import Undo
from pliant.session.second_head import SecondHead

MakeSecond = Callable[[torch.optim.Optimizer, Collection[str], Undo], SecondHead]

FAST = 0.5  # of the loss before, in half as many steps as the head has at least: then it goes on alone
UNKNOWN = 20  # steps of the head alone, where the length of the run is unknown
LEARNED = 0.4  # of the loss of the first steps: a head that comes below has learned most by itself, and layers must do better
BETTER, WORSE = 2.0, 3.0  # standard errors: clearly below the loss of the second head, and clearly above it
SMALLER = 0.25  # of the units, in the second try; the third is the head alone
_LEAST = 10  # steps of the head alone, if that is no more than a quarter of the run
_BEGIN = 2  # the first steps
_PATIENCE = 3  # times the steps planned for the head: the longest that it trains alone without learning, or that a test takes
_FEW = 8  # steps of the head alone: the losses of fewer say little
_AT_ONCE = 256  # losses that are read off a device


def length(share: float, total: int | None) -> int:
    """The steps in which the head trains alone: this share of the run, but at least ten, or a quarter of a short run."""
    if not share:
        return 0
    return UNKNOWN if total is None else max(round(share * total), min(_LEAST, total // 4), 1)


class Beginning:
    """Losses of a run's first steps, and a copy of what the first selection may spoil."""

    def __init__(self, scaler: torch.amp.GradScaler | None = None, second: MakeSecond | None = None) -> None:
        """`second` makes a second head of an optimizer, the names of the head's parameters, and the network as it was."""
        self._scaler, self._make_second = scaler, second
        self._scale: dict[str, Any] | None = None  # the state of the scaler when the selection came into force
        self.tries = 0  # selections that were taken back
        self._passed = 0  # spans in which the selection did no harm: the test, and those after it
        self.over = False
        self._losses: list[torch.Tensor | float] = []  # of the head alone
        self._after: list[torch.Tensor | float] | None = None  # of the selection that is judged
        self._undo: Undo | None = None
        self._second: SecondHead | None = None
        self._first: list[torch.Tensor | float] = []  # losses of the run
        self._beside: list[torch.Tensor | float] = []  # losses of the second head, one for each of `_after`
        self._loss_beside: torch.Tensor | float = math.nan  # of the last batch
        self._silent: float | None = None  # the loss of a head whose weights are all zero; NaN if there is none
        self._seen = 0, False  # spans of the head alone, and whether its loss halved in the last one

    def see(self, loss: torch.Tensor | None) -> None:
        """A step is over."""
        if loss is None and self._after is not None:
            self.end()  # the caller takes steps that neither it nor a second head can be judged by
        if self.over or loss is None:
            return
        if len(self._first) < _BEGIN:
            self._first.append(loss)
        if self._after is None:
            add(self._losses, loss)
            return
        add(self._after, loss)
        if self._second is not None and not self._passed:
            add(self._beside, self._loss_beside)

    def goes_on(self, length: int, silent: Callable[[], float]) -> bool:
        """Whether the head trains on alone, after `length` steps: its loss halved in the last whole half of so many steps, or
        is still above that of the first steps or of a `silent` head. The latter may last three times as long."""
        span = max(length // 2, 1)
        spans = len(self._losses) // span
        if spans < 2 or length < _FEW:
            return False
        if spans != self._seen[0]:  # once per span: reading numbers off a GPU waits for it
            if self._silent is None:
                self._silent = silent()
            early, late = (_mean(read(self._losses[k * span : (k + 1) * span])) for k in (spans - 2, spans - 1))
            knows_nothing = min([self._begun, *filter(math.isfinite, [self._silent])])
            waits = late > knows_nothing and spans * span < _PATIENCE * length
            self._seen = spans, waits or 0 < late < FAST * early
        return self._seen[1]

    def chose(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, nn.Parameter],
        length: int,
        may: bool,
        head: Collection[str] = (),
    ) -> None:
        """The first selection comes into force. It is judged after `length` steps if the head had enough, and there `may` be a
        copy. A second one of this `head` trains on beside it; without any, the head's last steps are the measure."""
        self._losses = self._losses[-length:] if length else []
        if not may or len(self._losses) < _FEW:
            return self.end()
        self._after, self._undo = [], Undo(model, optimizer)
        self._scale = self._scaler.state_dict() if self._scaler is not None else None
        self._undo.keep(params)
        if head and self._make_second is not None and not needs_closure(optimizer):
            self._second = self._make_second(optimizer, head, self._undo)

    def train_second_head(self, batch: Any, first: bool, last: bool) -> bool:
        """Comes before each batch that a selection trains on, the `first` and the `last` of a step. Returns whether there is a
        second head, and the selection is still tested."""
        if self._second is None or self._passed:
            return False
        self._loss_beside = self._second.train(batch, first, last)
        return True

    @property
    def tests(self) -> bool:
        """Whether a selection is tested, so that nothing should be added to it."""
        return self._after is not None and not self._passed

    def drop_second_head(self) -> None:
        """It is no measure any more, or there is no room for it."""
        self._second, self._beside = None, []

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """This one takes the steps from now on. It knows nothing of what the one before it has kept."""
        if needs_closure(optimizer):
            self.drop_second_head()
        for one in (self._undo, self._second):
            if one is not None:
                one.use_optimizer(optimizer)

    def start_over(self) -> None:
        """Norm statistics were replaced, so losses so far are those of another network: the first steps are yet to come."""
        self._first = []

    def keep(self, params: Mapping[str, nn.Parameter]) -> None:
        """These train from now on, as the selection changed: they may have to be put back too."""
        if self._undo is not None:
            self._undo.keep(params)

    def keep_buffers(self) -> None:
        """Buffers were changed from outside: as they are now they are put back. The second head knows nothing of them."""
        self.drop_second_head()
        if self._undo is not None:
            self._undo.keep_buffers()

    def judge_(self, left: float = math.inf) -> tuple[str, float] | None:
        """After as many steps as were planned for the head, and a few times more: if the selection does harm, put everything
        back as it was when it came into force, but the head as the second one is by now. Returns why, and the share of the
        units to try next. There is none if they could not be judged in the steps that are `left`, or if a selection failed
        that had passed."""
        if self.over or self._undo is None or self._after is None or len(self._after) < len(self._losses):
            return None
        why, learns = self._found_later() if self._passed else self._found()
        if why is None:
            self._passed, self._after = self._passed + 1, []
            if self._second is not None:
                self._second.stop()
            if self._passed == _PATIENCE or self._second is None:
                self.end()
            return None
        self._undo.rollback_()
        if self._scaler is not None and self._scale is not None:
            self._scaler.load_state_dict(self._scale)
        if self._second is not None and math.isfinite(_late(self._beside)):
            self._second.take_over_()
        share = 0.0 if self.tries or self._passed or not learns or left < len(self._losses) else SMALLER
        self.tries, self._after, self._beside = self.tries + 1, [], []
        if not share:
            self.end()
        return why, share

    def _found(self) -> tuple[str | None, bool]:
        """What is wrong with the selection, and whether the head alone learns. One whose loss was above that of the first steps
        before and is still is no measure."""
        after, before, beside = map(_late, (self._after, self._losses, self._beside))
        if self._second is None:
            back = after <= before or not math.isfinite(before)
            return None if back else f"the loss is {after:.4g}, the head left it at {before:.4g}", True
        begun, losses_after = self._begun, read(self._after or [])
        learns = math.isfinite(beside) and not min(before, beside) > begun
        is_whole = any(map(math.isfinite, losses_after[-2:]))  # one bad batch says nothing
        most = begun > 0 and beside < LEARNED * begun
        partly = not most and any(_is_below(losses, begun) for losses in (self._losses, self._beside))
        if learns and is_whole and after <= begun and _mean(losses_after) <= begun and self._keeps_up(partly):
            return None, learns
        losses = f"the loss is {after:.4g}, at the start it was {begun:.4g}"
        return f"{losses}; the head alone went from {before:.4g} to {beside:.4g}", learns

    def _found_later(self) -> tuple[str | None, bool]:
        """What is wrong with a selection that has passed the test."""
        after, begun = _mean(read(self._after or [])), self._begun
        return None if after <= begun else f"later its loss rose to {after:.4g}, at the start it was {begun:.4g}", True

    def _keeps_up(self, partly: bool) -> bool:
        """Whether the late losses of the selection are clearly below those of the second head on the same batches; where the
        head has learned `partly`, whether they are not clearly above."""
        below = [other - one for one, other in zip(read(self._after or []), read(self._beside), strict=False)]
        below = [one for one in below[-(len(below) // 2) :] if math.isfinite(one)]
        if len(below) < 2:
            return False
        error = stdev(below) / len(below) ** 0.5
        return fmean(below) >= -WORSE * error if partly else fmean(below) > BETTER * error

    @property
    def _begun(self) -> float:
        """The loss of the first steps; infinite if none of them was finite."""
        finite = [loss for loss in read(self._first) if math.isfinite(loss)]
        return fmean(finite) if finite else math.inf

    def end(self) -> None:
        """No further selection is judged."""
        self.over, self._losses, self._after, self._undo, self._scale = True, [], None, None, None
        self._second, self._first, self._beside = None, [], []

    def state(self) -> dict[str, Any]:
        """In plain types."""
        after = None if self._after is None else read(self._after)
        undo, second = (None if one is None else one.state() for one in (self._undo, self._second))
        losses = {"losses": read(self._losses), "after": after, "first": read(self._first), "beside": read(self._beside)}
        return {
            "tries": self.tries,
            "passed": self._passed,
            "over": self.over,
            "silent": self._silent,
            **losses,
            "undo": undo,
            "second": second,
            "scale": self._scale,
        }

    def load(self, state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.tries, self._passed, self.over = state["tries"], state["passed"], state["over"]
        self._silent, self._seen = state["silent"], (0, False)
        self._losses, self._first, self._beside = (list(state[name]) for name in ("losses", "first", "beside"))
        self._after = None if state["after"] is None else list(state["after"])
        self._scale, self._undo, self._second = state["scale"], None, None
        if state["undo"] is not None:
            self._undo = Undo(model, optimizer)
            self._undo.load(state["undo"])
        if state["second"] is not None and self._undo is not None and self._make_second is not None:
            self._second = self._make_second(optimizer, state["second"]["params"].keys(), self._undo)
            self._second.load(state["second"])


def read(losses: list[torch.Tensor | float]) -> list[Any]:
    """As numbers; reading them off a GPU waits for it once."""
    there = [loss for loss in losses if isinstance(loss, torch.Tensor)]
    values = iter(torch.stack([loss.float().reshape(()) for loss in there]).tolist() if there else [])
    return [next(values) if isinstance(loss, torch.Tensor) else loss for loss in losses]


def add(losses: list[torch.Tensor | float], loss: torch.Tensor | float) -> None:
    """Add one. Now and then all become numbers, as a small tensor holds much more memory than it needs."""
    losses.append(loss)
    if len(losses) % _AT_ONCE == 0:
        losses[:] = read(losses)


def _late(losses: list[torch.Tensor | float] | None) -> float:
    """The mean of the last half."""
    return _mean(read(losses[-(len(losses) // 2) :])) if losses else math.nan


def _is_below(losses: list[torch.Tensor | float], level: float) -> bool:
    """Whether the mean of the last half is, by more than a standard error."""
    late = [loss for loss in read(losses[-(len(losses) // 2) :]) if math.isfinite(loss)]
    return len(late) > 1 and fmean(late) + stdev(late) / len(late) ** 0.5 < level


def _mean(losses: list[Any]) -> float:
    """Of those that are finite, if most are: a single bad batch says nothing."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return fmean(finite) if 2 * len(finite) > len(losses) else math.nan
