"""What the kernels here cost beside PyTorch's, for the prices of captured steps."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from pliant.core.prices import KernelPrices
from pliant.runtime.batchnorm import in_eights


def _serves(values: torch.Tensor) -> bool:
    return find_spec("triton") is not None and in_eights(values)


# The kernel of norm_triton.py against cuDNN's, on an H200.
PRICES = KernelPrices(of_batch=0.25, of_running=0.16, serves=_serves)
