"""Pretrained networks carried over to a new task: every method from the same start, on the same batches, by the same clock.

    python benchmarks/transfer.py --data DIR --device cuda --jobs 8     # accuracies: several runs side by side; resumable
    python benchmarks/transfer.py --data DIR --device cuda --timed 1    # then one run of each alone, at its rate: times
    python benchmarks/transfer.py --data DIR --classes 10 --images 40   # one CPU thread, a part of each set: hours; resumable
    python benchmarks/transfer.py --data DIR --quick                    # five methods, a few images: a minute or two

For each method and task: one run per learning rate with seed 0, judged on the validation split; then the other seeds at every
rate that comes within five points of the best, and the best mean over seeds counts (a small validation split and one seed pick
rates by luck). The test split is read at the end of a run, and looked at for the best rate alone. SGD with momentum (AdamW for
text), half a cosine, clipped gradients, the same number of steps. Which samples a batch holds and how they are changed, and the
head that a run begins with, hang on the seed alone; each cell holds numbers that tell (`start`, `order`). `full` and `full,
tuned` are plain loops, all others a `Session` (engine "auto") with the precision and layout of `full, tuned`: on CUDA bfloat16
autocast, channels-last and the fused optimizer. Methods, and words that change one thing in them: `transfer_methods.py`. Sets
and networks: `transfer_tasks.py`.
What is timed, after one step on a copy that loads kernels:

    import all there is; start clock; open the session
    for every epoch: for every batch: pick, change and enlarge its images, step; stop clock; evaluate; start clock

So time holds profiling, probing, choosing, racing and capturing, but neither reading files nor evaluation. GPU: synchronised
wall time. CPU: CPU time of one thread. Each cell tells how many others may have run beside it (`beside`); times and energy in
the tables are of those that ran alone. Peak memory on CUDA is what the allocator held at most while training, less what the
data takes: weights, gradients, optimizer state, probing and profiling included; and, apart, from the second epoch on, when
nothing is profiled any more, with all that captured steps hold (which is reserved, and counts as free between replays). On the
CPU it is that of one more step after the run: what the step makes, and the optimizer's state. Sessions keep no way back
(`undo=False`), as plain loops do not.
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
from torch import Tensor, nn
from training import clock
from transfer_table import best, contenders, table

from pliant import Selection, Session, energy
from pliant.apps.tasks import rate
from pliant.core.errors import PliantError
from pliant.engine.prefix.feature_cache import Features
from pliant.runtime.memory import LiveBytes

MAIN = ("mobilenet_v2/cub", "mobilenet_v2/pets")
RATES = {"sgd": (0.003, 0.01, 0.03, 0.1), "adamw": (3e-5, 1e-4, 3e-4, 1e-3)}
CLIP = 1.0
BEGUN = time.monotonic()

Batch = tuple[Tensor, Tensor]  # inputs, labels


class Watch:
    """Seconds, joules and the peak of memory, over the stretches between `go` and `stop`."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds = device, 0.0
        self.peaks: list[int] = []  # bytes, of each stretch
        self._meter = energy.meter(device)
        self.joules = 0.0 if self._meter is not None else None
        self._stands = torch.cuda.memory_allocated() if device == "cuda" else 0
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
            self.peaks.append(torch.cuda.max_memory_allocated() - self._stands)

    def later_peak(self) -> int:
        """Bytes from the second stretch on, or those that are held now, if they are more: captured steps run in them."""
        torch.cuda.empty_cache()
        return max(*(self.peaks[1:] or self.peaks), torch.cuda.memory_reserved() - self._reserved)


class Run:
    """One network in training: how it is shown a batch, and how a step is taken."""

    def __init__(self, method: methods.Method, task: str, lr: float, seed: int, data: tasks.Task, device: str) -> None:
        self.method, self.device, self.session = method, device, None
        backbone = task.split("/")[0]
        model = tasks.start(backbone, data.classes, seed)
        self.start = tasks.fingerprint(model)
        if method.recipe == "lora":
            methods.with_low_rank(model, seed)
        self.policy = None if method.is_plain else methods.policy(method, model, seed)  # loads a solver
        images = bool(data.pixels) and device == "cuda"  # on CPUs, training them channels-last is slower
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
        """One plain full step on a copy: the first one of a process loads kernels."""
        spare = copy.deepcopy(self.model)
        self.plain(spare, torch.optim.SGD(spare.parameters(), lr=1e-4))(batch)

    def plain(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
        def step(batch: Batch, ids: Any = None) -> Tensor:
            optimizer.zero_grad()
            value = self.loss(model, batch)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            return value.detach()

        return step

    def begin(self, per_epoch: int, total: int) -> Callable[..., Tensor]:
        """What takes a step: part of what is timed."""
        if self.policy is None:
            return self.plain(self.model, self.optimizer)
        self.session = Session(
            self.model,
            self.optimizer,
            self.loss,
            self.policy,
            engine=self.method.engine,
            norm=self.method.words.get("norm", "auto"),
            clip=CLIP,
            steps_per_epoch=per_epoch,
            total_steps=total,
            cache=Features(methods.CACHE_BYTES, device=self.device) if self.method.views else None,
            undo=False,
        )
        return self.session.step

    def step_bytes(self, step: Callable[..., Tensor], batch: Batch, ids: Tensor) -> int:
        """The peak of what one more step makes, with the optimizer's state: for CPUs, whose allocator tells nothing."""
        state = [value for some in self.optimizer.state.values() for value in some.values() if isinstance(value, Tensor)]
        self.optimizer.zero_grad()
        with LiveBytes(torch.device(self.device)) as live:
            step(batch, ids)
        return live.peak + sum(value.nbytes for value in state)


def cell(task: str, method: str, lr: float, seed: int, setting: dict[str, Any], beside: int) -> dict[str, Any]:
    """One run: accuracies, times, and what was chosen when. What a method cannot do is told in `failed`."""
    device, size = setting["device"], setting["batch"]
    tidy(device)
    data = tasks.load(task, device, *(setting[name] for name in ("pixels", "classes", "images", "validation")))
    watch = Watch(device)
    run = Run(methods.parse(method), task, lr, seed, data, device)
    epochs, per_epoch = run.method.epochs(setting["epochs"]), len(data.train) // size
    out: dict[str, Any] = {"task": task, "method": method, "lr": lr, "seed": seed, "beside": beside, "start": run.start}
    if not per_epoch:
        raise SystemExit(f"{task}: a batch of {size} is more than the {len(data.train)} samples that there are to train on.")
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
                    group["lr"] = rate(lr, taken, total)
                losses.append(step(batch, ids))
                seen.append(ids)
                taken += 1
                if run.session is not None and (not choices or choices[-1][1] is not run.session.selection):
                    choices.append((taken - 1, run.session.selection))
            watch.stop()
            order = zlib.crc32((torch.cat(seen) // max(run.method.views, 1)).numpy().tobytes(), order)
            judged = tasks.accuracy(run.model, data, data.validation, run.forward)
            curve.append([round(watch.seconds, 4), round(judged, 5), float(torch.stack(losses).float().mean())])
            if not math.isfinite(curve[-1][2]):
                return out | {"failed": f"the loss of epoch {epoch + 1} is {curve[-1][2]}"}
        out |= {"steps": taken, "order": order, "curve": curve, "validation": curve[-1][1], "seconds": watch.seconds}
        out["test"] = tasks.accuracy(run.model, data, data.test, run.forward)
        if run.session is not None:
            out |= told(run.session, choices)
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
        if run.session is not None:
            run.session.close()


def tidy(device: str) -> None:
    """Let go of what came before, captured steps among it, so that it is not counted now."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def told(session: Session, choices: list[tuple[int, Selection]]) -> dict[str, Any]:
    """What a session says of itself: what it ran on, what it spent beside steps, and its choices, each with its first step."""
    steps, full = sum(one.steps for one in session.rounds), session.profile.full.seconds
    share = sum(one.seconds for one in session.rounds) / steps / full if steps and full else None
    chosen = [[step, by_block(selection)] for step, selection in choices]
    return {
        "ran": session.engine,
        "why_not": dict(session.why_not),
        "spent": session.spent,
        "mean_step": share,  # of a plain full step, as this session measured that
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

    With `--timed`, those of the best rate alone, and again if they did not run alone.
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
    return sorted((one for one in out if one not in known), key=lambda one: one[3])  # every method gets on as far as the others


def rates_of(task: str, args: argparse.Namespace) -> tuple[float, ...]:
    return tuple(args.rates or RATES[tasks.BACKBONES[task.split("/")[0]].optimizer])


# ---------------------------------------------------------------- main


def main() -> None:
    args = parsed()
    torch.set_num_threads(1)
    tasks.FOLDER[0] = packed.folder(args.data)
    for task in args.tasks:  # what is missing is told before anything runs
        backbone, name = task.split("/")
        packed.need(tasks.FOLDER[0] / "weights" / f"{tasks.BACKBONES[backbone].weights}.safetensors")
        packed.need(tasks.FOLDER[0] / tasks.SETS[name].file)
    for method in args.methods:
        methods.parse(method)
    out = args.out or record.place("transfer_quick" if args.quick else "transfer", args.device)
    names = ("device", "epochs", "batch", "pixels", "classes", "images", "validation", "bytes")
    setting = {name: getattr(args, name) for name in names} | {"clip": CLIP, "shift": tasks.SHIFT}
    done = record.load(out, setting)

    broken: set[tuple[Any, ...]] = set()  # cells that an error ended: told, not recorded, not tried again now

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
    """What a process needs before its first cell; it ends when the one that started it is no more."""
    torch.set_num_threads(1)
    tasks.FOLDER[0] = folder
    parent = os.getppid()

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None, help="folder with data and weights (or $PLIANT_DATA)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tasks", nargs="+", choices=tasks.TASKS, default=None, help=f"({' '.join(MAIN)})")
    parser.add_argument(
        "--methods", nargs="+", default=None, help="names, like 'pliant 0.5, engine plain' (all of the main grid)"
    )
    parser.add_argument("--seeds", type=int, default=None, help="(3)")
    parser.add_argument("--rates", type=float, nargs="+", default=None, help="learning rates to try (four; AdamW has its own)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run cells side by side; their times do not count")
    parser.add_argument(
        "--timed", type=int, default=0, help="run so many seeds of each method alone, at the rate that is known"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so many")
    parser.add_argument("--epochs", type=int, default=None, help="(6, or 12 on a GPU)")
    parser.add_argument("--batch", type=int, default=None, help="(8, or 32 on a GPU)")
    parser.add_argument("--pixels", type=int, default=None, help="of a side (64, or on a GPU as the network was pretrained)")
    parser.add_argument("--classes", type=int, default=None, help="the first so many of a set")
    parser.add_argument("--images", type=int, default=None, help="samples of each class in each split, at most")
    parser.add_argument("--validation", type=float, default=0.2, help="share cut from the training split, where there is none")
    parser.add_argument("--no-bytes", dest="bytes", action="store_false", help="on a CPU, without the step that tells memory")
    parser.add_argument("--out", type=Path, default=None)
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
