"""Joules: meters from a fake zeus, power from recorded meters, and budgets with `energy=`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from instances import chain_profile, laws, units
from torch import nn
from zoo import ZOO, failing, fingerprint, mid_training

from pliant import Budget, BudgetError, Policy, Profile, Selection, Unit, energy, measure, plan, recipes
from pliant.core.errors import PliantError
from pliant.core.mode import Mode
from pliant.planning.solve import knapsack, milp


class Clock:
    """Time that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def meter(self, watts: float, jump: float = 0.0) -> energy.CounterMeter:
        """A meter of something that draws so much power, whose counter moves every `jump` seconds."""
        return energy.CounterMeter("a recorded meter", lambda: watts * (self.now // jump * jump if jump else self.now))


# ---------------------------------------------------------------- meters


@laws(100)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12))
def test_a_meter_starts_at_its_first_reading_and_never_falls(readings: list[float]) -> None:
    meter = energy.recorded(readings)
    told = [meter.joules() for _ in readings]
    assert told == sorted(told) and told[0] >= 0
    assert told[-1] == max(0.0, *(reading - readings[0] for reading in readings))


def test_a_counter_that_wraps_is_right_again_once_zeus_has_noticed() -> None:
    """zeus adds the range of a counter up to a second after it wrapped; until then the total stands still."""
    meter = energy.recorded([65_000.0, 65_500.0, 20.0, 65_536.0 + 30.0, 65_536.0 + 40.0])
    assert [meter.joules() for _ in range(4)] == [500.0, 500.0, 566.0, 576.0]


def test_a_recorded_meter_stands_still_after_its_last_reading() -> None:
    meter = energy.recorded([1.0, 3.0])
    assert [meter.joules() for _ in range(3)] == [2.0, 2.0, 2.0]


def test_a_meter_that_can_no_longer_be_read_says_so() -> None:
    readings = iter([1.0])
    meter = energy.CounterMeter("a shelf meter", lambda: next(readings))
    with pytest.raises(energy.MeterError, match="a shelf meter cannot be read any more: StopIteration"):
        meter.joules()


# ---------------------------------------------------------------- zeus


class NoDevice(Exception):
    pass


class Fake:
    """What `pliant.energy` uses of `zeus.device`; `snake` names methods as zeus 0.12 and later do, else as zeus-ml 0.11."""

    def __init__(self, snake: bool = True, **sources: Any) -> None:
        self.gpus: dict[str, float] = {}
        self.zones: dict[str, float] = {}
        self.soc: dict[str, float | None] | None = None
        self.snake = snake
        vars(self).update(sources)

    def _named(self, **methods: Callable[..., Any]) -> SimpleNamespace:
        camel = {re.sub("_(.)", lambda found: found[1].upper(), name): method for name, method in methods.items()}
        return SimpleNamespace(**(methods if self.snake else camel))

    def get_gpus(self) -> Any:
        print("libamd_smi.so: cannot open shared object file")  # as amdsmi does
        if not self.gpus:
            raise NoDevice("NVML and AMDSMI unavailable.")
        found = self._named(
            get_name=lambda i: list(self.gpus)[i],
            get_total_energy_consumption=lambda i: list(self.gpus.values())[i] * 1e3,
        )
        return _Sized(found, len(self.gpus))

    def get_cpus(self) -> Any:
        if not self.zones:
            raise NoDevice("RAPL unavailable.")
        return SimpleNamespace(cpus=[self._cpu(name) for name in self.zones])

    def _cpu(self, name: str) -> Any:
        read = self._named(get_total_energy_consumption=lambda: SimpleNamespace(cpu_mj=self.zones[name] * 1e3))
        read.rapl_file = SimpleNamespace(name=name)
        return read

    def get_soc(self) -> Any:
        if self.soc is None:
            raise NoDevice("No observable SoC.")
        soc = self.soc
        return self._named(get_total_energy_consumption=lambda: SimpleNamespace(**soc))


class _Sized:
    def __init__(self, methods: SimpleNamespace, size: int) -> None:
        self._size = size
        vars(self).update(vars(methods))

    def __len__(self) -> int:
        return self._size


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fake]:
    def fake(snake: bool = True, **sources: Any) -> Fake:
        made = Fake(snake, **sources)
        module = SimpleNamespace(get_gpus=made.get_gpus, get_cpus=made.get_cpus)
        if snake:
            module.get_soc = made.get_soc
        monkeypatch.setitem(sys.modules, "zeus.device", module)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        return made

    return fake


@pytest.mark.parametrize("snake", [True, False], ids=["zeus", "zeus-ml"])
def test_each_device_has_its_own_meter(install: Callable[..., Fake], snake: bool, capsys: pytest.CaptureFixture[str]) -> None:
    zeus = install(snake, gpus={"H200": 7.0, "H200 ": 1.0}, zones={"package-0": 1.0, "psys": 50.0, "package-1": 2.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        first, second, cpu = (energy.required(device) for device in ("cuda", "cuda:1", "cpu"))
    zeus.gpus = {"H200": 9.0, "H200 ": 4.0}
    zeus.zones |= {"package-0": 6.0, "psys": 99.0, "package-1": 4.0}
    assert (first.joules(), second.joules(), cpu.joules()) == (2.0, 3.0, 7.0)
    assert (first.name, cpu.name) == ("energy counter of H200", "RAPL counters of package-0 + package-1")
    assert capsys.readouterr().out == "", "what zeus and amdsmi print stays out of our output"


@pytest.mark.parametrize(
    ("device", "reading", "field"),
    [
        ("cuda", {"total_energy_mj": 0.0, "gpu_energy_mj": 0.0}, "total_energy_mj"),
        ("cpu", {"total_energy_mj": 0.0, "cpu_energy_mj": 0.0}, "total_energy_mj"),
        ("cpu", {"total_energy_mj": None, "cpu_total_mj": 0.0}, "cpu_total_mj"),
        ("mps", {"cpu_total_mj": 0.0, "gpu_mj": 0.0}, "gpu_mj"),
    ],
)
def test_boards_and_apple_chips(install: Callable[..., Fake], device: str, reading: dict[str, Any], field: str) -> None:
    zeus = install(soc=reading)
    meter = energy.required(device)
    assert zeus.soc is not None
    zeus.soc[field] = 2500.0
    assert meter.joules() == 2.5


def test_no_package_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeus.device", None)
    assert energy.meter("cpu") is None
    assert "pip install 'pliant[energy]'" in energy.missing("cpu")
    with pytest.raises(energy.MeterError, match="package zeus"):
        energy.required("cuda")
    assert issubclass(energy.MeterError, PliantError)


@pytest.mark.parametrize(
    ("device", "sources", "said"),
    [
        ("cuda", {}, "GPU: NoDevice: NVML and AMDSMI unavailable; SoC: NoDevice: No observable SoC. Check that `nvidia-smi`"),
        ("cpu", {}, "CPU: NoDevice: RAPL unavailable; SoC: NoDevice: No observable SoC. On Linux"),
        ("cpu", {"zones": {"psys": 1.0}}, "CPU: no CPU package"),
        ("cpu", {"soc": {"gpu_mj": 1.0}}, "has no reading for cpu"),
        ("cuda:1", {"gpus": {"H200": 1.0}}, "it sees 1 GPUs, so none with index 1"),
        ("cuda", {"gpus": {"H200": 1.0, "T4": 1.0}}, "CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        ("cpu", {"snake": False}, "`zeus` 0.12 and later do"),
        ("meta", {}, "nothing for devices of type 'meta'"),
    ],
)
def test_no_meter_is_told_with_what_zeus_found(
    install: Callable[..., Fake], device: str, sources: dict[str, Any], said: str
) -> None:
    install(**sources)
    assert energy.meter(device) is None
    assert f"there is no energy meter for {device!r}. zeus found: " in energy.missing(device) and said in energy.missing(device)


def test_a_helper_process_that_runs_the_script_again_ends(
    install: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """zeus starts processes for CPU counters. A script without `if __name__ == "__main__"` would train in each of them."""

    def get_cpus() -> Any:
        raise RuntimeError("before the current process has finished its bootstrapping phase.")

    install()
    monkeypatch.setattr(sys.modules["zeus.device"], "get_cpus", get_cpus)
    with pytest.raises(RuntimeError, match="bootstrapping phase"):
        energy.meter("cpu")


def test_a_meter_that_is_there_is_not_missing(install: Callable[..., Fake]) -> None:
    install(zones={"package-0": 1.0})
    assert energy.missing("cpu") == "" and energy.meter("cpu") is not None


# ---------------------------------------------------------------- the power of full steps


class Lab:
    """A small model whose forward pass takes `seconds` of a clock that nothing else moves."""

    def __init__(self, seconds: float = 0.05) -> None:
        self.clock, self.steps = Clock(), 0
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batch, self._seconds = torch.ones(2, 4), seconds

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.clock.now += self._seconds
        self.steps += 1
        return model(batch).square().mean()

    def power(self, meter: energy.Meter, **how: Any) -> float:
        return measure.power(self.model, self.optimizer, self.loss, self.batch, meter, clock=self.clock, **how)


@pytest.mark.parametrize("seconds", [0.015, 0.05, 3.0])
def test_power_is_joules_over_the_time_that_passed(seconds: float) -> None:
    lab = Lab(seconds)
    assert lab.power(lab.clock.meter(250.0)) == pytest.approx(250.0)


def test_a_counter_that_jumps_is_read_from_jump_to_jump() -> None:
    """A step of 30 ms sees nothing of a counter that moves every 400 ms. Each jump is seen within a step."""
    lab = Lab(0.03)
    assert lab.power(lab.clock.meter(250.0, jump=0.4)) == pytest.approx(250.0, rel=0.03 / 2)
    assert lab.power(lab.clock.meter(250.0, jump=0.4), least=8.0) == pytest.approx(250.0, rel=0.03 / 8)


def test_a_meter_is_read_at_both_ends_alone() -> None:
    lab, reads = Lab(0.008), 0
    meter = lab.clock.meter(10.0)

    class Counting:
        name = "counting"

        def joules(self) -> float:
            nonlocal reads
            reads += 1
            return meter.joules()

    lab.power(Counting())
    assert lab.steps > 360 and reads == 4


def test_a_meter_that_stands_still_is_an_error() -> None:
    lab = Lab()
    with pytest.raises(energy.MeterError, match="stuck has not moved in 10 s of training"):
        lab.power(energy.recorded([5.0], "stuck"))


@pytest.mark.parametrize("name", ["conv_net", "transformer"])
def test_measuring_power_leaves_no_trace(name: str) -> None:
    model, optimizer, loss, batch = mid_training(ZOO[name])
    before, clock = fingerprint(model, optimizer), Clock()

    def slow(model: nn.Module, batch: Any) -> torch.Tensor:
        clock.now += 0.5
        return loss(model, batch)

    measure.power(model, optimizer, slow, batch, clock.meter(5.0), clock=clock)
    assert fingerprint(model, optimizer) == before
    with pytest.raises(RuntimeError, match="midway"):
        measure.power(model, optimizer, failing(slow, 4), batch, clock.meter(5.0), clock=clock)
    assert fingerprint(model, optimizer) == before


# ---------------------------------------------------------------- power while training


def fed(power: energy.Power, clock: Clock, meter: energy.Meter, steps: int, seconds: float, pause: float = 0.0) -> float | None:
    """Ten steps at a time, with a pause after each."""
    took, start = 0.0, clock.now
    power.update(meter.joules, took, 0.0)
    for _ in range(steps // 10):
        clock.now += 10 * (seconds + pause)
        took += 10 * seconds
        power.update(meter.joules, took, clock.now - start)
    return power.watts


def test_watts_follow_the_meter_whatever_its_jumps() -> None:
    for jump in (0.0, 0.1):
        clock = Clock()
        watts = fed(energy.Power(100.0), clock, clock.meter(300.0, jump), steps=4000, seconds=0.013)
        assert watts == pytest.approx(300.0, rel=0.02)


def test_the_first_window_counts_in_full_where_nothing_was_known() -> None:
    clock = Clock()
    assert fed(energy.Power(), clock, clock.meter(40.0), steps=10, seconds=0.3) == pytest.approx(40.0)
    assert energy.Power().update(lambda: 5.0, 5.0, 5.0) is None


def test_what_is_drawn_between_steps_counts_as_theirs() -> None:
    clock = Clock()
    watts = fed(energy.Power(100.0), clock, clock.meter(300.0), steps=4000, seconds=0.02, pause=0.002)
    assert watts == pytest.approx(330.0, rel=0.001)


def test_windows_that_steps_do_not_fill_are_left_out() -> None:
    clock = Clock()
    assert fed(energy.Power(100.0), clock, clock.meter(300.0), steps=2000, seconds=0.02, pause=0.02) == 100.0


def test_the_meter_is_read_once_in_two_seconds() -> None:
    readings = iter(range(100))
    power = energy.Power()
    for step in range(100):
        power.update(lambda: float(next(readings)), 0.125 * step, 0.125 * step)
    assert next(readings) == 7


def test_an_evaluation_does_not_spoil_the_windows_after_it() -> None:
    clock, power = Clock(), energy.Power(100.0)
    meter = clock.meter(300.0)
    power.update(meter.joules, 0.0, 0.0)
    clock.now += 60.0
    assert power.update(meter.joules, 0.5, 60.0) == 100.0
    clock.now += 2.0
    assert power.update(meter.joules, 2.5, 62.0) == pytest.approx(200.0)


def test_a_meter_that_stands_still_changes_nothing() -> None:
    assert fed(energy.Power(100.0), Clock(), energy.recorded([5.0]), steps=1000, seconds=0.02) == 100.0


# ---------------------------------------------------------------- budgets


def unasked(*_: Any) -> Any:
    raise AssertionError("plan() works on what it is given")


def policy(**budget: Any) -> Policy:
    return Policy(unasked, unasked, unasked, milp() if len(budget) > 1 else knapsack(), budget=Budget(**budget))


FOUR = chain_profile(own=[1, 2, 3, 4], way=[1, 1, 1, 0], base=7)  # a full step takes 20 s
METERED = FOUR.with_watts(50.0)  # and 1 kJ
VALUES: dict[Unit, float] = dict(zip(units(4), (1.0, 5.0, 2.0, 9.0), strict=True))


def chosen(profile: Profile, correction: float | None = None, **budget: Any) -> Selection:
    return plan(policy(**budget), profile, VALUES, correction=correction)


def test_joules_are_watts_times_seconds() -> None:
    for picked in ([], list(VALUES)[:2], list(VALUES)):
        cost = METERED.cost(picked)
        assert cost.joules == 50.0 * cost.seconds and replace(cost, joules=None) == FOUR.cost(picked)
    assert METERED.full.joules == 1000.0 and FOUR.full.joules is None
    assert METERED.alone(tuple(VALUES)) == [METERED.cost([unit]) for unit in VALUES]


@pytest.mark.parametrize(("joules", "seconds"), [("700J", "14s"), ("0.65kJ", "13s"), (0.8, 0.8), (1.0, 1.0)])
def test_a_budget_in_joules_chooses_what_its_seconds_would(joules: float | str, seconds: float | str) -> None:
    picked = chosen(METERED, energy=joules)
    assert picked.units == chosen(FOUR, time=seconds).units
    assert picked.cost.joules is not None and picked.cost.joules <= picked.limit["joules"]
    assert picked.asked == {"joules": Budget(energy=joules).limits(METERED.full)["joules"]}


def test_the_tighter_of_time_and_energy_decides() -> None:
    assert chosen(METERED, energy="700J", time=0.9).units == chosen(FOUR, time="14s").units
    assert chosen(METERED, energy="900J", time="13s").units == chosen(FOUR, time="13s").units


@laws(50)
@given(st.floats(1.0, 500.0), st.floats(0.42, 1.0))
def test_no_choice_is_over_its_joules(watts: float, share: float) -> None:
    picked = chosen(FOUR.with_watts(watts), energy=share)
    assert picked.share("joules") <= share * (1 + 1e-6)


def test_a_budget_below_the_floor_names_it_in_joules() -> None:
    with pytest.raises(BudgetError) as refused:
        chosen(METERED, energy="390J")
    assert str(refused.value) == (
        "energy=0.390 (390 J) is below the floor of 0.400 (400 J): the forward pass alone takes 0.350 (350 J) of a full step "
        "and the cheapest unit ('u0') adds 0.050 (50 J). Use energy>=0.400 (400 J)."
    )
    assert chosen(METERED, energy=0.4).share("joules") == pytest.approx(0.4)


def test_without_a_measured_power_energy_is_refused() -> None:
    for amount in (0.5, "3J"):
        with pytest.raises(BudgetError, match="this profile holds no joules"):
            chosen(FOUR, energy=amount)


def test_a_correction_of_time_is_one_of_joules_too() -> None:
    """Steps that take 1.25 times as long as predicted draw 1.25 times the joules, so less is planned for."""
    corrected = chosen(METERED, 0.8, energy="875J")
    assert corrected.limit["joules"] == 700.0 and corrected.asked["joules"] == 875.0
    assert corrected.units == chosen(METERED, energy="700J").units
    assert chosen(METERED, 0.1, energy="875J").limit["joules"] == 400.0, "never below the floor"


def test_other_watts_change_what_fits_and_not_what_a_full_step_means() -> None:
    thrifty = METERED.with_watts(40.0)
    assert thrifty.full.joules == 1000.0 and thrifty.cost(VALUES).joules == 800.0
    assert chosen(thrifty, energy=0.8).units == tuple(VALUES), "steps that draw less power may take longer"
    assert chosen(METERED, energy=0.8).units != tuple(VALUES)
    assert thrifty.full == thrifty.on(Mode(lean=True)).full == thrifty.with_watts(60.0).full


def test_the_longest_step_that_the_limits_allow() -> None:
    assert METERED.seconds_within({"joules": 500.0}) == 10.0
    assert METERED.seconds_within({"joules": 500.0, "seconds": 8.0}) == 8.0
    assert METERED.seconds_within({"bytes": 8.0}) is None
    assert FOUR.seconds_within({"seconds": 8.0}) == 8.0


def test_watts_are_saved_and_older_profiles_have_none() -> None:
    again = METERED.with_watts(40.0)
    assert Profile.from_json(again.to_json()) == again
    older = FOUR.to_json()
    del older["watts"]
    assert Profile.from_json(older) == FOUR


@pytest.mark.parametrize("watts", [0.0, -1.0, float("nan"), float("inf")])
def test_power_that_is_none_is_refused(watts: float) -> None:
    with pytest.raises(ValueError, match="watts="):
        FOUR.with_watts(watts)


def test_selections_tell_joules_where_they_are_known() -> None:
    assert "0.70 of a full step's joules" in str(chosen(METERED, energy="700J"))
    assert "joules" not in str(chosen(FOUR, time="14s"))


def test_the_default_recipe_takes_energy() -> None:
    assert recipes.pliant(energy="3J").budget == Budget(energy="3J")
