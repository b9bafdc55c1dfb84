"""The two peaks of a device, FLOP/s and bytes/s: measured once, then read from the user's cache folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pliant.runtime.clock import Watch, device_name
from pliant.runtime.files import cache_folder, write_aside
from pliant.runtime.working import told

Work = Callable[[], object]
Seconds = Callable[[Work], float]  # runs some work and returns how long it took

_REPEATS = 4  # of each timed work, after one that is not counted; the best one is the peak
_SPEND = 0.5  # seconds: no matmul is begun that would take longer than this with its repeats
_RISE = 1.02  # a rate that rises by less has stopped rising
_SIZES = tuple(2**n for n in range(8, 14))
_COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}  # large against the caches


@dataclass(frozen=True)
class Peaks:
    """The most that a device computes and moves in a second."""

    flops: float  # FLOP/s
    bandwidth: float  # bytes/s
    device: str
    dtype: str
    threads: int

    def __post_init__(self) -> None:
        for name, value in (("flops", self.flops), ("bandwidth", self.bandwidth)):
            if not 0 < value < math.inf:
                raise ValueError(f"a peak is a positive number: {name}={value}. Measure it with peaks().")

    @property
    def ridge(self) -> float:
        """The intensity, FLOP per byte, from which on computing takes longer than moving."""
        return self.flops / self.bandwidth

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Peaks:
        numbers = float(data["flops"]), float(data["bandwidth"])
        return cls(*numbers, str(data["device"]), str(data["dtype"]), int(data["threads"]))


def roof_seconds(macs: int, moved: int, peaks: Peaks, launch: float = 0.0) -> float:
    """The least time for this much work: max(2·MACs / peak, bytes / bandwidth) + launch.

    >>> roof_seconds(500, 100, Peaks(flops=1000, bandwidth=50, device="cpu", dtype="float32", threads=1))
    2.0
    """
    return max(2 * macs / peaks.flops, moved / peaks.bandwidth) + launch


def peaks(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, again: bool = False) -> Peaks:
    """This device's peaks: measured once, then read from `$PLIANT_CACHE/peaks.json` (else the user's cache folder).

    `again` measures anew. On CUDA, measuring shows in torch's peak memory statistics.
    """
    device = torch.device(device)
    if device.type not in _COPY_BYTES:
        raise ValueError(f"peaks are measured on cpu and cuda: got {str(device)!r}. Give the device's own as Peaks(…).")
    if not dtype.is_floating_point:
        raise ValueError(f"peaks are those of a floating point dtype: got {dtype}. Use torch.float32, say.")
    key = _key(device, dtype)
    if not again:
        try:
            return Peaks.from_json(_kept()[key])
        except (KeyError, TypeError, ValueError):  # not there, or not a whole one
            pass
    found = measured(clock(device), device, dtype)
    _keep(key, found)
    return found


def measured(seconds: Seconds, device: torch.device, dtype: torch.dtype) -> Peaks:
    """The peaks of a device by this clock."""
    flops, bandwidth = _matmul_peak(seconds, device, dtype), _copy_peak(seconds, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the copies are large, and others may need the memory
    return Peaks(flops, bandwidth, device_name(device), str(dtype).removeprefix("torch."), torch.get_num_threads())


def clock(device: torch.device) -> Seconds:
    """Runs some work on a device and returns its seconds; with one CPU thread, that thread's CPU time."""
    watch = Watch(device)
    return lambda work: watch.time(work)[0]


def _best(seconds: Seconds, work: Work) -> float:
    work()
    return min(seconds(work) for _ in range(_REPEATS))


def _matmul_peak(seconds: Seconds, device: torch.device, dtype: torch.dtype) -> float:
    """The best rate of square matmuls that grow until it stops rising. Ones cost a GPU less power than real data does."""
    peak = 0.0
    for size in told("measuring the device", _SIZES):
        try:
            a, out = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
            took = _best(seconds, partial(torch.mm, a, a, out=out))
        except torch.OutOfMemoryError:
            if not peak:
                raise
            break
        rate = 2 * size**3 / took if took > 0 else 0.0  # a coarse clock may not see a small one
        rises, peak = rate > _RISE * peak or not rate, max(rate, peak)
        if not rises or 8 * took * (_REPEATS + 1) > _SPEND:
            break
    return peak


def _copy_peak(seconds: Seconds, device: torch.device) -> float:
    """The best rate of large copies; each byte is read and written."""
    size = _COPY_BYTES[device.type]
    while True:
        try:
            a, b = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
            took = _best(seconds, partial(b.copy_, a))
            return 2 * size / took if took > 0 else 0.0
        except RuntimeError:  # short of memory: the CPU has no error of its own for that
            if size <= 2**20:
                raise
            size //= 2


def _key(device: torch.device, dtype: torch.dtype) -> str:
    """All that the peaks depend on."""
    parts = [device_name(device), f"{torch.get_num_threads()} threads", str(dtype), f"torch {torch.__version__}"]
    if device.type == "cuda":  # what allow_tf32 says; that one raises once fp32_precision was set
        parts.append(f"tf32 {torch.backends.cuda.matmul.fp32_precision == 'tf32'}")
    return ", ".join(parts)


def _cache_file() -> Path | None:
    folder = cache_folder()
    return folder / "peaks.json" if folder is not None else None


def _kept() -> dict[str, Any]:
    file = _cache_file()
    try:
        kept = json.loads(file.read_bytes()) if file is not None else {}
    except (OSError, ValueError):  # no file, no JSON
        return {}
    return kept if isinstance(kept, dict) else {}


def _keep(key: str, found: Peaks) -> None:
    file = _cache_file()
    if file is not None:
        with suppress(OSError):  # it cannot be written: measured again next time
            write_aside(file, json.dumps(_kept() | {key: found.to_json()}, indent=1).encode())
