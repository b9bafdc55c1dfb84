"""Live bytes: storages, each counted once however many tensors share it, and the peak while something runs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pliant.runtime.compiled import eager
from pliant.runtime.torch_internals import TorchDispatchMode, tree_leaves, uses_onednn

_SMALL = 1 << 12  # elements that are not worth their while
_SMALL_COPY = 1 << 16  # bytes that a heap has anyway
_PLAIN = (torch.Tensor, nn.Parameter)
_ALIGNED = 512  # bytes: where any tensor may begin
_CPU_CACHE = 1 << 24  # bytes: about what the caches of a processor hold


def when_freed(tensor: torch.Tensor, then: Callable[[], None]) -> Any:
    """Call `then` when the memory behind a tensor is freed, for as long as the result is held."""
    try:
        return weakref.ref(tensor.untyped_storage(), lambda _: then())
    except (NotImplementedError, RuntimeError):
        return weakref.ref(tensor, lambda _: then())


def resident() -> int | None:
    """Bytes of this process in main memory, Python and libraries included; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def resident_peak() -> int | None:
    """The most bytes that this process has had in main memory at a time; None where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:", 1)[1].split(maxsplit=1)[0]) * 1024
    except (OSError, IndexError, ValueError):  # not Linux
        return None


def storage(tensor: torch.Tensor) -> tuple[int, int]:
    """A name for the memory behind a tensor, and its bytes."""
    try:
        memory = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors and other subclasses have no single storage
        return id(tensor), tensor.numel() * tensor.element_size()
    return memory._cdata, memory.nbytes()


def kernel_copies(func: Any, args: Sequence[Any], out: Any) -> tuple[int, int]:
    """Bytes of input and output that a convolution on the CPU copies inside, where it does; in backward, those of its forward.

    oneDNN has its own order in memory. Of tensors that are not channels-last it copies the larger of the two forward and for
    an input gradient, and both for a weight gradient (measured: docs/notebook.md). Small ones do not count.
    """
    if func is torch.ops.aten.convolution.default:
        convolution, result = args, out
    elif func is torch.ops.aten.convolution_backward.default:
        convolution, result = (*args[1:3], None, *args[4:10]), args[0]
    else:
        return 0, 0
    x, weight = convolution[:2]
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    sizes = x.numel() * x.element_size(), result.numel() * result.element_size()
    if max(sizes) < _SMALL_COPY or x.device.type != "cpu" or x.dim() < 4:
        return 0, 0
    if any(_is_only(t, last) for t in (x, weight)) or not uses_onednn(convolution):
        return 0, 0
    return sizes


def _is_only(tensor: torch.Tensor, order: torch.memory_format) -> bool:
    return tensor.is_contiguous(memory_format=order) and not tensor.is_contiguous()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations make while it is on, and remembers the peak.

    On the CPU it follows every storage from the operation that makes it until it is freed; scratch memory inside a kernel is
    not seen but, with `kernels`, for the copies of convolutions. Compiled code runs eagerly. On CUDA it reads the allocator,
    which sees all of that. What an operation finds is not what it makes.
    """

    def __init__(self, device: torch.device, kernels: bool = False) -> None:
        super().__init__()
        self._kernels = kernels
        self._device = device if device.type == "cuda" else None
        self._refs: dict[int, Any] = {}
        self._bytes = self._peak = 0
        self._start = self._allocated("current")

    def _allocated(self, when: Literal["current", "peak"]) -> int:
        # The nested form: `max_memory_allocated` flattens and sorts a hundred figures to tell one.
        return torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"][when] if self._device else 0

    @property
    def bytes(self) -> int:
        """What lives now, of what was made since the start."""
        return self._allocated("current") - self._start if self._device is not None else self._bytes

    @property
    def peak(self) -> int:
        """The most that lived at a time since the start or `forget`."""
        return self._allocated("peak") - self._start if self._device is not None else self._peak

    def forget(self) -> None:
        """Look for a peak anew from here."""
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._peak = self._bytes

    def __enter__(self) -> LiveBytes:
        if self._device is not None:
            return self
        self._eagerly = eager()
        self._eagerly.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._device is None:
            super().__exit__(*error)
            self._eagerly.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see((args, kwargs), made=False)
        out = func(*args, **(kwargs or {}))
        self._see(out, made=True)
        if self._kernels:
            copies = kernel_copies(func, args, out)
            trains = func is torch.ops.aten.convolution_backward.default and args[10][1]
            self._peak = max(self._peak, self._bytes + (sum(copies) if trains else max(copies)))
        return out

    def _see(self, tree: Any, made: bool) -> None:
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":  # those have a shape and no memory
                key, size = storage(tensor)
                if key not in self._refs:
                    size = size if made else 0
                    self._refs[key] = when_freed(tensor, partial(self._freed, key, size))
                    self._bytes += size
                    self._peak = max(self._peak, self._bytes)

    def _freed(self, key: int, size: int) -> None:
        if self._refs.pop(key, None) is not None:
            self._bytes -= size


def inference_peak(run: Callable[[], Any], device: torch.device, kernels: bool = False) -> int | None:
    """Peak live bytes of a pass without gradients; None where it needs them, since the loss itself differentiates."""
    live = LiveBytes(device, kernels)
    live.forget()
    try:
        with live, torch.no_grad():
            run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None
    return live.peak


class _Shape(NamedTuple):
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    bytes: int  # from its first element to its last


def _cached_at_most(device: torch.device) -> int:
    return 2 * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else _CPU_CACHE


class StandIns(saved_tensors_hooks):
    """Forward passes inside keep the shapes of what backward needs and not the values: backward finds zeros in their place.

    The time of a pass depends on shapes, with few exceptions (indices that are all 0 point to one place). So a pass can be
    timed where there is no room for all that it would keep; its gradients mean nothing. Integers (they may be indices), small
    tensors and the model's own tensors are kept as they are. All zeros share one piece of memory, but tensors that follow each
    other lie apart in it, so that none is found in a cache of the processor.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._let_go, self._stand_in)
        own = (tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.layout == torch.strided)
        self._own = {tensor.data_ptr() for tensor in own if type(tensor) in _PLAIN}
        self._largest = self._at = 0
        self._zeros: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._zeros.clear()

    def _let_go(self, tensor: torch.Tensor) -> torch.Tensor | _Shape:
        itself = tensor if tensor.grad_fn is None else tensor.detach()  # an output that its own node keeps would be a cycle
        if tensor.numel() < _SMALL or not tensor.is_floating_point() or type(tensor) not in _PLAIN:
            return itself
        if tensor.layout != torch.strided or tensor.is_nested or tensor.data_ptr() in self._own:
            return itself
        size, stride = tensor.shape, tensor.stride()
        elements = 1 + sum((many - 1) * apart for many, apart in zip(size, stride, strict=True))
        shape = _Shape(size, stride, tensor.dtype, tensor.device, elements * tensor.element_size())
        self._largest = max(self._largest, shape.bytes)
        return shape

    def _stand_in(self, kept: torch.Tensor | _Shape) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        zeros = self._zeros.get((kept.device, kept.dtype))
        if zeros is None or zeros.nbytes < kept.bytes:
            zeros = self._zeros[kept.device, kept.dtype] = self._enough(kept.device).view(kept.dtype)
        at = self._at if self._at + kept.bytes <= zeros.nbytes else 0
        self._at = at + -(-kept.bytes // _ALIGNED) * _ALIGNED
        return zeros.as_strided(kept.size, kept.stride, at // zeros.element_size())

    def _enough(self, device: torch.device) -> torch.Tensor:
        """As many zeros as anything needs, and some more."""
        there = self._zeros.get((device, torch.uint8))
        if there is None or there.nbytes < self._largest:
            size = max(self._largest, min(4 * self._largest, _cached_at_most(device)))
            self._zeros = {key: zeros for key, zeros in self._zeros.items() if key[0] != device}  # all are of one memory
            there = torch.zeros(-(-size // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=device)
            self._zeros[device, torch.uint8] = there
        return there


class StepPeak:
    """The peak of one optimizer step beyond that of inference, with the optimizer's state as it is from then on.

    The parts of a step run inside of it, as many as there are. `before` are the bytes of gradients and of state that stand at
    its start, `state()` those of state that stand when it is asked. What kernels copy inside counts too.
    """

    def __init__(self, device: torch.device, inference: int, before: int, state: Callable[[], int]) -> None:
        self._inference, self._before, self._state = inference, before, state
        self._had, self._passes = state(), 0
        self._live = LiveBytes(device, kernels=True)
        self._live.forget()

    def __enter__(self) -> StepPeak:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def updating(self) -> None:
        """The passes are over; the update comes."""
        self._passes = self._live.peak
        self._live.forget()

    @property
    def bytes(self) -> int | None:
        """What the step took: its passes beside all of the state, its update beside what there was before it.

        None where it cannot be told: the first state was made, and nobody said when the passes were over.
        """
        state = self._state()
        if not self._passes and state != self._had:
            return None
        grown = max(state - self._had, 0)
        return max(self._passes + grown, self._live.peak) + self._before - self._inference
