"""What the engine's own kernels cost, declared by the engine and used by measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _never(values: Any) -> bool:
    return False


@dataclass(frozen=True)
class KernelPrices:
    """The backward pass of a batch norm on running statistics, where captured steps run it in a kernel of the engine.

    `of_batch` is its time as a share of PyTorch's backward pass on batch statistics, `of_running` of PyTorch's on running
    statistics. `serves(input)` tells whether the kernel takes such an input. The default is PyTorch's own kernels.
    """

    of_batch: float = 1.0
    of_running: float = 1.0
    serves: Callable[[Any], bool] = _never
