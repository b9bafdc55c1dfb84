"""What a long computation says on its way, for whoever listens: a command shows it, the library itself prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class Listener:
    """`progress` is called with what is being done, how many parts of it are done, and how many there are; `note` with a
    sentence that the user should read, such as how many files were ignored."""

    progress: Callable[[str, int, int], None] = lambda what, done, total: None
    note: Callable[[str], None] = lambda text: None


_NOBODY = Listener()
_LISTENER: ContextVar[Listener] = ContextVar("pliant_listener", default=_NOBODY)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside, what runs in this thread tells the listener how far it is."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextmanager
def noting() -> Iterator[list[str]]:
    """The notes of what runs inside. Progress goes to whoever listens already."""
    notes: list[str] = []
    with listening(replace(_LISTENER.get(), note=notes.append)):
        yield notes


def note(text: str) -> None:
    _LISTENER.get().note(text)


def told(what: str, parts: Sequence[_T]) -> Iterator[_T]:
    """The parts of a computation, one after the other; a listener hears of each.

    >>> with listening(Listener(lambda what, done, total: print(f"{what} {done}/{total}"))):
    ...     total = sum(told("adding", [1, 2]))
    adding 0/2
    adding 1/2
    adding 2/2
    """
    progress = _LISTENER.get().progress
    progress(what, 0, len(parts))
    try:
        for done, part in enumerate(parts):
            if done:
                progress(what, done, len(parts))
            yield part
    finally:
        progress(what, len(parts), len(parts))  # also where the rest was not needed
