"""Decides what trains next: measures once, probes when due, plans. Changes nothing; the session applies what it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pliant.core.budget import RESOURCES, Absolute, Budget, Progress
from pliant.core.errors import BudgetError, ProbeError
from pliant.core.mode import Mode
from pliant.core.types import Part, Selection, Unit
from pliant.cost.measure import origin, read_graph, sparing
from pliant.cost.profile import ChargeKind, Profile
from pliant.engine.kernels.prices import PRICES
from pliant.planning.floor import in_reach, least_bytes, leaving_room
from pliant.planning.plan import plan
from pliant.planning.policy import Policy
from pliant.runtime.batches import Around, Loss
from pliant.runtime.batchnorm import NormRule
from pliant.runtime.optimizer_step import Update
from pliant.session.feedback import WITHIN, Feedback, Round
from pliant.signals.drift import Drift, latest

Probe = Callable[[int], dict[Unit, float]]

_REMEMBERED = 8  # plans of a round
_MOST_SPARED = 0.99  # by inference: all of it would be a cache
_WHILE_SCORED = 3  # times what is scored: a gradient, its update and their product


class Choice:
    """What can be chosen, what it costs, what it is worth, what is chosen now, and when that was decided."""

    def __init__(
        self, policy: Policy, profile: Profile | None, check: bool, correct: bool = True, engine: str = "plain"
    ) -> None:
        """`check` holds a profile that was given against the conditions of the first batch; `correct` closes the loop; `engine`
        runs the steps."""
        self.policy = policy
        self.correct = correct
        self.profile = profile.on(Mode(lean=engine == "lean")) if profile is not None else None
        self._engine = engine
        self.captured = False  # whether a step is one launch
        self.spared = 0.0  # of the forward pass before anything chosen: all of it where features come from a cache
        self.units: tuple[Unit, ...] = ()
        self.selection: Selection | None = None
        self.drift = Drift()
        self.feedback = Feedback()
        self._check = check and profile is not None
        self._values: dict[Unit, float] = {}
        self._settled: dict[Unit, float] = {}  # the values of the last re-selection that had all its probes
        self._pending: Selection | None = None  # planned for a new budget, not yet in force
        self._plans: list[Selection] = []  # of this round, so that going back and forth needs no solving
        self._last = Progress()
        self._collected: list[dict[Unit, float]] | None = None  # probes of a re-selection that is under way
        self._least: tuple[Profile, int] | None = None  # bytes of a step that trains no more than it must, by such prices

    def look(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        batch: Any,
        update: Update,
        norm: NormRule,
        around: Around,
    ) -> None:
        """Measure and name the units, on the first batch. Every parameter must be as the user left it. Forward passes are
        measured inside of `around()`, where the measurement can and whole parameters are chosen."""
        graph = read_graph(model, loss, batch, norm)
        units = self.policy.units(graph)
        if self.profile is None:
            # A GradScaler skips steps whose gradients are not finite, and without real values they may not be.
            short = self.policy.budget.memory is not None and update.scaler is None
            whole = all(part.dim is None for unit in units for part in unit.parts)
            cost = sparing(self.policy.cost) if short else self.policy.cost
            how: dict[str, Any] = {"graph": graph, "update": update, "norm": norm, "prices": PRICES}
            how["around"] = around if whole else nullcontext
            self.profile = self._as_run(cost(model, optimizer, loss, batch, **how))
        elif self._check:
            self.profile.check_origin(origin(model, batch, update, norm))
        self.units = units

    def next(self, now: Progress, probe: Probe) -> Selection | None:
        """What to change to, or None. `probe(round)` scores every unit on the batch at hand.

        A probe that fails ends the attempt: what is in force stays.
        """
        if self._pending is not None:
            if self._collected is None and self.selection is not None and self._asks(now):
                self._collected = []  # what was due now comes with the next batch
            return self._pending
        if self.selection is None or (self._collected is None and self._asks(now)):
            self._collected = []
        if self._collected is None:
            return None
        try:
            self._collected.append(probe(self._next_round))
        except ProbeError:
            self._collected, self._last = None, self._last if self._is_unscored else now
            raise
        self._values = latest(self._settled, self._collected[-1])
        self._collected, self._settled = None, self._values
        return self._plan(replace(now, round=self._next_round))

    def is_due(self, now: Progress) -> bool:
        """Whether `next` has something to do."""
        under_way = self._pending is not None or self._collected is not None or self.selection is None
        return under_way or self._asks(now)

    def _asks(self, now: Progress) -> bool:
        """Whether the schedule asks for another choice."""
        left = now.total_steps - now.step if now.total_steps is not None else 0
        if 0 < left < self.policy.when.lasts and not self._is_unscored:
            return False
        return self.policy.when.due(now, self._last, self.drift.amount)

    def is_off(self, now: Progress, correct: bool, toll: float = 0.0) -> bool:
        """Whether the budget moved, a step took more bytes than it may or, with `correct`, steps do not take the seconds that
        were asked; by more than another choice would take of each step that is left, its `toll`."""
        if self.selection is None or self._pending is not None:
            return False
        if self.is_over(now):
            return True
        if self._collected is not None:
            return False
        asked = self.asked_seconds(now) if correct and not self._is_unscored else None
        if self._budget_moved(now, toll):
            return True
        return asked is not None and self.feedback.is_off(asked, toll, self._asked_bytes(now))

    @property
    def _is_unscored(self) -> bool:
        """Whether the head alone trains, since nothing was scored yet: there is nothing to correct."""
        return False

    def _deciding(self, policy: Policy) -> Policy:
        """The policy that plans: before anything was scored, nothing is chosen but what always is, whatever the solver."""
        return replace(policy, solver=lambda problem: problem.always) if self._is_unscored else policy

    def again(self, now: Progress, toll: float = 0.0) -> Selection | None:
        """Plan the same round anew; None where that changes nothing or comes no nearer to what was asked. Two choices take
        turns only where another one has no `toll`, and what one overspends the other makes up for.

        Where a step took more bytes than it may, another selection is tried; if there is none, that is an error.
        """
        if self.selection is None:
            return None
        if self.is_over(now):
            return self._smaller(now)
        moved, asked = self._budget_moved(now), self.asked_seconds(now) if self.correct else None
        near = () if moved else self.selection.units  # another budget is no correction
        up = self._one_up() if asked is not None and near else math.inf
        aim = None
        if asked is not None and not toll and not callable(self.policy.budget.time) and self.feedback.wants_next_up(up, asked):
            aim = up * (1 + 1e-8)
        selection = self._known(now, aim)
        if selection is None:
            selection = self._plan(replace(now, round=self.selection.round), near, aim)
            if near and selection.units == near and "seconds" in selection.limit:  # until something more is within reach
                within = max(selection.limit["seconds"], up * (1 - 1e-8))
                self._remember(replace(selection, limit={**selection.limit, "seconds": within}))
        nearer = asked is None or aim is not None or self.feedback.is_nearer(selection.cost.seconds, asked)
        if selection.units != self.selection.units and (nearer or moved):
            return selection
        self.selection = replace(self.selection, limit=selection.limit, asked=selection.asked)
        return None

    def _one_up(self) -> float:
        """The seconds of a step with the least that adds to what is in force, by time alone; infinite where nothing does."""
        if self.profile is None or self.selection is None:
            raise RuntimeError("nothing is chosen yet.")
        chosen = set(self.selection.units)
        more = zip(self.units, self.profile.with_one_more(self.units, self.selection.units), strict=True)
        return min(
            (seconds for unit, seconds in more if unit not in chosen and self._values.get(unit, 0.0) > 0), default=math.inf
        )

    def _smaller(self, now: Progress) -> Selection:
        """A selection that is predicted to take less than the one in force, by as much as that took too much."""
        if self.selection is None or self.profile is None:
            raise RuntimeError("nothing is chosen yet.")
        selection = self._plan(replace(now, round=self.selection.round))
        if selection.units == self.selection.units:
            asked, ran = self._asked_bytes(now) or 0.0, self.feedback.rounds[-1]
            raise BudgetError(
                f"memory={asked / 1e3:.10g} KB is below the floor of {math.ceil((ran.measured_bytes or 0) / 1e3)} KB: so much "
                f"was measured in a step that trains the least there is ({', '.join(unit.name for unit in selection.units)}). "
                f"Use memory>='{math.ceil((ran.measured_bytes or 0) / 1e3)}KB'."
            )
        return selection

    def is_over(self, now: Progress) -> bool:
        """Whether a step of the selection in force took more bytes than it may."""
        asked = self._asked_bytes(now) if self.correct else None
        return asked is not None and self.feedback.is_over(asked)

    def _asked_bytes(self, now: Progress) -> float | None:
        """The memory limit of a step as it is now."""
        if self.profile is None or self.policy.budget.memory is None:
            return None
        return self._budget.limits(self.profile.full, now)["bytes"]

    @property
    def _budget(self) -> Budget:
        """The budget of steps as they run."""
        budget = self.policy.budget
        return leaving_room(budget, self.profile) if self.captured and self.profile is not None else budget

    def has_room(self, budget: Budget, now: Progress, engine: str | None = None) -> bool:
        """Whether steps that train the least there is can be captured within this budget's memory; on this engine, if not on
        the one that runs them now."""
        if self.profile is None or not self.units or budget.memory is None:
            return True
        engine = engine or self._engine
        profile = self.profile.on(replace(self.profile.mode, lean=engine == "lean"), self.profile.spared)
        room = leaving_room(budget, profile).limits(profile.full, now)["bytes"]
        within = self.feedback.bytes_within(room) if self.correct and engine == self._engine else room
        if self._least is None or self._least[0] is not profile:
            self._least = profile, least_bytes(self.policy, profile, self.units)
        return self._least[1] <= within

    def _within(self, now: Progress) -> float | None:
        """The bytes to plan for."""
        asked = self._asked_bytes(now)
        return asked if asked is None or not self.correct else self.feedback.bytes_within(asked)

    def windows(self, now: Progress, batch: Any) -> list[list[str]] | None:
        """Parameters that a probe of such a batch may look at together within the memory that a step may take; None where
        nothing is limited.

        One that alone needs more, or whose units each alone take more MACs than a step may, is in no window: it could not be
        trained either.
        """
        limit = self._within(now)
        if self.profile is None or (limit is None and self.policy.budget.macs is None):
            return None
        names = in_reach(replace(self.policy, budget=self._budget), self.profile, self.units, now)
        if limit is None:
            return [names]
        if self.selection is not None:  # the optimizer's state stands meanwhile
            limit -= sum(
                charge.cost.bytes for charge in self.profile.due(self.selection.units) if charge.kind is ChargeKind.OPTIMIZER
            )
        if self.captured:  # steps that hold on to something are let go of meanwhile
            limit += self.profile.inference
        idle = self.profile.without_optimizer
        signal, size = self.policy.signal, {name: self.profile.param_bytes(name) for name in names}
        if signal.needs == "activation":
            size = {name: self.profile.output_bytes(name) for name in names}

        def fits(window: list[str]) -> bool:
            held = sum(size[name] for name in window) if signal.needs == "activation" else 0  # outputs
            scoring = _WHILE_SCORED * max(size[name] for name in window)
            return idle.cost([Unit("*", tuple(Part(name) for name in window))]).bytes + held + scoring <= limit

        out: list[list[str]] = []
        for name in names:
            if out and fits([*out[-1], name]):
                out[-1].append(name)
            elif fits([name]):
                out.append([name])
        return out

    def asked_seconds(self, now: Progress) -> float | None:
        """The time limit of a step as it is now."""
        if self.profile is None or self.policy.budget.time is None:
            return None
        return self.policy.budget.limits(self.profile.full, now).get("seconds")

    def measured(self, seconds: Sequence[float], now: Progress, pause: float, left: int = 0) -> None:
        """Steps of the selection in force took so long; between two corrections so many seconds must pass. `left`: the steps
        that are still to come, where another choice is costly, so that what was saved or overspent is made up for slowly."""
        given = self.policy.budget.time
        share = not isinstance(given(now) if callable(given) else given, str | Absolute)
        self.feedback.see(seconds, self.asked_seconds(now), pays=not callable(given), share=share, pause=pause, left=left)

    def wants_bytes(self, batch: int) -> bool:
        """Whether a step with a batch of so many elements should have its bytes measured."""
        return self.correct and self.feedback.wants_bytes(batch)

    @property
    def out_of_reach(self) -> str | None:
        """Why steps cannot come nearer to what was asked, if they cannot."""
        if self.selection is None or "seconds" not in self.selection.asked or self.feedback.recent is None:
            return None
        if self._is_unscored:  # what is left over now is spent later
            return None
        asked, recent = self.selection.asked["seconds"], self.feedback.recent
        if not self.feedback.is_off(asked):
            return None
        limit, most = self.selection.limit["seconds"], self.selection.asked.get("bytes")
        if recent < asked and most is not None and self.feedback.is_short_of_memory(most):
            return "memory leaves no room for more"
        if recent > asked and limit != asked and limit <= self.selection.cost.seconds * (1 + 1e-9):
            return "the cheapest step there is takes more"
        if recent < asked and len(self.selection.units) >= sum(value > 0 for value in self.selection.values.values()):
            return "everything that is worth training is chosen"
        if self.feedback.is_stuck(asked):
            return "the next choice up takes a quarter more than was asked, or more still"
        return None

    def take(self, selection: Selection, now: Progress) -> None:
        """This selection is in force from now on."""
        if self.selection is not None and selection.round == self.selection.round:  # the same round, corrected
            self.drift.follow_only(unit.name for unit in selection.units)
        else:
            self._last, self.drift = now, Drift()
        self.selection, self._pending = selection, None
        asked, predicted, full = selection.asked.get("seconds"), selection.cost.seconds, selection.full.seconds
        now_on = Round(selection.round, selection.step, asked, predicted, full)
        now_on.asked_bytes, now_on.predicted_bytes = selection.asked.get("bytes"), selection.cost.bytes
        self.feedback.begin(now_on)

    def ask_again(self) -> None:
        """Probe with the next batch, whatever the schedule says; unless nothing was scored so far either."""
        if self._collected is None and not self._is_unscored:
            self._collected = []

    def change_budget(self, budget: Budget, now: Progress, engine: str, captured: bool = False) -> None:
        """Plan for another budget with the values at hand; one that cannot be kept is refused and the old one stays."""
        policy = replace(self.policy, budget=budget)
        spared = self.spared if engine == self._engine else float(self.spared == 1)  # what inference spares was the old one's
        profile = self.profile.on(_mode(engine, spared, captured), spared) if self.profile is not None else None
        ratio = self.feedback.ratio if captured == self.captured else 1.0
        if self.selection is not None and profile is not None:
            then = replace(now, round=self._next_round)
            room = leaving_room(budget, profile) if captured else budget
            deciding = self._deciding(replace(policy, budget=room))
            pending = plan(deciding, profile, self._values, then)
            if self.correct and (budget.time is not None or budget.memory is not None):
                asked = room.limits(profile.full, then).get("bytes")
                within = self.feedback.bytes_within(asked) if asked is not None and engine == self._engine else None
                pending = plan(deciding, profile, self._values, then, 1 / ratio, within)
            self._pending = pending
        self.feedback.ratio = ratio
        if (engine, spared, captured) != (self._engine, self.spared, self.captured):
            self.feedback.since = len(self.feedback.rounds)
        if engine != self._engine:
            self.feedback.forget_bytes()
        self.policy, self.profile = policy, profile
        self._engine, self.spared, self.captured = engine, spared, captured
        self._plans = []
        self.feedback.forget()

    def run_on(self, engine: str, spared: float, captured: bool) -> None:
        """Another engine runs the steps from now on, or one that spares so much of the forward pass, or captures; what is
        chosen stays."""
        if (engine, spared, captured) == (self._engine, self.spared, self.captured):
            return
        if engine != self._engine:
            self.feedback.forget_bytes()
        if captured != self.captured:
            self.feedback.price_anew()
        self._engine, self.spared, self.captured, self._plans = engine, spared, captured, []
        if self.profile is None:
            return
        self.profile = self._as_run(self.profile)
        if self.selection is not None:
            self.selection = replace(self.selection, cost=self.profile.cost(self.selection.units))
            self.feedback.predict(self.selection.cost.seconds)

    def raced(self, seconds: float, without: float | None) -> None:
        """Steps of the selection in force take so long on the engine that won, and so long without running what comes before
        it as inference, if that was tried: prices know from now on how much of it that spares."""
        if self.selection is None or self.profile is None:
            return
        if without is not None:
            plain, least = (self.profile.cost(self.selection.units, cached=cached).seconds for cached in (False, True))
            share = (1 - seconds / without) * plain / (plain - least) if plain > least and without > 0 else 0.0
            self.run_on(self._engine, min(max(share, 0.0), _MOST_SPARED), self.captured)
        self.feedback.expect(seconds)

    def _as_run(self, profile: Profile) -> Profile:
        return profile.on(_mode(self._engine, self.spared, self.captured), self.spared)

    @property
    def _next_round(self) -> int:
        return self.selection.round + 1 if self.selection is not None else 0

    def _plan(self, now: Progress, near: Sequence[Unit] = (), aim: float | None = None) -> Selection:
        """`aim`: the seconds to plan for, if not what the steps so far tell."""
        if self.profile is None:
            raise RuntimeError("nothing is measured yet: look() comes first.")
        correction = None  # at the start, a budget that cannot be kept is an error
        if self.feedback.rounds:
            asked = self.asked_seconds(now)
            correction = 1.0
            if asked is not None and self.correct:
                correction = self.feedback.correction(asked) if aim is None else aim / asked
        policy = self._deciding(replace(self.policy, budget=self._budget))
        selection = plan(policy, self.profile, self._values, now, correction, self._within(now), near)
        self._remember(selection)
        return selection

    def _remember(self, selection: Selection) -> None:
        """Plans of this round, each with the widest limit that it was the answer to."""
        same = [p for p in self._plans if p.round == selection.round and p.asked == selection.asked]
        widest = max([selection, *(p for p in same if p.units == selection.units)], key=lambda p: p.limit.get("seconds", 0.0))
        self._plans = [*(p for p in same if p.units != selection.units), widest][-_REMEMBERED:]

    def _known(self, now: Progress, aim: float | None = None) -> Selection | None:
        """A plan of this round that serves what is to be planned for now, or for a step of `aim` seconds: the best there is
        within its own limit is the best within every limit down to its cost, and one that costs almost what it may is good
        enough."""
        asked = self.asked_seconds(now)
        if asked is None or self.profile is None or not self.correct:
            return None
        limits = self._budget.limits(self.profile.full, now)
        aim, within = aim or asked * self.feedback.correction(asked), self._within(now)
        for known in sorted(self._plans, key=lambda known: -known.cost.seconds):
            limit, cost = known.limit["seconds"], known.cost.seconds
            if (within is not None and known.cost.bytes > within) or not self._is_near(known):
                continue
            if known.asked == limits and cost <= aim and (aim <= limit or cost >= (1 - WITHIN) * aim):
                return replace(known, step=now.step, limit={**known.limit, "seconds": aim})
        return None

    def _is_near(self, plan: Selection) -> bool:
        """Whether it only adds to what is in force, or only takes from it."""
        there, here = set(plan.units), set(self.selection.units if self.selection is not None else ())
        return there <= here or here <= there

    def _budget_moved(self, now: Progress, toll: float = 0.0) -> bool:
        """Whether a budget that moves with progress has moved away from the one that was planned for."""
        budget = self.policy.budget
        if self.selection is None or self.profile is None or not any(callable(getattr(budget, k)) for k in RESOURCES):
            return False
        planned = self.selection.asked
        limits = self._budget.limits(self.profile.full, now)
        room = {name: 0.05 * planned.get(name, 0.0) + (toll if name == "seconds" else 0.0) for name in limits}
        return any(abs(amount - planned.get(name, 0.0)) > room[name] for name, amount in limits.items())

    # ------------------------------------------------------------ save and resume

    def state(self) -> dict[str, Any]:
        """Everything that decides what is chosen next, in plain types."""
        budget = {kind: getattr(self.policy.budget, kind) for kind in RESOURCES}
        return {
            "policy": self.policy.name,
            "last": [self._last.step, self._last.round],
            "units": [unit.to_json() for unit in self.units],
            "profile": self.profile.to_json() if self.profile is not None else None,
            "selection": self.selection.to_json() if self.selection is not None else None,
            "plans": [plan.to_json() for plan in self._plans],
            "pending": self._pending.to_json() if self._pending is not None else None,
            "values": {unit.name: value for unit, value in self._values.items()},
            "settled": {unit.name: value for unit, value in self._settled.items()},
            "collected": None if self._collected is None else [{u.name: v for u, v in c.items()} for c in self._collected],
            "drift": self.drift.state(),
            "feedback": self.feedback.state(),
            "budget": None if any(callable(amount) for amount in budget.values()) else budget,
            "seed": self.policy.seed,
        }

    def load(self, state: Mapping[str, Any], now: Progress) -> None:
        """Go on from a saved state: same values, same selection, same measurements."""
        self.units = tuple(Unit.from_json(unit) for unit in state["units"])
        by_name = {unit.name: unit for unit in self.units}
        self._last = replace(now, step=state["last"][0], round=state["last"][1])
        if state["profile"]:
            self.profile = Profile.from_json(state["profile"])
            self._engine = "lean" if self.profile.mode.lean else "plain"
            self.spared, self.captured = self.profile.spared, self.profile.mode.graphs
        self.selection = Selection.from_json(state["selection"]) if state["selection"] else None
        self._pending = Selection.from_json(state["pending"]) if state["pending"] else None
        self._plans = [Selection.from_json(plan) for plan in state["plans"]]
        self._values = {by_name[name]: value for name, value in state["values"].items()}
        self._settled = {by_name[name]: value for name, value in state["settled"].items()}
        collected = state["collected"]
        self._collected = None if collected is None else [{by_name[n]: v for n, v in c.items()} for c in collected]
        self.drift = Drift.of(state["drift"])
        self.feedback = Feedback.of(state["feedback"])
        self.policy = replace(self.policy, seed=state["seed"])
        if state["budget"] is not None:
            self.policy = replace(self.policy, budget=Budget(**state["budget"]))


def _mode(engine: str, spared: float, captured: bool) -> Mode:
    return Mode(lean=engine == "lean", prefix=spared > 0, graphs=captured, cached=spared == 1)
