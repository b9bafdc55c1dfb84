"""`Session`: the one object that a user holds. Measures once, chooses when due, applies, steps, logs, resumes, restores."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from pliant import signals as score
from pliant.core.budget import Budget, Progress
from pliant.core.errors import ProbeError
from pliant.core.types import Selection, Unit
from pliant.cost.measure import inference_bytes
from pliant.cost.profile import Profile
from pliant.engine.engine import ENGINES, Engine
from pliant.engine.prefix.feature_cache import Features
from pliant.graph.backward import trainable
from pliant.planning.policy import Policy
from pliant.runtime import batches
from pliant.runtime.batches import Around, Loss, Pieces
from pliant.runtime.batchnorm import BatchNormModes, NormRule
from pliant.runtime.clock import Laps, Pace, Watch
from pliant.runtime.memory import resident
from pliant.runtime.optimizer_step import Update
from pliant.runtime.sample_ids import ids_of
from pliant.runtime.trainable import apply_, check_in_groups, found, restore_
from pliant.session import checkpoint, journal
from pliant.session.choice import Choice
from pliant.session.delta import Undo
from pliant.session.feedback import Feedback, Round
from pliant.session.pricing import Pricing
from pliant.session.run_log import RunLog
from pliant.session.stepper import Stepper
from pliant.signals.drift import Drift

_LOOK_EVERY = 10  # steps between two looks of the closed loop at what steps take
_A_WHILE = 1000  # steps that a choice is to last where nobody knows how many there will be
_OPEN: WeakKeyDictionary[nn.Module, ref[Session]] = WeakKeyDictionary()  # a model has one session at a time


class Session:
    """Elastic training of a model that stays the user's own.

    >>> import torch, torch.nn.functional as F
    >>> from pliant import Session, recipes
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def loss(model, batch):
    ...     x, y = batch
    ...     return F.cross_entropy(model(x), y)
    >>> batch = torch.randn(8, 4), torch.randint(0, 2, (8,))
    >>> with Session(model, optimizer, loss, recipes.head()) as session:
    ...     value = session.step(batch)
    ...     [unit.name for unit in session.selection.units]
    ['2.weight', '2.bias']

    `step` does forward, backward and the optimizer's step. Whoever keeps their own loop calls `before_step(batch)` once per
    optimizer step instead. Leaving the `with` block (or `close()`) puts trainable flags and modes back; so does opening another
    session on the same model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        policy: Policy,
        *,
        engine: str = "auto",
        norm: NormRule = "auto",
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        accumulate: int = 1,
        steps_per_epoch: int | None = None,
        total_steps: int | None = None,
        cache: Features | str | int | None = None,
        probe: Pieces | None = None,
        prefix_dtype: torch.dtype | None = None,
        log: str | os.PathLike[str] | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        allow_mismatch: bool = False,
        undo: bool = True,
        correct: bool = True,
    ) -> None:
        """`profile` is a saved measurement to use instead of measuring; `undo` keeps what `delta` and `rollback` need; `cache`
        is how many bytes of features may be kept by sample, or a `Features` of your own; `probe` are batches that units are
        scored on in place of the one at hand, such as all there are, where they are few; `prefix_dtype` is what the prefix
        engine computes in, like torch.bfloat16 where the device is fast at it.

        `norm` says which norms take the statistics of each batch: those that are chosen ("chosen"), none ("frozen"), or as the
        model's own modes say ("as-is"). "auto": those that are chosen, unless batches are too small for that and like
        what the norms have learned their statistics of; where everything is chosen without a budget, as in plain training.

        `correct` plans again within a round where measured steps miss the time that was asked or take more memory. What is
        chosen then hangs on measurements; without it, on the profile and the seed alone.
        """
        if not isinstance(policy, Policy):
            raise TypeError(f"policy={policy!r} is no Policy: give a recipe's result, like recipes.pliant(time=0.5).")
        self.model, self.loss = model, loss
        self._probe_on = probe
        self.update = Update(clip, scaler, accumulate)
        self.steps_per_epoch, self.total_steps = steps_per_epoch, total_steps
        earlier = _OPEN[model]() if model in _OPEN else None
        if earlier is not None:
            earlier.close()
        self._params = trainable(model)
        hooked = next((name for name, p in self._params.items() if p._post_accumulate_grad_hooks), None)
        if hooked is not None:
            raise ValueError(
                f"{hooked!r} has a post-accumulate-grad hook (an optimizer inside backward?), which a probe would set off. "
                f"Remove it."
            )
        self._found = found(model)
        self._norms = BatchNormModes(model, norm)
        self._undo = Undo(model, optimizer) if undo else None
        self._device = next(iter(self._params.values())).device
        self._laps = Laps(Watch(self._device))
        if isinstance(cache, (str, int)):
            cache = Features(cache)
        if cache is not None and not isinstance(cache, Features):
            raise ValueError(f"cache={cache!r} is no feature cache: give a limit like '2GB', or Features('2GB', half=True).")
        self._engine = Engine(model, loss, engine, cache, prefix_dtype)
        self._engine.settle(policy.budget, races=False)
        known = Profile.load(profile) if isinstance(profile, (str, os.PathLike)) else profile
        self._choice = Choice(policy, known, check=not allow_mismatch, correct=correct, engine=self._engine.keeps)
        self._pricing = Pricing(self._engine, self._choice)
        self._step = 0
        self._log = RunLog(log)
        self._pace = Pace()
        self._elements = 0  # of the batch whose step is measured
        self._told = ""  # the last reason why a budget is out of reach
        self._closed = False
        self._stepper = Stepper(self._engine, optimizer, self._params.values(), self.update, self._laps, self._count_step)
        _OPEN[model] = ref(self)

    # ------------------------------------------------------------ what the user reads

    @property
    def selection(self) -> Selection:
        """What is chosen now."""
        if self._choice.selection is None:
            raise RuntimeError("nothing is chosen yet: the first step (or before_step) chooses.")
        return self._choice.selection

    @property
    def units(self) -> tuple[Unit, ...]:
        """Everything that can be chosen, nearest the loss first; empty before the first step."""
        return self._choice.units

    @property
    def policy(self) -> Policy:
        """The method and its budget as they are now."""
        return self._choice.policy

    @property
    def profile(self) -> Profile:
        """What a step costs here, for any selection."""
        if self._choice.profile is None:
            raise RuntimeError("nothing is measured yet: the first step (or before_step) measures.")
        return self._choice.profile

    @property
    def engine(self) -> str:
        """What runs the coming step: "plain", or of "lean", "prefix" and "graphs" those that work together, like
        "prefix+graphs"."""
        return str(self._engine.way)

    @property
    def why_not(self) -> dict[str, str]:
        """What engines that may run the steps do not do here, and why."""
        return self._engine.why_not

    @property
    def progress(self) -> Progress:
        """Where the run stands."""
        elapsed, aside = self._pace.elapsed, self._pace.aside(self._step, self._choice.feedback.mean)
        return Progress(self._step, self._round, self.steps_per_epoch, self.total_steps, elapsed, aside)

    @property
    def _left(self) -> int:
        """Steps that are still to come, as far as is known."""
        return max(self.total_steps - self._step, 1) if self.total_steps is not None else _A_WHILE

    @property
    def _round(self) -> int:
        return self._choice.selection.round if self._choice.selection is not None else 0

    @property
    def measured_seconds(self) -> float | None:
        """The median of this round's last hundred steps, by this device's clock; None before its first step."""
        return self._laps.median()

    @property
    def rounds(self) -> tuple[Round, ...]:
        """What was asked, predicted and measured, for every selection of the run."""
        so_far = Feedback.of(self._choice.feedback.state())
        so_far.see(self._laps.peek(), self._choice.asked_seconds(self.progress))
        return tuple(so_far.rounds)

    @property
    def spent(self) -> dict[str, float]:
        """Seconds by the clock on the wall since the session began: in all, and what profiling and choosing took of it."""
        return {"all": self._pace.elapsed, **self._pace.spent}

    @property
    def budget(self) -> Budget:
        """What a step may cost. May be set at any moment; one that cannot be kept is refused and the old one stays.

        Before the first step nothing is measured yet; then it is the first step that refuses.
        """
        return self.policy.budget

    @budget.setter
    def budget(self, budget: Budget) -> None:
        self._check_open()
        if not isinstance(budget, Budget):
            raise TypeError(f"budget={budget!r} is no Budget: write Budget(time=0.5).")
        self._look_at_steps()  # they ran under the old one
        self._told = ""
        self._pricing.change_budget(budget, self.progress)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer. Another one may be set if it holds what is chosen; values are then probed again."""
        return self._stepper.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_open()
        if self._choice.selection is not None:
            check_in_groups(self._params, optimizer, self.selection.params)
            self._engine.check(self.selection.parts, optimizer)
            self._choice.ask_again()
        self._stepper.step_with(optimizer)
        self._note("the optimizer was replaced")

    def _repr_html_(self) -> str:
        """How a notebook shows it: what was asked, predicted and measured of late, and what is chosen now."""
        selection = self._choice.selection
        rounds = self.rounds if selection is not None else ()
        return journal.display(self.policy.name, self.engine, self._step, rounds, selection)

    # ------------------------------------------------------------ steps

    def step(self, batch: Any, ids: Any = None) -> torch.Tensor:
        """Forward, backward and (every `accumulate` calls) the optimizer's step. Returns the loss, detached.

        `ids` name the samples of the batch for the feature cache, if there is one; without them, the batch may carry its own
        (`data.with_ids`).
        """
        self._check_open()
        if self._engine.features is not None:
            ids = ids_of(batch) if ids is None else ids
            self._pricing.cached(ids is not None)
        if self._stepper.begins:
            self._stepper.zero_grad()  # first: a probe needs the room
            is_first = not self.units  # to find out about captures takes its time
            self._begin_step(
                batch, is_first and self.update.scaler is None and self._pricing.expects_capture, self._engine.around
            )
        else:
            self._hold_norms(self.selection.params)
        with self._stepper.ours():
            if self._stepper.begins:
                self._stepper.follow(self._inference_bytes(batch))
            return self._stepper.take(batch, ids)

    @property
    def caches(self) -> bool:
        """Whether what is computed before the choice is kept by sample, as far as is known."""
        return self._engine.caches

    def compute(self, function: Loss, batch: Any, ids: Any = None) -> torch.Tensor:
        """function(model, batch), detached, from the same cached features as steps: to look at what trains, between steps."""
        self._check_open()
        if not self._engine.caches:
            with torch.no_grad():
                return function(self.model, batch)
        return self._engine.compute(function, batch, ids_of(batch) if ids is None else ids)

    def before_step(self, batch: Any) -> None:
        """Measure (once), choose again (when due) and apply; then the caller's own forward, backward and step follow."""
        self._begin_step(batch, False, nullcontext)
        if self._engine.slices is not None and self.update.scaler is not None:
            self._laps.drop()
            raise ValueError(
                "a GradScaler unscales before slices stand in for their parameters: take such steps with session.step."
            )
        self._engine.hang_on(self.model, self.optimizer)
        if self._device.type == "cuda":  # elsewhere every operation of the caller's would have to be followed
            self._stepper.follow(self._inference_bytes(batch))

    def _begin_step(self, batch: Any, captures: bool, around: Around) -> None:
        """`captures`: what is measured now is to price steps that are captured, as far as is known. `around`: what forward
        passes of steps run inside of."""
        self._check_open()
        if self.policy.when.needs_epochs and self.steps_per_epoch is None:
            raise ValueError(f"the schedule '{self.policy.when.name}' counts epochs: give Session steps_per_epoch=len(loader).")
        if self._laps.is_running:
            self._count_step()  # every call stands for a step, also where the caller's scaler skipped it
        batches.check_not_empty(batch)
        try:
            few = None if self._norms.is_settled else self._settle_norms(batch)
            if not self.units:
                with self._pace.not_training("profiling"):
                    what = self.model, self.optimizer, self.loss, batch, self.update, self._norms.priced
                    self._choice.look(*what, around)
                self._pricing.measured(captures, self.progress)
                if self._log.path is not None:
                    took = self._pace.spent.get("profiling")
                    self._log.write("start", **journal.start(self.policy, self.profile, self.units, self.engine, took))
            if few is not None:
                self._note(f"norms keep their statistics: a batch has {few:.0f} values per channel")
            due, looked = self._choice.is_due(self.progress), self._laps.untaken >= _LOOK_EVERY
            if looked or (due and self._laps.untaken >= _LOOK_EVERY // 2):
                self._look_at_steps()
            if due:
                self._laps.watch.settle()  # to wait for steps that still run is not choosing
            with self._pace.not_training("choosing"):
                self._choose(batch, looked)
        except BaseException:
            if self._choice.selection is None:  # the probe held norms for a choice that did not come about
                self._norms.release_()
                if not self.units:  # else steps are priced by what was settled
                    self._norms.unsettle_()
            raise
        check_in_groups(self._params, self.optimizer, self.selection.params)
        self._hold_norms(self.selection.params)
        self._laps.begin()

    def _settle_norms(self, batch: Any) -> float | None:
        with self._pace.not_training("profiling"):
            if self._choice.profile is not None and "norms" in self.profile.origin:
                self._norms.settle_as_(self.profile.origin["norms"])
            return self._norms.settle_(lambda: self.loss(self.model, batch))

    def _hold_norms(self, chosen: Collection[str]) -> None:
        self._norms.hold_(self._params, chosen, limited=self.budget != Budget())

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this session is closed: the model is as it was found. Open another one.")

    def fit(self, loader: Any, epochs: int, on_step: Callable[[Progress, torch.Tensor], None] | None = None) -> list[float]:
        """Train up to epoch `epochs`, counted from the session's first step; a resumed session goes on where it stopped.

        Returns the mean loss of each epoch that it ran.
        """
        if self.steps_per_epoch is None:
            self.steps_per_epoch = len(loader) // self.update.accumulate
            if not self.steps_per_epoch:
                raise ValueError(
                    f"the loader has {len(loader)} batches, and accumulate={self.update.accumulate} takes more for one step."
                )
        if self.total_steps is None:
            self.total_steps = epochs * self.steps_per_epoch
        means = []
        for epoch in range(self._step // self.steps_per_epoch, epochs):
            done = (self._step - epoch * self.steps_per_epoch) * self.update.accumulate
            losses = []
            for batch in islice(loader, done, self.steps_per_epoch * self.update.accumulate):
                losses.append(self.step(batch))
                if on_step is not None:
                    on_step(self.progress, losses[-1])
            if self._step < (epoch + 1) * self.steps_per_epoch:
                raise ValueError(
                    f"the loader ended after {done + len(losses)} batches, but steps_per_epoch={self.steps_per_epoch} with "
                    f"accumulate={self.update.accumulate} needs {self.steps_per_epoch * self.update.accumulate}."
                )
            means.append(float(torch.stack(losses).float().mean()))
        return means

    def _count_step(self, value: torch.Tensor | None = None) -> None:
        """A step is over; `value` is its loss if it was one of ours."""
        self._engine.let_go()
        for news in self._engine.news():
            self._note(news)
        self._step += 1
        counts = not self._stepper.is_followed and not self._engine.fills  # what fills a cache is paid once
        seconds = self._laps.end(counts)
        self._log.step(self._step, self._round, value, seconds)
        if self._engine.fills and value is not None:
            self._pricing.fills(seconds, self._left)
        if counts and value is not None and self._engine.see(seconds):
            self._look_at_steps()  # of all that took part
            if self._pricing.won():
                ways = ", ".join(map(str, self._engine.race.ways))
                self._note(f"steps run on the engine {self.engine!r}: the fastest of {ways}")
        self._look_at_bytes()
        if self.policy.when.watches and self._step % Drift.every == 0:
            holders: dict[str, torch.Tensor] = {**self._params, **self._engine.leaves()}
            self._choice.drift.see(score.watch(holders, self.selection.units))

    # ------------------------------------------------------------ bytes

    def _inference_bytes(self, batch: Any) -> int | None:
        """What inference takes, if the bytes beyond it are to be measured in the step that comes: the first of a selection
        whose memory is limited, and of a larger batch."""
        if self.budget.memory is None:
            return None
        self._elements = sum(tensor.numel() for tensor in batches.tensors(batch))
        if not self._choice.wants_bytes(self._elements):
            return None
        self._engine.make_room()
        with self._pace.not_training("choosing"):
            try:
                return inference_bytes(self.model, self.loss, batch)
            except RuntimeError:  # a loss that needs gradients
                return self.profile.inference

    def _look_at_bytes(self) -> None:
        """Let the closed loop see the bytes of a step that was measured."""
        measured = self._stepper.take_bytes()
        if measured is not None:
            self._choice.feedback.see_bytes(measured, self._elements)
            now = self._choice.feedback.rounds[-1]
            self._log.write("memory", **journal.memory(self._step, self._round, now, measured))

    # ------------------------------------------------------------ choosing

    def _choose(self, batch: Any, looked: bool) -> None:
        """Ask for the next selection and apply it; a probe that fails leaves the one in force."""
        start = self._laps.watch.mark()
        # A correction that moves the boundary costs all that is cached.
        may = self._choice.correct and self._pace.may_correct and not self._engine.race.is_on and self._choice.spared < 1
        capture = self._engine.seconds_per_choice
        toll = (capture + self._pace.per_correction) / self._left if capture else 0.0
        self._pricing.look_for_room(self.progress)
        if self._choice.is_off(self.progress, looked and may, toll):
            with self._pace.correcting():
                selection = self._choice.again(self.progress, toll)
                if selection is not None:
                    self._use(selection, (start, self._laps.watch.mark()))
        try:
            selection = self._choice.next(self.progress, partial(self._probe, batch))
        except ProbeError as error:
            if self._choice.selection is None:
                raise
            self._note(f"probe skipped: {error}")
            return
        if selection is not None:
            self._use(selection, (start, self._laps.watch.mark()))

    def _look_at_steps(self) -> None:
        """Let the closed loop see what the last steps took."""
        left = self._left if self._engine.seconds_per_choice > 0 else 0
        self._choice.measured(self._laps.take(), self.progress, self._pace.pause, left)
        why = self._choice.out_of_reach
        if why is not None and why != self._told:
            self._told = why
            self._note(f"asked {self._choice.feedback.rounds[-1]}: {why}")

    def _probe(self, batch: Any, round: int) -> dict[Unit, float]:
        self._engine.make_room()
        # Norms run as they do now; before anything is chosen, as if the head alone were.
        current = self._choice.selection.params if self._choice.selection is not None else set(self.profile.head)
        self._hold_norms(current)
        scale = self.update.scaler.get_scale() if self.update.scaler is not None else 1.0
        signal, seed = self.policy.signal, self.policy.seed
        work = signal, self.model, self.optimizer, self.loss, batch, self.units
        piece = next(iter(self._probe_on), batch) if self._probe_on is not None else batch
        windows, around = self._choice.windows(self.progress, piece), ENGINES[self._engine.keeps]
        values = score.probe(*work, scale=scale, seed=seed, round=round, windows=windows, around=around, pieces=self._probe_on)
        self._engine.make_room()  # what lasts, like optimizer state, is not to lie among what a probe has left free
        return values

    def _use(self, selection: Selection, took: tuple[Any, Any]) -> None:
        """Apply a selection: everything that can fail comes before the first change."""
        check_in_groups(self._params, self.optimizer, selection.params)
        self._engine.check(selection.parts, self.optimizer)
        if self._undo is not None:
            self._undo.keep({name: self._params[name] for name in selection.params})
            if self._state_rule == "drop":
                self._undo.keep_dropped({n: p for n, p in self._params.items() if n not in selection.params})
        self._log.flush()
        self._look_at_steps()
        measured = self.measured_seconds
        self._apply_(selection)
        self._pricing.chosen(selection)
        self._choice.take(selection, replace(self.progress, round=selection.round))
        self._laps.new_round()
        seconds = self._laps.seconds(took)
        if self._log.path is not None:
            line = journal.chosen(selection, self.profile, self.engine, seconds, measured, resident())
            self._log.write("round", **line)

    def _apply_(self, selection: Selection) -> None:
        sliced = self._engine.choose_(selection.parts, self._params, self.optimizer)
        apply_(self._params, self.optimizer, selection.params - sliced, self._state_rule)

    @property
    def _state_rule(self) -> Literal["keep", "drop"]:
        """What becomes of the optimizer state of what leaves: where memory is limited there is no room for it."""
        return "drop" if self.budget.memory is not None else self.policy.state

    def _note(self, text: str) -> None:
        self._log.write("note", step=self._step, text=text)

    # ------------------------------------------------------------ save, resume, undo, leave

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what happens next, in plain types.

        The model, the optimizer and the random states are saved beside it; `save` does all of that.
        """
        if not self._stepper.begins:
            there = f"{self._stepper.batches} of {self.update.accumulate} batches of this step are in"
            raise RuntimeError(f"{there}: save between optimizer steps.")
        if self._laps.is_running:  # a step that the caller's scaler skipped
            self._count_step()
        return {
            "format": "pliant.session/8",
            "step": self._step,
            "pace": self._pace.state(),
            "unseen": self._laps.peek(),
            **self._choice.state(),
            "undo": self._undo.state() if self._undo is not None else None,
            "engine": self._pricing.state(),
            "slices": self._engine.slices.state_dict() if self._engine.slices is not None else None,
            "norms": self._norms.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state: same values, same selection, same measurements, and the budget that was saved."""
        self._check_open()
        self._check_state(state)
        self._stepper.drop()
        self._step = state["step"]
        self._pace.load(state["pace"])
        self._choice.load(state, self.progress)
        self._pricing.load(state["engine"], self.progress)
        self._norms.load(state["norms"])
        self._engine.forget()
        self._laps.load(state["unseen"])
        if self._undo is not None and state["undo"] is not None:
            self._undo.load(state["undo"])
        if self._choice.selection is not None:
            self._apply_(self.selection)
            if state["slices"] and self._engine.slices is not None:
                self._engine.slices.load_state_dict(state["slices"])
        else:  # from before the first choice, which looks at everything
            restore_(self._found)
        self._log.write("resume", step=self._step, round=self._round)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that does not fit before anything is changed."""
        if state.get("format") != "pliant.session/8":
            raise ValueError(f"not the state of a Pliant session: format is {state.get('format')!r}.")
        if state["policy"] != self.policy.name:
            raise ValueError(f"this state is of the recipe {state['policy']!r}; this session runs {self.policy.name!r}.")
        known = {param for unit in state["units"] for param in Unit.from_json(unit).params}
        missing = sorted(known - set(self._params))
        if missing:
            raise ValueError(f"this state is of another model: it knows {missing[0]!r}, which is not trainable here.")
        if state["selection"]:
            selection = Selection.from_json(state["selection"])
            check_in_groups(self._params, self.optimizer, selection.params)
            self._engine.check(selection.parts, self.optimizer)

    def save(self, path: str | os.PathLike[str], beside: Any = None) -> None:
        """Model, optimizer, scaler, session and random states in one file, written aside and then renamed.

        `beside` is whatever of your own belongs with them, in plain types: `load` gives it back.
        """
        state = self.state_dict()
        self._log.flush()  # a checkpoint is never ahead of the log
        checkpoint.save(path, self.model, self.optimizer, self.update.scaler, state, beside)

    def load(self, path: str | os.PathLike[str]) -> Any:
        """Go on from a file that `save` wrote, as if the run had never stopped. Returns what was saved `beside`."""
        self._check_open()
        saved = checkpoint.read(path, self.model, self.optimizer)
        self._check_state(saved["session"])
        checkpoint.fill_(saved, self.model, self.optimizer, self.update.scaler)
        self.load_state_dict(saved["session"])
        return saved.get("beside")

    def delta(self, path: str | os.PathLike[str] | None = None) -> dict[str, torch.Tensor]:
        """What differs from the start, by state-dict name, in its new values; with `path` also as a safetensors file.

        `model.load_state_dict(load_file(path), strict=False)` brings a fresh copy of the start to where this model is.
        """
        changed = self._undoable().changed()
        if path is not None:
            checkpoint.save_delta(path, changed, self._step)
        return changed

    def rollback(self) -> None:
        """Weights, buffers and optimizer state as they were at the start. The session goes on from there."""
        self._undoable().rollback_(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self._engine.forget()
        self._stepper.drop()
        self._note("rolled back to the start")

    def _undoable(self) -> Undo:
        if self._undo is None:
            raise RuntimeError("this session keeps nothing to go back to: it was opened with undo=False.")
        return self._undo

    def close(self) -> None:
        """Put trainable flags and modes back as they were found. Weights stay as trained."""
        if self._closed:
            return
        self._closed = True
        try:
            self._log.write("end", step=self._step, round=self._round, resident=resident(), spent=self.spent)
        finally:
            self._stepper.let_go()
            self._engine.let_go()
            self._norms.release_()
            restore_(self._found)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
