"""A whole run of training, from names to files: what `pliant train` does, as a function."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import torch

from pliant.apps import run_folder, tasks
from pliant.apps.data.errors import in_short
from pliant.apps.tasks import Task, TaskError
from pliant.apps.train.interrupts import Stopped, Stopwatch, explain_disk_errors
from pliant.apps.train.loggers import other_logs
from pliant.apps.train.options import Evaluation, OnStatus, Options, Result, Status
from pliant.apps.train.run import TrainingRun
from pliant.planning.policy import Policy
from pliant.runtime import working
from pliant.session.session import Session

__all__ = ["Evaluation", "OnStatus", "Options", "Result", "Status", "Stopped", "load_task", "open_session", "train"]
_CLIP = 1.0  # gradient norm: with batch norms on running statistics, useful learning rates need clipping


def load_task(options: Options) -> Task:
    """The model and the data that the options name."""
    options = options.resolved()
    return tasks.load(
        options.model,
        options.data,
        size=options.size,
        seed=options.seed,
        device=options.device,
        scratch=options.scratch,
        validation=options.validation,
        reading=options.reading,
        augment=options.augment,
        class_weights=options.class_weights,
    )


def open_session(
    options: Options, task: Task, policy: Policy, *, exact: bool = False, log: str | os.PathLike[str] | None = None
) -> Session:
    """The session of a run with these options: SGD with momentum, or AdamW, with gradient clipping.

    From scratch, batch norms keep their modes, because the running statistics of random weights mean nothing.
    """
    if options.batch > len(task.train):
        raise TaskError(
            f"batch={options.batch} is larger than the training split, which has {len(task.train)} samples. Use a smaller "
            f"batch."
        )
    steps = len(task.train) // options.batch
    return Session(
        task.model,
        tasks.OPTIMIZERS[options.optimizer](task.model.parameters(), options.lr or 0.0),
        task.loss,
        policy,
        engine=options.engine,
        norm="as-is" if options.from_scratch else "auto",
        clip=_CLIP,
        steps_per_epoch=steps,
        total_steps=options.epochs * steps,
        log=log,
        correct=not exact,
    )


def train(options: Options, on_status: OnStatus | None = None) -> Result:
    """Train, evaluate, keep the best and the last weights, and return to the start if that was better.

    `on_status` is called with the status of the run a few times per second. The folder of the run then holds
    `best.safetensors` and `last.safetensors`, `run.jsonl` (the log), `state.pt` (what `resume` continues from) and `run.json`
    (the options). Ctrl-C stops the run after the current step, with everything saved.

    On a CPU with the same number of threads, a run that was killed and resumed gives the same weights bit for bit as one that
    was not. The exception is a run with a time budget but without `exact`: it continues with the same batches, costs,
    corrections and selection, but later decisions depend on how long its steps take. A run that was killed before its first
    step starts again.
    """
    options = options.resolved()
    policy = tasks.policy(options.recipe, options.time, options.memory, options.macs, options.seed)
    if options.resume:
        _check_same(options)
    with working.noting() as notes:
        task = load_task(options)
        if task.skipped:
            working.note(f"{in_short(task.skipped)}. All are listed in skipped.csv")
    if "graphs" in options.engine.split("+") and task.device.type != "cuda":
        raise TaskError(
            f"engine={options.engine!r}: steps can only be captured on CUDA, but this run is on {task.device.type!r}. Leave "
            f"out graphs."
        )
    tasks.check_names(options.recipe, task.model)
    out = options.out or os.fspath(run_folder.unused(f"{Path(options.data).stem}-{policy.name}"))
    data = task.fingerprints()
    if options.resume and run_folder.data_of(out) not in ({}, data):
        raise TaskError(
            f"the data in {options.data!r} are not those that the run in {out!r} began with, so it would be another run. Put "
            f"them back as they were, or start another run."
        )
    with run_folder.claimed(out, options.to_json(), options.resume, data) as folder, other_logs(options, folder) as logs:
        listeners = [*([on_status] if on_status is not None else []), *logs]
        exact = options.exact or not _depends_on_the_clock(policy, task.device)
        session = open_session(options, task, policy, exact=exact, log=folder.log)
        with explain_disk_errors(folder), session:
            return TrainingRun(options, task, folder, session, Stopwatch(task.device), listeners, notes).train()


def _depends_on_the_clock(policy: Policy, device: torch.device) -> bool:
    """Whether measured times may decide how a run continues.

    Without a budget for time or memory they could only choose the engine. On a CPU that gains little, and a resumed run would
    no longer give the same weights.
    """
    return device.type != "cpu" or policy.budget.time is not None or policy.budget.memory is not None


def _check_same(options: Options) -> None:
    """Refuse to resume a run with options that would make it another run."""
    if options.out is None:
        raise TaskError("resume needs to know which run: give its folder with out (--out).")
    began = Options.of(run_folder.options_of(options.out), f"the run in {options.out!r}").resolved()
    for field in fields(options):
        now, then = getattr(options, field.name), getattr(began, field.name)
        if now != then and not field.metadata["may_change"]:
            raise TaskError(
                f"the run in {options.out!r} has {field.name}={then!r} and cannot continue with {now!r}. Leave the option out, "
                f"or start another run."
            )
