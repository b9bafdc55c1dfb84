"""What data from a file must look like, said once and checked before any of it is used."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


class Either:
    """One of several shapes; an error tells about the last one."""

    def __init__(self, *shapes: Any) -> None:
        self.shapes = shapes


NUMBER = Either(int, float)


def check(shape: Any, value: Any, where: str) -> None:
    """A ValueError that names the place where the value is not as the shape says.

    A shape is a type, None, `Either(…)`, `[item]`, a tuple of items in this order, `{str: item}` for any names, or a dict with
    these names, and maybe others. A bool is no number.

    >>> check({"step": int, "names": [str]}, {"step": 3, "names": ["a", 4]}, "state")
    Traceback (most recent call last):
    ValueError: state.names[1] is 4, not str.
    """
    if isinstance(shape, Either):
        for each in shape.shapes[:-1]:
            with suppress(ValueError):
                return check(each, value, where)
        check(shape.shapes[-1], value, where)
    elif isinstance(shape, list):
        _expect(isinstance(value, list), value, where, "a list")
        for i, item in enumerate(value):
            check(shape[0], item, f"{where}[{i}]")
    elif isinstance(shape, tuple):
        _expect(isinstance(value, (list, tuple)) and len(value) == len(shape), value, where, f"{len(shape)} items")
        for i, (each, item) in enumerate(zip(shape, value, strict=True)):
            check(each, item, f"{where}[{i}]")
    elif isinstance(shape, dict) and str in shape:
        _expect(isinstance(value, dict) and all(isinstance(name, str) for name in value), value, where, "a dict of names")
        for name, item in value.items():
            check(shape[str], item, f"{where}.{name}")
    elif isinstance(shape, dict):
        _expect(isinstance(value, dict), value, where, "a dict")
        for name, item in shape.items():
            if name not in value:
                raise ValueError(f"{where} has no {name!r}.")
            check(item, value[name], f"{where}.{name}")
    elif shape is None:
        _expect(value is None, value, where, "None")
    elif shape is not Any:
        _expect(isinstance(value, shape) and (shape is bool or not isinstance(value, bool)), value, where, shape.__name__)


def _expect(holds: bool, value: Any, where: str, what: str) -> None:
    if not holds:
        given = repr(value)
        raise ValueError(f"{where} is {given if len(given) < 60 else type(value).__name__}, not {what}.")
