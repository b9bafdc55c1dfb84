"""What benchmarks that train share: the clock that counts, and accuracy on a split."""

from __future__ import annotations

import time

import torch

from pliant import data


def clock(device: str) -> float:
    """Seconds: synchronised wall time on a GPU, else CPU time of this thread."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time()


def accuracy(model: torch.nn.Module, split: data.Split) -> float:
    """The share of a split that the model gets right; every mode is put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.inference_mode():
        pairs = zip(split.images.split(50), split.labels.split(50), strict=True)
        hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs)
    for module, mode in modes:
        module.training = mode
    return hits / len(split)
