"""Keep a solver written in C from printing to the standard output. No file descriptor is touched."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any


class _Stdout:
    """The variable `stdout` of the C library, which its functions print to. Python and other processes do not use it.

    The GNU C library documents that programs may set it. Where there is no such variable, nothing is silenced.
    """

    def __init__(self) -> None:
        self._lock, self._users = Lock(), 0
        self._now: Any = None
        try:
            library = ctypes.CDLL(None)
            library.fopen.restype = ctypes.c_void_p
            self._nowhere = library.fopen(os.devnull.encode(), b"w")
            if library.gnu_get_libc_version and self._nowhere:
                self._now = ctypes.c_void_p.in_dll(library, "stdout")
        except (OSError, AttributeError, TypeError, ValueError):  # another C library
            pass
        self._own: Any = None

    def silence(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1 and self._now is not None:
                self._own = self._now.value
                self._now.value = self._nowhere

    def restore(self) -> None:
        """The last of all threads that silenced it brings it back."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._now is not None:
                self._now.value = self._own


@cache
def _stdout() -> _Stdout:
    return _Stdout()


@contextmanager
def silence() -> Iterator[None]:
    """Inside, what C code prints goes nowhere, in any thread.

    HiGHS 1.12, of scipy 1.17, prints a line where it solves a part again, and no option of it keeps it from that
    (jump-dev/HiGHS.jl, issue 312): 11 of 7,000 random problems brought one.
    """
    _stdout().silence()
    try:
        yield
    finally:
        _stdout().restore()
