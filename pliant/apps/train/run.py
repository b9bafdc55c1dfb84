"""A run while it goes on: steps, and what happens between two of them."""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from pliant.apps import models
from pliant.apps import tasks as task
from pliant.apps.run_folder import Folder, FolderError
from pliant.apps.tasks import Task
from pliant.apps.train.interrupts import Spent, Stopped, interrupts
from pliant.apps.train.options import Evaluation, Moment, Options, Result, Watch
from pliant.apps.train.roof import Roof
from pliant.core.budget import Progress
from pliant.core.mode import Mode
from pliant.cost import measure
from pliant.engine.engine import around_forward
from pliant.runtime.files import write_aside
from pliant.session import checkpoint
from pliant.session import run_log as runlog
from pliant.session.session import Session

_SAVE_SECONDS = 60.0  # so much may be lost where a run is killed
_TELL_SECONDS = 0.2  # between two looks at a run: to read a loss off a GPU waits for it


class Run:
    """One run while it goes on. `go` trains; everything else happens between two steps."""

    def __init__(
        self, options: Options, loaded: Task, place: Folder, session: Session, spent: Spent, watches: list[Watch]
    ) -> None:
        self.options, self.task, self.place, self.session, self.spent = options, loaded, place, session, spent
        self.watches, self.name = watches, _name(options.model)
        self.steps: int = session.total_steps or 0
        self.per_epoch: int = session.steps_per_epoch or 1
        self.every = options.evaluate_every or self.per_epoch
        self.evaluations: list[Evaluation] = []
        self.roof: Roof | None = None  # until it is in the log
        self.saved = self.told = -math.inf  # when
        self.began, self.first_step = time.monotonic(), 0

    @property
    def best(self) -> Evaluation:
        """The first among equals."""
        return max(self.evaluations, key=lambda e: (_finite(e), e.accuracy, -e.step))

    def go(self) -> Result:
        if self.options.resume and self.place.state.exists():
            self.resume()
        else:
            self.begin()
        with interrupts(lambda: self.session.progress.step > self.first_step) as stop:
            try:
                self.began, self.first_step = time.monotonic(), self.session.progress.step
                for epoch in range(self.first_step // self.per_epoch, self.options.epochs):
                    self.set_rate_(self.session.progress.step)
                    batches = self.task.batches(self.options.batch, self.options.seed, epoch)
                    self.session.fit(batches, epoch + 1, lambda now, loss: self.after_step(now, loss, stop))
            except Stopped:
                self.save()
                raise
        return self.finish()

    def begin(self) -> None:
        with self.spent.stopped():
            batch = next(self.task.batches(self.options.batch, self.options.seed, 0))
            self.roof = Roof(self.session, self.task.model, batch)
        self.evaluate(0)
        self.tell(None, f"accuracy before training: {self.evaluations[0].accuracy:.1%}", evaluated=True)
        for split, lack in ((self.task.validation, "to validate with"), (self.task.train, "to train on")):
            counts = split.labels.bincount(minlength=len(self.task.classes)).tolist()
            absent = [name for name, count in zip(self.task.classes, counts, strict=True) if not count]
            if absent:
                warning = f"warning: no image {lack} of {', '.join(map(repr, absent))}"
                runlog.append(self.place.log, [{"event": "note", "step": 0, "text": warning}])
                self.tell(None, warning)

    def resume(self) -> None:
        try:
            held = self.session.load(self.place.state)
            self.evaluations = [Evaluation(**one) for one in held["evaluations"]]
            self.spent.add(held["seconds"], held["joules"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # no checkpoint, or one whose parts are not whole
            what = error if isinstance(error, ValueError) else f"{os.fspath(self.place.state)!r} is damaged ({error!r})."
            raise FolderError(f"{os.fspath(self.place.path)!r} cannot be resumed: {what}") from error
        self.first_step = self.session.progress.step
        self.tell(None, f"resumed at step {self.session.progress.step} of {self.steps}")

    def set_rate_(self, step: int) -> None:
        for group in self.session.optimizer.param_groups:
            group["lr"] = task.rate(self.options.lr, step, self.steps)

    def after_step(self, now: Progress, loss: torch.Tensor, stop: threading.Event) -> None:
        self.set_rate_(now.step)
        if self.roof is not None:
            with self.spent.stopped():
                runlog.append(self.place.log, [self.roof.line()])
                self.roof = None
        due = now.step % self.every == 0 or now.step == self.steps
        if due:
            self.evaluate(now.step)
        if due or time.monotonic() - self.saved > _SAVE_SECONDS:
            self.save()
        if due or time.monotonic() - self.told > _TELL_SECONDS:
            said = f"accuracy {self.evaluations[-1].accuracy:.1%}" if due else ""
            self.tell(loss, said, evaluated=due)
        if stop.is_set():
            raise Stopped

    def evaluate(self, step: int) -> None:
        """Judge the model as it is; the best so far is kept."""
        with self.spent.stopped():
            accuracy, loss = task.judge(self.task.model, self.task.validation)
            self.evaluations.append(Evaluation(step, accuracy, loss, self.spent.seconds))
            line = {"event": "evaluated", "step": step, "split": "validation", "accuracy": accuracy, "loss": loss}
            runlog.append(self.place.log, [{**line, "seconds": self.spent.seconds}])
            if self.best is self.evaluations[-1]:
                self.write(self.place.best)

    def save(self) -> None:
        """What the run goes on from, then the weights for others; each is the old one or the new one."""
        with self.spent.stopped():
            beside = {
                "evaluations": [asdict(one) for one in self.evaluations],
                "seconds": self.spent.seconds,
                "joules": self.spent.joules,
            }
            self.session.save(self.place.state, beside)
            self.write(self.place.last)
            self.saved = time.monotonic()

    def write(self, path: Path) -> None:
        """The weights as they are, or what of them differs from the start."""
        kind = "delta" if self.options.delta else "weights"
        about = {
            "format": f"pliant.{kind}/1",
            "model": self.name,
            "classes": str(len(self.task.classes)),
            "names": "\n".join(self.task.classes),
            "step": str(self.session.progress.step),
        }
        if self.options.delta:
            checkpoint.save_tensors(path, self.session.delta(), about)
        else:
            write_aside(path, checkpoint.in_order(models.weights_of(self.task.model, about)))

    def finish(self) -> Result:
        start, end = self.evaluations[0], self.evaluations[-1]
        with self.spent.stopped():
            memory = self.peak() if self.options.measure_memory else None
            worse = not _finite(end) or end.accuracy < start.accuracy
            back = worse and not self.options.keep_anyway
            if back:
                self.session.rollback()
                self.write(self.place.last)
        if worse:
            why = f"training made it worse: {start.accuracy:.1%} before, {end.accuracy:.1%} after"
            done = "the last weights are those of the start again (--keep-anyway keeps them)" if back else "kept all the same"
            found = f"; best.safetensors, of step {self.best.step}, has {self.best.accuracy:.1%}" if self.best.step else ""
            self.tell(None, f"{why}: {done}{found}")
        full = self.session.profile.full.seconds
        return Result(
            out=os.fspath(self.place.path),
            options=self.options,
            evaluations=tuple(self.evaluations),
            best=self.best,
            accuracy=(start if back else end).accuracy,
            rolled_back=back,
            seconds=self.spent.seconds,
            seconds_per_step=_mean_step(self.session),
            full_seconds_per_step=full or None,
            rounds=tuple({**asdict(one), "measured": one.measured} for one in self.session.rounds),
            memory_bytes=memory,
            joules=self.spent.joules,
            engine=self.session.engine,
        )

    def peak(self) -> int:
        """Bytes of a step as it is chosen now, beyond those of inference."""
        batch = next(self.task.batches(self.options.batch, self.options.seed, 0))
        around = partial(around_forward, Mode(lean="lean" in self.session.engine.split("+")))
        update = self.session.update
        step, inference = measure.peak_bytes(
            self.task.model, self.session.optimizer, task.loss, batch, update=update, around=around
        )
        return step - inference

    def tell(self, loss: torch.Tensor | None, news: str = "", evaluated: bool = False) -> None:
        if not self.watches:
            return
        self.told = time.monotonic()
        session, step = self.session, self.session.progress.step
        here = step - self.first_step
        pace = (time.monotonic() - self.began) / here if here > 0 else None
        chosen = set(session.selection.units) if session.units else set()
        moment = Moment(
            step=step,
            steps=self.steps,
            epoch=max(math.ceil(step / self.per_epoch), 1),
            epochs=self.options.epochs,
            loss=float(loss) if loss is not None else None,
            accuracy=self.evaluations[-1].accuracy,
            best=self.best.accuracy,
            share=_share(session, session.measured_seconds),
            budget=_budget(session),
            trained=tuple(unit in chosen for unit in reversed(session.units)),
            seconds_left=None if pace is None else pace * (self.steps - step),
            evaluated=evaluated,
            news=news,
        )
        for watch in self.watches:
            watch(moment)


def _name(model: str) -> str:
    """Of a model, for those who load its weights: a file of weights passes on the one that it has."""
    return models.read_weights(model)[1].get("model", "") if model.endswith(".safetensors") else model


def _finite(evaluation: Evaluation) -> bool:
    return math.isfinite(evaluation.loss)


def _mean_step(session: Session) -> float | None:
    """Seconds of a step, over the run so far: what to hold a budget against, since selections may alternate to keep it."""
    rounds = [one for one in session.rounds if one.steps]
    steps = sum(one.steps for one in rounds)
    return sum(one.seconds for one in rounds) / steps if steps else session.measured_seconds


def _share(session: Session, seconds: float | None) -> float | None:
    """Of a plain full step; None where none was timed."""
    full = session.profile.full.seconds if session.units else 0.0
    return seconds / full if seconds is not None and full else None


def _budget(session: Session) -> str:
    """What was asked of a step and what it takes, in words."""
    if not session.units:
        return ""
    asked, full, mean, said = session.selection.asked, session.profile.full, _mean_step(session), []
    share = _share(session, mean)
    if "seconds" in asked:
        said.append(f"time asked {asked['seconds'] / full.seconds:.2f}" + (f", measured {share:.2f}" if share else ""))
    elif share:
        said.append(f"time {share:.2f} of a full step")
    elif mean:
        said.append(f"{mean * 1e3:.3g} ms a step")
    if "bytes" in asked:
        measured = session.rounds[-1].measured_bytes
        said.append(f"memory asked {asked['bytes'] / 1e6:.4g} MB" + (f", measured {measured / 1e6:.4g} MB" if measured else ""))
    if "macs" in asked:
        said.append(f"macs asked {asked['macs'] / full.macs:.2f}, chosen {session.selection.share('macs'):.2f}")
    return " · ".join(said)
