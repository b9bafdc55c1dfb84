"""`Session`: the only object with state. Measures once, chooses when due, applies, runs steps, logs, resumes, restores."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from pliant import __version__, batches, checkpoint, score
from pliant.apply import NormRule, Norms, apply_, check_in_groups, found, restore_, sandbox
from pliant.drift import Drift, blend, mean
from pliant.engine import Work, pick
from pliant.graph import Loss, compute_loss, read, trainable
from pliant.measure import Watch, origin
from pliant.policy import Policy, plan
from pliant.runlog import RunLog
from pliant.types import Budget, ProbeError, Profile, Progress, Selection, Unit, write_aside
from pliant.undo import Undo


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
    optimizer step instead. Leaving the `with` block (or `close()`) puts trainable flags and modes back.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        policy: Policy,
        *,
        engine: str = "auto",
        norm: NormRule = "chosen",
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        accumulate: int = 1,
        steps_per_epoch: int | None = None,
        total_steps: int | None = None,
        cache: Any = None,
        log: str | os.PathLike[str] | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        allow_mismatch: bool = False,
        undo: bool = True,
    ) -> None:
        """`profile` is a saved measurement to use instead of measuring; `undo` keeps what `delta` and `rollback` need."""
        if accumulate < 1:
            raise ValueError(f"accumulate={accumulate}: at least one batch goes into an optimizer step.")
        if cache is not None:
            raise ValueError("cache=… needs the prefix engine, which is not there yet: leave it None.")
        self.model, self.loss, self.policy = model, loss, policy
        self.engine, self._run = pick(engine)
        self.clip, self.scaler, self.accumulate = clip, scaler, accumulate
        self.steps_per_epoch, self.total_steps = steps_per_epoch, total_steps
        self._params = trainable(model)
        if not self._params:
            raise ValueError("no trainable parameter: every parameter has requires_grad=False (or there is none).")
        hooked = next((name for name, p in self._params.items() if p._post_accumulate_grad_hooks), None)
        if hooked is not None:
            raise ValueError(
                f"{hooked!r} has a post-accumulate-grad hook (an optimizer inside backward?), which a probe would set off. "
                f"Remove it."
            )
        self._optimizer = optimizer
        self._begun: Any = None  # the mark at which a step began that is not counted yet
        self._ours = False  # whether `step` takes it, and not the caller
        self._found = found(model)
        self._norms = Norms(model, norm)
        self._undo = Undo(model, optimizer) if undo else None
        self._watch = Watch(next(iter(self._params.values())).device)
        self._profile: Profile | None = Profile.load(profile) if isinstance(profile, (str, os.PathLike)) else profile
        self._given = profile is not None and not allow_mismatch
        self._units: tuple[Unit, ...] = ()
        self._values: dict[Unit, float] = {}
        self._selection: Selection | None = None
        self._pending: Selection | None = None  # planned by a new budget, not yet applied
        self._last = Progress()
        self._collected: list[dict[Unit, float]] | None = None
        self._drift = Drift()
        self._step = self._round = self._micro = 0
        self._log = RunLog(log)
        self._seconds: deque[tuple[Any, Any]] = deque(maxlen=100)
        self._closed = False
        self._hook = optimizer.register_step_post_hook(self._on_optimizer_step)

    # ------------------------------------------------------------ what the user reads

    @property
    def selection(self) -> Selection:
        """What is chosen now."""
        if self._selection is None:
            raise RuntimeError("nothing is chosen yet: the first step (or before_step) chooses.")
        return self._selection

    @property
    def units(self) -> tuple[Unit, ...]:
        """Everything that can be chosen, nearest the loss first; empty before the first step."""
        return self._units

    @property
    def profile(self) -> Profile:
        """What a step costs here, for any selection."""
        if self._profile is None:
            raise RuntimeError("nothing is measured yet: the first step (or before_step) measures.")
        return self._profile

    @property
    def progress(self) -> Progress:
        """Where the run stands."""
        return Progress(self._step, self._round, self.steps_per_epoch, self.total_steps)

    @property
    def measured_seconds(self) -> float | None:
        """The median of this round's last hundred steps, by this device's clock; None before its first step."""
        taken = sorted(self._elapsed(span) for span in self._seconds)
        return taken[len(taken) // 2] if taken else None

    @property
    def budget(self) -> Budget:
        """What a step may cost. May be set at any moment; a budget that cannot be kept is refused and the old one stays."""
        return self.policy.budget

    @budget.setter
    def budget(self, budget: Budget) -> None:
        policy = replace(self.policy, budget=budget)
        if self._selection is not None and self._profile is not None:
            self._pending = plan(policy, self._profile, self._values, replace(self.progress, round=self._round + 1))
        self.policy = policy

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer. Another one may be set if it holds what is chosen; values are then probed again."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._selection is not None:
            check_in_groups(self._params, optimizer, self._selection.params)
            self._collected = self._collected if self._collected is not None else []
        self._hook.remove()
        self._hook = optimizer.register_step_post_hook(self._on_optimizer_step)
        self._optimizer = optimizer
        self._note("the optimizer was replaced")

    # ------------------------------------------------------------ steps

    def step(self, batch: Any, ids: Any = None) -> torch.Tensor:
        """Forward, backward and (every `accumulate` calls) the optimizer's step. Returns the loss, detached.

        `ids` names the samples of the batch for a feature cache; the plain engine has none and does not look at it.
        """
        self._check_open()
        if self._micro == 0:
            self.before_step(batch)
            self._optimizer.zero_grad(set_to_none=True)
        else:
            self._norms.hold_(self._params, self.selection.params)
        self._ours = True
        try:
            value = self._run(Work(self.model, self._checked_loss, batch, self._backward))
            self._micro = (self._micro + 1) % self.accumulate
            if self._micro == 0:
                self._optimizer_step()
                self._count_step(value)
        except BaseException:
            if self._micro == 0:
                self._begun = None  # a step that failed does not count
            raise
        finally:
            self._ours = False
        return value

    def before_step(self, batch: Any) -> None:
        """Measure (once), choose again (when due) and apply; then the caller's own forward, backward and step follow."""
        self._check_open()
        if self.policy.when.needs_epochs and self.steps_per_epoch is None:
            raise ValueError(f"the schedule '{self.policy.when.name}' counts epochs: give Session steps_per_epoch=len(loader).")
        if self._begun is not None:
            self._count_step()  # the caller's scaler skipped the last step, say; its batch is spent all the same
        if batches.size(batch) == 0:
            raise ValueError("the batch is empty: its tensors have no samples. Skip it, or use drop_last in the loader.")
        try:
            if not self._units:
                self._look(batch)
            self._choose(batch)
        except BaseException:
            if self._selection is None:  # the probe held norms for a choice that did not come about
                self._norms.release_()
            raise
        check_in_groups(self._params, self._optimizer, self.selection.params)
        self._norms.hold_(self._params, self.selection.params)
        self._begun = self._watch.mark()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this session is closed: the model is as it was found. Open another one.")

    def fit(self, loader: Any, epochs: int, on_step: Callable[[Progress, torch.Tensor], None] | None = None) -> list[float]:
        """Train for `epochs` passes over a loader; a resumed session goes on where it stopped. Mean loss of each epoch."""
        if self.steps_per_epoch is None:
            self.steps_per_epoch = len(loader) // self.accumulate
            if not self.steps_per_epoch:
                raise ValueError(
                    f"the loader has {len(loader)} batches, and accumulate={self.accumulate} takes more for one step."
                )
        if self.total_steps is None:
            self.total_steps = epochs * self.steps_per_epoch
        means = []
        for epoch in range(self._step // self.steps_per_epoch, epochs):
            done = (self._step - epoch * self.steps_per_epoch) * self.accumulate
            losses = []
            for batch in islice(loader, done, self.steps_per_epoch * self.accumulate):
                losses.append(self.step(batch))
                if on_step is not None:
                    on_step(self.progress, losses[-1])
            if self._step < (epoch + 1) * self.steps_per_epoch:
                raise ValueError(
                    f"the loader ended after {done + len(losses)} batches, but steps_per_epoch={self.steps_per_epoch} with "
                    f"accumulate={self.accumulate} needs {self.steps_per_epoch * self.accumulate}."
                )
            means.append(float(torch.stack(losses).float().mean()))
        return means

    def _checked_loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return compute_loss(model, self.loss, batch)

    def _backward(self, value: torch.Tensor) -> None:
        if self.accumulate > 1:
            value = value / self.accumulate
        (self.scaler.scale(value) if self.scaler is not None else value).backward()  # type: ignore[no-untyped-call]

    def _optimizer_step(self) -> None:
        if self.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self._optimizer)
            grads = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
            nn.utils.clip_grad_norm_(grads, self.clip)
        if self.scaler is not None:
            self.scaler.step(self._optimizer)
            self.scaler.update()
        else:
            self._optimizer.step()

    def _on_optimizer_step(self, *_: Any) -> None:
        """Hangs on the optimizer: sees the end of a step that the caller takes."""
        if self._begun is not None and not self._ours:
            self._count_step()

    def _count_step(self, value: torch.Tensor | None = None) -> None:
        self._step += 1
        self._seconds.append((self._begun, self._watch.mark()))
        self._begun = None
        self._log.step(self._step, self._round, value, partial(self._elapsed, self._seconds[-1]))
        if self.policy.when.watches and self._step % Drift.every == 0:
            self._drift.see(score.watch(self._params, self.selection.units))

    # ------------------------------------------------------------ choosing

    def _look(self, batch: Any) -> None:
        """Read the graph, name the units, measure: once, on the first batch."""
        if self._profile is None:
            self._profile = self.policy.cost(self.model, self._optimizer, self.loss, batch)
        elif self._given:
            self._profile.check_origin(origin(self.model, batch))
        with sandbox(self.model, train=self._params):
            graph = read(self.model, self.loss, batch)
        self._units = self.policy.units(graph)
        self._log.write(
            "start",
            pliant=__version__,
            policy=self.policy.name,
            when=self.policy.when.name,
            signal=self.policy.signal.name,
            engine=self.engine,
            seed=self.policy.seed,
            origin=dict(self._profile.origin),
            full=asdict(self._profile.full),
            forward=asdict(self._profile.base),
            units={unit.name: list(unit.params) for unit in self._units},
        )

    def _choose(self, batch: Any) -> None:
        """Probe and plan if due; apply only what was planned without error."""
        if self._pending is not None:
            self._use(self._pending)
            self._pending = None
        now = self.progress
        idle = self._collected is None
        if self._selection is None or (idle and self.policy.when.due(now, self._last, self._drift.amount)):
            self._collected = []
        if self._collected is None:
            if self._selection is not None and self._over_limit(now):
                self._use(self._plan())
            return
        start = self._watch.mark()
        # Norms run as they do now; before anything is chosen, as if the head alone were.
        current = self._selection.params if self._selection is not None else set(self.profile.head)
        self._norms.hold_(self._params, current)
        try:
            self._collected.append(self._probe(batch))
        except ProbeError as error:
            if self._selection is None:
                raise
            self._note(f"probe skipped: {error}")
            self._collected, self._last = None, now
            return
        complete = len(self._collected) >= self.policy.signal.batches
        if self._selection is not None and not complete:
            return
        self._values = blend(self._values, mean(self._collected), self.policy.signal.smooth)
        if complete:
            self._collected = None
        self._use(self._plan(), (start, self._watch.mark()))

    def _probe(self, batch: Any) -> dict[Unit, float]:
        scale = self.scaler.get_scale() if self.scaler is not None else 1.0
        return score.probe(
            self.policy.signal,
            self.model,
            self._optimizer,
            self.loss,
            batch,
            self._units,
            scale=scale,
            seed=self.policy.seed,
            round=self._next_round,
        )

    @property
    def _next_round(self) -> int:
        return self._round + 1 if self._selection is not None else 0

    def _plan(self) -> Selection:
        return plan(self.policy, self.profile, self._values, replace(self.progress, round=self._next_round))

    def _over_limit(self, now: Progress) -> bool:
        """Whether a budget that moves with progress has moved away from the one that was planned for."""
        if not any(callable(getattr(self.policy.budget, kind)) for kind in ("time", "memory", "macs", "energy")):
            return False
        limits, planned = self.policy.budget.limits(self.profile.full, now), self.selection.limit
        return any(abs(amount - planned[name]) > 0.05 * planned[name] for name, amount in limits.items())

    def _use(self, selection: Selection, took: tuple[Any, Any] | None = None) -> None:
        """Apply a selection: everything that can fail comes before the first change."""
        check_in_groups(self._params, self._optimizer, selection.params)
        if self._undo is not None:
            self._undo.keep({name: self._params[name] for name in selection.params})
            if self.policy.state == "drop":
                self._undo.keep_dropped({n: p for n, p in self._params.items() if n not in selection.params})
        self._log.flush()
        measured = self.measured_seconds
        apply_(self._params, self._optimizer, selection.params, self.policy.state)
        self._round = selection.round
        self._selection, self._last = selection, self.progress
        self._drift = Drift()
        self._seconds.clear()
        self._log.write(
            "round",
            **selection.to_json(),
            choosing_seconds=self._elapsed(took) if took else 0.0,
            measured_before=measured,
        )

    def _elapsed(self, span: tuple[Any, Any]) -> float:
        self._watch.settle()
        return self._watch.seconds(*span)

    def _note(self, text: str) -> None:
        self._log.write("note", step=self._step, text=text)

    # ------------------------------------------------------------ save, resume, undo, leave

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what happens next, in plain types.

        The model, the optimizer and the random states are saved beside it; `save` does all of that.
        """
        if self._micro:
            raise RuntimeError(f"{self._micro} of {self.accumulate} batches of this step are in: save between optimizer steps.")
        if self._begun is not None:  # a step that the caller's scaler skipped
            self._count_step()
        budget = {kind: getattr(self.budget, kind) for kind in ("time", "memory", "macs", "energy")}
        return {
            "format": "pliant.session/1",
            "step": self._step,
            "round": self._round,
            "last": [self._last.step, self._last.round],
            "units": [unit.to_json() for unit in self._units],
            "profile": self._profile.to_json() if self._profile is not None else None,
            "selection": self._selection.to_json() if self._selection is not None else None,
            "pending": self._pending.to_json() if self._pending is not None else None,
            "values": {unit.name: value for unit, value in self._values.items()},
            "collected": None if self._collected is None else [{u.name: v for u, v in c.items()} for c in self._collected],
            "drift": self._drift.state(),
            "budget": None if any(callable(v) for v in budget.values()) else budget,
            "seed": self.policy.seed,
            "undo": self._undo.state() if self._undo is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state: same values, same selection, same measurements."""
        self._check_state(state)
        units = tuple(Unit.from_json(unit) for unit in state["units"])
        by_name = {unit.name: unit for unit in units}
        selection = Selection.from_json(state["selection"]) if state["selection"] else None
        self._micro, self._begun = 0, None
        self._step, self._round = state["step"], state["round"]
        self._last = Progress(state["last"][0], state["last"][1], self.steps_per_epoch, self.total_steps)
        self._units = units
        self._profile = Profile.from_json(state["profile"]) if state["profile"] else self._profile
        self._selection = selection
        self._pending = Selection.from_json(state["pending"]) if state["pending"] else None
        self._values = {by_name[name]: value for name, value in state["values"].items()}
        collected = state["collected"]
        self._collected = None if collected is None else [{by_name[n]: v for n, v in c.items()} for c in collected]
        self._drift = Drift.of(state["drift"])
        if state["budget"] is not None:
            self.policy = replace(self.policy, budget=Budget(**state["budget"]))
        self.policy = replace(self.policy, seed=state["seed"])
        if self._undo is not None and state["undo"] is not None:
            self._undo.load(state["undo"])
        if selection is not None:
            apply_(self._params, self._optimizer, selection.params, self.policy.state)
        self._log.write("resume", step=self._step, round=self._round)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that does not fit before anything is changed."""
        if state.get("format") != "pliant.session/1":
            raise ValueError(f"not the state of a Pliant session: format is {state.get('format')!r}.")
        known = {param for unit in state["units"] for param in Unit.from_json(unit).params}
        missing = sorted(known - set(self._params))
        if missing:
            raise ValueError(f"this state is of another model: it knows {missing[0]!r}, which is not trainable here.")
        if state["selection"]:
            check_in_groups(self._params, self._optimizer, Selection.from_json(state["selection"]).params)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Model, optimizer, scaler, session and random states in one file, written aside and then renamed."""
        state = self.state_dict()
        self._log.flush()  # a checkpoint is never ahead of the log
        checkpoint.save(path, self.model, self._optimizer, self.scaler, state)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a file that `save` wrote, as if the run had never stopped."""
        saved = checkpoint.read(path, self.model, self._optimizer)
        self._check_state(saved["session"])
        checkpoint.fill_(saved, self.model, self._optimizer, self.scaler)
        self.load_state_dict(saved["session"])

    def delta(self, path: str | os.PathLike[str] | None = None) -> dict[str, torch.Tensor]:
        """What differs from the start, by state-dict name, in its new values; with `path` also as a safetensors file.

        `model.load_state_dict(load_file(path), strict=False)` brings a fresh copy of the start to where this model is.
        """
        changed = self._undoable().changed()
        if path is not None:
            from safetensors.torch import save

            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in changed.items()}
            write_aside(path, save(tensors, {"format": "pliant.delta/1", "step": str(self._step), "pliant": __version__}))
        return changed

    def rollback(self) -> None:
        """Weights, buffers and optimizer state as they were at the start. The session goes on from there."""
        self._undoable().rollback_(self._optimizer)
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
            self._log.write("end", step=self._step, round=self._round)
        finally:
            self._hook.remove()
            self._norms.release_()
            restore_(self._found)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
