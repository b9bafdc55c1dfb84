"""The arguments of a call: the tensors among them, and the rest."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Any

import torch

_ATOMS = frozenset((int, float, bool, NoneType, str))
_HERE = "a tensor"  # stands in the place of one


def split(*given: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors among arguments, and the arguments without them."""
    tensors: list[torch.Tensor] = []
    plain: list[Any] = []
    _split(given, tensors, plain)
    return tensors, plain


def _split(given: Any, tensors: list[torch.Tensor], plain: list[Any]) -> None:
    if isinstance(given, (tuple, list)):
        plain.append(len(given))
        for one in given:
            if type(one) in _ATOMS:  # nearly all: without another call
                plain.append(one)
            elif isinstance(one, torch.Tensor):
                tensors.append(one)
                plain.append(_HERE)
            else:
                _split(one, tensors, plain)
    elif isinstance(given, dict):
        plain.append(tuple(given))
        _split(tuple(given.values()), tensors, plain)
    elif isinstance(given, slice):
        _split((given.start, given.stop, given.step), tensors, plain)
    else:
        plain.append(given)


def swap(given: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The same arguments with other tensors in them."""
    if isinstance(given, torch.Tensor):
        return next(tensors)
    if isinstance(given, (tuple, list)):
        return arranged(type(given), [swap(one, tensors) for one in given])
    if isinstance(given, dict):
        return {name: swap(one, tensors) for name, one in given.items()}
    if isinstance(given, slice):
        return slice(*[swap(one, tensors) for one in (given.start, given.stop, given.step)])
    return given


def arranged(form: Any, ones: list[Any]) -> Any:
    """Items in a list, a tuple or a named tuple."""
    return form(*ones) if hasattr(form, "_fields") else form(ones)
