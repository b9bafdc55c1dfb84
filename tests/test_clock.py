"""Moments and the seconds between them, by clocks that are told what time it is."""

from __future__ import annotations

import json

import pytest
import torch

from pliant.runtime.clock import Laps, RunTime, Watch, device_name

CPU = torch.device("cpu")


class Clock:
    """Stands still until it is moved."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


def opened() -> tuple[RunTime, Clock]:
    clock = Clock()
    return RunTime(clock), clock


def test_a_run_lasts_from_when_it_was_opened() -> None:
    run, clock = opened()
    assert run.elapsed == 0.0
    clock.move(5.0)
    assert run.elapsed == 5.0


def test_what_passes_beside_steps_is_neither_steps_nor_choosing() -> None:
    run, clock = opened()
    clock.move(100.0)  # before training begins: nobody's
    with run.not_training("profiling"):
        clock.move(7.0)
    for _ in range(10):
        clock.move(2.0 + 0.5)  # a step, and loading the next batch
    with run.not_training("choosing"):
        clock.move(3.0)
    assert run.aside(10, 2.0) == pytest.approx(0.5)
    assert run.elapsed == 135.0
    assert run.spent == {"profiling": 7.0, "choosing": 3.0}


def test_nothing_is_known_to_pass_beside_steps_before_the_first() -> None:
    run, clock = opened()
    clock.move(4.0)
    assert run.aside(1, 1.0) == 0.0  # training did not begin
    with run.not_training("choosing"):
        clock.move(4.0)
    clock.move(4.0)
    assert run.aside(0, None) == 0.0
    assert run.aside(1, None) == 0.0
    assert run.aside(1, 1.0) == 3.0


def test_a_step_clock_that_runs_ahead_of_the_wall_leaves_nothing_aside() -> None:
    run, clock = opened()
    with run.not_training("choosing"):
        pass
    clock.move(1.0)
    assert run.aside(1, 1.5) == 0.0


def test_choosing_that_fails_is_choosing_too() -> None:
    run, clock = opened()
    with pytest.raises(KeyError), run.not_training("choosing"):
        clock.move(9.0)
        raise KeyError
    clock.move(1.0)
    assert run.aside(1, 0.25) == 0.75


def test_the_time_of_a_run_goes_on_in_another_process() -> None:
    run, clock = opened()
    clock.move(20.0)
    with run.not_training("choosing"):
        clock.move(1.0)
    clock.move(30.0)
    elsewhere = Clock(5.0)
    resumed = RunTime(elsewhere)
    elsewhere.move(8.0)  # opened long before the state came
    resumed.load(json.loads(json.dumps(run.state())))
    for clock_ in (clock, elsewhere):
        clock_.move(9.0)
    assert resumed.elapsed == run.elapsed == 60.0
    assert resumed.aside(3, 10.0) == run.aside(3, 10.0) == 3.0
    assert resumed.spent == run.spent == {"profiling": 0.0, "choosing": 1.0}


def test_a_run_saved_before_training_began_still_waits_for_that() -> None:
    run, clock = opened()
    clock.move(100.0)
    resumed = RunTime(clock)
    resumed.load(run.state())
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
    assert (laps.median(), laps.unread) == (2.0, 3)
    assert laps.read() == [1.0, 3.0, 2.0] and laps.read() == []
    laps.new_round()
    assert laps.median() is None


def test_a_lap_that_is_dropped_does_not_count_and_saved_ones_go_on() -> None:
    hand = _Hand()
    laps = Laps(hand)  # type: ignore[arg-type]
    laps.begin()
    assert laps.is_running
    laps.drop()
    assert not laps.is_running and laps.unread == 0
    ran(laps, hand, 1.0)
    later = Laps(hand)  # type: ignore[arg-type]
    later.load(laps.peek())
    ran(later, hand, 2.0)
    assert later.read() == [1.0, 2.0]


def test_a_pause_is_no_part_of_a_lap() -> None:
    laps, clock = Laps(Watch(CPU)), Clock()
    laps.watch._now = clock
    with laps.paused():
        clock.move(9.0)  # before the lap
    laps.begin()
    clock.move(1.0)
    with laps.paused():
        clock.move(5.0)
    clock.move(2.0)
    seconds = laps.end()
    assert seconds() == pytest.approx(3.0) and laps.read() == [pytest.approx(3.0)]
