"""Where the custom kernels for ARM processors serve. Some of PyTorch's convolutions are several times too slow there."""

from __future__ import annotations

import platform
from typing import Any

import torch

SLOW_HERE = platform.machine() in ("aarch64", "arm64")


def is_slow(input: Any, weight: Any) -> bool:
    """Whether PyTorch is slow for convolutions with such tensors, whatever their settings."""
    return (
        SLOW_HERE
        and input.dim() == weight.dim() == 4
        and input.device.type == "cpu"
        and input.dtype == weight.dtype == torch.float32
    )
