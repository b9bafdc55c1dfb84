"""One bit per element: whether a value lies within an interval, packed eight to a byte, and back.

On the CPU numpy packs, a piece at a time so that it stays in the cache; elsewhere a few PyTorch operations do.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

_PIECE = 1 << 18  # elements


def within(flat: torch.Tensor, low: float, high: float, nan: bool) -> torch.Tensor:
    """For each element of a flat tensor one bit: low < x < high. `nan` is the answer for what is not a number.

    Where `high` is infinite there is no upper end: infinity lies within.
    """
    if flat.device.type != "cpu" or flat.dtype not in (torch.float32, torch.float64):
        if high == math.inf:
            return pack((flat <= low).logical_not_() if nan else flat > low)
        return pack(((flat <= low) | (flat >= high)).logical_not_() if nan else (flat > low) & (flat < high))
    values = flat.numpy()
    if len(values) <= _PIECE:
        return torch.from_numpy(_within(values, low, high, nan)).clone()  # a copy that is PyTorch's own, and seen as such
    out = torch.empty((len(values) + 7) // 8, dtype=torch.uint8)
    packed = out.numpy()
    for start in range(0, len(values), _PIECE):
        piece = _within(values[start : start + _PIECE], low, high, nan)
        packed[start // 8 : start // 8 + len(piece)] = piece
    return out


def _within(values: Any, low: float, high: float, nan: bool) -> Any:
    if not nan:
        return np.packbits(values > low if high == math.inf else (values > low) & (values < high))
    mask = values <= low
    if high != math.inf:
        mask |= values >= high
    packed = np.packbits(mask)
    return np.invert(packed, out=packed)  # whatever is not outside


def pack(mask: torch.Tensor) -> torch.Tensor:
    """A flat boolean tensor as bytes, eight elements in each."""
    if mask.device.type == "cpu":
        out = torch.empty((mask.numel() + 7) // 8, dtype=torch.uint8)
        out.numpy()[:] = np.packbits(mask.numpy())
        return out
    short = -mask.numel() % 8
    if short:
        mask = torch.cat([mask, mask.new_zeros(short)])
    return (mask.view(-1, 8) * _places(mask.device)).sum(dim=1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of so many ones and zeros."""
    if packed.device.type != "cpu":
        return (packed[:, None] & _places(packed.device)).ne(0).view(-1)[:count].to(dtype)
    bits = packed.numpy()
    if count <= _PIECE:
        return torch.from_numpy(np.unpackbits(bits, count=count)).to(dtype)
    out = torch.empty(count, dtype=dtype)
    for start in range(0, count, _PIECE):
        stop = min(start + _PIECE, count)
        piece = np.unpackbits(bits[start // 8 : (stop + 7) // 8], count=stop - start)
        out[start:stop].copy_(torch.from_numpy(piece))
    return out


def _places(device: torch.device) -> torch.Tensor:
    """What each bit of a byte counts, the first element in the highest, as numpy does."""
    if device not in _PLACES:
        _PLACES[device] = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=device)
    return _PLACES[device]


_PLACES: dict[torch.device, torch.Tensor] = {}
