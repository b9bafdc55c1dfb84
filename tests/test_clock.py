"""Moments and the seconds between them, by clocks that are told what time it is."""

from __future__ import annotations

import json

import pytest
import torch

from pliant.runtime.clock import Laps, Pace, Watch, device_name

CPU = torch.device("cpu")


class Clock:
    """Stands still until it is moved."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


def opened() -> tuple[Pace, Clock]:
    clock = Clock()
    return Pace(clock), clock


def test_a_run_lasts_from_when_it_was_opened() -> None:
    pace, clock = opened()
    assert pace.elapsed == 0.0
    clock.move(5.0)
    assert pace.elapsed == 5.0


def test_what_passes_beside_steps_is_neither_steps_nor_choosing() -> None:
    pace, clock = opened()
    clock.move(100.0)  # before training begins: nobody's
    with pace.not_training("profiling"):
        clock.move(7.0)
    for _ in range(10):
        clock.move(2.0 + 0.5)  # a step, and loading the next batch
    with pace.not_training("choosing"):
        clock.move(3.0)
    assert pace.aside(10, 2.0) == pytest.approx(0.5)
    assert pace.elapsed == 135.0
    assert pace.spent == {"profiling": 7.0, "choosing": 3.0}


def test_nothing_is_known_to_pass_beside_steps_before_the_first() -> None:
    pace, clock = opened()
    clock.move(4.0)
    assert pace.aside(1, 1.0) == 0.0  # training did not begin
    with pace.not_training("choosing"):
        clock.move(4.0)
    clock.move(4.0)
    assert pace.aside(0, None) == 0.0
    assert pace.aside(1, None) == 0.0
    assert pace.aside(1, 1.0) == 3.0


def test_a_step_clock_that_runs_ahead_of_the_wall_leaves_nothing_aside() -> None:
    pace, clock = opened()
    with pace.not_training("choosing"):
        pass
    clock.move(1.0)
    assert pace.aside(1, 1.5) == 0.0


def test_choosing_that_fails_is_choosing_too() -> None:
    pace, clock = opened()
    with pytest.raises(KeyError), pace.not_training("choosing"):
        clock.move(9.0)
        raise KeyError
    clock.move(1.0)
    assert pace.aside(1, 0.25) == 0.75


@pytest.fixture
def none_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "_in_any_case", 0)


def test_the_first_corrections_are_free() -> None:
    pace, clock = opened()
    for _ in range(Pace._in_any_case):
        assert pace.may_correct
        with pace.correcting():
            clock.move(1.0)
    assert not pace.may_correct


@pytest.mark.usefixtures("none_in_any_case")
def test_the_first_correction_is_free_and_the_next_waits_until_both_are_little() -> None:
    pace, clock = opened()
    clock.move(10.0)
    assert pace.may_correct
    with pace.correcting():
        clock.move(1.0)
    assert not pace.may_correct
    enough = 2.0 / Pace._most_correcting  # seconds of which two such corrections are little
    clock.now = 999.0 + enough
    assert not pace.may_correct
    clock.now = 1001.0 + enough
    assert pace.may_correct


@pytest.mark.usefixtures("none_in_any_case")
def test_a_pace_goes_on_in_another_process() -> None:
    pace, clock = opened()
    clock.move(20.0)
    with pace.not_training("choosing"), pace.correcting():
        clock.move(1.0)
    clock.move(30.0)
    elsewhere = Clock(5.0)
    resumed = Pace(elsewhere)
    elsewhere.move(8.0)  # opened long before the state came
    resumed.load(json.loads(json.dumps(pace.state())))
    for clock_ in (clock, elsewhere):
        clock_.move(9.0)
    assert resumed.elapsed == pace.elapsed == 60.0
    assert resumed.aside(3, 10.0) == pace.aside(3, 10.0) == 3.0
    assert resumed.spent == pace.spent == {"profiling": 0.0, "choosing": 1.0}
    assert not resumed.may_correct


@pytest.mark.usefixtures("none_in_any_case")
def test_the_last_correction_is_remembered_too() -> None:
    pace, clock = opened()
    with pace.correcting():
        clock.move(1.0)
    clock.move(1.5 / Pace._most_correcting)
    resumed = Pace(clock)
    resumed.load(pace.state())
    assert not pace.may_correct
    assert not resumed.may_correct


def test_a_pace_saved_before_training_began_still_waits_for_that() -> None:
    pace, clock = opened()
    clock.move(100.0)
    resumed = Pace(clock)
    resumed.load(pace.state())
    with resumed.not_training("choosing"):
        pass
    clock.move(10.0)
    assert resumed.aside(10, 1.0) == 0.0


# ---------------------------------------------------------------- watches, devices


def test_a_watch_times_work_and_hands_over_its_result() -> None:
    clock, watch = Clock(), Watch(CPU)
    watch._now = clock

    def work() -> str:
        clock.move(3.0)
        return "done"

    assert watch.time(work) == (3.0, "done")


def test_of_several_tries_the_fastest_counts_on_a_cpu_and_the_median_on_cuda() -> None:
    watch = Watch(CPU)
    assert watch.typical([3.0, 1.0, 9.0]) == 1.0
    watch.cuda = True
    assert watch.typical([3.0, 1.0, 9.0]) == 3.0


@pytest.mark.parametrize("threads", [1, 2])
def test_one_thread_is_timed_by_its_own_clock_and_several_by_the_wall(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.setattr("time.thread_time", lambda: 1.0)
    monkeypatch.setattr("time.perf_counter", lambda: 2.0)
    assert Watch(CPU).mark() == float(threads)


def test_a_device_has_a_name_that_begins_with_its_kind() -> None:
    kind, _, model = device_name(CPU).partition(": ")
    assert (kind, bool(model.strip())) == ("cpu", True)
    kind, _, model = device_name(torch.device("meta")).partition(": ")
    assert (kind, bool(model.strip())) == ("meta", True)


def test_a_system_that_hides_its_processor_still_names_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr("pathlib.Path.read_text", nothing)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    monkeypatch.setattr("platform.processor", lambda: "")
    assert device_name(CPU) == "cpu: riscv64"


# ---------------------------------------------------------------- laps


class _Hand:
    """A watch that we wind ourselves, and that tells whether it was waited for."""

    def __init__(self) -> None:
        self.now, self.waited = 0.0, 0

    def mark(self) -> float:
        return self.now

    def settle(self) -> None:
        self.waited += 1

    def seconds(self, start: float, end: float) -> float:
        return end - start


def ran(laps: Laps, hand: _Hand, *seconds: float) -> None:
    for s in seconds:
        laps.begin()
        hand.now += s
        laps.end()


def test_laps_are_read_when_they_are_asked_for_and_taken_once() -> None:
    hand = _Hand()
    laps = Laps(hand)  # type: ignore[arg-type]
    ran(laps, hand, 1.0, 3.0, 2.0)
    assert hand.waited == 0, "marking waits for nothing"
    assert laps.peek() == laps.peek() == [1.0, 3.0, 2.0]
    assert (laps.median(), laps.untaken) == (2.0, 3)
    assert laps.take() == [1.0, 3.0, 2.0] and laps.take() == []
    laps.new_round()
    assert laps.median() is None


def test_a_lap_that_is_dropped_does_not_count_and_saved_ones_go_on() -> None:
    hand = _Hand()
    laps = Laps(hand)  # type: ignore[arg-type]
    laps.begin()
    assert laps.is_running
    laps.drop()
    assert not laps.is_running and laps.untaken == 0
    ran(laps, hand, 1.0)
    later = Laps(hand)  # type: ignore[arg-type]
    later.load(laps.peek())
    ran(later, hand, 2.0)
    assert later.take() == [1.0, 2.0]


def test_a_correction_is_charged_for_what_corrections_take_in_the_mean() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert pace.per_correction == 0.0
    for took in (0.1, 0.3):
        with pace.correcting():
            now[0] += took
    assert pace.per_correction == pytest.approx(0.2)
