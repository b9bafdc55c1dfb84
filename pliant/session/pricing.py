"""Prices follow the engine: whenever steps go another way, the choice is told, so that it plans by what they cost that way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pliant.core.budget import Budget, Progress
from pliant.core.mode import Mode
from pliant.core.types import Selection
from pliant.cost.profile import SPARED_BY_INFERENCE
from pliant.engine.engine import Engine
from pliant.session.choice import Choice

_RACE_AGAIN = 0.2  # of a step's cost: where another choice differs by more, another engine may be the fastest
_LOOK_EVERY = 10  # steps that fill a cache, between two looks at what they take
_HOPELESS = 2.0  # times as long as a captured step is predicted: steps that wait for launches need no race


class Pricing:
    """Lets the engine race where that is worth it, and keeps the prices of the choice those of the way that steps go."""

    def __init__(self, engine: Engine, choice: Choice) -> None:
        self._engine, self._choice = engine, choice
        self._raced: float | None = None  # the size of the selection that ways to run a step were raced on
        self._filling: list[Callable[[], float]] = []  # steps of this choice that nobody has looked at yet
        self._wasted = 0.0  # seconds that filling took beyond what those steps would have taken without it
        self._may_capture = False  # whether steps of ours can be, as far as is known, if memory leaves room for it

    @property
    def expects_capture(self) -> bool:
        """Whether steps of ours will be captured, as far as is known."""
        return self._engine.may_capture and (self._choice.correct or self._engine.way.graphs)

    def measured(self, captures: bool, now: Progress) -> None:
        """Costs are known now; `captures`: they are to be those of captured steps, where such steps can be."""
        sliced = any(part.dim is not None for unit in self._choice.units for part in unit.parts)
        self._may_capture = captures and not sliced
        budget = self._choice.policy.budget
        captured = self._may_capture and self._choice.has_room(budget, now, self._engine.keeps)
        self._engine.may_hold = captured or budget.memory is None
        self._choice.run_on(self._engine.keeps, self._spared(captured, self._choice.spared == 1), captured)

    def _spared(self, captured: bool, cached: bool) -> float:
        """What is spared of the forward pass before a choice, as long as no race has told: all of it, where it is `cached`."""
        ways = self._engine.race.ways
        infers = captured and len(ways) > 1 and any(way.prefix and way.graphs for way in ways)
        return 1.0 if cached else SPARED_BY_INFERENCE if infers else 0.0

    def look_for_room(self, now: Progress) -> None:
        """Where the limit of memory changes, or steps took more than it, they are captured only as long as there is room for
        what they hold on to."""
        budget = self._choice.policy.budget
        changes = callable(budget.memory) and self._may_capture
        if not changes and not (self._choice.captured and self._choice.is_over(now)):
            return
        has_room = self._choice.has_room(budget, now)
        if has_room != self._engine.may_hold:
            self._engine.make_room()
            self._engine.may_hold = has_room
            self._engine.settle(budget, races=False)
            captured = has_room and self._engine.may_capture
            self._choice.run_on(self._engine.keeps, self._spared(captured, self._choice.spared == 1), captured)
            self._raced = None

    def cached(self, named: bool) -> None:
        """The samples of the coming batch are `named`, so that a cache can be used, or not."""
        cached = self._engine.caches and named
        if cached != (self._choice.spared == 1) and not self._engine.race.is_on:
            self._choice.run_on(self._engine.keeps, float(cached), self._choice.captured)

    def fills(self, seconds: Callable[[], float], left: int) -> None:
        """A step put its batch into the cache; it took so long, and so many steps are left.

        Where filling has taken more, beyond what these steps would have without it, than a full cache can save in all that are
        left, the cache is given up; a profile without seconds cannot tell.
        """
        self._filling.append(seconds)
        if len(self._filling) < _LOOK_EVERY or self._choice.selection is None or self._choice.profile is None:
            return
        units, profile, ratio = self._choice.selection.units, self._choice.profile, self._choice.feedback.ratio
        without, cached = (ratio * profile.cost(units, cached=cached).seconds for cached in (False, True))
        self._wasted += sum(read() - without for read in self._filling)
        self._filling.clear()
        if without > 0 and self._wasted > left * (without - cached):
            self._engine.give_up_cache()

    def won(self) -> bool:
        """A race is over: from now on steps go the way that won. False where there is another one, since no step could be
        captured, and those that are not had been left out."""
        engine = self._engine
        again = engine.way.graphs and not engine.captures and bool(engine.race.without)
        if again:
            engine.settle(self._choice.policy.budget, races=True)
        self._choice.run_on(engine.keeps, float(engine.caches), engine.captures)
        if not again:
            self._choice.raced(*engine.raced)
        return not again

    def chosen(self, selection: Selection) -> None:
        """Race again where this selection is of another size than the last that was raced on."""
        self._filling.clear()
        size = selection.cost.seconds or selection.cost.macs
        if self._choice.correct and (self._raced is None or abs(size - self._raced) > _RACE_AGAIN * self._raced):
            self._raced = size
            self._engine.settle(self._choice.policy.budget, races=True, waits=self._waits(selection))

    def _waits(self, selection: Selection) -> bool:
        """Whether steps of this selection would spend most of their time waiting for launches, unless they are captured."""
        if not self._choice.captured or self._choice.profile is None:
            return False
        lean = self._engine.keeps == "lean"
        ways = (self._choice.profile.on(Mode(lean=lean, graphs=captured)) for captured in (False, True))
        launched, captured = (prices.cost(selection.units).seconds for prices in ways)
        return launched > _HOPELESS * captured

    def change_budget(self, budget: Budget, now: Progress) -> None:
        """Other engines serve where memory is short. A budget that cannot be kept is refused, and everything stays."""
        engine, old = self._engine, self._choice.policy.budget
        was = engine.race, engine.may_hold, engine.is_tight
        if (budget.memory is None) != (old.memory is None):
            engine.settle(budget, races=False)
        try:
            may = self._may_capture and (self._choice.captured or not engine.may_hold)  # or were, had there been room
            may = may and self._choice.has_room(budget, now, engine.keeps)
            engine.may_hold = may or budget.memory is None
            if budget.memory is not None and not engine.serves(budget):
                engine.settle(budget, races=False)
            self._choice.change_budget(budget, now, engine.keeps, may and engine.may_capture)
        except BaseException:
            engine.race, engine.may_hold, engine.is_tight = was
            raise
        if engine.race is not was[0]:
            self._raced = None

    # ------------------------------------------------------------ save and resume

    def state(self) -> list[Any]:
        """The way that won, on what it did, whether the cache was given up, and whether steps may be captured."""
        winner = self._engine.race.winner
        return [str(winner) if winner is not None else None, self._raced, self._engine.gave_up_cache, self._may_capture]

    def load(self, state: Sequence[Any], now: Progress) -> None:
        """Go on the way that won, with the prices of a choice that was loaded before."""
        winner, self._raced, self._engine.gave_up_cache, self._may_capture = state
        budget = self._choice.policy.budget
        has_room = self._choice.captured and self._choice.has_room(budget, now)
        self._engine.may_hold = has_room or budget.memory is None
        known = self._engine.settle(budget, races=self._choice.correct, winner=winner)
        captured = self._choice.captured and self._engine.may_capture and self._engine.may_hold
        spared = self._spared(captured, self._engine.caches)
        self._choice.run_on(self._engine.keeps, self._choice.spared if known else spared, captured)
