"""What every exporter returns, and how an exported model is held against the one in PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from pliant.core.errors import PliantError

Forward = Callable[[nn.Module, Tensor], Tensor]
"""The logits of a model for a batch."""

TOLERANCE = 1e-4  # of the largest value: other runtimes add in another order


class ExportError(PliantError, RuntimeError):
    """A model that cannot be exported, or whose export computes something else."""


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how far its results are from PyTorch's, as a share of the largest value."""

    path: Path
    difference: float


class Logits(nn.Module):
    """The model as one function from a batch to logits; it is exported, never trained."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self._logits = forward

    def forward(self, inputs: Tensor) -> Tensor:
        return self._logits(self.model, inputs)


def difference(run: Callable[[Tensor], Tensor], model: nn.Module, example: Tensor, what: str) -> float:
    """The largest difference between an exported model and the one in PyTorch, on all samples together and on the first alone.

    More than the tolerance is an error: nothing is written then.
    """
    worst = 0.0
    for batch in (example, example[:1]):
        with torch.no_grad():
            mine, theirs = model(batch).float(), run(batch).float()
        if theirs.shape != mine.shape:
            raise ExportError(f"{what} returns {tuple(theirs.shape)} where PyTorch returns {tuple(mine.shape)}.")
        worst = max(worst, float((theirs - mine).abs().max() / mine.abs().max().clamp(min=1e-12)))
    if not worst <= TOLERANCE:
        raise ExportError(
            f"{what} differs from PyTorch by {worst:.2g} of the largest value, more than {TOLERANCE:g}. It was not written."
        )
    return worst


def aside(path: str | os.PathLike[str]) -> Path:
    """Where a file is written before it gets its name, beside it, so that half a file never has it."""
    whole = Path(path)
    return whole.with_name(f".{whole.name}.part{whole.suffix}")
