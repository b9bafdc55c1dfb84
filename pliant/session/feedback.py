"""Asked, predicted, measured: what steps really take, and how the next plan is to be corrected for it. Arithmetic only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean, median
from typing import Any

WITHIN = 0.015  # of what was asked: closer than this nothing is corrected
_PAY_BACK = 50  # steps within which seconds that were saved or overspent are made up for at the soonest: else choices swing
_CHANCE = 10  # steps after which a correction must have shown
_FEW = 5  # steps: the capture of a choice may be most of what fewer of them took
_SURE = 3  # looks that say the same: a slow moment of the device is no reason for another choice where that is costly
_LEAST, _MOST = 0.75, 1.25  # of what was asked: a step goes no further to pay back
_SLOPES = 0.75, 4.0  # of measured over predicted: how much seconds may grow with their prediction
_APART = 0.05  # relative: predictions that are nearer to each other than that tell no slope
_FLATTEST = 0.5  # of measured over predicted: bytes never grow more slowly than that with their prediction
_WILD = 2.0  # a step that takes this many times the median was disturbed and counts as so many


@dataclass
class Round:
    """How one selection ran: seconds per step that were asked (None: no limit), predicted and measured; and bytes.

    `batch` is the number of elements of the largest batch whose step's bytes were measured.
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
    typical: float | None = None  # seconds of a step, by the last look

    @property
    def measured(self) -> float | None:
        """The mean step; None before the first."""
        return self.seconds / self.steps if self.steps else None

    def __str__(self) -> str:
        def share(seconds: float | None) -> str:
            if seconds is None:
                return "–"
            return f"{seconds / self.full:.3f}" if self.full else f"{seconds * 1e3:.3g} ms"

        told = f"asked {share(self.asked)}, predicted {share(self.predicted)}, measured {share(self.measured)}"
        line = f"round {self.number} from step {self.step}: {told} of a full step, {self.steps} steps"
        if self.asked_bytes is None:
            return line
        sizes = (self.asked_bytes, self.predicted_bytes, self.measured_bytes)
        asked, predicted, measured = ("–" if size is None else f"{size / 1e6:.4g} MB" for size in sizes)
        return f"{line}; memory: asked {asked}, predicted {predicted}, measured {measured}"


@dataclass
class Feedback:
    """Follows the steps of a run and says by how much the next plan must miss its limit so that the mean step meets it."""

    ratio: float = 1.0  # measured over predicted, of late
    debt: float = 0.0  # seconds that were asked for and not taken; less than nothing: taken beyond
    recent: float | None = None  # seconds of a step, of late
    horizon: float = _PAY_BACK  # steps within which the debt is to be paid back
    looks: list[float] = field(default_factory=list)  # seconds of a step, by the last looks at the selection in force
    rounds: list[Round] = field(default_factory=list)
    peaks: list[tuple[int, int]] = field(default_factory=list)  # bytes of steps, predicted and measured: the last two
    costly: bool = False  # whether another choice is
    since: int = 0  # the first of the rounds whose predictions are by the prices that are in force
    same_bytes: int = 0  # the first of the rounds whose bytes are those of the engine that is in force

    def begin(self, round: Round) -> None:
        """Another selection is in force."""
        self.rounds.append(round)
        self.recent, self.looks = None, []

    def predict(self, seconds: float) -> None:
        """So much is predicted of the selection in force now: prices are better known."""
        if self.rounds:
            self.rounds[-1].predicted, self.since = seconds, len(self.rounds) - 1

    def expect(self, seconds: float) -> None:
        """Steps of the selection in force will take so long: the engine that runs them is another one than before."""
        if self.rounds and self.rounds[-1].predicted > 0 and seconds > 0:
            self.ratio, self.recent, self.looks = seconds / self.rounds[-1].predicted, None, []

    def see(
        self,
        seconds: Sequence[float],
        asked: float | None,
        pays: bool = True,
        share: bool = False,
        pause: float = 0.0,
        left: int = 0,
    ) -> None:
        """Steps of the selection in force. `pays`: what this one misses, later ones make up for. `pause`: the seconds that
        must pass between two corrections. `left`: the steps that are still to come, where half of them is soon enough to make
        up for something: another choice is costly there. So what steps of this one take is believed at once, not little by
        little; the first of them, which pay for it, do not tell what the others take, and few are no sign at all.

        A `share` is one of a full step as fast as this device takes it undisturbed, so what disturbs steps is left out: all of
        them count as the quick ones among them do.
        """
        if not seconds or not self.rounds:
            return
        now, middle = self.rounds[-1], sorted(seconds)[len(seconds) // 4] if share else median(seconds)
        tame = [middle if share else min(s, _WILD * middle) for s in seconds]
        tells = not left or len(seconds) >= _FEW
        if tells and now.predicted > 0 and middle > 0:
            seen = middle / now.predicted
            at_once = left > 0 or (self.recent is None and len(self.rounds) == 1)
            self.ratio = seen if at_once else (self.ratio + seen) / 2
        self.costly = left > 0
        if tells:
            self.recent, now.typical = middle if left > 0 else fmean(tame), middle
            self.looks = [*self.looks, self.recent][-_SURE:]
        self.horizon = max(_PAY_BACK, pause / self.recent if self.recent else 0.0, left / 2)
        now.seconds += sum(seconds)
        now.steps += len(seconds)
        self.debt = self.debt + sum(asked - s for s in tame) if asked is not None and pays else 0.0

    def target(self, asked: float) -> float:
        """What a step should take from now on."""
        return max(_LEAST * asked, min(asked + self.debt / self.horizon, _MOST * asked))

    def correction(self, asked: float) -> float:
        """What to plan for, over what was asked."""
        target, line = self.target(asked), self._line()
        if line is None:
            return target / asked / self.ratio
        predicted, seconds, slope = line
        return max(predicted + (target - seconds) / slope, _LEAST * target / self.ratio) / asked

    def _line(self) -> tuple[float, float, float] | None:
        """Where another choice is costly and two have run: what was predicted of this one, what it takes, and how much seconds
        grow with their prediction from one to the other. Prices that are wrong for some layers are wrong for this choice and
        right for that one: a ratio alone, and it swings to and fro."""
        if not self.costly or len(self.rounds) <= self.since or not self.rounds[-1].typical:
            return None
        now, seconds = self.rounds[-1], self.rounds[-1].typical
        for other in reversed(self.rounds[self.since : -1]):
            apart = now.predicted - other.predicted
            if other.typical is not None and abs(apart) > _APART * now.predicted > 0:
                least, most = (share * seconds / now.predicted for share in _SLOPES)
                return now.predicted, seconds, min(max((seconds - other.typical) / apart, least), most)
        return None

    def is_off(self, asked: float, toll: float = 0.0, asked_bytes: float | None = None) -> bool:
        """Whether steps take so much more or less than they should that planning again is worth it. Where another choice has a
        `toll` of so many seconds on each step that is left, a few looks in a row must say so. Where memory holds
        the choice back (`asked_bytes`), seconds that are left over stay."""
        if self.recent is None:
            return False
        looks, target, most = self.looks if toll else [self.recent], self.target(asked), WITHIN * asked + toll
        enough = len(looks) == _SURE or not toll
        too_short = target - max(looks) > most and not (asked_bytes is not None and self.is_short_of_memory(asked_bytes))
        return enough and (min(looks) - target > most or too_short)

    def is_nearer(self, predicted: float, asked: float) -> bool:
        """Whether a step of which so much is predicted comes nearer to what it should take than steps do now."""
        target = self.target(asked)
        return self.recent is None or abs(self._expected(predicted) - target) < abs(self.recent - target)

    def wants_next_up(self, predicted: float, asked: float) -> bool:
        """Whether steps take much less than was asked, and a few of the next choice up, of which so much is predicted, would
        come nearer to it: with both in turn the mean step is met, where nothing lies between them."""
        if self.recent is None or asked - self.recent <= 2 * WITHIN * asked:
            return False
        expected, owed = self._expected(predicted), asked + self.debt / _CHANCE
        return self.target(asked) < expected <= _MOST * asked and expected - owed < owed - self.recent

    def _expected(self, predicted: float) -> float:
        """What a step takes of which so much is predicted: what it took when it ran in this round, if it did."""
        ran = [r for r in self.rounds if r.number == self.rounds[-1].number and r.predicted == predicted and r.steps]
        if ran:
            return sum(r.seconds for r in ran) / sum(r.steps for r in ran)
        line = self._line()
        return predicted * self.ratio if line is None else line[1] + (predicted - line[0]) * line[2]

    def is_stuck(self, asked: float) -> bool:
        """Whether so much was saved that a step may take all that it ever may, and steps still take less than was asked."""
        since = self.rounds[-1].steps if self.rounds else 0  # a correction had its chance
        return since > _CHANCE and self.recent is not None and self.recent < asked and self.target(asked) >= _MOST * asked

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

    def is_short_of_memory(self, asked: float) -> bool:
        """Whether, in this round, something was added to a choice, and steps took more bytes than they might, and may now."""
        same = [round for round in self.rounds[self.same_bytes :] if round.number == self.rounds[-1].number]
        return any(
            now.measured_bytes is not None
            and now.measured_bytes > max(asked, now.asked_bytes or 0.0)
            and now.predicted_bytes > before.predicted_bytes
            for before, now in itertools.pairwise(same)
        )

    def bytes_within(self, asked: float) -> float:
        """The bytes to plan for, so that no more than was asked are measured: on the line through the last two peaks."""
        predicted, measured = self.peaks[-1] if self.peaks else (0, 0)
        if measured <= 0:
            return asked
        ratio = slope = measured / predicted if predicted > 0 else 1.0
        if len(self.peaks) == 2:
            before = self.peaks[0]
            slope = min(max((before[1] - measured) / (before[0] - predicted), _FLATTEST * ratio), ratio)
        return min(asked, predicted + (asked - measured) / slope)

    def price_anew(self) -> None:
        """Other prices: how far steps were off the old ones says nothing."""
        self.ratio, self.since = 1.0, len(self.rounds)

    def forget_bytes(self) -> None:
        """Another engine: what the old one took says nothing."""
        self.peaks, self.same_bytes = [], len(self.rounds)

    # ------------------------------------------------------------ the run

    def forget(self) -> None:
        """Another budget: nothing is owed from the old one."""
        self.debt = 0.0

    @property
    def mean(self) -> float | None:
        """The mean step of the run so far."""
        steps = sum(round.steps for round in self.rounds)
        return sum(round.seconds for round in self.rounds) / steps if steps else None

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Feedback:
        rounds = [Round(**{f.name: saved[f.name] for f in fields(Round) if f.name in saved}) for saved in state["rounds"]]
        peaks = [(predicted, measured) for predicted, measured in state["peaks"]]
        known = {f.name: state[f.name] for f in fields(cls) if f.name in state}
        return cls(**known | {"rounds": rounds, "peaks": peaks})
