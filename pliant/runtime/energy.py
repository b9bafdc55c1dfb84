"""Joules from a real meter, through the package zeus (`pip install 'pliant[energy]'`). Without a meter there is no number."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from typing import Any, Protocol

import torch

from pliant.core.errors import PliantError

_WINDOW_SECONDS = 2.0  # of steps: a counter that moves every 0.1 s is then read to 5 %
_WEIGHT = 0.5  # of the newest window in the smoothed power
_BUSY = 0.8  # share of a window that steps must fill, or the window says little about steps
_BY_DEVICE = {"cuda": ("GPU", "SoC"), "cpu": ("CPU", "SoC"), "mps": ("SoC",)}  # in which order sources are tried
_ON_SOC = {"cuda": ("total_energy_mj",), "cpu": ("total_energy_mj", "cpu_total_mj"), "mps": ("gpu_mj",)}
_HINTS = {
    "cuda": "Check that `nvidia-smi` or `amd-smi` shows this GPU.",
    "cpu": "On Linux, CPU counters are readable by root alone: chmod a+r /sys/class/powercap/intel-rapl*/energy_uj.",
}


class MeterError(PliantError, RuntimeError):
    """There is no meter, or it cannot be read."""


class Meter(Protocol):
    """Joules so far, from an arbitrary start; never falls. `name` says what is read."""

    @property
    def name(self) -> str: ...

    def joules(self) -> float: ...


class CounterMeter:
    """Joules since it was opened, from a counter of joules.

    A counter that wrapped reads low until zeus notices it, so a reading below an earlier one is ignored.

    >>> readings = iter([10.0, 12.5, 11.0])
    >>> meter = CounterMeter("a shelf meter", lambda: next(readings))
    >>> meter.joules(), meter.joules()
    (2.5, 2.5)
    """

    def __init__(self, name: str, read: Callable[[], float]) -> None:
        self.name, self._read = name, read
        self._start, self._most = read(), 0.0

    def joules(self) -> float:
        try:
            self._most = max(self._most, self._read() - self._start)
        except Exception as error:  # each source has its own exceptions
            raise MeterError(f"{self.name} cannot be read any more: {_said(error)}. Open a new meter.") from error
        return self._most


def recorded(readings: Iterable[float], name: str = "a recorded meter") -> CounterMeter:
    """A meter that replays counter readings, for tests; after the last one it stands still."""
    left = iter(readings)
    last = 0.0

    def read() -> float:
        nonlocal last
        last = next(left, last)
        return last

    return CounterMeter(name, read)


class Power:
    """Watts of training, smoothed: joules per second of steps, over windows of two seconds.

    What is drawn between two steps counts as the steps' own. Windows that steps do not fill (evaluation, slow data loading) are
    left out, and so are those in which the meter did not move.

    >>> power = Power(100.0)
    >>> [power.update(lambda: joules, seconds=t, elapsed=t) for joules, t in [(0.0, 0.0), (400.0, 2.0), (500.0, 2.5)]]
    [100.0, 150.0, 150.0]
    """

    def __init__(self, watts: float | None = None) -> None:
        self.watts = watts
        self._since: tuple[float, float, float] | None = None

    def update(self, read: Callable[[], float], seconds: float, elapsed: float) -> float | None:
        """The smoothed power, None as long as nothing is known. `seconds` are those of all steps so far, `elapsed` those that
        passed. `read` (`meter.joules`) is called at the ends of windows alone, since a GPU's meter takes milliseconds."""
        before, busy, passed = self._since, 0.0, 0.0
        if before is not None:
            busy, passed = seconds - before[1], elapsed - before[2]
            if busy < _WINDOW_SECONDS and passed < 2 * _WINDOW_SECONDS:
                return self.watts
        joules = read()
        self._since = joules, seconds, elapsed
        if before is not None and joules > before[0] and busy >= _BUSY * passed:
            watts = (joules - before[0]) / busy
            self.watts = watts if self.watts is None else self.watts + _WEIGHT * (watts - self.watts)
        return self.watts


def meter(device: torch.device | str = "cpu") -> Meter | None:
    """The meter for what runs on this device, or None: `missing` says why.

    It reads a whole GPU, all CPU packages or a whole board, whoever uses them. A GPU's joules do not include its host's.
    Wait for the GPU before you read (`torch.cuda.synchronize`), and read over seconds: counters move in jumps of up to 0.1 s.
    """
    try:
        return required(device)
    except MeterError:
        return None


def missing(device: torch.device | str = "cpu") -> str:
    """Why there is no meter for this device; empty where there is one."""
    try:
        required(device)
    except MeterError as error:
        return str(error)
    return ""


def required(device: torch.device | str = "cpu") -> Meter:
    """The meter for what runs on this device; `MeterError` where there is none."""
    where = torch.device(device)
    zeus = _zeus()
    tried = []
    for source in _BY_DEVICE.get(where.type, ()):
        try:
            with redirect_stdout(io.StringIO()):  # amdsmi prints where there is no AMD GPU
                return {"GPU": _gpu, "CPU": _cpu, "SoC": _soc}[source](zeus, where)
        except Exception as error:  # each source has its own exceptions, and some leave those of others through
            if "bootstrapping phase" in str(error):  # a helper process of zeus that runs the user's script: it must end here
                raise
            tried.append(f"{source}: {_said(error)}")
    found = "; ".join(tried) or f"nothing for devices of type {where.type!r}"
    hint = _HINTS.get(where.type, "Limit time= in place of energy=.")
    raise MeterError(f"there is no energy meter for {str(where)!r}. zeus found: {found}. {hint}")


def _zeus() -> Any:
    """`zeus.device`. Imported when asked: it takes half a second, and old versions log to the stdout that they find."""
    try:
        with redirect_stdout(io.StringIO()):
            return importlib.import_module("zeus.device")
    except ImportError as error:
        said = f"energy is read with the package zeus, which cannot be imported ({error})."
        raise MeterError(f"{said} Run: pip install 'pliant[energy]'") from error


def _gpu(zeus: Any, where: torch.device) -> Meter:
    index = where.index if where.index is not None else torch.cuda.current_device() if torch.cuda.is_available() else 0
    gpus = zeus.get_gpus()
    names = [_call(gpus, "get_name", "getName", i) for i in range(len(gpus))]
    if index >= len(names):
        raise MeterError(f"it sees {len(names)} GPUs, so none with index {index}")
    if len(set(names)) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise MeterError("GPUs of several kinds, which CUDA numbers in another order. Set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return CounterMeter(f"energy counter of {names[index]}", lambda: _total(gpus, index) / 1e3)


def _cpu(zeus: Any, where: torch.device) -> Meter:
    """All CPU packages together. A zone for the whole platform (psys) would count them twice."""
    cpus = [cpu for cpu in zeus.get_cpus().cpus if _zone(cpu).startswith("package")]
    if not cpus:
        raise MeterError("no CPU package")
    name = "RAPL counters of " + " + ".join(map(_zone, cpus))
    return CounterMeter(name, lambda: sum(_total(cpu).cpu_mj for cpu in cpus) / 1e3)


def _zone(cpu: Any) -> str:
    return getattr(getattr(cpu, "rapl_file", None), "name", "package")  # zeus' daemon names none


def _soc(zeus: Any, where: torch.device) -> Meter:
    if not hasattr(zeus, "get_soc"):
        raise MeterError("this version of zeus reads none (`zeus` 0.12 and later do)")
    soc = zeus.get_soc()
    first = _total(soc)
    field = next((field for field in _ON_SOC[where.type] if getattr(first, field, None) is not None), None)
    if field is None:
        raise MeterError(f"{type(soc).__name__} has no reading for {where.type}")
    return CounterMeter(f"{type(soc).__name__}, {field.removesuffix('_mj')}", lambda: getattr(_total(soc), field) / 1e3)


def _total(source: Any, *which: int) -> Any:
    """Millijoules so far."""
    return _call(source, "get_total_energy_consumption", "getTotalEnergyConsumption", *which)


def _call(source: Any, name: str, old_name: str, *given: int) -> Any:
    """Old versions (zeus-ml 0.11) name its methods in camelCase; later versions warn about those names."""
    return getattr(source, name if hasattr(source, name) else old_name)(*given)


def _said(error: Exception) -> str:
    kind = "" if isinstance(error, MeterError) else f"{type(error).__name__}: "
    return f"{kind}{error}".rstrip(".")
