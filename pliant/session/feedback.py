"""Corrects a missed time or memory budget: compares what steps take with what was asked and predicted.

This is the arithmetic. `Controller.correction` (`session/controller`) calls it after steps, and plans the new selection.

One smoothed ratio of measured to predicted seconds prices the next plan. A selection is corrected only if its steps leave a
band around what was asked, and only after a dwell time that doubles with each correction of a round. If a share of a full step
was asked, steps first alternate with full steps, unless it is the first correction of a round and they take only a little too
long. Seconds beyond what was asked, and those of measuring and choosing, are saved in later steps. Seconds below it are not
spent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any, ClassVar

from pliant.core.types import Selection

OVER, UNDER = 0.02, 0.10  # of what is aimed at: the band in which nothing is corrected
MUCH = 0.2  # of what is aimed at: a correction of steps that take more than that beyond it compares them with full steps first
DWELL = 10  # steps until the first correction of a round; each one doubles it
PAY_BACK = 50  # steps in which overspent seconds are saved
LEAST = 0.95  # of what was asked: steps go no lower to save
FLATTEST = 0.5  # of measured over predicted: bytes never grow more slowly than that with their prediction
ENOUGH = 5  # steps: fewer say nothing, since the first ones of a selection pay for the change


@dataclass
class Round:
    """How one selection ran: seconds per step that were asked (None: no limit), predicted and measured; and bytes.

    `batch` is the number of elements of the largest batch whose step's bytes were measured. A round that was corrected has
    several of these, with the same number.
    """

    number: int
    step: int
    asked: float | None
    predicted: float
    full: float
    seconds: float = 0.0
    steps: int = 0
    asked_bytes: float | None = None
    predicted_bytes: int = 0
    measured_bytes: int | None = None
    batch: int = 0

    @classmethod
    def of(cls, selection: Selection, asked: float | None) -> Round:
        """How a selection that comes into force will run, if at most so many seconds are asked of a step."""
        found = cls(selection.round, selection.step, asked, selection.cost.seconds, selection.full.seconds)
        found.asked_bytes, found.predicted_bytes = selection.asked.get("bytes"), selection.cost.bytes
        return found

    @property
    def measured(self) -> float | None:
        """The mean step; None before the first."""
        return self.seconds / self.steps if self.steps else None

    def __str__(self) -> str:
        def share(seconds: float | None) -> str:
            if seconds is None:
                return "–"
            return f"{seconds / self.full:.3f}" if self.full else f"{seconds * 1e3:.3g} ms"

        times = f"asked {share(self.asked)}, predicted {share(self.predicted)}, measured {share(self.measured)}"
        line = f"round {self.number} from step {self.step}: {times} of a full step, {self.steps} steps"
        if self.asked_bytes is None:
            return line
        sizes = (self.asked_bytes, self.predicted_bytes, self.measured_bytes)
        asked, predicted, measured = ("–" if size is None else f"{size / 1e6:.4g} MB" for size in sizes)
        return f"{line}; memory: asked {asked}, predicted {predicted}, measured {measured}"


@dataclass
class Turns:
    """Seconds of steps, and of plain full steps that take turns with them, so that other work disturbs both alike.

    The first full step does not count: it finds none of its weights in the caches.
    """

    STEPS: ClassVar[int] = ENOUGH + 1  # full steps of a comparison

    mine: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)

    @property
    def is_last(self) -> bool:
        """Whether one more full step is enough."""
        return len(self.full) == ENOUGH

    def goes_on(self, full: float) -> bool:
        """Take in a full step. False where that is enough, or where none can be taken (0 seconds)."""
        self.full.append(full)
        return full > 0 and len(self.full) <= ENOUGH

    @property
    def share(self) -> float | None:
        """What a step takes of the full step after it; None where too few were compared."""
        pairs = list(zip(self.mine[::-1], self.full[:0:-1], strict=False))
        return median(mine / full for mine, full in pairs) if len(pairs) >= ENOUGH and min(self.full) > 0 else None

    @property
    def full_seconds(self) -> float:
        return median(self.full[1:])


@dataclass
class Feedback:
    """Follows the steps of a run."""

    ratio: float = 1.0  # measured over predicted seconds, smoothed
    peaks: list[tuple[int, int]] = field(default_factory=list)  # predicted and measured bytes of the last two selections
    recent: float | None = None  # seconds of a step of the selection in force
    overspent: float = 0.0  # seconds of steps beyond what was asked
    owed: float = 0.0  # seconds of measuring and choosing that are not saved yet
    aside: float = 0.0  # seconds of measuring and choosing so far
    waited: int = 0  # steps since the last selection or correction
    corrections: int = 0  # tried in this round
    turns: Turns | None = None  # while steps are compared with full steps
    rounds: list[Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        past = self.rounds[:-1]
        self._past = sum(round.steps for round in past), sum(round.seconds for round in past)  # before the last of them

    # ------------------------------------------------------------ seconds

    def begin(self, round: Round) -> None:
        """Start to follow a new selection."""
        if not self.rounds or round.number != self.rounds[-1].number:
            self.corrections = 0
        self._past = self.steps, self.seconds
        self.rounds.append(round)
        self.recent, self.waited, self.turns = None, 0, None

    def see(
        self, seconds: Sequence[float], asked: float | None, share: bool = False, owes: bool = True, aside: float = 0.0
    ) -> None:
        """Take in the measured seconds of the last steps, and those of measuring and choosing since the run began (`aside`).

        A `share` is one of a full step that nothing disturbs, so all steps count as the quicker ones among them. Where a
        function of progress says what is left, nothing is owed (`owes`).
        """
        new, self.aside = max(aside - self.aside, 0.0), max(aside, self.aside)
        asked = asked if owes else None
        self.owed = 0.0 if asked is None else self.owed + new
        if not seconds or not self.rounds:
            return
        now = self.rounds[-1]
        typical = sorted(seconds)[len(seconds) // 4] if share else median(seconds)
        if len(seconds) >= ENOUGH and now.predicted > 0 and typical > 0:
            first = self.recent is None and len(self.rounds) == 1
            self.ratio = typical / now.predicted if first else (self.ratio + typical / now.predicted) / 2
            self.recent = typical
        if self.turns is not None:
            self.turns.mine.extend(seconds)
        self.waited += len(seconds)
        now.seconds += sum(seconds)
        now.steps += len(seconds)
        taken = typical * len(seconds) if share else sum(seconds)
        left = 0.0 if asked is None else self.overspent + taken - asked * len(seconds)
        self.overspent, self.owed = max(left, 0.0), max(self.owed + min(left, 0.0), 0.0)

    def aim(self, asked: float) -> float:
        """What a step should take from now on."""
        return max(asked - (self.overspent + self.owed) / PAY_BACK, LEAST * asked)

    def is_off(self, asked: float) -> bool:
        """Whether steps take more than they should, or so much less that more could be chosen."""
        if self.recent is None:
            return False
        aim = self.aim(asked)
        return not (1 - UNDER) * aim <= self.recent <= (1 + OVER) * aim

    def needs_turns(self, asked: float) -> bool:
        """Whether a correction compares steps with full steps first: one by much, one that adds, and any but the first of a
        round. A full step may have been measured in a slow moment, and a budget means "at most"."""
        return self.corrections > 0 or (self.recent is not None and not 0 <= self.recent / self.aim(asked) - 1 <= MUCH)

    def may_correct(self, asked: float, seconds: float, left: int) -> bool:
        """Whether the selection has had its time, and what it misses in the steps that are left is more than the seconds that
        another selection costs: twice as much at the second attempt of a round, and so on, since what looks like a miss after
        an attempt is often a device whose speed changes."""
        if self.recent is None or self.waited < DWELL * 2**self.corrections:
            return False
        return self.is_off(asked) and abs(self.recent - self.aim(asked)) * left > seconds * (1 + self.corrections)

    def correcting(self, in_turn: bool) -> None:
        """A correction is tried, where steps take turns with full steps first (`in_turn`). The next one waits twice as long."""
        self.corrections += 1
        self.waited = 0
        self.turns = Turns() if in_turn else None

    def limit(self, asked: float, near: bool = False, share: bool = False) -> float:
        """The seconds to plan for, so that steps take what they should. A selection `near` the one in force only adds to it, if
        that takes less than it should: what it adds takes what was predicted for it, though the rest takes less. Where a
        `share` is asked, quick steps of one selection do not enlarge another: the device may be quicker than when it was
        measured, and so would a full step be."""
        aim = self.aim(asked)
        if near and self.recent is not None and self.recent < aim and self.ratio < 1:
            return min(self.rounds[-1].predicted + aim - self.recent, aim / self.ratio)
        return aim / (max(self.ratio, 1.0) if share and not near else self.ratio)

    def reassess(self, turns: Turns, asked: float) -> None:
        """Steps took turns with full steps, and so many seconds are asked of a step now."""
        now = self.rounds[-1]
        now.full, self.recent = turns.full_seconds, (turns.share or 0.0) * turns.full_seconds
        if now.predicted > 0:
            self.ratio = self.recent / now.predicted
        self.overspent = max(self.recent - asked, 0.0) * now.steps

    def predict(self, seconds: float, same_prices: bool) -> None:
        """So much is predicted of the selection in force now. Where prices are others, what steps missed says nothing."""
        if self.rounds:
            self.rounds[-1].predicted = seconds
        if not same_prices:
            self.ratio, self.recent = 1.0, None

    # ------------------------------------------------------------ bytes

    def wants_bytes(self, batch: int) -> bool:
        """Whether the next step's bytes should be measured: the first of a selection, and of a larger batch than before."""
        return bool(self.rounds) and self.rounds[-1].asked_bytes is not None and self.rounds[-1].batch < batch

    def see_bytes(self, measured: int, batch: int) -> None:
        """The peak of a step of the selection in force, with a batch of so many elements."""
        now = self.rounds[-1]
        now.batch = batch
        if now.measured_bytes is None or measured > now.measured_bytes:
            now.measured_bytes = measured
            earlier = [peak for peak in self.peaks if peak[0] != now.predicted_bytes]
            self.peaks = [*earlier, (now.predicted_bytes, measured)][-2:]

    def is_over(self, asked: float) -> bool:
        """Whether a step of the selection in force took more bytes than this."""
        measured = self.rounds[-1].measured_bytes if self.rounds else None
        return measured is not None and measured > asked

    def bytes_within(self, asked: float) -> float:
        """The bytes to plan for, so that no more than was asked are measured: on the line through the last two peaks."""
        predicted, measured = self.peaks[-1] if self.peaks else (0, 0)
        if measured <= 0:
            return asked
        ratio = slope = measured / predicted if predicted > 0 else 1.0
        if len(self.peaks) == 2:
            before = self.peaks[0]
            slope = min(max((before[1] - measured) / (before[0] - predicted), FLATTEST * ratio), ratio)
        return min(asked, predicted + (asked - measured) / slope)

    # ------------------------------------------------------------ the run

    def forget(self, bytes: bool = False) -> None:
        """Another budget: nothing is owed from the old one. Another way to keep tensors: nothing is known of its `bytes`."""
        self.overspent, self.owed, self.corrections, self.waited, self.turns = 0.0, 0.0, 0, 0, None
        if bytes:
            self.peaks = []

    @property
    def steps(self) -> int:
        """The steps of the run so far that were measured."""
        return self._past[0] + (self.rounds[-1].steps if self.rounds else 0)

    @property
    def seconds(self) -> float:
        """What they took."""
        return self._past[1] + (self.rounds[-1].seconds if self.rounds else 0.0)

    @property
    def mean(self) -> float | None:
        """The mean step of the run so far."""
        return self.seconds / self.steps if self.steps else None

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Feedback:
        known = {f.name: state[f.name] for f in fields(cls)}
        peaks = [(predicted, measured) for predicted, measured in state["peaks"]]
        turns = Turns(**state["turns"]) if state["turns"] is not None else None
        return cls(**known | {"rounds": [Round(**saved) for saved in state["rounds"]], "peaks": peaks, "turns": turns})
