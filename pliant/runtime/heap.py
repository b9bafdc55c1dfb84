"""The heap of the process while memory is limited: what is freed goes back to the operating system.

The C library keeps freed memory for later. Tensors of many sizes come and go in a step, so what it keeps can be several times
what lives. Where the library is glibc, its limits on that are lowered while some session needs it. Elsewhere nothing changes.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from threading import Lock
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of glibc's `mallopt`
_LARGE = 1 << 17  # bytes: glibc begins with it. From there on an allocation is a mapping of its own, and freeing it returns it
# Where glibc's own thresholds end once large blocks were freed, which any training has done: it cannot be told to adapt again.
_USUAL = {_TRIM_THRESHOLD: 1 << 26, _MMAP_THRESHOLD: 1 << 25}
_NAMES = {_TRIM_THRESHOLD: "trim_threshold", _MMAP_THRESHOLD: "mmap_threshold"}

_lock = Lock()
_held = 0


def hold() -> None:
    """Return freed memory from now on, until as many calls of `release`."""
    global _held
    libc = _glibc()
    with _lock:
        _held += 1
        if _held == 1 and libc is not None:
            for option in _USUAL:
                libc.mallopt(option, _LARGE)
    give_back()


def release() -> None:
    """The counterpart of `hold`: the last one brings the usual thresholds back, or those that the user had set."""
    global _held
    libc = _glibc()
    with _lock:
        _held -= 1
        if _held == 0 and libc is not None:
            for option, usual in _USUAL.items():
                libc.mallopt(option, _set_by_user(_NAMES[option]) or usual)


def is_held() -> bool:
    """Whether freed memory is returned now."""
    return _held > 0


def give_back() -> None:
    """Return what is free inside the heap; nothing where nobody asked for it (`hold`)."""
    libc = _glibc()
    if _held and libc is not None:
        libc.malloc_trim(0)


def _set_by_user(name: str) -> int | None:
    """A threshold from the environment of the process."""
    tunables = dict(one.partition("=")[::2] for one in os.environ.get("GLIBC_TUNABLES", "").split(":"))
    given = tunables.get(f"glibc.malloc.{name}") or os.environ.get(f"MALLOC_{name.upper()}_")
    try:
        return int(given, 0) if given else None
    except ValueError:
        return None


@cache
def _glibc() -> Any:
    """The C library of this process, if it is glibc; None elsewhere."""
    try:
        libc = ctypes.CDLL(None)
        if libc.gnu_get_libc_version and libc.mallopt:
            libc.malloc_trim.argtypes = [ctypes.c_size_t]
            return libc
    except (OSError, AttributeError, TypeError):  # another C library, or another system
        pass
    return None
