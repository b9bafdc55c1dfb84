"""A context in which code that `torch.compile` compiles runs as it was written."""

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
    """Inside, compiled code runs as it was written, in all threads.

    Dynamo gives up on code for good that it meets under a dispatch mode, and traces through function modes into the library.
    PyTorch's setting is one for the whole process: the first to need it sets it, and the last resets it.
    """
    global _users, _stance
    with _lock:
        if not _users:
            _stance = torch.compiler.set_stance("force_eager")
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _stance.__exit__(None, None, None)
