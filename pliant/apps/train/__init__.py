"""A whole run of training, from names to files: what `pliant train` does, as a function."""

from __future__ import annotations

import os
from dataclasses import asdict, fields
from pathlib import Path

import torch

from pliant.apps import run_folder as folder
from pliant.apps import tasks as task
from pliant.apps.tasks import TaskError
from pliant.apps.train.interrupts import Spent, Stopped, tensorboard, told_of_the_disk
from pliant.apps.train.options import Evaluation, Moment, Options, Result, Watch
from pliant.apps.train.run import Run
from pliant.planning.policy import Policy

__all__ = ["Evaluation", "Moment", "Options", "Result", "Stopped", "Watch", "train"]

_MAY_CHANGE = ("out", "resume", "device", "log_to", "keep_anyway", "measure_memory")


def train(options: Options, watch: Watch | None = None) -> Result:
    """Train, evaluate, keep the best and the last weights, and go back to the start if that was better.

    `watch` is told how the run stands, some times a second. The folder of the run then holds `best.safetensors` and
    `last.safetensors`, `run.jsonl` (the log), `state.pt` (what `resume` goes on from) and `run.json` (the options). Ctrl-C ends
    it after the step that runs, with everything saved.

    The result of a run that was killed and resumed is that of one that was not, bit for bit on a CPU with as many threads,
    unless it has a time budget without `exact`. Such a run goes on with the same batches, costs, corrections and selection, and
    differs by what steps take from then on. Before its first step there is nothing to go on from: it begins anew.
    """
    policy = task.policy(options.recipe, options.time, options.memory, options.macs, options.seed)
    if options.resume:
        _check_same(options)
    loaded = task.load(
        options.model,
        options.data,
        size=options.size,
        seed=options.seed,
        device=options.device,
        scratch=options.scratch,
        validation=options.validation,
    )
    if "graphs" in options.engine.split("+") and loaded.device.type != "cuda":
        raise TaskError(f"engine={options.engine!r}: steps are captured on CUDA, and this run is on {loaded.device.type!r}.")
    task.check_names(options.recipe, loaded.model)
    out = options.out or os.fspath(folder.unused(f"{Path(options.data).stem}-{policy.name}"))
    saved = {name: value for name, value in asdict(options).items() if name not in ("out", "resume")}
    with folder.claimed(out, saved, options.resume) as place, tensorboard(options.log_to, place) as also:
        watches = [w for w in (watch, also) if w is not None]
        session = task.session(
            loaded,
            policy,
            batch=options.batch,
            lr=options.lr,
            epochs=options.epochs,
            scratch=options.scratch,
            engine=options.engine,
            exact=options.exact or not _hangs_on_the_clock(policy, loaded.device),
            log=place.log,
        )
        with told_of_the_disk(place), session:
            return Run(options, loaded, place, session, Spent(loaded.device), watches).go()


def _hangs_on_the_clock(policy: Policy, device: torch.device) -> bool:
    """Whether what steps take may decide how a run goes on. Where no time is asked for, it could only decide which engine runs
    them: on a CPU that gains a tenth or so, and a run that is killed would no longer end as it would have."""
    return device.type != "cpu" or policy.budget.time is not None or policy.budget.memory is not None


def _check_same(options: Options) -> None:
    """A run goes on as it began: options that would make it another one are refused."""
    if options.out is None:
        raise TaskError("say which run to resume: out (--out) is its folder.")
    was = Options.of_run(options.out)
    for field in fields(options):
        now, then = getattr(options, field.name), getattr(was, field.name)
        if now != then and field.name not in _MAY_CHANGE:
            raise TaskError(
                f"the run in {options.out!r} has {field.name}={then!r}, and cannot go on with {now!r}. Leave it out, or begin "
                f"another run."
            )
