"""A batch is whatever the user's loss takes. Its tensors, its size, its shapes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]  # the user's: a model and a batch → a scalar
Around = Callable[[], AbstractContextManager[Any]]  # what the forward pass of a loss runs inside of
Ready = Callable[[Any], Callable[[], torch.Tensor]]  # a batch → the forward pass of a step on it, with nothing left to prepare


class Pieces(Protocol):
    """A batch that comes in pieces, each as one forward pass takes it; the loss of the whole is the mean of theirs.

    It may be gone through several times and gives the same each time. A list of batches is one; what makes each piece when it
    is asked for takes less memory.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


def map_tensors(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure (tuple, list, dict, named tuple, dataclass, object) with every tensor changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, (str, bytes, type, torch.nn.Module)) or batch is None:
        return batch
    if isinstance(batch, dict):
        changed = copy.copy(batch)
        for key, value in batch.items():
            changed[key] = map_tensors(value, change)
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(value, change) for value in batch)
    names = (
        [f.name for f in dataclasses.fields(batch)] if dataclasses.is_dataclass(batch) else list(getattr(batch, "__dict__", ()))
    )
    if not names:
        return batch
    changed = copy.copy(batch)
    for name in names:
        object.__setattr__(changed, name, map_tensors(getattr(batch, name), change))
    return changed


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a batch."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, note)
    return iter(found)


def size(batch: Any) -> int | None:
    """The number of samples: the leading dimension that the batch's tensors agree on, else None."""
    sizes = {tensor.shape[0] for tensor in tensors(batch) if tensor.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else None


def part(batch: Any, samples: int) -> Any:
    """The first samples of a batch whose tensors agree on their number (`size`)."""
    return map_tensors(batch, lambda tensor: tensor[:samples] if tensor.dim() > 0 else tensor)


def mismatched(batch: Any) -> Any | None:
    """The same samples, each with the label of another: the first tensor is shifted by one sample, the others stay.

    None where a batch has a single tensor, or a single sample.
    """
    found = list(tensors(batch))
    if len(found) < 2 or found[0].dim() == 0 or len(found[0]) < 2:
        return None
    return map_tensors(batch, lambda tensor: tensor.roll(1, 0) if tensor is found[0] else tensor)


def check_not_empty(batch: Any) -> None:
    """Refuse a batch without samples."""
    if size(batch) == 0:
        raise ValueError("the batch is empty: its tensors have no samples. Skip it, or use drop_last in the loader.")


def shapes(batch: Any) -> list[list[int]]:
    """The shape of every tensor, as plain lists."""
    return [list(tensor.shape) for tensor in tensors(batch)]
