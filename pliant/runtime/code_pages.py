"""The code of libraries that lies in main memory: what is not needed now goes back to the operating system.

Importing PyTorch reads far more code than training runs, and it counts as memory of the process. The files still hold it. So
the system may forget it at any time, and reads it again, page by page, when it is used. Files that a program maps to read data
are left alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DONTNEED = 4  # of Linux's `madvise`


@dataclass
class _Mapping:
    """A part of the address space, as the system describes it."""

    start: int
    end: int
    mode: str  # such as "r-xp"
    path: str
    resident: int = 0  # bytes in main memory
    written: int | None = None  # bytes that differ from the file; None: unknown
    swapped: int | None = None  # bytes that were written, and are not in main memory now


def forget_code() -> int:
    """Let the system take back the pages of libraries that are as in their files. Returns their bytes; 0 where it cannot."""
    try:
        found = [*_mappings(Path("/proc/self/smaps").read_text(errors="replace"))]
        advise = ctypes.CDLL(None).madvise
    except (OSError, ValueError, AttributeError, TypeError):  # not Linux
        return 0
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libraries = {one.path for one in found if "x" in one.mode and one.path.startswith("/")}
    bytes_ = 0
    for one in found:
        is_as_in_file = one.path in libraries and "w" not in one.mode and one.written == one.swapped == 0
        if is_as_in_file and one.resident and advise(one.start, one.end - one.start, _DONTNEED) == 0:
            bytes_ += one.resident
    return bytes_


def _mappings(text: str) -> Iterator[_Mapping]:
    now: _Mapping | None = None
    for line in text.splitlines():
        name, *rest = line.split(maxsplit=5)
        if not name.endswith(":"):
            if now is not None:
                yield now
            start, end = (int(number, 16) for number in name.split("-"))
            now = _Mapping(start, end, rest[0], rest[4] if len(rest) > 4 else "")
        elif now is not None and name == "Rss:":
            now.resident = int(rest[0]) * 1024
        elif now is not None and name == "Anonymous:":
            now.written = int(rest[0]) * 1024
        elif now is not None and name == "Swap:":
            now.swapped = int(rest[0]) * 1024
    if now is not None:
        yield now
