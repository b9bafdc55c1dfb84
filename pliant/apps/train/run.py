"""One run of training: its steps, and what happens between two of them."""

from __future__ import annotations

import copy
import csv
import errno
import io
import json
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pliant.apps import models, run_folder, tasks
from pliant.apps.run_folder import Folder, FolderError
from pliant.apps.tasks import Task
from pliant.apps.train.interrupts import Stopped, Stopwatch, delayed_interrupt
from pliant.apps.train.options import Evaluation, OnStatus, Options, Result, Status
from pliant.apps.train.outcome import confusion, outcome, too_short
from pliant.apps.train.readme import readme
from pliant.apps.train.roofline import PendingRoofline
from pliant.apps.train.shares import budget, mean_step, share_of_full
from pliant.core.budget import Progress
from pliant.core.mode import Mode
from pliant.cost import measure
from pliant.engine.around import around_forward
from pliant.runtime.files import write_aside
from pliant.session import checkpoint, run_log
from pliant.session.session import Session

_SAVE_SECONDS = 60.0  # the most that a killed run loses
_STATUS_SECONDS = 0.2  # between two status reports: reading a loss from a GPU waits for the GPU


class TrainingRun:
    """One run of training. `train` takes all steps; the other methods run before, between and after them."""

    def __init__(
        self,
        options: Options,
        task: Task,
        folder: Folder,
        session: Session,
        spent: Stopwatch,
        listeners: list[OnStatus],
        notes: Sequence[str] = (),
    ) -> None:
        self.options, self.task, self.folder, self.session, self.spent = options, task, folder, session, spent
        self.listeners, self.model_name, self.notes = listeners, models.name_of(options.model), [*notes]
        self.steps: int = session.total_steps or 0
        self.steps_per_epoch: int = session.steps_per_epoch or 1
        self.evaluate_every = options.evaluate_every or self.steps_per_epoch
        self.evaluations: list[Evaluation] = []
        self.whole_before = 0.0  # seconds of the run before it was resumed
        self.roofline: PendingRoofline | None = None  # until it is in the log
        self.saved_at = self.reported_at = -math.inf
        self.opened_at = time.monotonic()
        self.began_at, self.first_step = time.monotonic(), 0

    @property
    def best(self) -> Evaluation:
        """The best evaluation; the first one among equals."""
        return max(self.evaluations, key=lambda e: (_finite(e), e.accuracy, -e.step))

    def train(self) -> Result:
        try:
            return self._train()
        except OSError as error:
            if self.folder.is_there:
                raise
            raise FolderError(self.rescue()) from error

    def _train(self) -> Result:
        if self.options.resume and self.folder.state.exists():
            self.resume()
        elif self.options.resume and self.folder.last.exists():
            raise FolderError(
                f"{str(self.folder.path)!r} cannot be resumed: {self.folder.state.name} is missing. Its weights can still be "
                f"used (pliant predict). Begin another run with another --out."
            )
        else:
            self.start()
        with delayed_interrupt(lambda: self.session.progress.step > self.first_step) as stop:
            try:
                self.began_at, self.first_step = time.monotonic(), self.session.progress.step
                self.check_patience()
                for epoch in range(self.first_step // self.steps_per_epoch, self.options.epochs):
                    self.set_learning_rate_(self.session.progress.step)
                    batches = self.task.batches(self.options.batch, self.options.seed, epoch)
                    self.session.fit(batches, epoch + 1, lambda now, loss: self.after_step(now, loss, stop))
            except Stopped:
                self.save()
                raise
            except _NoPatience:
                text = f"stopped early: no better accuracy or loss in {self.options.patience} evaluations"
                self.log({"event": "note", "step": self.session.progress.step, "text": text})
                self.report_status(None, text)
        return self.finish()

    def start(self) -> None:
        begins = {"event": "run", "options": self.options.to_json(), "total_steps": self.steps, "classes": [*self.task.classes]}
        self.log(begins)  # first of all, for those who watch
        with self.spent.paused():
            self.write_notes()
            batch = next(self.task.batches(self.options.batch, self.options.seed, 0))
            self.roofline = PendingRoofline(self.session, self.task, batch)
        self.evaluate(0)
        self.report_status(None, f"accuracy before training: {self.evaluations[0].accuracy:.1%}", evaluated=True)
        for split, purpose in ((self.task.validation, "to validate with"), (self.task.train, "to train on")):
            counts = split.labels.bincount(minlength=len(self.task.classes)).tolist()
            absent = [name for name, count in zip(self.task.classes, counts, strict=True) if not count]
            if absent:
                one = {"images": "image"}.get(self.task.inputs.kind, "sample")
                self.notes.append(f"warning: no {one} {purpose} of {', '.join(map(repr, absent))}")
        left = len(self.task.train) % self.options.batch
        if left:
            every = f"{len(self.task.train)} to train on, {self.options.batch} per step"
            self.notes.append(f"the last {left} of every epoch, in random order, are left out: {every}")
        short = too_short(self.session.policy, self.steps, self.steps_per_epoch, self.task.device.type)
        for text in [*self.notes, *([short] if short is not None else [])]:
            self.log({"event": "note", "step": 0, "text": text})
            self.report_status(None, text)

    def resume(self) -> None:
        try:
            state = self.session.load(self.folder.state)
            self.evaluations = [Evaluation(**one) for one in state["evaluations"]]
            self.spent.add(state["seconds"], state["joules"])
            self.whole_before = state.get("whole_seconds", 0.0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # not a checkpoint, or a part of it is damaged
            what = error if isinstance(error, ValueError) else f"{os.fspath(self.folder.state)!r} is damaged ({error!r})."
            raise FolderError(f"{os.fspath(self.folder.path)!r} cannot be resumed: {what}") from error
        self.first_step = self.session.progress.step
        if not self.folder.best.exists():  # it was in a folder that is gone
            self.evaluations = self.evaluations[:1]
            self.report_status(None, "best.safetensors is missing: the best weights from here on are kept")
        self.report_status(None, f"resumed at step {self.session.progress.step} of {self.steps}")

    def set_learning_rate_(self, step: int) -> None:
        for group in self.session.optimizer.param_groups:
            group["lr"] = tasks.rate(self.options.lr or 0.0, step, self.steps)

    def after_step(self, now: Progress, loss: torch.Tensor, stop: threading.Event) -> None:
        self.set_learning_rate_(now.step)
        self.check_folder()
        if self.roofline is not None:
            with self.spent.paused():
                self.log(self.roofline.event())
                self.roofline = None
        due = now.step % self.evaluate_every == 0 or now.step == self.steps
        if due:
            self.evaluate(now.step)
        if due or time.monotonic() - self.saved_at > _SAVE_SECONDS:
            self.save()
        if due or time.monotonic() - self.reported_at > _STATUS_SECONDS:
            news = f"accuracy {self.evaluations[-1].accuracy:.1%}" if due else ""
            self.report_status(loss, news, evaluated=due)
        if stop.is_set():
            raise Stopped
        if due:
            self.check_patience()

    def check_patience(self) -> None:
        """Stop where neither accuracy nor loss has reached a new best for as many evaluations as the options say."""
        patience = self.options.patience
        if patience is None or len(self.evaluations) <= patience:
            return
        before, recent = self.evaluations[:-patience], self.evaluations[-patience:]
        losses = [one.loss for one in before if _finite(one)]
        better = max(one.accuracy for one in recent) > max(one.accuracy for one in before)
        if not better and not any(one.loss < min(losses, default=math.inf) for one in recent if _finite(one)):
            raise _NoPatience

    def evaluate(self, step: int) -> None:
        """Evaluate the model as it is now, and write its weights if they are the best so far."""
        with self.spent.paused():
            accuracy, loss = tasks.judge(self.task.model, self.task.validation)
            self.evaluations.append(Evaluation(step, accuracy, loss, self.spent.seconds))
            line = {"event": "evaluated", "step": step, "split": "validation", "accuracy": accuracy, "loss": loss}
            self.log({**line, "seconds": self.spent.seconds})
            if self.best is self.evaluations[-1] or not self.folder.best.exists():
                self.write_weights(self.folder.best)

    def save(self) -> None:
        """Write the state that `resume` reads, then the last weights. A crash leaves the old file or the new one."""
        with self.spent.paused():
            extra = {
                "evaluations": [asdict(one) for one in self.evaluations],
                "seconds": self.spent.seconds,
                "joules": self.spent.joules,
                "whole_seconds": self.whole_seconds,
            }
            self.session.save(self.folder.state, extra)
            self.write_weights(self.folder.last)
            self.saved_at = time.monotonic()

    def check_folder(self) -> None:
        if not self.folder.is_there:
            raise FileNotFoundError(errno.ENOENT, "the folder of the run is gone", os.fspath(self.folder.path))

    def rescue(self) -> str:
        """Save what can be saved of a run whose folder was removed or moved; says where it is."""
        old, step = self.folder.path, self.session.progress.step
        said = f"the folder {os.fspath(old)!r} of this run was removed, moved or replaced while it ran."
        if not step:
            return f"{said} Nothing was trained yet: start it again."
        try:
            with run_folder.locked(run_folder.unused(old.name, old.parent)) as self.folder:
                run_folder.write_options(self.folder, self.options.to_json(), self.task.fingerprints())
                self.write_notes()
                self.session.log = self.folder.log
                self.save()
        except (OSError, RuntimeError) as error:
            return f"{said} The run could not be saved elsewhere: {error}"
        new = os.fspath(self.folder.path)
        best = f" The best weights, of step {self.best.step}, were in the old folder." if self.best.step != step else ""
        return f"{said} Everything up to step {step} is saved in {new!r}: continue with --resume --out {new}.{best}"

    def write_weights(self, path: Path) -> None:
        """Write all weights, or with `delta` those that differ from the start."""
        kind = "delta" if self.options.delta else "weights"
        metadata = {
            "format": f"pliant.{kind}/1",
            "model": self.model_name,
            "classes": str(len(self.task.classes)),
            "names": json.dumps(self.task.classes),
            "step": str(self.session.progress.step),
            "inputs": json.dumps(self.task.inputs.to_json()),
            "versions": json.dumps(models.versions(self.model_name)),
        }
        if self.options.delta:
            checkpoint.save_tensors(path, self.session.delta(), metadata)
        else:
            write_aside(path, models.weights_of(self.task.model, metadata))

    def finish(self) -> Result:
        first, last = self.evaluations[0], self.evaluations[-1]
        with self.spent.paused():
            memory = self.peak_bytes() if self.options.measure_memory else None
            self.log_classes()
            worse = not _finite(last) or last.accuracy < first.accuracy
            roll_back = worse and not self.options.keep_anyway
            if roll_back:
                self.session.rollback()
                self.write_weights(self.folder.last)
        if worse:
            why = f"training made it worse: {first.accuracy:.1%} before, {last.accuracy:.1%} after"
            if not _finite(last):
                lower = f"Use a lower --lr than {self.options.lr:g}"
                why = f"training diverged: the loss is {last.loss}, not a finite number. {lower}"
            done = "the last weights are those of the start again (--keep-anyway keeps them)" if roll_back else "kept anyway"
            best = f"; best.safetensors, of step {self.best.step}, has {self.best.accuracy:.1%}" if self.best.step else ""
            self.report_status(None, f"{why}: {done}{best}")
        full = self.session.profile.full.seconds
        self.check_folder()
        found = outcome(self.session, self.spent.seconds, self.whole_seconds, memory)
        result = Result(
            out=os.fspath(self.folder.path),
            options=self.options,
            evaluations=tuple(self.evaluations),
            best=self.best,
            accuracy=(first if roll_back else last).accuracy,
            rolled_back=roll_back,
            seconds=self.spent.seconds,
            seconds_per_step=mean_step(self.session),
            full_seconds_per_step=full or None,
            rounds=tuple({**asdict(one), "measured": one.measured} for one in self.session.rounds),
            memory_bytes=memory,
            joules=self.spent.joules,
            engine=self.session.engine,
            outcome=found,
            stopped_early=self.session.progress.step < self.steps,
        )
        scores = {"accuracy": result.accuracy, "rolled_back": roll_back, "best": asdict(self.best)}
        scores |= {"seconds_per_step": result.seconds_per_step, "joules": result.joules}
        self.log({"event": "summary", "step": self.session.progress.step, **scores, **found.to_json()})
        self.write_notes(result)
        return result

    @property
    def whole_seconds(self) -> float:
        """Wall time of the run with everything: measuring, training, evaluating, saving."""
        return self.whole_before + time.monotonic() - self.opened_at

    def log(self, line: dict[str, Any]) -> None:
        run_log.append(self.folder.log, [line], make_folder=False)

    def write_notes(self, result: Result | None = None) -> None:
        """README.md, and the list of samples that were skipped."""
        task = self.task
        text = readme(self.options, self.folder.path, task.classes, task.inputs, result)
        write_aside(self.folder.readme, text.encode(errors="replace"))  # a name may hold bytes that are not UTF-8
        if self.options.skip_unreadable:
            rows = io.StringIO()
            csv.writer(rows).writerows([("sample", "why"), *task.skipped])
            write_aside(self.folder.skipped, rows.getvalue().encode(errors="surrogateescape"))

    def log_classes(self) -> None:
        """How the best weights do on each class of the validation split."""
        if not self.evaluations or not _finite(self.best):
            return
        model = self.task.model
        if self.best.step != self.session.progress.step:
            if self.options.delta:
                return  # the file holds only what changed, and the start is gone
            model = copy.deepcopy(model)
            model.load_state_dict(models.read_weights(self.folder.best)[0])
        split = self.task.validation
        guesses = tasks.outputs(model, split.inputs).argmax(1)
        self.log(
            {
                "event": "classes",
                "step": self.best.step,
                "split": "validation",
                "weights": "best",
                "accuracy": float((guesses == split.labels).double().mean()),
                "samples": len(split),
                "classes": list(self.task.classes),
                "confusion": confusion(split.labels.tolist(), guesses.tolist()),
            }
        )

    def peak_bytes(self) -> int:
        """Peak memory of a step with the current selection, beyond that of inference."""
        batch = next(self.task.batches(self.options.batch, self.options.seed, 0))
        around = partial(around_forward, Mode(lean="lean" in self.session.engine.split("+")))
        update = self.session.update
        step, inference = measure.peak_bytes(
            self.task.model, self.session.optimizer, self.task.loss, batch, update=update, around=around
        )
        return step - inference

    def report_status(self, loss: torch.Tensor | None, news: str = "", evaluated: bool = False) -> None:
        if not self.listeners:
            return
        self.reported_at = time.monotonic()
        session, step = self.session, self.session.progress.step
        steps_here = step - self.first_step
        pace = (time.monotonic() - self.began_at) / steps_here if steps_here > 0 else None
        chosen = set(session.selection.units) if session.units else set()
        status = Status(
            step=step,
            steps=self.steps,
            epoch=max(math.ceil(step / self.steps_per_epoch), 1),
            epochs=self.options.epochs,
            loss=float(loss) if loss is not None else None,
            accuracy=self.evaluations[-1].accuracy,
            best=self.best.accuracy,
            share=share_of_full(session, session.measured_seconds),
            budget=budget(session),
            trained=tuple(unit in chosen for unit in reversed(session.units)),
            seconds_left=None if pace is None else pace * (self.steps - step),
            evaluated=evaluated,
            news=news,
        )
        for listener in self.listeners:
            listener(status)


class _NoPatience(Exception):
    """Evaluations have not become better for a while."""


def _finite(evaluation: Evaluation) -> bool:
    return math.isfinite(evaluation.loss)
