"""What data from a file must look like, said once and checked before any of it is used."""

from __future__ import annotations

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
    if (wrong := _wrong(shape, value)) is not None:
        raise ValueError(where + wrong)


def _wrong(shape: Any, value: Any) -> str | None:
    """What is wrong, and where below this value. Text is made where something is: a state has many thousands of places."""
    if shape is Any:
        return None
    if isinstance(shape, type):
        fits = isinstance(value, shape) and (shape is bool or not isinstance(value, bool))
        return None if fits else _not(value, shape.__name__)
    if isinstance(shape, Either):
        wrong = None
        for each in shape.shapes:
            if (wrong := _wrong(each, value)) is None:
                return None
        return wrong
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _not(value, "a list")
        [each] = shape
        for i, item in enumerate(value):
            if (wrong := _wrong(each, item)) is not None:
                return f"[{i}]{wrong}"
    elif isinstance(shape, tuple):
        if not isinstance(value, (list, tuple)) or len(value) != len(shape):
            return _not(value, f"{len(shape)} items")
        for i, (each, item) in enumerate(zip(shape, value, strict=True)):
            if (wrong := _wrong(each, item)) is not None:
                return f"[{i}]{wrong}"
    elif isinstance(shape, dict) and str in shape:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            return _not(value, "a dict of names")
        for name, item in value.items():
            if (wrong := _wrong(shape[str], item)) is not None:
                return f".{name}{wrong}"
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            return _not(value, "a dict")
        for name, item in shape.items():
            if name not in value:
                return f" has no {name!r}."
            if (wrong := _wrong(item, value[name])) is not None:
                return f".{name}{wrong}"
    elif shape is not None:
        raise TypeError(f"{shape!r} is no shape of a state.")
    elif value is not None:
        return _not(value, "None")
    return None


def _not(value: Any, what: str) -> str:
    given = repr(value)
    return f" is {given if len(given) < 60 else type(value).__name__}, not {what}."
