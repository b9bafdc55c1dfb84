"""Real run logs, small ones: a chain of layers that learns for a dozen steps and chooses anew every third."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from oracle import on_steady_device
from torch import nn

from pliant import Policy, Session, recipes, schedule
from pliant.session import run_log as runlog

BAD = "<script>alert('pwned')</script>\"&"  # what a hostile log would like to see on a page


class Blocks(nn.Module):
    """A stem, four blocks of two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def policy(time: float = 0.7) -> Policy:
    return on_steady_device(recipes.pliant(time=time, memory=0.9, when=schedule.every(steps=3), head_first=0))


def opened(log: Path, which: Policy | None = None) -> Session:
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return Session(model, optimizer, loss, which or policy(), log=log, engine="plain")


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 16, 6, generator=generator)
    return [(each, (each.sum(1) > 0).long() + (each[:, 0] > 1).long()) for each in x]


def train(folder: Path, steps: int = 12, which: Policy | None = None) -> Path:
    """A whole run with an evaluation before, in the middle and at the end; returns its folder."""
    log = folder / "run.jsonl"
    with opened(log, which) as session:
        evaluated(log, 0, 0.34)
        for number, batch in enumerate(batches(steps), 1):
            session.step(batch)
            if number in (steps // 2, steps):
                evaluated(log, number, 0.5 + 0.4 * number / steps)
    roofline(log)
    return folder


def evaluated(log: Path, step: int, accuracy: float) -> None:
    runlog.append(
        log, [{"event": "evaluated", "step": step, "split": "validation", "accuracy": accuracy, "loss": 1 - accuracy}]
    )


def roofline(log: Path) -> None:
    peaks = {"flops": 1e10, "bandwidth": 1e9, "device": "cpu", "dtype": "float32", "threads": 1}
    rows = [{"name": f"blocks.{i}.0", "seconds": 1e-5 * (i + 1), "macs": 20_000, "moved": 4_000 * (i + 1)} for i in range(4)]
    runlog.append(log, [{"event": "roofline", "peaks": peaks, "units": rows}])


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def rewrite(log: Path, told: list[dict[str, Any]]) -> None:
    log.write_text("".join(json.dumps(line) + "\n" for line in told))


def hostile(folder: Path, source: Path) -> Path:
    """The same run, told by somebody who puts markup wherever a log holds text."""
    folder.mkdir(parents=True)
    text = (source / "run.jsonl").read_text()
    for name in ("blocks.1.0", "pliant", "validation", "cpu", "every 3 steps"):
        text = text.replace(json.dumps(name), json.dumps(f"{name}{BAD}"))
    told = [json.loads(line) for line in text.splitlines()]
    told.append({"event": "note", "step": 3, "text": BAD})
    told.append({"event": BAD, "step": BAD})
    rewrite(folder / "run.jsonl", told)
    return folder
