"""A context in which compiled and scripted code runs as it was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

_lock = Lock()
_users = 0  # of `eager`, in all threads
_stance: Any = None


@contextmanager
def eager() -> Iterator[None]:
    """Inside, what `torch.compile` and `torch.jit` have compiled runs operation by operation.

    Dynamo gives up on code for good that it meets under a dispatch mode, and traces through function modes into the library.
    Its setting is one for all threads: the first to need it sets it, and the last resets it. TorchScript joins operations after
    a few runs, so that the backward graph changes.
    """
    global _users, _stance
    with _lock:
        if not _users:
            _stance = torch.compiler.set_stance("force_eager")
        _users += 1
    try:
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _stance.__exit__(None, None, None)
