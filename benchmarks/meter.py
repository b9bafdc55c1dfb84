"""Memory meters that do not depend on the library: every tensor followed, and PyTorch's own allocator."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations create while it is on, and their peak.

    On a CPU it follows every storage from the operation that creates it until it is freed. It does not see scratch memory
    inside a kernel. On a GPU it reads the allocator, which sees that too. Tensors that were there before do not count.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._cuda = device == "cuda"
        self._known: dict[int, Any] = {}
        self._bytes = self._peak = 0
        self._start = torch.cuda.memory_allocated() if self._cuda else 0

    @property
    def bytes(self) -> int:
        return torch.cuda.memory_allocated() - self._start if self._cuda else self._bytes

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self._start if self._cuda else self._peak

    def reset_peak(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        self._peak = self._bytes

    def __enter__(self) -> LiveBytes:
        return self if self._cuda else super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if not self._cuda:
            super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._follow((args, kwargs), created=False)
        out = func(*args, **(kwargs or {}))
        self._follow(out, created=True)
        return out

    def _follow(self, tree: Any, created: bool) -> None:
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                memory = tensor.untyped_storage()
                if memory._cdata not in self._known:
                    size = memory.nbytes() if created else 0
                    self._known[memory._cdata] = weakref.ref(memory, partial(self._freed, memory._cdata, size))
                    self._bytes += size
                    self._peak = max(self._peak, self._bytes)

    def _freed(self, key: int, size: int, _: Any) -> None:
        if self._known.pop(key, None) is not None:
            self._bytes -= size


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state."""
    return tensor_bytes(list(optimizer.state.values()))


def tensor_bytes(tree: Any) -> int:
    """Bytes of the tensors in nested lists and dictionaries."""
    return sum(one.nbytes for one in tree_leaves(tree) if isinstance(one, torch.Tensor))


def allocated_peak(run: Callable[[], Any]) -> int:
    """The most bytes that the CPU allocator had given out during `run`, beyond those at its start."""
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(accumulate(changes), default=0)


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler writes to the standard error stream when it starts and stops, whatever its log level."""
    sys.stderr.flush()
    stream, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stream, 2)
        os.close(stream)
        os.close(nowhere)
