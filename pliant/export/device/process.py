"""Training on this machine as on a device, in a process of its own whose memory is measured from outside.

The process loads program and data, and waits. What it holds then is an idle device. While it trains, its parent reads how much
it holds from /proc. Anonymous memory is what the program takes. File pages (weights and code, mapped from disk) come on top of
it, are shared, and can be dropped at any time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pliant.export.device.errors import ExportError
from pliant.export.device.facts import PROGRAM, Facts, read_delta, save_delta
from pliant.export.device.runner import Runner

_LOOK_EVERY = 0.01  # seconds between two looks at the memory of a process that trains
_FIELDS = {"VmHWM": "resident", "RssAnon": "anonymous"}


@dataclass(frozen=True)
class Job:
    """What to train where: a folder with a program, arrays of samples (.npz), and how long."""

    folder: str
    data: str
    test: str | None = None
    steps: int = 40
    lr: float | None = None
    seed: int = 0
    before: bool = True  # evaluate before training too
    start: str | None = None
    out: str | None = None


@dataclass(frozen=True)
class Trained:
    """Losses, accuracy before and after, seconds of CPU time per step, and bytes beyond those of the idle process."""

    losses: tuple[float, ...]
    before: float | None
    after: float | None
    seconds: float
    planned: int
    anonymous: int | None
    resident: int | None


def run_device(job: Job, on_step: Callable[[int, float], None] | None = None) -> Trained:
    """Train in a process of its own, and measure its memory from outside where the system shows it."""
    facts = Facts.read(job.folder)
    command = [sys.executable, "-W", "ignore", "-m", __name__, json.dumps(job.__dict__)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    if child.stdin is None or child.stdout is None:
        raise RuntimeError("a process without pipes")
    losses: list[float] = []
    seconds: list[float] = []
    idle: dict[str, int] = {}
    watch = _Watch(child.pid)
    result: dict[str, Any] = {}
    try:
        for line in child.stdout:
            said = json.loads(line) if line.startswith("{") else {}
            if "error" in said:
                raise ExportError(said["error"])
            if "ready" in said:
                idle = _memory(child.pid)
                child.stdin.write("go\n")
                child.stdin.flush()
                watch.start()
            if "loss" in said:
                losses.append(said["loss"])
                seconds.append(said["seconds"])
                if on_step is not None:
                    on_step(len(losses), said["loss"])
            if "done" in said:
                result = said["done"]
                watch.stop()  # before the delta is saved, which an app may do elsewhere
                child.stdin.close()
        if child.wait() or not result:
            raise ExportError(f"the process that trains ended with code {child.returncode}. Its messages are above.")
    finally:
        watch.stop()
        if child.poll() is None:
            child.kill()
        child.wait()
        child.stdout.close()
    over = {name: watch.peak[name] - idle[name] for name in idle if name in watch.peak}
    return Trained(
        tuple(losses),
        result["before"],
        result["after"],
        statistics.median(seconds) if seconds else 0.0,
        facts.planned,
        over.get("anonymous"),
        over.get("resident"),
    )


class _Watch(threading.Thread):
    """Looks at the memory of a process until it is stopped, and once more then."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak: dict[str, int] = {}
        self._pid = pid
        self._over = threading.Event()

    def run(self) -> None:
        over = False
        while not over:
            over = self._over.wait(_LOOK_EVERY)
            for name, value in _memory(self._pid).items():
                self.peak[name] = max(value, self.peak.get(name, 0))

    def stop(self) -> None:
        self._over.set()
        if self.is_alive():
            self.join()


def _memory(pid: int) -> dict[str, int]:
    """Bytes that a process holds; empty where the system does not show it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: int(found[field].split()[0]) * 1024 for field, name in _FIELDS.items() if field in found}


# ---------------------------------------------------------------- inside the process


def read_arrays(path: str, facts: Facts) -> list[torch.Tensor]:
    """The samples of a .npz file: one array for each input of the program, in their order."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = [torch.from_numpy(file[name]) for name in file.files]
    except (OSError, ValueError) as error:
        raise ExportError(f"{path!r} holds no arrays of samples: {error}") from error
    wanted = [(list(shape[1:]), kind) for shape, kind in facts.inputs]
    given = [(list(array.shape[1:]), str(array.dtype).removeprefix("torch.")) for array in arrays]
    if wanted != given or len({len(array) for array in arrays}) != 1:
        raise ExportError(f"{path!r} has samples of {given}, but the program takes {wanted}.")
    return arrays


def batches(arrays: Sequence[torch.Tensor], size: int, seed: int | None) -> Iterator[tuple[torch.Tensor, ...]]:
    """Batches of this size; shuffled and without end with a seed, else once in order. A smaller last one is left out.

    All are the same memory, which the next one overwrites: tensors that come and go would leave gaps in that of the process.
    """
    epoch, batch = 0, tuple(array.new_empty((size, *array.shape[1:])) for array in arrays)
    while True:
        count = len(arrays[0])
        order = np.arange(count) if seed is None else np.random.default_rng([seed, epoch]).permutation(count)
        for first in range(0, count - size + 1, size):
            index = torch.from_numpy(order[first : first + size])
            for array, out in zip(arrays, batch, strict=True):
                torch.index_select(array, 0, index, out=out)
            yield batch
        if seed is None or count < size:
            return
        epoch += 1


def accuracy(runner: Runner, arrays: Sequence[torch.Tensor], size: int) -> float | None:
    """Share of right classes, if the program returns logits and its last input are labels."""
    right = total = 0
    for batch in batches(arrays, size, None):
        logits = runner.predict(batch)
        if not logits or logits[0].dim() != 2 or batch[-1].dim() != 1 or batch[-1].is_floating_point():
            return None
        right += int((logits[0].argmax(1) == batch[-1]).sum())
        total += len(batch[-1])
    return right / total if total else None


def train(job: Job, say: Callable[[dict[str, Any]], None], wait: Callable[[], None]) -> None:
    """Load, wait, train, evaluate, save. `wait` returns when training may begin."""
    facts = Facts.read(job.folder)
    size = facts.inputs[0][0][0] if facts.inputs and facts.inputs[0][0] else 1
    arrays = read_arrays(job.data, facts)
    held_out = read_arrays(job.test, facts) if job.test else None
    if len(arrays[0]) < size:
        raise ExportError(f"{job.data!r} has {len(arrays[0])} samples, fewer than one batch of {size}.")
    sgd = facts.sgd if job.lr is None else {**facts.sgd, "lr": job.lr}
    runner = Runner(Path(job.folder) / PROGRAM, facts.trains)
    first = next(batches(arrays, size, job.seed))
    _warm_up()
    started = read_delta(job.start)[0] if job.start else {}
    say({"ready": True})
    wait()
    if started:
        runner.load_(started, first)
    before = accuracy(runner, held_out, size) if held_out and job.before else None
    stream = batches(arrays, size, job.seed)
    for _ in range(job.steps):
        began = time.process_time()
        value, _ = runner.step(next(stream), sgd)
        say({"loss": value, "seconds": time.process_time() - began})
    after = accuracy(runner, held_out, size) if held_out else None
    say({"done": {"before": before, "after": after}})
    wait()  # until what it held was read
    if job.out:
        save_delta(job.out, runner.weights(first), facts)


def _warm_up() -> None:
    """Use once what training uses: what Python and torch load then would look like memory of the program."""
    import_module("safetensors.torch")
    with torch.inference_mode():
        some = torch.zeros(1, 2).clone()
        int((some.argmax(1) == torch.zeros(1, dtype=torch.int64)).sum())
        float(some[0, 0])
        some.copy_(some + 1)


def _main() -> None:
    torch.set_num_threads(1)

    def say(what: dict[str, Any]) -> None:
        print(json.dumps(what), flush=True)

    def wait() -> None:
        sys.stdin.readline()

    try:
        train(Job(**json.loads(sys.argv[1])), say, wait)
    except (ExportError, ImportError) as error:  # a package may be missing
        say({"error": str(error)})


if __name__ == "__main__":
    _main()
