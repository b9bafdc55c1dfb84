"""When to choose again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from instances import laws

from pliant import Budget, Cost, Progress
from pliant.core.schedule import Schedule, every, on_drift, once, ramp


def due_steps(schedule: Schedule, steps: int, drift: float | None = None, **known: int) -> list[int]:
    """At which of the first steps a run would choose again."""
    last, out = Progress(**known), []
    for step in range(1, steps):
        now = Progress(step=step, **known)
        if schedule.due(now, last, drift):
            out.append(step)
            last = now
    return out


def test_once_is_never_again() -> None:
    assert due_steps(once(), 1000, drift=2.0) == []
    assert not once().watches


def test_every_so_many_steps() -> None:
    assert due_steps(every(steps=100), 350) == [100, 200, 300]
    assert due_steps(every(steps=1), 4) == [1, 2, 3]
    assert not every(steps=100).needs_epochs


def test_every_so_many_epochs() -> None:
    assert due_steps(every(epochs=2), 50, steps_per_epoch=10) == [20, 40]
    assert due_steps(every(epochs=0.5), 21, steps_per_epoch=10) == [5, 10, 15, 20]
    assert due_steps(every(epochs=0.01), 4, steps_per_epoch=10) == [1, 2, 3], "never more than once per step"
    assert every(epochs=2).needs_epochs


def test_every_share_of_the_run() -> None:
    assert due_steps(every(share=0.25), 40, total_steps=40) == [10, 20, 30]
    assert due_steps(every(share=0.01), 4, total_steps=40) == [1, 2, 3], "never more than once per step"
    assert not every(share=0.25).needs_epochs
    with pytest.raises(ValueError, match=r"every\(share=0\.25\) needs the length of the run: give Session\(total_steps=…\)"):
        every(share=0.25).due(Progress(step=2), Progress(step=0), None)


def test_epochs_of_unknown_length_are_an_error() -> None:
    with pytest.raises(ValueError, match="steps_per_epoch"):
        every(epochs=2).due(Progress(step=2), Progress(step=0), None)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: every(),
        lambda: every(steps=3, epochs=1),
        lambda: every(steps=0),
        lambda: every(steps=-5),
        lambda: every(epochs=0.0),
        lambda: every(epochs=float("nan")),
        lambda: every(epochs=1, share=0.5),
        lambda: every(share=0.0),
        lambda: every(share=1.5),
        lambda: on_drift(0),
        lambda: on_drift(2.5),
        lambda: on_drift(float("nan")),
        lambda: on_drift(at_least=50, at_most=10),
        lambda: ramp(1.0, 0.5, until=0.0),
        lambda: ramp(1.0, 0.5, until=1.5),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_was_given(bad: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"(every|on_drift|ramp)\(.*\)"):
        bad()


def test_on_drift_waits_for_drift_and_for_its_least_interval() -> None:
    schedule = on_drift(0.3, at_least=20)
    assert due_steps(schedule, 100, drift=0.31) == [20, 40, 60, 80]
    assert due_steps(schedule, 100, drift=0.3) == []
    assert due_steps(schedule, 100, drift=None) == []
    assert due_steps(schedule, 100, drift=float("nan")) == []
    assert schedule.watches


def test_on_drift_chooses_at_the_latest_when_told() -> None:
    schedule = on_drift(0.3, at_least=20, at_most=50)
    assert due_steps(schedule, 160, drift=None) == [50, 100, 150]
    assert due_steps(schedule, 60, drift=1.0) == [20, 40]


@laws(100)
@given(st.floats(0.05, 1), st.floats(0.05, 1), st.floats(0.1, 1), st.integers(1, 1000), st.integers(0, 2000))
def test_a_ramp_stays_between_its_ends(start: float, end: float, until: float, total: int, step: int) -> None:
    value = ramp(start, end, until)(Progress(step=step, total_steps=total))
    assert min(start, end) - 1e-12 <= value <= max(start, end) + 1e-12
    if step == 0:
        assert value == start
    if step >= until * total:
        assert value == pytest.approx(end)
    Budget(time=ramp(start, end, until)).limits(Cost(seconds=1.0), Progress(step=step, total_steps=total))


def test_a_ramp_is_a_straight_line() -> None:
    line = ramp(1.0, 0.4, until=0.5)
    assert [line(Progress(step=s, total_steps=100)) for s in (0, 25, 50, 100)] == pytest.approx([1.0, 0.7, 0.4, 0.4])


def test_a_ramp_without_the_length_of_the_run_says_so() -> None:
    with pytest.raises(ValueError, match="total_steps=…"):
        ramp(1.0, 0.4)(Progress(step=3))


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        (once(), "once"),
        (every(steps=5), "every 5 steps"),
        (every(epochs=3), "every 3 epochs"),
        (every(share=0.01), "every 0.01 of the run"),
        (on_drift(0.2), "on drift > 0.2"),
    ],
)
def test_a_schedule_says_what_it_is(schedule: Schedule, name: str) -> None:
    assert schedule.name == name
