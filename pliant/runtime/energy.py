"""Joules, read from a real meter (NVML, RAPL, a Jetson's sensor); without one there is no number and never an estimate."""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pliant.core.errors import PliantError

_SAMPLE_SECONDS = 0.05
_SAMPLED = f"sampled every {_SAMPLE_SECONDS * 1e3:.0f} ms"
_WRAP_SECONDS = 30.0  # a RAPL counter of 65 kJ wraps once at most in this time, up to 2 kW
_BOARD_RAIL = "VDD_IN"  # the rail that feeds the whole module; others are parts of it

Clock = Callable[[], float]
Wait = Callable[[threading.Event, float], bool]  # (stop, seconds) → whether to stop


class MeterError(PliantError, RuntimeError):
    """A meter that cannot be read, or no longer."""


class Meter:
    """A running total of joules since it was opened; `name` says in words what it reads. Close it: a thread may read along.

    >>> readings = iter([10.0, 12.5, 12.5])
    >>> with Meter("a shelf meter", counter(lambda: next(readings))) as shelf:
    ...     shelf.joules()
    2.5
    """

    def __init__(
        self,
        name: str,
        advance: Callable[[], float],
        every: float | None = None,
        shut: Callable[[], None] | None = None,
        wait: Wait = threading.Event.wait,
    ) -> None:
        """`advance` gives the joules since its previous call; with `every`, a thread calls it that often (seconds)."""
        self.name = name
        self._read, self._shut, self._wait = advance, shut, wait
        self._total, self._closed = 0.0, False
        self._failure: Exception | None = None
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        if every is not None:
            self._thread = threading.Thread(target=self._follow, args=(every,), name=f"pliant meter: {name}", daemon=True)
            self._thread.start()

    def joules(self) -> float:
        """Joules since the meter was opened, or until it was closed; never falls."""
        self._advance()
        with self._lock:
            if self._failure is not None:
                what = f"{self.name} cannot be read any more ({self._failure}). It had counted {self._total:.6g} J until then."
                raise MeterError(f"{what} Open a new meter.") from self._failure
            return self._total

    def close(self) -> None:
        """Take a last reading, stop the thread and let the source go; `joules()` keeps the total."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._advance()
        with self._lock:
            closed, self._closed = self._closed, True
        if self._shut is not None and not closed:
            self._shut()

    def _follow(self, every: float) -> None:
        while not self._wait(self._stop, every) and self._failure is None:
            self._advance()

    def _advance(self) -> None:
        with self._lock:
            if self._closed or self._failure is not None:
                return
            try:
                self._total += self._read()
            except Exception as error:  # whatever a source raises, `joules()` tells it, also when it happened in the thread
                self._failure = error

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def counter(read: Callable[[], float], span: float | None = None) -> Callable[[], float]:
    """Joules since the previous call, off a counter of joules that starts again from 0 after `span`."""
    last = read()

    def advance() -> float:
        nonlocal last
        now = read()
        grown = now - last
        if grown < 0 and span is not None:
            grown += span
        if grown < 0:
            raise MeterError(f"its counter fell from {last:.6g} to {now:.6g} J: it was reset")
        last = now
        return grown

    return advance


def integral(watts: Callable[[], float], clock: Clock = time.monotonic) -> Callable[[], float]:
    """Joules since the previous call, off readings of power: (P₀ + P₁) / 2 · (t₁ − t₀)."""

    def sample() -> tuple[float, float]:
        power = watts()
        if power < 0:
            raise MeterError(f"it reads {power:.6g} W: that is no power drawn")
        return clock(), power

    then, before = sample()

    def advance() -> float:
        nonlocal then, before
        now, power = sample()
        grown = (before + power) / 2 * (now - then)
        then, before = now, power
        return grown

    return advance


def meter(
    device: torch.device | str = "cpu",
    root: Path = Path("/sys"),
    clock: Clock = time.monotonic,
    wait: Wait = threading.Event.wait,
) -> Meter | None:
    """The best meter for what runs on this device, or None where there is none: `missing` says why.

    It reads the whole GPU, CPU packages or board, whoever uses them, and nothing else: a GPU's joules hold none of its host's.
    It does not wait for a GPU: synchronize before you read. A counter moves in steps (an H200's every 0.1 s) and sampled power
    may lag (newer GPUs give a mean over a second), so read over many steps, not over one.
    """
    found = _find(device, root, clock, wait)
    return None if isinstance(found, str) else found


def missing(device: torch.device | str = "cpu", root: Path = Path("/sys")) -> str:
    """Why there is no meter for this device, source by source; empty where there is one."""
    found = _find(device, root, time.monotonic, lambda stop, seconds: True)
    if isinstance(found, str):
        return found
    found.close()
    return ""


def _find(device: torch.device | str, root: Path, clock: Clock, wait: Wait) -> Meter | str:
    where = torch.device(device)
    probes: dict[str, Callable[[], Meter]] = {}
    if where.type == "cuda":
        probes["NVML"] = lambda: _nvml(where, clock, wait)
    if where.type == "cpu":
        probes["RAPL"] = lambda: _rapl(root, wait)
    if where.type in ("cuda", "cpu"):
        probes["Jetson"] = lambda: _jetson(root, clock, wait)  # one sensor for the board, so for its GPU too
    reasons = []
    for source, probe in probes.items():
        try:
            return probe()
        except PermissionError as error:
            reasons.append(f"{source}: {error.filename} may not be read (permission denied; as root: chmod a+r)")
        except (MeterError, OSError, ValueError) as error:
            reasons.append(f"{source}: {error}")
    return "no meter here: " + ("; ".join(reasons) or f"no source knows devices of type {where.type!r}")


def _nvml(device: torch.device, clock: Clock, wait: Wait) -> Meter:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        raise MeterError("pynvml is not installed (pip install nvidia-ml-py)") from error
    index = device.index if device.index is not None else torch.cuda.current_device() if torch.cuda.is_available() else 0
    if index >= torch.cuda.device_count():
        raise MeterError(f"torch sees no GPU {index} (it sees {torch.cuda.device_count()})")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise MeterError(f"the driver does not answer ({error})") from error
    try:
        return _gpu(nvml, torch.cuda.get_device_properties(index), clock, wait)
    except nvml.NVMLError as error:
        nvml.nvmlShutdown()
        raise MeterError(f"GPU {index} gives neither energy nor power ({error})") from error


def _gpu(nvml: Any, torchs: Any, clock: Clock, wait: Wait) -> Meter:
    """NVML counts GPUs otherwise than torch does (CUDA_VISIBLE_DEVICES), so by UUID, else by place on the bus."""
    if hasattr(torchs, "uuid"):
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torchs.uuid}")
    else:
        place = f"{torchs.pci_domain_id:08x}:{torchs.pci_bus_id:02x}:{torchs.pci_device_id:02x}.0"
        handle = nvml.nvmlDeviceGetHandleByPciBusId(place)
    name = f"NVML: {nvml.nvmlDeviceGetName(handle)}"
    try:
        advance = counter(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)
        return Meter(f"{name} (energy counter)", advance, shut=nvml.nvmlShutdown)
    except nvml.NVMLError:  # no counter: GPUs older than Volta
        advance = integral(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, clock)
        return Meter(f"{name} (power, {_SAMPLED})", advance, _SAMPLE_SECONDS, nvml.nvmlShutdown, wait)


def _rapl(root: Path, wait: Wait) -> Meter:
    """All CPU packages together: one that cannot be read would leave half a sum, so then there is no meter."""
    zones = root / "class" / "powercap"
    top = [zone for zone in sorted(zones.glob("intel-rapl:*")) if re.fullmatch(r"intel-rapl:\d+", zone.name)]
    named = [((zone / "name").read_text().strip(), zone) for zone in top]
    packages = [(name, zone) for name, zone in named if name.startswith("package")]  # psys would count them twice
    if not packages:
        raise MeterError(f"no CPU package under {zones}")
    parts = [_package(zone) for _, zone in packages]
    names = " + ".join(name for name, _ in packages)
    return Meter(f"RAPL: {names}", lambda: sum(part() for part in parts), _WRAP_SECONDS, wait=wait)


def _package(zone: Path) -> Callable[[], float]:
    return counter(lambda: _number(zone / "energy_uj") / 1e6, span=_number(zone / "max_energy_range_uj") / 1e6)


def _jetson(root: Path, clock: Clock, wait: Wait) -> Meter:
    drivers = root / "bus" / "i2c" / "drivers"
    labels = sorted(drivers.glob("ina3221*/*/hwmon/hwmon*/in*_label"))  # each device is a link: ** would not follow it
    rails = {label.read_text().strip(): label for label in labels}
    if not rails:
        raise MeterError(f"no INA3221 under {drivers}")
    if _BOARD_RAIL not in rails:
        raise MeterError(f"its INA3221 has no rail {_BOARD_RAIL} for the whole board, only {', '.join(sorted(rails))}")
    folder, channel = rails[_BOARD_RAIL].parent, rails[_BOARD_RAIL].name[len("in") : -len("_label")]
    power, volts, amperes = (folder / f"{kind}{channel}_input" for kind in ("power", "in", "curr"))  # µW, mV, mA

    def watts() -> float:
        return _number(power) / 1e6 if has_power else _number(volts) * _number(amperes) / 1e6

    has_power = power.exists()
    return Meter(f"Jetson INA3221: {_BOARD_RAIL} ({_SAMPLED})", integral(watts, clock), _SAMPLE_SECONDS, wait=wait)


def _number(path: Path) -> int:
    text = path.read_text().strip()
    try:
        return int(text)
    except ValueError as error:
        raise MeterError(f"{path} holds {text!r}, not a whole number") from error
