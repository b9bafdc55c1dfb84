"""Keep a solver written in C from printing to the standard output."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silence() -> Iterator[None]:
    """Inside, what C code writes to the standard output goes nowhere.

    HiGHS tells it now and then that it solves a part again, whatever it was told (jump-dev/HiGHS.jl, issue 312), and what we
    print there may be read by another program.
    """
    try:
        sys.stdout.flush()
        flush = ctypes.CDLL(None).fflush
        flush(None)
        kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    except (OSError, AttributeError, TypeError, ValueError):  # there is none, or no C library to ask
        yield
        return
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
