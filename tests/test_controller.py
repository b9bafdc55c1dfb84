"""The closed loop that users run, on a simulated device that takes more or less for a step than its profile predicts.

The laws: the mean step is at most 3 % over what was asked, and no selection is shorter than its dwell time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import Device, differences, snapshot, steady
from torch import nn
from zoo import sgd

from pliant import Budget, BudgetError, Policy, Profile, Session, energy, recipes, schedule, score, solve, units, within
from pliant.core.types import Selection
from pliant.session.beginning import UNKNOWN
from pliant.session.feedback import DWELL, ENOUGH, LEAST

Batch = tuple[torch.Tensor, torch.Tensor]
SLOW, FAST = 1.25, 0.8


class Deep(nn.Module):
    """Many small layers: selections of almost any cost."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(16))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Deep()


def data(count: int = 8) -> list[Batch]:
    draw = torch.Generator().manual_seed(4)
    return [(torch.randn(8, 6, generator=draw), torch.randint(0, 3, (8,), generator=draw)) for _ in range(count)]


def learnable(count: int = 8) -> list[Batch]:
    """Labels that follow from the inputs, so that a selection is not taken back for learning by heart."""
    draw = torch.Generator().manual_seed(4)
    teacher = torch.randn(6, 3, generator=draw)
    inputs = [torch.randn(8, 6, generator=draw) for _ in range(count)]
    return [(x, (x @ teacher).argmax(1)) for x in inputs]


STREAM = data()


def light(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, batch: Any, **how: Any) -> Profile:
    """A forward pass of half the usual weight, so that small budgets stay above the floor on a slow device."""
    profile = steady(model, optimizer, loss, batch, **how)
    return replace(profile, base=replace(profile.base, seconds=profile.base.seconds / 2))


def full_seconds() -> float:
    model = make()
    return light(model, sgd(model), classify, STREAM[0]).full.seconds


def by_gain(time: Any, when: schedule.Schedule | None = None) -> Policy:
    words = units.layers(), score.update_gain(), light, solve.knapsack(), when or schedule.every(steps=70)
    return Policy(*words, Budget(time=time))


def at_random(time: Any) -> Policy:
    return replace(recipes.random(time=time, when=schedule.every(steps=60), seed=3), cost=light)


def last(time: Any) -> Policy:
    return replace(recipes.last(time=time), cost=light)


def default(time: Any) -> Policy:
    return replace(recipes.pliant(time=time), cost=light)


METHODS = pytest.mark.parametrize("method", [last, at_random, by_gain, default])


def opened(device: Device, policy: Policy, model: nn.Module | None = None, **how: Any) -> Session:
    """A session whose steps run on the simulated device."""
    model = model if model is not None else make()
    return device.runs(Session(model, sgd(model), classify, policy, clock=device.clock, **how))


def train(session: Session, steps: int, stream: Sequence[Batch] = STREAM) -> list[Selection]:
    """What is chosen for each of so many further steps."""
    out = []
    for _ in range(steps):
        session.step(stream[session.progress.step % len(stream)])
        out.append(session.selection)
    return out


def notes(log: Path) -> list[str]:
    return [line["text"] for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "note"]


# ---------------------------------------------------------------- the laws of the loop


@METHODS
@pytest.mark.parametrize(
    ("time", "speed"), [(0.4, FAST), (0.5, 0.97), (0.7, 1.0), (0.4, 1.03), (0.4, SLOW), (0.5, SLOW), (0.7, SLOW)]
)
def test_the_mean_step_is_at_most_3_percent_over_what_was_asked(
    method: Callable[[float], Policy], time: float, speed: float
) -> None:
    device = Device(speed)
    with opened(device, method(time)) as session:
        chosen = train(session, 150)
        asked = time * session.profile.full.seconds
    assert device.now / 150 <= 1.03 * asked
    changes = [step for step, (a, b) in enumerate(pairwise(chosen), 1) if a.units != b.units and a.round == b.round]
    starts = [step for step, (a, b) in enumerate(pairwise(chosen), 1) if a.units != b.units]
    assert all(b - a >= DWELL for a, b in pairwise([0, *starts]))
    assert sum(step <= 60 for step in changes) <= 2


@METHODS
def test_time_that_is_left_over_is_spent(method: Callable[[float], Policy]) -> None:
    device, stream = Device(FAST), learnable()
    with opened(device, method(0.5)) as session:
        train(session, 60, stream)
        start, asked = device.now, 0.5 * session.profile.full.seconds
        train(session, 60, stream)
    assert (device.now - start) / 60 >= 0.85 * asked


@METHODS
def test_a_device_that_was_slow_while_it_was_measured_gets_no_more_than_its_share(method: Callable[[float], Policy]) -> None:
    device = Device(speed=0.7, full_speed=0.7)
    with opened(device, method(0.5)) as session:
        train(session, 60, learnable())
        start = device.now
        train(session, 60, learnable())
    assert (device.now - start) / 60 <= 1.03 * 0.5 * (0.7 * full_seconds())


def test_nothing_is_added_to_a_selection_that_is_tested() -> None:
    device, stream = Device(FAST), learnable()
    with opened(device, default(0.5)) as session:
        chosen = train(session, 120, stream)
    first = next(step for step, selection in enumerate(chosen) if selection.round == 1)
    added = next(step for step, selection in enumerate(chosen) if len(selection.units) > len(chosen[first].units))
    assert added >= first + UNKNOWN


def test_a_device_that_turns_slow_is_followed() -> None:
    device = Device()
    with opened(device, last("9us")) as session:
        asked = 9e-6
        train(session, 100)
        device.speed = 1.5
        train(session, 400)
        assert device.now / 500 <= 1.03 * asked


def test_a_share_is_one_of_a_full_step_as_the_device_takes_it_now(tmp_path: Path) -> None:
    """The whole device turns slow: a share of its full step buys what it bought before."""
    device = Device()
    with opened(device, last(0.5), log=tmp_path / "log") as session:
        before = train(session, 30)[-1]
        device.speed = device.full_speed = 2.0
        after = train(session, 100)[-1]
        assert after.units == before.units
    assert any("the full step was measured again" in note for note in notes(tmp_path / "log"))


@pytest.mark.parametrize("wrong", [0.4, 2.5])
def test_a_full_step_that_was_measured_wrong_does_not_ruin_the_choice(wrong: float) -> None:
    """The guard: a noisy moment at the start made every step look cheaper, or more expensive, than it is."""

    def noisy(*what: Any, **how: Any) -> Profile:
        profile = light(*what, **how)
        charges = tuple(replace(c, cost=replace(c.cost, seconds=wrong * c.cost.seconds)) for c in profile.charges)
        return replace(profile, charges=charges, base=replace(profile.base, seconds=wrong * profile.base.seconds))

    device = Device(1 / wrong)
    device.full_seconds = true = full_seconds()
    with opened(device, replace(last(0.6), cost=noisy)) as session:
        chosen = train(session, 60)
        assert session.profile.full.seconds == pytest.approx(true)
        assert {selection.units for selection in chosen} == {chosen[0].units}  # 0.6 of a full step, whatever that takes


def test_a_small_correction_takes_no_full_step_and_a_second_one_does(tmp_path: Path) -> None:
    device = Device(1.1)
    with opened(device, last(0.5), log=tmp_path / "log") as session:
        train(session, 20)
        assert len(session.rounds) == 2 and not notes(tmp_path / "log")
        device.speed = 1.3
        train(session, 100)
    assert any("the full step was measured again" in note for note in notes(tmp_path / "log"))


def test_no_full_steps_are_taken_for_a_correction_that_would_change_nothing(tmp_path: Path) -> None:
    policy = replace(recipes.head(), budget=Budget(time=0.5), cost=light)
    with opened(Device(0.7), policy, log=tmp_path / "log") as session:
        train(session, 100)
    assert not any("the full step was measured again" in note for note in notes(tmp_path / "log"))


def test_work_beside_the_run_is_no_reason_to_change() -> None:
    """It slows full steps too, and comes and goes from step to step."""
    device, noise = Device(), random.Random(0)
    with opened(device, last(0.5)) as session:
        for _ in range(120):
            device.full_speed, device.speed = device.speed, noise.choice([1.0, 1.3, 1.6])  # a full step comes after a step
            train(session, 1)
        assert len(session.rounds) == 1


def test_steps_that_take_what_was_asked_are_left_alone() -> None:
    for share in (1.0, 0.95):
        device = Device(share)
        with opened(device, last(0.5)) as session:
            train(session, 100)
            assert len(session.rounds) == 1


def test_a_single_slow_moment_is_no_reason_to_change() -> None:
    device = Device()
    with opened(device, last(0.5)) as session:
        for step in range(40):
            device.speed = 20.0 if step % 10 == 3 else 1.0
            train(session, 1)
        assert len(session.rounds) == 1


def test_another_selection_must_be_worth_what_it_costs() -> None:
    """Near the end of a run nothing is changed that the steps that are left cannot pay for."""
    counts = []
    for total in (12, None):
        device = Device(SLOW)
        with opened(device, last("9us"), total_steps=total) as session:
            train(session, 1)
            session._loop.change_seconds = 5e-6
            train(session, 11)
            counts.append(len(session.rounds))
    assert counts == [1, 2]


# ---------------------------------------------------------------- what a correction is


def test_rounds_show_what_was_asked_predicted_and_measured() -> None:
    device = Device(SLOW)
    with opened(device, last(0.5)) as session:
        chosen = train(session, 25)
        full, (first, second, *_) = session.profile.full.seconds, session.rounds
        assert (first.number, first.step, first.steps) == (0, 0, DWELL + ENOUGH)
        assert first.asked == second.asked == pytest.approx(0.5 * full)
        assert first.predicted == chosen[0].cost.seconds
        assert first.measured == pytest.approx(SLOW * first.predicted)
        assert (second.number, second.step) == (0, DWELL + ENOUGH)
        assert second.predicted == chosen[DWELL + ENOUGH].cost.seconds < first.predicted
        assert sum(round.steps for round in session.rounds) == 25
        assert sum(round.seconds for round in session.rounds) == pytest.approx(device.now)


def test_reading_the_rounds_does_not_change_the_run() -> None:
    runs = []
    for reads in (False, True):
        with opened(Device(SLOW), last(0.5)) as session:
            chosen = []
            for _ in range(40):
                chosen += train(session, 1)
                assert not reads or session.rounds
            runs.append(chosen)
    assert runs[0] == runs[1]


def test_a_correction_is_no_new_round_and_takes_no_probe() -> None:
    scored: list[int] = []

    def worth(seen: score.Seen) -> torch.Tensor:
        scored.append(seen.depth)
        return torch.ones(())

    policy = replace(by_gain(0.5), signal=score.Signal("ones", worth, needs="nothing"))
    with opened(Device(SLOW), policy) as session:
        chosen = train(session, 80)
        assert [selection.round for selection in chosen] == [0] * 70 + [1] * 10
        assert chosen[69].units != chosen[0].units and chosen[69].values == chosen[0].values
    assert scored.count(0) == 2  # probes


@pytest.mark.parametrize("method", [at_random, by_gain])
def test_a_correction_only_adds_or_only_takes_away(method: Callable[..., Policy]) -> None:
    device = Device()
    chosen = []
    with opened(device, method(0.5)) as session:
        for device.speed in (FAST, SLOW):
            chosen += train(session, 60)
    moves = [(a, b) for a, b in pairwise(chosen) if a.units != b.units and a.round == b.round]
    grown = [set(a.units) < set(b.units) for a, b in moves]
    assert all(set(a.units) < set(b.units) or set(b.units) < set(a.units) for a, b in moves)
    assert any(grown) and not all(grown)


def test_a_correction_keeps_what_drift_remembers() -> None:
    with opened(Device(SLOW), by_gain(0.5, schedule.on_drift(2.0, at_least=1000))) as session:
        chosen = train(session, 40)
        assert chosen[-1].units != chosen[0].units
        drift = session.state_dict()["drift"]
        assert drift["count"] == 10  # every four steps, from the first
        always = set.intersection(*({unit.name for unit in selection.units} for selection in chosen))
        assert set(drift["now"]) == always


@pytest.mark.parametrize("method", [last, at_random])
def test_without_corrections_the_profile_and_the_seed_decide(method: Callable[[float], Policy]) -> None:
    chosen = []
    for speed in (1.0, SLOW):
        with opened(Device(speed), method(0.5), correct=False) as session:
            chosen.append(train(session, 130))
            assert len(session.rounds) == session.progress.round + 1
    assert chosen[0] == chosen[1]


def test_without_a_time_budget_nothing_is_corrected() -> None:
    with opened(Device(SLOW), replace(last(0.5), budget=Budget(macs=0.6))) as session:
        train(session, 40)
        [only] = session.rounds
        assert only.asked is None and only.measured == pytest.approx(SLOW * only.predicted)


@pytest.mark.parametrize(("total", "rounds"), [(None, 5), (99, 4), (100, 5), (59, 2)])
def test_on_drift_does_not_choose_again_near_the_end_of_a_run(total: int | None, rounds: int) -> None:
    policy = by_gain(0.9, schedule.on_drift(2.0, at_least=20, at_most=20))
    with opened(Device(), policy, total_steps=total) as session:
        train(session, total or 100)
        assert session.progress.round + 1 == rounds


# ---------------------------------------------------------------- out of reach


def test_a_budget_below_the_floor_is_refused_at_the_start_and_noted_later(tmp_path: Path) -> None:
    with opened(Device(), last(0.1)) as session, pytest.raises(BudgetError, match="floor"):
        train(session, 1)
    with opened(Device(SLOW), last(0.22), log=tmp_path / "log") as session:
        train(session, 100)
        assert {unit.name for unit in session.selection.units} == {"head"}
    assert any(note.endswith("the cheapest step there is takes more") for note in notes(tmp_path / "log"))


def test_a_fast_device_that_trains_everything_says_so(tmp_path: Path) -> None:
    with opened(Device(0.5), last(0.9), log=tmp_path / "log") as session:
        train(session, 100)
        assert len(session.selection.units) == 17
    assert any(note.endswith("everything that is worth training is chosen") for note in notes(tmp_path / "log"))


# ---------------------------------------------------------------- budgets that change


def test_a_budget_that_falls_below_the_floor_ends_with_the_cheapest_step() -> None:
    with opened(Device(), last(schedule.ramp(1.0, 0.1)), total_steps=100) as session:
        chosen = train(session, 100)
        assert {unit.name for unit in chosen[-1].units} == {"head"}
        assert chosen[-1].asked["seconds"] < chosen[-1].limit["seconds"] == chosen[-1].cost.seconds
        assert {selection.round for selection in chosen} == {0}


def test_what_measuring_takes_is_saved_from_the_first_selection_on() -> None:
    device = Device()

    def slow(*what: Any, **how: Any) -> Profile:
        device.now += 20 * full_seconds()
        return light(*what, **how)

    with opened(device, replace(by_gain(0.5), cost=slow)) as session:
        first = train(session, 1)[0]
        assert first.limit["seconds"] == pytest.approx(LEAST * first.asked["seconds"])
        assert first.cost.seconds <= first.limit["seconds"]
    with opened(device, replace(by_gain(0.01), cost=slow)) as session, pytest.raises(BudgetError, match="below the floor"):
        train(session, 1)


@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_what_choosing_takes_is_saved_in_later_steps(seconds: float) -> None:
    """Three choices and a correction of 3 full steps each, in 200 steps."""
    device, choose = Device(), solve.knapsack()

    def slow(problem: solve.Problem) -> solve.Mask:
        device.now += seconds * full_seconds()
        return choose(problem)

    with opened(device, replace(by_gain(0.5), solver=slow), total_steps=200) as session:
        train(session, 200)
        share = device.now / 200 / session.profile.full.seconds
        choices = session.spent["choosing"] / full_seconds()
        assert (choices > 0) == (seconds > 0)
        assert share - choices / 200 < (0.475 if seconds else 0.501)
        assert share > 0.45


def test_another_budget_owes_nothing() -> None:
    device = Device(SLOW)
    with opened(device, last(0.9)) as session:
        train(session, 11)
        assert session.state_dict()["feedback"]["overspent"] > 0
        session.budget = Budget(time=0.5)
        assert session.state_dict()["feedback"]["overspent"] == 0.0
        device.now = 0.0
        train(session, 200)
        assert device.now / 200 <= 1.03 * 0.5 * session.profile.full.seconds


@pytest.mark.parametrize("refused", [Budget(time=0.01), Budget(memory="1B")])
def test_a_refused_budget_leaves_the_old_one(refused: Budget) -> None:
    with opened(Device(SLOW), last(0.85)) as session:
        chosen = train(session, DWELL + ENOUGH + 5)[-1]
        session.state_dict()
        before = [session.engine, session.selection, session.rounds]
        with pytest.raises(BudgetError):
            session.budget = refused
        feedback = session.state_dict()["feedback"]
        assert [session.engine, session.selection, session.rounds] == before and feedback["corrections"] == 1
        assert session.budget == Budget(time=0.85)
        assert train(session, 1)[-1].units == chosen.units


def test_a_full_step_is_measured_again_only_with_a_batch_like_the_first(tmp_path: Path) -> None:
    """A smaller batch, or one of several that make a step, would seem to make a full step cheap."""
    small = STREAM[0][0][:2], STREAM[0][1][:2]
    for how, batch in (({}, small), ({"accumulate": 2}, STREAM[0])):
        device = Device(0.5)
        with opened(device, last(0.5), log=tmp_path / "log", **how) as session:
            session.step(STREAM[0])
            for _ in range(60):
                session.step(batch)
        assert not any("measured again" in note for note in notes(tmp_path / "log"))


@pytest.mark.parametrize("speed", [FAST, SLOW])
def test_a_whole_run_ends_in_its_time(speed: float) -> None:
    device, whole = Device(speed), 0.6 * 200 * full_seconds()
    with opened(device, last(within(f"{whole}s")), total_steps=200) as session:
        train(session, 200)
    assert 0.85 * whole <= device.now <= 1.03 * whole


def test_what_passes_beside_the_steps_counts_too() -> None:
    device, whole = Device(), 0.8 * 200 * full_seconds()
    with opened(device, last(within(f"{whole}s")), total_steps=200) as session:
        for _ in range(200):
            train(session, 1)
            device.now += 0.2 * session.profile.full.seconds
    assert 0.85 * whole <= device.now <= 1.03 * whole


def test_fit_knows_how_long_a_run_is() -> None:
    device, whole = Device(SLOW), 0.6 * 200 * full_seconds()
    with opened(device, last(within(f"{whole}s"))) as session:
        assert len(session.fit(data(50), epochs=4)) == 4
    assert device.now <= 1.03 * whole


def test_a_limit_for_a_run_of_unknown_length_is_refused() -> None:
    model = make()
    before = snapshot(model)
    with (
        opened(Device(), last(within("2min")), model) as session,
        pytest.raises(ValueError, match=r"within\('2min'\).*total_steps"),
    ):
        train(session, 1)
    assert differences(before, snapshot(model)) == []


# ---------------------------------------------------------------- joules


@pytest.mark.parametrize("limit", ["600J", 0.5])
def test_steps_keep_a_limit_on_joules(limit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full steps draw 100 W, and partial steps 150 W."""
    device, watts = Device(), 150.0
    meter = energy.CounterMeter("simulated", lambda: watts * device.now * 1e6)
    monkeypatch.setattr(energy, "required", lambda _: meter)
    monkeypatch.setattr("pliant.session.loop.power", lambda *what, **how: 100.0 * 1e6)
    policy = replace(last(1.0), budget=Budget(energy=limit))
    with opened(device, policy) as session:
        train(session, 60)
        device.now += 100.0  # a window of the meter is over
        train(session, 200)
        asked = 600.0 if isinstance(limit, str) else limit * full_seconds() * 100.0 * 1e6
        assert session.selection.cost.joules is not None
        assert session.selection.cost.joules <= 1.001 * asked


def test_without_a_meter_a_limit_on_joules_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: Any) -> energy.Meter:
        raise energy.MeterError("there is no energy meter here.")

    monkeypatch.setattr(energy, "required", missing)
    model = make()
    before = snapshot(model)
    policy = replace(last(1.0), budget=Budget(energy=0.5))
    with opened(Device(), policy, model) as session, pytest.raises(energy.MeterError, match="no energy meter"):
        train(session, 1)
    assert differences(before, snapshot(model)) == []


# ---------------------------------------------------------------- stop and go on


@pytest.mark.parametrize(("method", "stop"), [(last, 20), (by_gain, 24)])
def test_a_corrected_run_goes_on_as_if_it_had_never_stopped(
    method: Callable[[float], Policy], stop: int, tmp_path: Path
) -> None:
    ends = []
    for stops in (False, True):
        device = Device(SLOW)
        session = opened(device, method(0.5))
        chosen = train(session, stop)
        if stops:
            session.save(tmp_path / "run.pt")
            session.close()
            session = opened(device, method(0.5), make(seed=5))
            session.load(tmp_path / "run.pt")
        chosen += train(session, 60)
        ends.append([snapshot(session.model, session.optimizer), chosen, session.rounds])
    assert ends[0][1:] == ends[1][1:]
    assert differences(ends[0][0], ends[1][0]) == []
