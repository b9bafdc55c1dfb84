"""What the benchmarks that train share: a clock, plain PyTorch training steps, freezing by hand, and accuracy."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pliant import Policy, Selection, Session, Unit

Loss = Callable[[nn.Module, Any], Tensor]
AT_A_TIME = 256  # samples per forward pass of an evaluation


def clock(device: str) -> float:
    """Seconds: synchronised wall time on a GPU, else CPU time of this thread."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time()


def seconds_of(step: Callable[[], Any], device: str) -> float:
    """Seconds that one call takes."""
    start = clock(device)
    step()
    return clock(device) - start


def typical(seconds: Iterable[float], device: str) -> float:
    """The figure that a table shows for several equal steps: their median on a GPU, the fastest on a CPU."""
    return statistics.median(seconds) if device == "cuda" else min(seconds)


# ---------------------------------------------------------------- plain PyTorch


def sgd(model: nn.Module, lr: float = 1e-4) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, batch: Any, clip: float | None = None) -> Tensor:
    """One training step in plain PyTorch. Returns the loss, detached."""
    optimizer.zero_grad()
    value = loss(model, batch)
    value.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return value.detach()


def freeze_(model: nn.Module, chosen: Collection[str], norm: Literal["chosen", "frozen"] = "chosen") -> None:
    """Freezing by hand: train only the `chosen` parameters.

    A batch norm with a trained parameter uses batch statistics, every other one its running statistics. With `norm="frozen"`
    all of them use running statistics.
    """
    chosen = set(chosen)
    for name, param in model.named_parameters():
        param.requires_grad_(name in chosen)
        if name not in chosen:
            param.grad = None
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train(norm == "chosen" and any(param.requires_grad for param in module.parameters()))


def last_share(model: nn.Module, share: float) -> list[str]:
    """The names of the last parameter tensors: this share of them all."""
    names = [name for name, _ in model.named_parameters()]
    return names[int(len(names) * (1 - share)) :]


def accuracy(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], forward: Callable[[nn.Module, Tensor], Tensor] | None = None
) -> float:
    """The share of samples that the model classifies correctly. The mode of every module is restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    hits = count = 0
    model.eval()
    try:
        with torch.no_grad():
            for inputs, labels in batches:
                logits = model(inputs) if forward is None else forward(model, inputs)
                hits += (logits.argmax(1) == labels).sum()
                count += len(labels)
    finally:
        for module, mode in modes:
            module.training = mode
    return int(hits) / count


def in_pieces(images: Tensor, labels: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """A split in batches for an evaluation."""
    return zip(images.split(AT_A_TIME), labels.split(AT_A_TIME), strict=True)


# ---------------------------------------------------------------- what a policy chooses


def choice_of(policy: Policy, model: nn.Module, loss: Loss, batch: Any) -> tuple[Selection, tuple[Unit, ...]]:
    """What a policy chooses for this model, and all units that it chooses from (nearest the loss first)."""
    spare = copy.deepcopy(model)
    with Session(spare, sgd(spare), loss, policy, engine="plain", undo=False) as session:
        session.before_step(batch)
        return session.selection, session.units


def quartile(seconds: Sequence[float]) -> float:
    """The lower quartile: steps that other processes disturbed do not change it."""
    return sorted(seconds)[len(seconds) // 4]
