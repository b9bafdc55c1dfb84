"""What benchmarks that train share: the clock that counts, and accuracy on a split."""

from __future__ import annotations

import time

import torch

from pliant.apps import data
from pliant.apps import tasks as task


def clock(device: str) -> float:
    """Seconds: synchronised wall time on a GPU, else CPU time of this thread."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time()


def accuracy(model: torch.nn.Module, split: data.Split) -> float:
    """The share of a split that the model gets right; every mode is put back."""
    return task.judge(model, split)[0]
