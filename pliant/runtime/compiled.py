"""A context in which compiled and scripted code runs as it was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import nn

_lock = Lock()
_users = 0  # of `eager`, in all threads
_stance: Any = None
_notices: bool | None = None  # see `notices_frozen_parameters`; None: not tried yet


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


def unjoin_(model: nn.Module) -> None:
    """Scripted parts run operation by operation inside `eager`, also those whose operations TorchScript has joined before."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule) and module._c._has_method("forward"):
            module._c._get_method("forward")._debug_flush_compilation_cache()


def notices_frozen_parameters() -> bool:
    """Whether PyTorch compiles anew where a parameter was frozen, or is no longer.

    PyTorch 2.11 does not: its compiled code goes on with the gradients that were asked for when it was compiled.
    """
    global _notices
    with _lock:
        if _notices is None and not _users:
            with torch.enable_grad(), torch.random.fork_rng(devices=()), torch.device("cpu"):
                layer, x = nn.Linear(1, 1).requires_grad_(False), torch.zeros(1, 1)
                compiled = torch.compile(layer, backend="aot_eager")
                compiled(x)
                layer.requires_grad_(True)
                _notices = bool(compiled(x).requires_grad)
        return bool(_notices)
