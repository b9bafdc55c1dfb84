"""Pretrained networks fine-tuned on a new task: every method from the same start, on the same batches, with the same clock.

    python benchmarks/transfer.py --data DIR --device cuda --jobs 8     # accuracies: several runs side by side; resumable
    python benchmarks/transfer.py --data DIR --device cuda --timed 1    # then one run of each alone, at its rate: times
    python benchmarks/transfer.py --data DIR --classes 10 --images 40   # one CPU thread, a part of each set: hours; resumable
    python benchmarks/transfer.py --data DIR --quick                    # five methods, a few images: a minute or two

For each method and task: one run per learning rate with seed 0, compared on the validation split. Then the other seeds at every
rate within five points of the best, and the best mean over seeds counts: one seed and a small validation split pick rates by
luck. The table shows test accuracies at that rate. SGD with momentum (AdamW for text), a cosine schedule, clipped gradients,
the same number of steps. The batches and the initial head depend only on the seed; the checksums `start` and `order` of each
cell prove it. `full` and `full, tuned` are plain loops. All others are a `Session` (engine "auto") with the precision and
layout of `full, tuned`: on CUDA bfloat16 autocast, channels-last and the fused optimizer. Methods and their options are in
`transfer_methods.py`, datasets and networks in `transfer_tasks.py`. What is timed, after one step on a copy that loads kernels:

    start clock; open the session
    for every epoch: for every batch: pick, change and enlarge its images, step; stop clock; evaluate; start clock

So time includes profiling, scoring, choosing and capturing, but neither reading files nor evaluation. GPU: synchronised wall
time. CPU: CPU time of one thread. Each cell says how many others may have run beside it (`beside`); times and energy in the
tables are of runs that were alone. Sessions keep no copy to roll back to (`undo=False`), as plain loops do not.

Peak memory on CUDA is the allocator's peak while training, less the data: weights, gradients, optimizer state, scoring and
profiling. A second figure is from the second epoch on, with everything that captured steps reserve. On a CPU the peak is that
of one more step after the run, plus the optimizer's state.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import gc
import itertools
import math
import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import packed
import record
import torch
import torch.nn.functional as F
import transfer_methods as methods
import transfer_tasks as tasks
from meter import LiveBytes, state_bytes
from torch import Tensor, nn
from training import accuracy, clock, plain_step
from transfer_table import best, contenders, table

from pliant import PliantError, Selection, Session, energy

MAIN = ("mobilenet_v2/cub", "mobilenet_v2/pets")
RATES = {"sgd": (0.003, 0.01, 0.03, 0.1), "adamw": (3e-5, 1e-4, 3e-4, 1e-3)}
CLIP = 1.0
BEGUN = time.monotonic()

Batch = tuple[Tensor, Tensor]  # inputs, labels


class Watch:
    """Seconds, joules and peak memory, over the intervals between `go` and `stop`."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds = device, 0.0
        self.peaks: list[int] = []  # bytes, of each interval
        self._meter = energy.meter(device)
        self.joules = 0.0 if self._meter is not None else None
        self._allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
        self._reserved = torch.cuda.memory_reserved() if device == "cuda" else 0

    def go(self) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._since = clock(self.device)
        self._joules = self._meter.joules() if self._meter is not None else 0.0

    def stop(self) -> None:
        self.seconds += clock(self.device) - self._since
        if self._meter is not None and self.joules is not None:
            self.joules += self._meter.joules() - self._joules
        if self.device == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated() - self._allocated)

    def later_peak(self) -> int:
        """Peak bytes from the second interval on, or the bytes reserved now if those are more: captured steps use them."""
        torch.cuda.empty_cache()
        return max(*(self.peaks[1:] or self.peaks), torch.cuda.memory_reserved() - self._reserved)

    def close(self) -> None:
        if self._meter is not None:
            self._meter.close()


class Run:
    """One network in training: how it sees a batch, and how a step is taken."""

    def __init__(self, method: methods.Method, task: str, lr: float, seed: int, data: tasks.Task, device: str) -> None:
        self.method, self.device, self.session = method, device, None
        backbone = task.split("/")[0]
        model = tasks.start(backbone, data.classes, seed)
        self.start = tasks.fingerprint(model)
        if method.recipe == "lora":
            methods.with_low_rank(model, seed)
        self.policy = None if method.is_plain else methods.policy(method, model, seed)
        images = bool(data.pixels) and device == "cuda"  # on CPUs channels-last is slower
        self.layout = torch.channels_last if method.is_tuned and images else torch.contiguous_format
        self.half = method.is_tuned and device == "cuda"
        self.model = model.to(device, memory_format=self.layout)
        self.optimizer = methods.optimizer(
            self.model, tasks.BACKBONES[backbone].optimizer, lr, fused=method.is_tuned and device == "cuda"
        )

    def forward(self, model: nn.Module, inputs: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16) if self.half else nullcontext():
            return model(inputs.contiguous(memory_format=self.layout))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        with torch.autocast("cuda", dtype=torch.bfloat16) if self.half else nullcontext():
            return F.cross_entropy(model(inputs), labels)

    def laid_out(self, batches: Iterator[tuple[Batch, Tensor]]) -> Iterator[tuple[Batch, Tensor]]:
        for (inputs, labels), ids in batches:
            yield (inputs.contiguous(memory_format=self.layout), labels), ids

    def warm(self, batch: Batch) -> None:
        """One plain full step on a copy: the first step of a process loads kernels."""
        spare = copy.deepcopy(self.model)
        plain_step(spare, torch.optim.SGD(spare.parameters(), lr=1e-4), self.loss, batch, CLIP)

    def begin(self, per_epoch: int, total: int) -> Callable[..., Tensor]:
        """Open the session, if there is one. Returns the function that takes a step."""
        if self.policy is None:
            return lambda batch, ids: plain_step(self.model, self.optimizer, self.loss, batch, CLIP)
        self.session = Session(
            self.model,
            self.optimizer,
            self.loss,
            self.policy,
            engine=self.method.engine,
            norm=self.method.words.get("norm", "auto"),
            prefix=self.method.words.get("prefix"),
            clip=CLIP,
            steps_per_epoch=per_epoch,
            total_steps=total,
            cache=methods.CACHE_BYTES if self.method.views else None,
            undo=False,
        )
        return self.session.step

    def step_bytes(self, step: Callable[..., Tensor], batch: Batch, ids: Tensor) -> int:
        """Peak bytes of one more step, plus the optimizer's state: for CPUs, whose allocator keeps no statistics."""
        state = state_bytes(self.optimizer)
        self.optimizer.zero_grad()
        with LiveBytes(self.device) as meter:
            step(batch, ids)
        return meter.peak + state


def cell(task: str, method: str, lr: float, seed: int, setting: dict[str, Any], beside: int) -> dict[str, Any]:
    """One run: accuracies, times and selections. `failed` says why a method could not run."""
    device, size = setting["device"], setting["batch"]
    tidy(device)
    data = tasks.load(task, device, *(setting[name] for name in ("pixels", "classes", "images", "validation")))
    watch = Watch(device)
    run = Run(methods.parse(method), task, lr, seed, data, device)
    epochs, per_epoch = run.method.epochs(setting["epochs"]), len(data.train) // size
    out: dict[str, Any] = {"task": task, "method": method, "lr": lr, "seed": seed, "beside": beside, "start": run.start}
    if not per_epoch:
        raise SystemExit(f"{task}: a batch of {size} is more than the {len(data.train)} training samples.")
    total, order, curve, choices = epochs * per_epoch, 0, [], []
    run.warm(next(run.laid_out(data.batches(size, seed, 0)))[0])
    tidy(device)
    try:
        watch.go()
        step, taken = run.begin(per_epoch, total), 0
        for epoch in range(epochs):
            if epoch:
                watch.go()
            losses, seen = [], []
            for batch, ids in run.laid_out(data.batches(size, seed, epoch, run.method.views)):
                for group in run.optimizer.param_groups:
                    group["lr"] = lr * (1 + math.cos(math.pi * taken / total)) / 2
                losses.append(step(batch, ids))
                seen.append(ids)
                taken += 1
                if run.session is not None and (not choices or choices[-1][1] is not run.session.selection):
                    choices.append((taken - 1, run.session.selection))
            watch.stop()
            order = zlib.crc32((torch.cat(seen) // max(run.method.views, 1)).numpy().tobytes(), order)
            judged = accuracy(run.model, tasks.pieces(data, data.validation), run.forward)
            curve.append([round(watch.seconds, 4), round(judged, 5), float(torch.stack(losses).float().mean())])
            if not math.isfinite(curve[-1][2]):
                return out | {"failed": f"the loss of epoch {epoch + 1} is {curve[-1][2]}"}
        out |= {"steps": taken, "order": order, "curve": curve, "validation": curve[-1][1], "seconds": watch.seconds}
        out["test"] = accuracy(run.model, tasks.pieces(data, data.test), run.forward)
        if run.session is not None:
            out |= reported(run.session, choices)
        if device == "cuda":
            out |= {"peak_bytes": max(watch.peaks), "later_peak_bytes": watch.later_peak()}
        elif setting["bytes"]:
            out["peak_bytes"] = run.step_bytes(step, batch, ids)
        if watch.joules is not None:
            out["joules"] = watch.joules
        return out
    except PliantError as error:
        return out | {"failed": str(error)}
    finally:
        watch.close()
        if run.session is not None:
            run.session.close()


def tidy(device: str) -> None:
    """Free what earlier runs left, captured steps included, so that it is not counted now."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def reported(session: Session, choices: list[tuple[int, Selection]]) -> dict[str, Any]:
    """What a session reports: its engine, the time it spent beside steps, and its selections, each with its first step."""
    steps, full = sum(one.steps for one in session.rounds), session.profile.full.seconds
    share = sum(one.seconds for one in session.rounds) / steps / full if steps and full else None
    chosen = [[step, by_block(selection)] for step, selection in choices]
    return {
        "ran": session.engine,
        "why_not": dict(session.why_not),
        "spent": session.spent,
        "mean_step": share,  # over a plain full step, as this session measured it
        "units": len(session.units),
        "chosen": [one for n, one in enumerate(chosen) if n == 0 or one[1] != chosen[n - 1][1]],
    }


def by_block(selection: Selection) -> dict[str, int]:
    """How many units of each block are chosen."""
    modules = (unit.name.split("[")[0].removesuffix(".weight").removesuffix(".bias") for unit in selection.units)
    return dict(Counter(".".join(name.split(".")[:2]) for name in modules))


# ---------------------------------------------------------------- which cells


def key(c: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(c[name] for name in ("task", "method", "lr", "seed"))


def wanted(args: argparse.Namespace, done: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The cells that can run now: seed 0 of every rate, then the other seeds of rates that may be the best.

    With `--timed`, only cells at the best rate, and again if they did not run alone.
    """
    out = []
    for task, method in itertools.product(args.tasks, args.methods):
        rates = rates_of(task, args)
        if args.timed:
            lr = best(done, task, method)
            out += [(task, method, lr, seed) for seed in range(args.timed) if lr is not None]
        else:
            near = contenders(done, task, method, rates)
            out += [(task, method, lr, seed) for lr in near or rates for seed in range(args.seeds if near else 1)]
    known = {key(c) for c in done if not args.timed or c["beside"] == 0}
    return sorted((one for one in out if one not in known), key=lambda one: one[3])  # all methods progress evenly


def rates_of(task: str, args: argparse.Namespace) -> tuple[float, ...]:
    return tuple(args.rates or RATES[tasks.BACKBONES[task.split("/")[0]].optimizer])


# ---------------------------------------------------------------- main


def main() -> None:
    args = parsed()
    torch.set_num_threads(1)
    tasks.FOLDER[0] = packed.folder(args.data)
    for task in args.tasks:  # report missing files before anything runs
        backbone, name = task.split("/")
        tasks.weights_of(backbone)
        packed.need(tasks.FOLDER[0] / tasks.SETS[name].file)
    for method in args.methods:
        methods.parse(method)
    out = record.out(args, "transfer")
    names = ("device", "epochs", "batch", "pixels", "classes", "images", "validation", "bytes")
    setting = {name: getattr(args, name) for name in names} | {"clip": CLIP, "shift": tasks.SHIFT}
    done = record.load(out, setting)

    broken: set[tuple[Any, ...]] = set()  # cells that ended with an error: printed, not recorded, not repeated now

    def add(which: tuple[Any, ...], result: Callable[[], dict[str, Any]]) -> None:
        try:
            done.append(result())
        except Exception:
            broken.add(which)
            traceback.print_exc()
            return
        record.save(out, setting, done, table(done, args.device))
        said = done[-1].get("failed") or f"validation {done[-1]['validation']:.3f}, {done[-1]['seconds']:.1f} s"
        print(f"{' '.join(map(str, which))}: {said}", flush=True)

    pool = None
    if args.jobs > 1:
        pool = ProcessPoolExecutor(args.jobs, get_context("spawn"), prepare, (tasks.FOLDER[0],))
    while (todo := [one for one in wanted(args, done) if one not in broken]) and not late(args):
        print(f"{len(done)} cells are done, {len(todo)} can run now", flush=True)
        if pool is None:
            for one in todo:
                if not late(args):
                    add(one, partial(cell, *one, setting, 0))
        else:
            futures = {pool.submit(cell, *one, setting, args.jobs - 1): one for one in todo}
            for future in as_completed(futures):
                if not future.cancelled():
                    add(futures[future], future.result)
                if late(args):
                    for other in futures:
                        other.cancel()
    if pool is not None:
        pool.shutdown()
    record.save(out, setting, done, table(done, args.device))
    print(table(done, args.device))
    if broken:
        raise SystemExit(f"{len(broken)} cells ended with an error, {' '.join(map(str, min(broken)))} among them: see above.")


def late(args: argparse.Namespace) -> bool:
    return time.monotonic() - BEGUN > args.seconds


def prepare(folder: Path) -> None:
    """Set up a worker process, which ends when its parent has ended."""
    torch.set_num_threads(1)
    tasks.FOLDER[0] = folder
    parent = os.getppid()

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def parsed() -> argparse.Namespace:
    parser = record.options(__doc__)
    packed.option(parser)
    parser.add_argument("--tasks", nargs="+", choices=tasks.TASKS, default=None, help=f"({' '.join(MAIN)})")
    parser.add_argument(
        "--methods", nargs="+", default=None, help="names, like 'pliant 0.5, engine plain' (all of the main grid)"
    )
    parser.add_argument("--seeds", type=int, default=None, help="(3)")
    parser.add_argument("--rates", type=float, nargs="+", default=None, help="learning rates to try (four; AdamW has its own)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run cells side by side; their times do not count")
    parser.add_argument("--timed", type=int, default=0, help="run this many seeds of each method alone, at its best rate")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing after this time")
    parser.add_argument("--epochs", type=int, default=None, help="(6, or 12 on a GPU)")
    parser.add_argument("--batch", type=int, default=None, help="(8, or 32 on a GPU)")
    parser.add_argument("--pixels", type=int, default=None, help="per side (64, or on a GPU the pretraining size)")
    parser.add_argument("--classes", type=int, default=None, help="the first classes of a set: how many")
    parser.add_argument("--images", type=int, default=None, help="most samples of each class in each split")
    parser.add_argument("--validation", type=float, default=0.2, help="share cut from the training split, where there is none")
    parser.add_argument("--no-bytes", dest="bytes", action="store_false", help="on a CPU: do not measure memory")
    args = parser.parse_args()
    if args.timed and args.jobs > 1:
        parser.error("--timed runs one at a time: leave --jobs out.")
    if args.quick:
        small = {"tasks": ["mobilenet_v2/pets"], "methods": list(methods.QUICK), "seeds": 1, "rates": [0.03]}
        small |= {"pixels": 64, "classes": 5, "images": 24, "epochs": 3, "batch": 8}
        for name, value in small.items():
            setattr(args, name, getattr(args, name) or value)
    gpu = args.device == "cuda"
    args.epochs, args.batch = args.epochs or (12 if gpu else 6), args.batch or (32 if gpu else 8)
    args.tasks, args.seeds = args.tasks or list(MAIN), args.seeds or 3
    args.methods = args.methods or methods.available(args.device)
    return args


if __name__ == "__main__":
    main()
