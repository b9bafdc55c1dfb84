"""`Loop`: one training run. It prepares each step, runs it and records it; `Session` is its public face."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from pliant import signals
from pliant.core.budget import Budget, Progress
from pliant.core.errors import ProbeError
from pliant.core.mode import Mode
from pliant.core.types import Selection, Unit
from pliant.cost.measure import power
from pliant.cost.profile import Profile
from pliant.engine.engine import Engine
from pliant.graph.backward import trainable
from pliant.planning.policy import Policy
from pliant.runtime import batches
from pliant.runtime.batches import Around, Loss, Pieces, Ready
from pliant.runtime.clock import Laps, RunTime, Watch
from pliant.runtime.heap import give_back
from pliant.runtime.optimizer_step import Update
from pliant.runtime.ranks import Ranks
from pliant.runtime.torch_internals import reshard_
from pliant.runtime.trainable import apply_, check_in_groups, forget_history_, leave_out_unheld
from pliant.session.beginning import Beginning
from pliant.session.controller import LOOK_EVERY, Controller
from pliant.session.delta import Undo
from pliant.session.energy_use import EnergyUse
from pliant.session.full_steps import FullSteps
from pliant.session.norms import Norms
from pliant.session.probes import Probes
from pliant.session.resident import Resident
from pliant.session.run_log import RunLog
from pliant.session.second_head import SecondHead
from pliant.session.stepper import Stepper, StepResult
from pliant.session.user_flags import UserFlags
from pliant.signals.drift import Drift


class Loop:
    """What a session does between two calls: decide, apply, run, record."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        engine: Engine,
        controller: Controller,
        norms: Norms,
        update: Update,
        log: RunLog,
        undo: Undo | None,
        probe: Pieces | None,
        clock: Watch | None,
        ranks: Ranks,
    ) -> None:
        self.model, self.loss, self.engine, self.controller = model, loss, engine, controller
        self.norms, self.update, self.log, self.undo, self.ranks = norms, update, log, undo, ranks
        self.params = trainable(model)
        self.steps_per_epoch: int | None = None
        self.total_steps: int | None = None
        self.steps = 0
        self.flags = UserFlags(model, self.params)
        self.device = next(iter(self.params.values())).device
        self.laps = Laps(clock if clock is not None else Watch(self.device))
        self.time = RunTime(self.laps.watch.wall)
        self.resident = Resident(self.device, controller.policy.budget)
        self.stepper = Stepper(engine, [*self.params.values()], update.accumulate, self.laps, self.record, self.check_gradients)
        self._probes = Probes(model, loss, engine, controller, update, self.ranks, probe)
        self._full_steps = FullSteps(model, loss, self.params, engine, norms, update, self.laps, self.ranks)
        self.change_seconds = 0.0  # what the last change of the selection took, without the probe
        self._shared_time: tuple[float, float] | None = None  # as it was at the first process when this step began
        beside = partial(SecondHead, model, loss, self.params, engine, norms, update, self.laps, self.time)
        self.beginning = Beginning(update.scaler, beside)
        self.energy: EnergyUse | None = None  # where joules are limited

    @property
    def progress(self) -> Progress:
        elapsed, aside = self._shared_time or self.time.now(self.steps, self.controller.feedback.mean)
        return Progress(self.steps, self.round, self.steps_per_epoch, self.total_steps, elapsed, aside)

    @property
    def round(self) -> int:
        return self.controller.selection.round if self.controller.selection is not None else 0

    @property
    def policy(self) -> Policy:
        return self.controller.policy

    @property
    def budget(self) -> Budget:
        return self.policy.budget

    @property
    def selection(self) -> Selection:
        if self.controller.selection is None:
            raise RuntimeError("nothing is chosen yet: the first step (or before_step) chooses.")
        return self.controller.selection

    @property
    def profile(self) -> Profile:
        """What steps cost in the mode that they run in."""
        return self.controller.prices(self.engine.mode)

    @property
    def freezes(self) -> bool:
        """Whether what is not chosen is frozen: not where the loss differentiates with respect to parameters."""
        return self.controller.profile is None or self.controller.profile.origin.get("differentiates") != "parameters"

    def note(self, *texts: str | None) -> None:
        for text in filter(None, texts):
            self.log.write("note", step=self.steps, text=text)

    # ------------------------------------------------------------ a step

    def step(self, batch: Any, ids: Any) -> torch.Tensor:
        """One batch of a step that the session takes. Returns its loss, detached."""
        if self.stepper.begins:
            if not self.engine.is_settled(own_loop=False, has_ids=ids is not None):
                self.settle(own_loop=False, has_ids=ids is not None)
            self.engine.zero_grad()  # first: a probe needs the room
            give_back()
            self.engine.check_kernels(batch)
            self.prepare(batch, self.engine.around, self.engine.ready)
            self.measure_bytes(batch)
        else:
            self._hold_norms(self.selection.params)
        try:
            if self.beginning.train_second_head(batch, self.stepper.begins, self.stepper.ends):
                self._hold_norms(self.selection.params)
        except BaseException:
            if self.stepper.begins:
                self.stepper.drop()
            raise
        before = self.engine.mode
        value, result = self.stepper.run(batch, ids)
        if result is not None:
            self.record(result)
        self.follow_engine(before)
        return value

    def prepare(self, batch: Any, around: Around = nullcontext, ready: Ready | None = None) -> None:
        """Measure, correct, choose and apply, as far as due. Forward passes are measured as `Controller.measure` says."""
        if self.policy.when.needs_epochs and self.steps_per_epoch is None:
            raise ValueError(f"the schedule '{self.policy.when.name}' counts epochs: use Session(steps_per_epoch=len(loader)).")
        if self.laps.is_running:
            self.record(self.stepper.end())  # every call stands for a step, also where the caller's scaler skipped it
        self.log.note_rate(self.engine.optimizer, self.total_steps)
        batches.check_not_empty(batch)
        shared, mean = self.budget.moves and not self.ranks.is_alone, self.controller.feedback.mean
        self._shared_time = self.ranks.first(lambda: self.time.now(self.steps, mean)) if shared else None
        self._heed_flags()
        try:
            if self.norms.looks:
                self.laps.watch.settle()  # to wait for steps that still run is no measuring
            with self.time.not_training("profiling"):
                notes, are_replaced = self.norms.look(self.engine.loss_alone, batch, self.controller.profile)
            if are_replaced:
                self.beginning.start_over()
            if not self.controller.units:
                self._measure(batch, around, ready)
            self.note(*notes)
            if head_steps := self.controller.head_is_ready(self.progress):
                with self.time.not_training("choosing"):  # in every process, since a forward pass may need all
                    goes_on = self.beginning.goes_on(head_steps, partial(self._probes.silent, batch, self._of(self.selection)))
                self.controller.head_goes_on = self.ranks.first(lambda: goes_on)
            due, turns = self.controller.is_due(self.progress), self.controller.feedback.turns
            if self.laps.unread >= (LOOK_EVERY // 2 if due else LOOK_EVERY) or (turns is not None and turns.is_last):
                self.read_steps()
            if due or turns is not None:
                self.laps.watch.settle()
            with self.time.not_training("choosing"):
                self._choose(batch)
        except BaseException:
            if self.controller.selection is None:  # the probe held norms for a selection that did not come about
                self.norms.release_()
                if not self.controller.units:  # else steps are priced by what was settled
                    self.norms.unsettle_()
            raise
        check_in_groups(self.params, self.engine.optimizer, self.selection.params)
        self._hold_norms(self.selection.params)
        self.norms.keep(batch, self.progress, self.budget)
        self.laps.begin()

    def _heed_flags(self) -> None:
        """What the user has frozen is not chosen, and what was chosen of it is chosen no more."""
        for text in self.flags.heed_():
            self.controller.frozen = self.flags.frozen
            self.note(text)
            if self.controller.selection is not None and not self.selection.params.isdisjoint(self.flags.frozen):
                self.controller.asks_anyway = True
                if self.flags.frozen.issuperset(self.profile.head):  # the head could not go on alone
                    self.beginning.end()

    def record(self, result: StepResult) -> None:
        """A step is over: count it and write it down."""
        self.engine.release()
        skipped = result.loss is not None and self.engine.skipped
        self.note(*self.engine.news(), "step skipped: its gradients are not finite" if skipped else None)
        self.steps += 1
        self.log.step(self.steps, self.round, result.loss, result.seconds)
        self.beginning.see(result.loss)
        if result.bytes is not None:
            taken = self.ranks.largest(result.bytes)
            self.controller.feedback.see_bytes(taken, self._probes.elements)
            self.log.memory(self.steps, self.controller.feedback.rounds[-1], taken, self.resident.growth)
        if self.policy.when.watches and self.steps % Drift.every == 0:
            moved = signals.watch({**self.params, **self.engine.leaves()}, self.selection.units)
            self.controller.drift.see(self.ranks.total(moved))
        if self.steps == self.total_steps:  # so that the model is evaluated as it was trained
            with self.time.not_training("profiling"):
                self.note(self.norms.finish_(self.model, self.engine.loss_alone))

    # ------------------------------------------------------------ measuring

    def _measure(self, batch: Any, around: Around, ready: Ready | None) -> None:
        """Costs and units, on the first batch."""
        with self.time.not_training("profiling"):
            try:
                self.energy = EnergyUse(self.device) if self.budget.energy is not None else None
                what = self.model, self.engine.optimizer, self.loss, batch, self.update, self.norms.priced
                how = around, ready, self.ranks, self.engine.mode, self.progress
                notes = self.controller.measure(*what, *how), self.leave_out_unheld()
                if self.energy is not None and self.controller.profile is not None:
                    watts = partial(power, self.model, self.engine.optimizer, self.loss, batch, update=self.update)
                    self.controller.profile = self.energy.begin(self.controller.profile, watts)
            except BaseException:
                self.controller.units = ()  # the next step measures again
                raise
            self.engine.units_are_sliced = any(part.dim is not None for unit in self.controller.units for part in unit.parts)
            self.engine.origin = self.profile.origin
        self.settle(self.budget)
        self.log.start(self.policy, self.profile, self.controller.units, str(self.engine.mode), self.time.spent["profiling"])
        self.note(*notes)
        self.read_steps()  # the first selection saves what this took

    def leave_out_unheld(self) -> str | None:
        """What the optimizer does not hold would be paid for and never move: it is not chosen. Returns what to say of it."""
        held, text = leave_out_unheld(self.params, self.engine.optimizer, [n for u in self.controller.units for n in u.params])
        self.controller.keep_only(held)
        return text

    def settle(self, budget: Budget | None = None, **changed: bool) -> None:
        """Let the engine pick its mode after a change, and the controller follow its prices."""
        before = self.engine.mode
        if budget is not None:
            self.resident.follow(budget)
            if budget.memory is not None and self.engine.could_capture:
                changed["room"] = self.controller.has_room(budget, self.progress, before)
        self.engine.settle(budget, **changed)
        self.follow_engine(before)

    def follow_engine(self, before: Mode) -> None:
        """Where the engine changed its mode: steps so far are judged by the old prices, later ones by the new."""
        if self.engine.mode != before:
            self.read_steps()
            self.engine.make_room()
            self.controller.run_in(before, self.engine.mode)

    def read_steps(self) -> None:
        """Let the closed loop see what the last steps took."""
        aside, *steps = self.ranks.slowest([sum(self.time.spent.values()), *self.laps.read()])
        self.controller.see(steps, self.progress, aside)
        if steps and self.energy is not None and self.controller.profile is not None and self.controller.correct:
            taken = self.controller.feedback.seconds
            self.controller.profile = self.energy.update(self.controller.profile, taken, self.time.elapsed)

    def measure_bytes(self, batch: Any) -> None:
        """Measure the bytes of the coming step, where that is due."""
        try:
            with self.time.not_training("choosing"):
                inference = self._probes.inference_bytes(batch)
            self.stepper.measure_bytes(inference)
        except BaseException:
            self.laps.drop()
            raise

    def before_forward(self) -> None:
        """Comes before each forward pass that somebody else runs."""
        self.ranks.check_forward()
        self._hold_norms(self.selection.params)

    def check_gradients(self) -> None:
        """Before the first optimizer step of a selection: all processes must have the same gradients."""
        if self.controller.selection is not None:
            self.ranks.check_gradients(self.params, self.selection.params)

    def _hold_norms(self, chosen: Collection[str]) -> None:
        self.norms.hold_(self.params, chosen, self.budget != Budget())

    # ------------------------------------------------------------ choosing

    def _choose(self, batch: Any) -> None:
        """Apply a correction, then the next selection if one is due; a probe that fails leaves the one in force."""
        if callable(self.budget.memory) or self.controller.is_over_memory(self.progress, self.engine.mode):
            self.settle(self.budget)
        start = self.laps.watch.mark()
        cost = self.change_seconds + (self.engine.seconds_per_capture if self.ranks.is_alone else 0.0)
        measure_full = partial(self._full_steps.seconds, batch, self.profile.origin)
        selection, note = self.controller.correction(self.progress, self.engine.mode, cost, measure_full, self.beginning.tests)
        if self.controller.feedback.turns is None:
            self._full_steps.end()
        self.note(note)
        if selection is not None:
            self._use(selection, start)
        left = math.inf if self.total_steps is None else self.total_steps - self.steps
        if (taken_back := self.beginning.judge_(left)) is not None:
            self.engine.forget()
            smaller = self.controller.shrink(self.progress, self.engine.mode, taken_back[1])
            if smaller.params.issubset(self.profile.head):  # nothing is left to judge
                self.beginning.end()
            what = "the head alone trains" if self.beginning.over else "a quarter of it is tried"
            self.note(f"the selection was taken back: {taken_back[0]}; {what}")
            self._use(smaller, start)
        try:
            selection = self.controller.next(self.progress, self.engine.mode, partial(self._probe, batch))
        except ProbeError as error:
            if self.controller.selection is None:
                raise
            self.note(f"probe skipped: {error}")
            return
        if selection is not None:
            if self.round == 0 < selection.round and not self.beginning.over:
                has_room = self.undo is not None or self.budget.memory is None
                length = self.controller.warm_up(self.progress)
                may = has_room and self.ranks.is_alone and length <= left
                head = self.selection.params if self.budget.memory is None and self.engine.trains_alike else ()
                self.beginning.chose(self.model, self.engine.optimizer, self._of(selection), length, may, head)
            self._use(selection, start)
            if self.round == 0 and not self.controller.warm_up(self.progress):
                self.beginning.end()

    def _probe(self, batch: Any, round: int) -> dict[Unit, float]:
        now = self.controller.selection  # with none, norms run as if the head alone trained: so they keep nothing
        self._hold_norms(set(self.profile.head) if now is None else now.params)
        return self._probes.values(batch, round, self.progress, self.freezes)

    def _use(self, selection: Selection, start: Any) -> None:
        """Apply a selection: everything that can fail comes before the first change."""
        applied = self.laps.watch.mark()
        selection = self.ranks.first(lambda: selection)
        self.ranks.check_selection(everything=len(selection.params) == len(self.params))
        check_in_groups(self.params, self.engine.optimizer, selection.params)
        self.engine.check(selection.parts, self.engine.optimizer)
        self.beginning.keep(self._of(selection))
        if self.undo is not None:
            self.undo.keep(self._of(selection))
            if self._state_rule == "drop":
                self.undo.keep_dropped({n: p for n, p in self.params.items() if n not in selection.params})
        self.log.flush()
        self.read_steps()
        measured, before = self.laps.median(), self.engine.mode
        forget_history_(self.params, self.engine.optimizer, selection.params)
        self.apply_(selection)
        if self.engine.mode != before:
            selection = replace(selection, cost=self.profile.cost(selection.units))
        self.controller.take(selection, replace(self.progress, round=selection.round))
        self.laps.new_round()
        end = self.laps.watch.mark()
        choosing, self.change_seconds = self.ranks.slowest([self.laps.seconds((mark, end)) for mark in (start, applied)])
        self.ranks.is_checked = False
        self.log.round(selection, self.profile, str(self.engine.mode), choosing, measured, self.resident.now())

    def _of(self, selection: Selection) -> dict[str, nn.Parameter]:
        return {name: param for name, param in self.params.items() if name in selection.params}

    def apply_(self, selection: Selection) -> None:
        frozen = self.flags.frozen  # by the user, maybe after this was chosen
        sliced = self.engine.choose_(tuple(part for part in selection.parts if part.param not in frozen), self.params)
        apply_(self.params, self.engine.optimizer, selection.params - sliced - frozen, self._state_rule)
        if not self.freezes:
            self.flags.restore_()
        self.flags.remember()
        reshard_(self.model)

    @property
    def _state_rule(self) -> Literal["keep", "drop"]:
        """What happens to the optimizer state of what is no longer chosen: where memory is limited it is dropped."""
        return "drop" if self.budget.memory is not None else self.policy.state

    def close(self) -> None:
        """Restore trainable flags and modes as they were found."""
        try:
            self.log.write("end", step=self.steps, round=self.round, **self.resident.now(), spent=self.time.account())
        finally:
            self.resident.close()
            self.stepper.release()
            self.engine.release()
            self.norms.release_()
            self.flags.heed_()
            self.flags.restore_()
