"""Meters: joules off fake counters and sensors, and a plain word where there is none."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant import energy
from pliant.core.errors import PliantError

RANGE_UJ = 262_143_328_850
UUID = "bec22643-b3b1-8c4a-d46d-2ec5a402c3c9"


class Clock:
    """Time that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def idle(stop: threading.Event, seconds: float) -> bool:
    """A sampling loop that takes no sample until it is stopped."""
    return stop.wait()


def never_mind(stop: threading.Event, seconds: float) -> bool:
    """A sampling loop that ends at once."""
    return True


def write(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")
    return path


def zone(root: Path, number: str, name: str, energy_uj: int) -> Path:
    """One RAPL domain; the path of its counter."""
    folder = root / "class" / "powercap" / f"intel-rapl:{number}"
    write(folder / "name", name)
    write(folder / "max_energy_range_uj", RANGE_UJ)
    return write(folder / "energy_uj", energy_uj)


def sensor(root: Path, rails: dict[int, tuple[str, int, int]], driver: str = "ina3221") -> Path:
    """An INA3221 (channel → label, mV, mA), linked from its driver's folder as /sys does; its hwmon folder."""
    folder = root / "devices" / "i2c-1" / "1-0040" / "hwmon" / "hwmon3"
    for channel, (label, millivolts, milliamperes) in rails.items():
        write(folder / f"in{channel}_label", label)
        write(folder / f"in{channel}_input", millivolts)
        write(folder / f"curr{channel}_input", milliamperes)
    link = root / "bus" / "i2c" / "drivers" / driver / "1-0040"
    link.parent.mkdir(parents=True)
    link.symlink_to(folder.parent.parent, target_is_directory=True)
    return folder


class NVMLError(Exception):
    pass


class NVML:
    """What `pliant.runtime.energy` uses of pynvml: two GPUs, of which torch sees the second only."""

    NVMLError = NVMLError

    def __init__(self, energy: bool = True, power: bool = True, driver: bool = True) -> None:
        self.energy, self.power, self.driver = energy, power, driver
        self.millijoules = 5_000_000
        self.milliwatts = 70_000
        self.opened = 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != f"GPU-{UUID}":
            raise NVMLError("Not Found")
        return "second"

    def nvmlDeviceGetHandleByPciBusId(self, place: str) -> str:
        if place != "00000000:3b:00.0":
            raise NVMLError("Not Found")
        return "second"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return {"second": "NVIDIA H200"}[handle]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if not self.energy:
            raise NVMLError("Not Supported")
        return {"second": self.millijoules}[handle]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if not self.power:
            raise NVMLError("GPU is lost")
        return {"second": self.milliwatts}[handle]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., NVML]:
    """Install a fake NVML, and one GPU that torch sees."""

    def fake(properties: dict[str, Any] | None = None, **abilities: bool) -> NVML:
        nvml = NVML(**abilities)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        seen = SimpleNamespace(**({"uuid": UUID} if properties is None else properties))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
        return nvml

    return fake


def opened(device: str, root: Path, **how: Any) -> energy.Meter:
    found = energy.meter(device, root, **how)
    assert found is not None, energy.missing(device, root)
    return found


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("pliant meter")] == []


# ---------------------------------------------------------------- RAPL


def test_a_package_counts_from_the_opening_on(tmp_path: Path) -> None:
    file = zone(tmp_path, "0", "package-0", 7_000_000)
    with opened("cpu", tmp_path) as meter:
        assert meter.name == "RAPL: package-0"
        assert meter.joules() == 0
        write(file, 9_500_000)
        assert meter.joules() == meter.joules() == pytest.approx(2.5)


def test_packages_are_summed_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    packages = [zone(tmp_path, "0", "package-0", 0), zone(tmp_path, "1", "package-1", 0)]
    others = [zone(tmp_path, "0:0", "core", 0), zone(tmp_path, "1:0", "dram", 0), zone(tmp_path, "2", "psys", 0)]
    with opened("cpu", tmp_path) as meter:
        assert meter.name == "RAPL: package-0 + package-1"
        for file, microjoules in zip(packages, (1_000_000, 20_000_000), strict=True):
            write(file, microjoules)
        for file in others:
            write(file, 500_000_000)
        assert meter.joules() == pytest.approx(21)


def test_a_counter_that_wraps_around_goes_on(tmp_path: Path) -> None:
    file = zone(tmp_path, "0", "package-0", RANGE_UJ - 1_000_000)
    other = zone(tmp_path, "1", "package-1", 10_000_000)
    with opened("cpu", tmp_path) as meter:
        write(file, 2_000_000)
        assert meter.joules() == pytest.approx(3)
        write(other, 11_000_000)
        assert meter.joules() == pytest.approx(4)


def test_a_thread_reads_along_so_that_no_wrap_is_missed(tmp_path: Path) -> None:
    file = zone(tmp_path, "0", "package-0", 0)
    half = RANGE_UJ // 2
    readings = iter([half, RANGE_UJ - 1, half, 0])  # what the counter holds at each turn of the loop
    done = threading.Event()
    waited = []

    def wait(stop: threading.Event, seconds: float) -> bool:
        waited.append(seconds)
        value = next(readings, None)
        if value is None:
            done.set()
            return stop.wait()
        write(file, value)
        return False

    with opened("cpu", tmp_path, wait=wait) as meter:
        assert done.wait(10)
        assert meter.joules() == pytest.approx(2 * RANGE_UJ / 1e6, rel=1e-6)
    assert max(waited) * 2000 < 65_000  # joules: not even a small counter wraps twice between two turns


def test_a_package_that_may_not_be_read_leaves_no_half_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone(tmp_path, "0", "package-0", 0)
    locked = zone(tmp_path, "1", "package-1", 0)
    read_text = Path.read_text

    def guarded(path: Path, *args: Any, **kwargs: Any) -> str:
        if path == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", guarded)
    assert energy.meter("cpu", tmp_path) is None
    why = energy.missing("cpu", tmp_path)
    assert why.startswith("no meter here: RAPL: ") and f"{locked} may not be read (permission denied" in why
    assert "Jetson: no INA3221" in why


def test_a_counter_that_vanishes_is_an_error_with_its_name(tmp_path: Path) -> None:
    file = zone(tmp_path, "0", "package-0", 0)
    with opened("cpu", tmp_path) as meter:
        write(file, 3_000_000)
        assert meter.joules() == pytest.approx(3)
        file.unlink()
        with pytest.raises(energy.MeterError, match=r"RAPL: package-0 cannot be read any more .*energy_uj.*counted 3 J"):
            meter.joules()
        write(file, 4_000_000)  # back again: what was drawn in between may have wrapped, so it stays an error
        with pytest.raises(PliantError, match="Open a new meter"):
            meter.joules()


def test_a_counter_that_holds_no_number(tmp_path: Path) -> None:
    write(zone(tmp_path, "0", "package-0", 0), "soon")
    assert energy.meter("cpu", tmp_path) is None
    assert "holds 'soon', not a whole number" in energy.missing("cpu", tmp_path)


# ---------------------------------------------------------------- a Jetson's sensor


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("driver", ["ina3221", "ina3221x"])
def test_a_jetson_reads_the_rail_of_the_whole_board(
    tmp_path: Path, device: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    rails = {1: ("VDD_CPU_GPU_CV", 5_000, 400), 2: ("VDD_IN", 5_000, 2_000), 7: ("sum of shunt voltages", 1, 1)}
    folder = sensor(tmp_path, rails, driver)
    clock = Clock()
    with opened(device, tmp_path, clock=clock, wait=never_mind) as meter:
        assert meter.name == "Jetson INA3221: VDD_IN (sampled every 50 ms)"
        clock.now += 2.0
        assert meter.joules() == pytest.approx(10.0 * 2)
        write(folder / "curr2_input", 4_000)
        clock.now += 1.0
        assert meter.joules() == pytest.approx(20 + (10 + 20) / 2)


def test_a_power_file_is_taken_where_there_is_one(tmp_path: Path) -> None:
    write(sensor(tmp_path, {1: ("VDD_IN", 1, 1)}) / "power1_input", 8_000_000)
    clock = Clock()
    with opened("cpu", tmp_path, clock=clock, wait=idle) as meter:
        clock.now += 0.5
        assert meter.joules() == pytest.approx(4)


def test_parts_of_a_board_are_not_the_board(tmp_path: Path) -> None:
    sensor(tmp_path, {1: ("VDD_GPU_SOC", 5_000, 400), 2: ("VDD_CPU_CV", 5_000, 2_000)})
    assert energy.meter("cpu", tmp_path) is None
    assert "no rail VDD_IN for the whole board, only VDD_CPU_CV, VDD_GPU_SOC" in energy.missing("cpu", tmp_path)


def test_a_cpu_prefers_its_own_counter(tmp_path: Path) -> None:
    sensor(tmp_path, {1: ("VDD_IN", 5_000, 2_000)})
    zone(tmp_path, "0", "package-0", 0)
    with opened("cpu", tmp_path) as meter:
        assert meter.name == "RAPL: package-0"


# ---------------------------------------------------------------- NVML


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 0)])
def test_a_gpu_has_the_counter_of_exactly_that_gpu(install: Callable[..., NVML], tmp_path: Path, device: Any) -> None:
    nvml = install()
    with opened(device, tmp_path) as meter:
        assert meter.name == "NVML: NVIDIA H200 (energy counter)"
        nvml.millijoules += 1_500
        assert meter.joules() == pytest.approx(1.5)
        assert nvml.opened == 1
        meter.close()
    assert nvml.opened == 0  # let go once, though it was closed twice


def test_without_a_uuid_its_place_on_the_bus_finds_it(install: Callable[..., NVML], tmp_path: Path) -> None:
    install({"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0})
    with opened("cuda", tmp_path) as meter:
        assert meter.name == "NVML: NVIDIA H200 (energy counter)"


def test_without_a_counter_power_is_sampled_and_the_name_says_so(install: Callable[..., NVML], tmp_path: Path) -> None:
    nvml = install(energy=False)
    clock = Clock()
    with opened("cuda", tmp_path, clock=clock, wait=idle) as meter:
        assert meter.name == "NVML: NVIDIA H200 (power, sampled every 50 ms)"
        nvml.milliwatts = 90_000
        clock.now += 3.0
        assert meter.joules() == pytest.approx(240)
    assert nvml.opened == 0


def test_a_gpu_that_is_lost(install: Callable[..., NVML], tmp_path: Path) -> None:
    nvml = install(energy=False)
    with opened("cuda", tmp_path, wait=idle) as meter:
        nvml.power = False
        with pytest.raises(energy.MeterError, match=r"NVML: NVIDIA H200 .* cannot be read any more \(GPU is lost\)"):
            meter.joules()


def test_a_counter_that_is_reset_is_an_error(install: Callable[..., NVML], tmp_path: Path) -> None:
    nvml = install()
    with opened("cuda", tmp_path) as meter:
        nvml.millijoules = 10
        with pytest.raises(energy.MeterError, match=r"fell from 5000 to 0\.01 J: it was reset"):
            meter.joules()


@pytest.mark.parametrize(
    ("setup", "why"),
    [
        ({"driver": False}, "NVML: the driver does not answer (Driver Not Loaded)"),
        ({"energy": False, "power": False}, "NVML: GPU 0 gives neither energy nor power (GPU is lost)"),
        ({"properties": {"uuid": "of a slice of a GPU"}}, "NVML: GPU 0 gives neither energy nor power (Not Found)"),
    ],
)
def test_why_a_gpu_has_no_meter(install: Callable[..., NVML], tmp_path: Path, setup: dict[str, Any], why: str) -> None:
    nvml = install(**setup)
    assert energy.meter("cuda", tmp_path) is None
    assert why in energy.missing("cuda", tmp_path)
    assert nvml.opened == 0


def test_a_gpu_that_torch_does_not_see(install: Callable[..., NVML], tmp_path: Path) -> None:
    install()
    assert energy.meter("cuda:3", tmp_path) is None
    assert "torch sees no GPU 3 (it sees 1)" in energy.missing("cuda:3", tmp_path)


def test_asking_what_is_missing_holds_nothing_open(install: Callable[..., NVML], tmp_path: Path) -> None:
    nvml = install(energy=False)
    assert energy.missing("cuda", tmp_path) == ""
    assert nvml.opened == 0


# ---------------------------------------------------------------- none, and the meter itself


def test_where_there_is_nothing_it_says_so_source_by_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nowhere = tmp_path / "no such folder"
    assert [energy.meter(device, nowhere) for device in ("cpu", "cuda", "meta")] == [None, None, None]
    powercap, drivers = nowhere / "class" / "powercap", nowhere / "bus" / "i2c" / "drivers"
    jetson = f"Jetson: no INA3221 under {drivers}"
    assert energy.missing("cpu", nowhere) == f"no meter here: RAPL: no CPU package under {powercap}; {jetson}"
    nvml = "NVML: pynvml is not installed (pip install nvidia-ml-py)"
    assert energy.missing("cuda", nowhere) == f"no meter here: {nvml}; {jetson}"
    assert energy.missing("meta", nowhere) == "no meter here: no source knows devices of type 'meta'"


def test_the_thread_samples_what_nobody_asks_for() -> None:
    """Power of 10 W + 20 W/s · t, sampled by the loop alone."""
    clock, done = Clock(), threading.Event()

    def wait(stop: threading.Event, seconds: float) -> bool:
        if clock.now >= 103.0:
            done.set()
            return stop.wait()
        clock.now += seconds
        return False

    advance = energy.integral(lambda: 10 + 20 * (clock.now - 100), clock)
    with energy.Meter("a ramp", advance, every=0.5, wait=wait) as meter:
        assert done.wait(10)
        total = 10 * 3 + 20 * 3**2 / 2
        assert meter.joules() == pytest.approx(total)
    assert meter.joules() == pytest.approx(total)


def test_closing_stops_the_thread_and_keeps_the_total() -> None:
    clock = Clock()
    meter = energy.Meter("a lamp", energy.integral(lambda: 60.0, clock), every=3600.0)  # the real wait: an hour, unless stopped
    clock.now += 1.0
    meter.close()
    clock.now += 1.0
    assert meter.joules() == pytest.approx(60)  # up to the closing, and no further


def test_an_error_in_the_thread_is_told_by_the_next_reading() -> None:
    readings, gone = iter([0.0, 5.0]), threading.Event()

    def read() -> float:
        value = next(readings, None)
        if value is None:
            gone.set()
            raise OSError("the device is gone")
        return value

    with energy.Meter("a socket", energy.counter(read), every=0.0, wait=lambda stop, seconds: False) as meter:
        assert gone.wait(10)
        with pytest.raises(energy.MeterError, match=r"a socket cannot .* \(the device is gone\)\. It had counted 5 J"):
            meter.joules()  # and the loop has ended by itself: nothing else would stop this one


def test_power_that_is_negative_is_not_drawn() -> None:
    watts = iter([1.0, -1.0])
    with (
        energy.Meter("a battery", energy.integral(lambda: next(watts), Clock())) as meter,
        pytest.raises(energy.MeterError, match="-1 W"),
    ):
        meter.joules()


@given(st.lists(st.floats(0, 999), min_size=2), st.lists(st.tuples(st.floats(0, 60), st.floats(0, 1e4)), min_size=1))
def test_the_total_never_falls(counts: list[float], samples: list[tuple[float, float]]) -> None:
    values, clock, power = iter([*counts, counts[-1]]), Clock(), [0.0]
    with energy.Meter("wrapping", energy.counter(lambda: next(values), span=1000.0)) as meter:
        totals = [meter.joules() for _ in counts[1:]]
    assert totals == sorted(totals) and totals[0] >= 0
    with energy.Meter("sampled", energy.integral(lambda: power[0], clock)) as meter:
        totals = []
        for seconds, power[0] in samples:
            clock.now += seconds
            totals.append(meter.joules())
    assert totals == sorted(totals) and totals[0] >= 0


def test_many_may_read_at_once() -> None:
    ticks = iter(range(10_000))
    with energy.Meter("a shared one", energy.counter(lambda: float(next(ticks)))) as meter:
        seen: list[list[float]] = [[] for _ in range(4)]
        threads = [threading.Thread(target=lambda own=own: own.extend(meter.joules() for _ in range(500))) for own in seen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(own == sorted(own) for own in seen)
        assert meter.joules() == 2001
