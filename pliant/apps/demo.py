"""The demo: EfficientNet-Lite0 learns handwritten digits on the CPU, in full and with a time budget, side by side."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from pliant.apps import data
from pliant.apps.models import efficientnet_lite0
from pliant.apps.tasks import judge, loss
from pliant.cost.measure import kept_bytes
from pliant.planning import recipes
from pliant.runtime.working import Listener, listening
from pliant.session.session import Session

CLIP = 1.0  # gradient norm; the high learning rate needs clipping


@dataclass(frozen=True)
class Outcome:
    """The result of one way of training. Seconds are CPU time of one thread; the total includes measuring and probing."""

    name: str
    accuracy: float
    seconds_per_step: float
    seconds_total: float
    kept_bytes: int
    chosen: str
    steps: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(
    console: Console,
    *,
    time_share: float = 0.3,
    steps: int = 60,
    batch: int = 16,
    size: int = 64,
    lr: float = 0.1,
    seed: int = 0,
) -> list[Outcome]:
    """Train twice from the same weights on the same batches; show progress, then a table. Returns the measurements."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # timing is steadier, and small convolutions gain little from a second thread
    try:
        digits = data.digits(size, seed)
        console.print(
            f"EfficientNet-Lite0 (ImageNet weights, 4.7 million parameters) learns {len(digits.train)} handwritten digits: "
            f"{steps} steps of {batch} images, {size}×{size}, on one CPU thread."
        )
        outcomes = []
        with Progress(
            TextColumn("{task.description:<26}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        ) as progress:
            for name, train in (("plain full fine-tuning", _plain), (f"pliant, time={time_share:g}", _pliant)):
                torch.manual_seed(seed)
                model = efficientnet_lite0(digits.classes, pretrained=True)
                for module in model.modules():
                    if isinstance(module, nn.BatchNorm2d):
                        # With the 0.01 of ImageNet, running statistics would need hundreds of steps to adapt.
                        module.momentum = 0.1
                optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
                batches = list(islice(data.batches(digits.train, batch, seed=seed), steps))
                task = progress.add_task(name, total=steps, note="starting" if train is _plain else "measuring")

                def show_step(value: torch.Tensor, task: Any = task) -> None:
                    progress.update(task, advance=1, note=f"loss {float(value):.3f}")

                def show_phase(what: str, done: int, total: int, task: Any = task) -> None:
                    progress.update(task, note=f"{what}: {done} of {total}")

                start = time.thread_time()
                with listening(Listener(show_phase)):
                    seconds, kept, chosen = train(model, optimizer, batches, time_share, show_step)
                total = time.thread_time() - start
                progress.update(task, note="testing")
                score, _ = judge(model, digits.test)
                progress.update(task, note=f"accuracy {score:.1%}")
                outcomes.append(Outcome(name, score, seconds, total, kept, chosen, steps))
        show(console, outcomes)
        return outcomes
    finally:
        torch.set_num_threads(threads)


OnStep = Callable[[torch.Tensor], None]
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def _plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, _: float, on_step: OnStep
) -> tuple[float, int, str]:
    """A plain PyTorch training loop."""
    kept = kept_bytes(model, loss, batches[0])
    seconds = []
    for batch in batches:
        start = time.thread_time()
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        seconds.append(time.thread_time() - start)
        on_step(value.detach())
    return sorted(seconds)[len(seconds) // 2], kept, "everything"


def _pliant(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, share: float, on_step: OnStep
) -> tuple[float, int, str]:
    trained: Counter[str] = Counter()
    with Session(model, optimizer, loss, recipes.pliant(time=share), clip=CLIP, total_steps=len(batches)) as session:
        for batch in batches:
            on_step(session.step(batch))
            trained.update(unit.name for unit in session.selection.units)
        kept = kept_bytes(model, loss, batches[0])
        seconds = session.measured_seconds or 0.0
        names = [unit.name for unit in reversed(session.units)]
        rounds = session.selection.round + 1
    strip = "".join(" ░▒▓█"[-(-4 * trained[name] // len(batches))] for name in names)
    chosen = (
        f"{len(session.selection.units)} of {len(names)} layers, chosen {rounds} times; input to output, by share of steps:"
    )
    return seconds, kept, f"{chosen}\n[{strip}]"


def show(console: Console, outcomes: list[Outcome]) -> None:
    """Print the table at the end, and what was trained."""
    reference = outcomes[0]
    table = Table(title="Handwritten digits, one CPU thread")
    for column in ("", "test accuracy", "time per step", "total time", "kept for backward"):
        table.add_column(column, justify="left" if not column else "right")
    for o in outcomes:
        table.add_row(
            o.name,
            f"{o.accuracy:.1%}",
            f"{o.seconds_per_step * 1e3:.0f} ms ({o.seconds_per_step / reference.seconds_per_step:.2f}×)",
            f"{o.seconds_total:.1f} s ({o.seconds_total / reference.seconds_total:.2f}×)",
            f"{o.kept_bytes / 1e6:.0f} MB",
        )
    console.print(table)
    for o in outcomes:
        console.print(f"{o.name} trained {o.chosen}", markup=False, highlight=False)
    console.print(
        "Total time includes measuring (about seven full steps, in the first run on a device) and choosing; longer runs "
        "amortise it. In so few steps "
        "the running statistics of full training do not settle, which costs accuracy; benchmarks/digits.py takes more steps.",
        highlight=False,
    )
