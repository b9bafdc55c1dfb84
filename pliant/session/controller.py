"""`Controller`: decides what trains next and keeps it inside the budget.

It measures once, probes when the schedule asks, plans, and corrects a plan whose steps miss what was asked. The arithmetic of
corrections (band, dwell time, pay-back) is in `feedback`. It changes nothing: the loop applies what it decides. How steps run
is the engine's matter; every price here is that of the mode it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from pliant.core.budget import Budget, Progress
from pliant.core.errors import BudgetError, ProbeError
from pliant.core.mode import Mode
from pliant.core.types import Selection, Unit, narrowed
from pliant.cost.charge import ChargeKind
from pliant.cost.kept_profiles import recall
from pliant.cost.limited import is_counted
from pliant.cost.measure import facts, origin, read_graph
from pliant.cost.profile import Profile
from pliant.engine.kernels.prices import PRICES
from pliant.planning.floor import always_chosen, has_time, in_reach, least_bytes, leaving_room
from pliant.planning.plan import plan, without
from pliant.planning.policy import Policy
from pliant.planning.solve import fixed
from pliant.planning.windows import windows
from pliant.runtime.batches import Around, Loss, Ready
from pliant.runtime.batchnorm import NormRule
from pliant.runtime.optimizer_step import Update
from pliant.runtime.ranks import Ranks
from pliant.session import beginning
from pliant.session.feedback import DWELL, Feedback, Round, Turns
from pliant.signals.drift import Drift, latest

LOOK_EVERY = 10  # steps between two comparisons of measured and predicted seconds
_STEPS_LEFT = 1000  # that a selection is taken to last where the length of the run is unknown


class Controller:
    """What can be chosen, what it costs, what it is worth, what is chosen now, and whether that keeps the budget."""

    def __init__(self, policy: Policy, profile: Profile | None = None, *, check: bool = True, correct: bool = True) -> None:
        """`check` compares a profile that was given with the conditions of the first batch; `correct` closes the loop."""
        self.policy, self.profile, self.correct = policy, profile, correct
        self.units: tuple[Unit, ...] = ()
        self.selection: Selection | None = None
        self.drift, self.feedback = Drift(), Feedback()
        self._check = check and profile is not None
        self.values: dict[Unit, float] = {}
        self.frozen: Collection[str] = ()  # parameters that may not be chosen
        self.pending: Selection | None = None  # planned for a new budget, not yet in force
        self.asks_anyway = False  # for another selection, scored with the next batch, whatever the schedule says
        self.head_goes_on = False  # alone, longer than planned
        self.last = Progress()  # where the run stood at the last selection
        self._priced: tuple[Profile, Mode, Profile] | None = None

    # ------------------------------------------------------------ costs

    def measure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        batch: Any,
        update: Update,
        norm: NormRule,
        around: Around,
        ready: Ready | None,
        ranks: Ranks,
        mode: Mode,
        now: Progress,
    ) -> str | None:
        """Measure costs and name the units, on the first batch. Every parameter must be as the user left it.

        `around` and `ready` hold where whole parameters are chosen. Seconds of an earlier run serve again. Returns a log line.
        """
        note, graph = None, read_graph(model, loss, batch, norm, kernels=is_counted(model, self.policy.budget))
        units = self.units = self.policy.units(graph)
        if self.profile is None:
            # A GradScaler skips steps whose gradients are not finite, and without real values they may not be.
            spare = self.policy.budget if self.policy.budget.memory is not None and update.scaler is None else None
            whole = all(part.dim is None for unit in units for part in unit.parts)
            how: dict[str, Any] = {"graph": graph, "update": update, "norm": norm, "prices": PRICES, "spare": spare}
            how |= {"around": around if whole else nullcontext, "ready": ready if whole and not facts(graph) else None}
            how["will_do"] = lambda profile: has_time(self.policy, profile.on(mode), units, now)
            recalled = partial(recall, self.policy.cost, model, optimizer, loss, batch, **how)
            self.profile, note = ranks.each(recalled)[0] if ranks.shards else ranks.first(recalled)
        elif self._check:
            self.profile.check_origin(origin(model, batch, update, norm))
        if facts(graph):  # also where the profile is of another loss
            self.profile = replace(self.profile, origin={**facts(graph), **self.profile.origin})
        return note

    def keep_only(self, params: Collection[str]) -> None:
        """Choose no other parameters than these."""
        self.units = narrowed(self.units, params)
        self.values = {unit: self.values[unit] for unit in self.units if unit in self.values}

    def prices(self, mode: Mode) -> Profile:
        """What steps cost that run in this mode."""
        if self.profile is None:
            raise RuntimeError("nothing is measured yet: the first step (or before_step) measures.")
        if self._priced is None or self._priced[0] is not self.profile or self._priced[1] != mode:
            self._priced = self.profile, mode, self.profile.on(mode)
        return self._priced[2]

    def _budget(self, mode: Mode) -> Budget:
        """What is left of the budget beside what captured steps hold."""
        budget = self.policy.budget
        return leaving_room(budget, self.prices(mode)) if mode.graphs and budget.memory is not None else budget

    def asked_seconds(self, now: Progress) -> float | None:
        """The time limit of a step as it is now; a limit on joules is one too, at the measured power."""
        budget = self.policy.budget
        if self.profile is None or (budget.time is None and budget.energy is None):
            return None
        return self.profile.seconds_within(budget.limits(self.profile.full, now))

    def _asked_bytes(self, now: Progress, mode: Mode) -> float | None:
        """The memory limit of a step as it is now."""
        return None if self.policy.budget.memory is None else self._budget(mode).limits(self.prices(mode).full, now)["bytes"]

    def _bytes_within(self, now: Progress, mode: Mode) -> float | None:
        """The bytes to plan for."""
        asked = self._asked_bytes(now, mode)
        return asked if asked is None or not self.correct else self.feedback.bytes_within(asked)

    def has_room(self, budget: Budget, now: Progress, mode: Mode) -> bool:
        """Whether steps that train the least there is, and are captured, fit into this budget's memory."""
        if self.profile is None or not self.units or budget.memory is None:
            return True
        prices = self.profile.on(replace(mode, graphs=True, prefix=True, lean=True))
        room = leaving_room(budget, prices).limits(prices.full, now)["bytes"]
        within = self.feedback.bytes_within(room) if self.correct else room
        return least_bytes(self.policy, prices, self.units) <= within

    # ------------------------------------------------------------ choosing

    def is_due(self, now: Progress) -> bool:
        """Whether `next` has something to do."""
        return self.pending is not None or self.selection is None or self._asks(now)

    def _asks(self, now: Progress) -> bool:
        """Whether another selection is due by the schedule, or was asked for."""
        if self.is_warming(now) and not self.asks_anyway:
            return bool(self.head_is_ready(now)) and not self.head_goes_on
        left = now.total_steps - now.step if now.total_steps is not None else 0
        is_short = 0 < left < self.policy.when.lasts
        return self.asks_anyway or (not is_short and self.policy.when.due(now, self.last, self.drift.amount))

    def next(self, now: Progress, mode: Mode, probe: Callable[[int], dict[Unit, float]]) -> Selection | None:
        """What to change to, or None. `probe(round)` scores every unit on the batch at hand.

        A probe that fails ends the attempt: what is in force stays.
        """
        if self.pending is not None:
            self.asks_anyway = self.selection is not None and self._asks(now)  # what is due now comes with the next batch
            return self.pending
        if self.selection is not None and not self._asks(now):
            return None
        if self.selection is None and self.warm_up(now):
            self.values = dict.fromkeys(self.units, 0.0)
            return self._plan(replace(now, round=0), mode)
        try:
            self.values = latest(self.values, probe(self._next_round))
        except ProbeError:
            self.last = now
            raise
        self.asks_anyway = False
        return self._plan(replace(now, round=self._next_round), mode)

    @property
    def _next_round(self) -> int:
        return self.selection.round + 1 if self.selection is not None else 0

    def _plan(self, now: Progress, mode: Mode, near: Sequence[Unit] = ()) -> Selection:
        """A selection that is `near` changes as little as it must."""
        policy, correction = replace(self.policy, budget=self._budget(mode)), None
        owes = self.policy.budget.energy is None and self.feedback.owed > 0
        can_begin = owes and has_time(policy, self.prices(mode), self.units, now)
        if self.feedback.rounds or can_begin:  # at the start, a budget that cannot be kept is an error
            asked, share = self.asked_seconds(now), self._is_share(now)
            correction = self.feedback.limit(asked, bool(near), share) / asked if asked is not None and self.correct else 1.0
        if now.round == 0 and self.warm_up(now):
            policy = replace(policy, solver=fixed())
        values, within = without(self.values, self.frozen), self._bytes_within(now, mode)
        return plan(policy, self.prices(mode), values, now, correction, within, near)

    def take(self, selection: Selection, now: Progress) -> None:
        """This selection is in force from now on."""
        if self.selection is not None and selection.round == self.selection.round:  # the same round, corrected
            self.drift.follow_only(unit.name for unit in selection.units)
        else:
            self.last, self.drift = now, Drift()
        self.selection, self.pending = selection, None
        asked = self.profile.seconds_within(selection.asked) if self.profile is not None else None
        self.feedback.begin(Round.of(selection, asked))

    def warm_up(self, now: Progress) -> int:
        """The steps in which only what is always chosen trains; 0 where that is nothing, or everything."""
        if not self.policy.head_first or self.profile is None or not self.units:
            return 0
        always = always_chosen(self.policy, self.profile, self.units)
        return beginning.length(self.policy.head_first, now.total_steps) if always.any() and not always.all() else 0

    def head_is_ready(self, now: Progress) -> int:
        """The steps that were planned for the head alone, where it has had them, and the run is long enough to judge layers."""
        steps = self.warm_up(now) if self.is_warming(now) else 0
        is_late = now.total_steps is not None and steps < now.step >= now.total_steps - steps
        return steps if now.step >= steps and not is_late else 0

    def is_warming(self, now: Progress) -> bool:
        """Whether what is always chosen trains alone."""
        return self.selection is not None and self.selection.round == 0 and self.warm_up(now) > 0

    def shrink(self, now: Progress, mode: Mode, share: float) -> Selection:
        """A selection of this share of the units in force, those that are worth most, beside what is always chosen."""
        best = sorted(self.selection.units if self.selection is not None else (), key=lambda unit: -self.values.get(unit, 0.0))
        kept = {unit.name for unit in best[: int(share * len(best))]}
        self.values = {unit: value if unit.name in kept else 0.0 for unit, value in self.values.items()}
        return self._plan(replace(now, round=self._next_round), mode)

    def windows(self, now: Progress, mode: Mode) -> list[list[str]] | None:
        """Parameters that a probe may score together within the memory that a step may take; None where nothing is limited.

        One that alone needs more, or whose units each alone take more MACs than a step may, is in no window: it could not be
        trained either.
        """
        limit, prices = self._bytes_within(now, mode), self.prices(mode)
        if limit is None and self.policy.budget.macs is None:
            return None
        names = in_reach(replace(self.policy, budget=self._budget(mode)), prices, self.units, now)
        if limit is None:
            return [names]
        if self.selection is not None:  # the optimizer's state stays meanwhile
            due = prices.due(self.selection.units)
            limit -= sum(charge.cost.bytes for charge in due if charge.kind is ChargeKind.OPTIMIZER)
        if mode.graphs:  # captured steps are released meanwhile
            limit += prices.inference
        return windows(self.policy.signal, prices, names, limit)

    def _in_reach(self, now: Progress, mode: Mode) -> set[str]:
        """The parameters that a probe scores: with a limit on memory or MACs, only those that alone keep it."""
        several = self.windows(now, mode)
        return {*chain(*([unit.params for unit in self.units] if several is None else several))}

    # ------------------------------------------------------------ the closed loop

    def see(self, seconds: Sequence[float], now: Progress, aside: float = 0.0) -> None:
        """Take in the measured seconds of the last steps, and those of measuring and choosing so far (`aside`)."""
        owes = not (callable(self.policy.budget.time) or callable(self.policy.budget.energy))
        self.feedback.see(seconds, self.asked_seconds(now), share=self._is_share(now), owes=owes, aside=aside)

    def _is_share(self, now: Progress) -> bool:
        """Whether the time that is asked for is a share of a full step."""
        given = self.policy.budget.time
        return given is not None and not isinstance(given(now) if callable(given) else given, str)

    def correction(
        self, now: Progress, mode: Mode, change_seconds: float, measure_full: Callable[[], float], tested: bool = False
    ) -> tuple[Selection | None, str | None]:
        """Another selection for the same round, if steps miss the budget, and what the log should say of it.

        `change_seconds` is what another selection costs beside its steps. A share of the time is one of a full step as it is
        now, so before a correction by much, a few steps take turns with full steps, if that pays: `measure_full` takes one and
        returns its seconds. Limited memory has no room for that. Nothing is added to a selection that is `tested`.
        """
        if self.selection is None or self.pending is not None:
            return None, None
        if self.is_over_memory(now, mode):
            return self._smaller(now, mode), None
        if self.is_warming(now):
            return None, None
        if self._budget_moved(now, mode):
            self.asks_anyway |= not self._in_reach(now, mode) <= self._in_reach(self.last, mode)
            return self._planned_again(now, mode), None
        asked = self.asked_seconds(now) if self.correct and not mode.cached else None  # another boundary empties the cache
        if asked is None or (tested and (self.feedback.recent or 0.0) < asked):
            return None, None
        note, selection = None, None
        if self.feedback.turns is None:
            left = max(now.total_steps - now.step, 1) if now.total_steps is not None else _STEPS_LEFT
            in_turn = self.policy.budget.memory is None and self._is_share(now) and self.feedback.needs_turns(asked)
            cost = change_seconds + (Turns.STEPS * self.prices(mode).full.seconds if in_turn else 0.0)
            if not self.feedback.may_correct(asked, cost, left):
                return None, None
            selection = self._planned_again(now, mode, self.selection.units)
            if selection is not None and 0 <= (selection.cost.seconds - self.selection.cost.seconds) * left <= cost:
                selection = None  # what it adds takes less than the change
            self.feedback.correcting(in_turn and selection is not None)
        if self.feedback.turns is not None:
            if self.feedback.turns.goes_on(measure_full()):
                return None, None
            note, asked = self._compare(now), self.asked_seconds(now) or asked
            if not self.feedback.is_off(asked):
                return None, note
            selection = self._planned_again(now, mode, self.selection.units)
        why = self._out_of_reach(self.selection, asked) if selection is None else None
        missed = None if why is None else f"asked {self.feedback.rounds[-1]}: {why}"
        return selection, "; ".join(filter(None, (note, missed))) or None

    def _compare(self, now: Progress) -> str | None:
        """Judge steps by the full steps that took turns with them."""
        turns, self.feedback.turns = self.feedback.turns, None
        if turns is None or turns.share is None or self.profile is None:
            return None
        before = self.profile.full
        joules = None if before.joules is None else before.joules * turns.full_seconds / before.seconds
        self.profile = replace(self.profile, plain=replace(before, seconds=turns.full_seconds, joules=joules))
        self.feedback.reassess(turns, self.asked_seconds(now) or 0.0)
        times = f"{turns.full_seconds * 1e3:.4g} ms, before {before.seconds * 1e3:.4g} ms"
        return f"the full step was measured again: {times}; steps in turn with it take {turns.share:.3f} of it"

    def _planned_again(self, now: Progress, mode: Mode, near: Sequence[Unit] = ()) -> Selection | None:
        """Another selection for this round. None where it is the one in force: then only its limits change."""
        if self.selection is None:
            return None
        selection = self._plan(replace(now, round=self.selection.round), mode, near)
        if selection.units != self.selection.units:
            return selection
        self.selection = replace(self.selection, limit=selection.limit, asked=selection.asked)
        return None

    def _out_of_reach(self, selection: Selection, asked: float) -> str | None:
        """Why steps of the selection in force cannot come nearer to what was asked."""
        if (self.feedback.recent or 0.0) > asked:
            return "the cheapest step there is takes more"
        if len(selection.units) >= sum(value > 0 for value in selection.values.values()):
            return "everything that is worth training is chosen"
        return "memory leaves no room for more" if "bytes" in selection.limit else None

    def _smaller(self, now: Progress, mode: Mode) -> Selection | None:
        """A selection that is predicted to take less memory than the one in force, by as much as that took too much."""
        selection = self._planned_again(now, mode)
        if selection is not None or self.selection is None:
            return selection
        asked, ran = self._asked_bytes(now, mode) or 0.0, self.feedback.rounds[-1]
        floor = math.ceil((ran.measured_bytes or 0) / 1e3)
        raise BudgetError(
            f"memory={asked / 1e3:.10g} KB is below the floor of {floor} KB: so much was measured in a step that trains "
            f"the least there is ({', '.join(unit.name for unit in self.selection.units)}). Use memory>='{floor}KB'."
        )

    def is_over_memory(self, now: Progress, mode: Mode) -> bool:
        """Whether a step of the selection in force took more bytes than it may."""
        asked = self._asked_bytes(now, mode) if self.correct and self.selection is not None else None
        return asked is not None and self.feedback.is_over(asked)

    def _budget_moved(self, now: Progress, mode: Mode) -> bool:
        """Whether a budget that is a function of progress has moved away from the one that was planned for."""
        if self.selection is None or not self.policy.budget.moves:
            return False
        planned = self.selection.asked
        limits = self._budget(mode).limits(self.prices(mode).full, now)
        if self.feedback.waited < DWELL:  # as long as a correction waits
            limits.pop("seconds", None)
        return any(abs(amount - planned.get(name, 0.0)) > 0.05 * planned.get(name, 0.0) for name, amount in limits.items())

    # ------------------------------------------------------------ what changes from outside

    def change_budget(self, budget: Budget, now: Progress, mode: Mode) -> None:
        """Plan for another budget with the values at hand; one that cannot be kept is refused and the old one stays.

        Where units come within reach that were not scored so far, the next batch scores them.
        """
        scored = self._in_reach(now, mode) if self.selection is not None else set()
        old, self.policy = self.policy, replace(self.policy, budget=budget)
        if self.selection is None or self.profile is None:
            return
        try:
            then = replace(now, round=0 if self.is_warming(now) else self._next_round)
            values, policy = without(self.values, self.frozen), replace(self.policy, budget=self._budget(mode))
            plan(policy, self.prices(mode), values, then)  # or it is refused
            self.pending = self._plan(then, mode)
            grows = not self._in_reach(now, mode) <= scored
        except BaseException:
            self.policy = old
            raise
        self.asks_anyway |= grows and not self.is_warming(now)  # the head's steps end with a probe
        self.feedback.forget()

    def run_in(self, old: Mode, new: Mode) -> None:
        """The engine changed its mode: price the selection again."""
        if self.profile is None or self.selection is None:
            return
        cost = self.prices(new).cost(self.selection.units)
        if old.lean != new.lean:
            self.feedback.forget(bytes=True)
        self.feedback.predict(cost.seconds, same_prices=cost.seconds == self.selection.cost.seconds)
        self.selection = replace(self.selection, cost=cost)
