"""The closed loop: steps are measured, and the same round is planned again where they miss what was asked.

Clocks are simulated (`oracle.Device`): a device takes more or less for a step than its profile predicts.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
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

from pliant import (
    Budget,
    BudgetError,
    Mode,
    Policy,
    Profile,
    Progress,
    Session,
    plan,
    recipes,
    schedule,
    score,
    solve,
    units,
    within,
)
from pliant.core.types import Part, Selection, Unit
from pliant.engine.modes import Race, Way
from pliant.graph.backward import read
from pliant.runtime.clock import Pace

Batch = tuple[torch.Tensor, torch.Tensor]
Open = Callable[..., Session]
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


STREAM = data()


def light(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, batch: Any, **how: Any) -> Profile:
    """A forward pass of half the usual weight: 0.4 of a full step stays in reach where everything takes 1.25 times as long."""
    profile = steady(model, optimizer, loss, batch, **how)
    return replace(profile, base=replace(profile.base, seconds=profile.base.seconds / 2))


def full_seconds() -> float:
    model = make()
    return light(model, sgd(model), classify, STREAM[0]).full.seconds


def by_gain(time: Any, when: schedule.Schedule | None = None) -> Policy:
    words = units.layers(), score.update_gain(cross=False), light, solve.knapsack(), when or schedule.every(steps=70)
    return Policy(*words, Budget(time=time))


def by_lot(time: Any) -> Policy:
    return replace(recipes.random(time=time, when=schedule.every(steps=60), seed=3), cost=light)


def last(time: Any) -> Policy:
    return replace(recipes.last(time=time), cost=light)


def ours(time: Any) -> Policy:
    """The default, with values as they are: what is chosen here was worked out by hand for those."""
    return replace(recipes.pliant(time=time), cost=light, solver=solve.filled(solve.milp(gap=1e-4)))


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def start(closed_loop: None, device: Device, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens a session whose steps run on the simulated device."""
    monkeypatch.setattr("pliant.session.session.Watch", device.watch)
    monkeypatch.setattr("pliant.session.session.Pace", device.pace)

    def opened(policy: Policy, model: nn.Module | None = None, **how: Any) -> Session:
        model = model if model is not None else make()
        return device.runs(Session(model, sgd(model), classify, policy, **how))

    return opened


def run(session: Session, steps: int) -> Iterator[Selection]:
    """What is chosen for each of so many further steps."""
    for _ in range(steps):
        session.step(STREAM[session.progress.step % len(STREAM)])
        yield session.selection


def train(session: Session, steps: int) -> list[Selection]:
    return list(run(session, steps))


def few_layers() -> nn.Module:
    torch.manual_seed(0)
    model = Deep()
    del model.layers[6:]
    return model


def far_apart(start: Open) -> tuple[float, float]:
    """The seconds of a choice of few layers above which there is nothing for a while, and of a full step."""
    with start(by_gain(0.61, schedule.once()), few_layers()) as session:
        least = train(session, 1)[0].cost.seconds
        assert session._choice._one_up() > 1.12 * least
        return least, session.profile.full.seconds


def notes(log: Path) -> list[str]:
    return [told["text"] for told in map(json.loads, log.read_text().splitlines()) if told["event"] == "note"]


# ---------------------------------------------------------------- steps come to take what was asked


@pytest.mark.parametrize("over", [0.05, 0.07])
def test_what_lies_between_two_choices_is_met_by_both_in_turn(start: Open, device: Device, over: float) -> None:
    """In a short run too: where the next choice up takes more than is owed for long, a few steps of it will do."""
    least, full = far_apart(start)
    asked = (1 + over) * least / full
    device.now = 0.0
    with start(by_gain(asked, schedule.once()), few_layers()) as session:
        chosen = train(session, 150)
        assert chosen[0].cost.seconds == least
        assert device.now / 150 == pytest.approx((1 + over) * least, rel=0.01)
    changes = [set(before.units) ^ set(after.units) for before, after in pairwise(chosen) if before.units != after.units]
    assert 2 <= len(changes) <= 14  # a look at what steps take comes every ten
    assert all(len(change) == 1 for change in changes)


@pytest.mark.parametrize("speed", [FAST, SLOW])
@pytest.mark.parametrize("time", [0.4, 0.5, 0.7])
@pytest.mark.parametrize("method", [last, by_lot, by_gain, ours])
def test_the_mean_step_is_what_was_asked_though_the_device_is_not_what_was_predicted(
    method: Callable[[float], Policy], time: float, speed: float, start: Open, device: Device
) -> None:
    device.speed = speed
    with start(method(time)) as session:
        train(session, 200)
        assert device.now / 200 == pytest.approx(time * session.profile.full.seconds, rel=0.03)


def test_a_device_that_turns_slow_in_the_middle_is_followed(start: Open, device: Device) -> None:
    with start(last(0.5)) as session:
        train(session, 100)
        device.speed = 1.5
        train(session, 200)
        assert device.now / 300 == pytest.approx(0.5 * session.profile.full.seconds, rel=0.03)


def coarse(head: int, body: int) -> nn.Module:
    """Few choices: the layers behind the first, or everything."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, body), nn.ReLU(), nn.Linear(body, head), nn.ReLU(), nn.Linear(head, 3))


def heavy(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, batch: Any, **how: Any) -> Profile:
    """A forward pass of three times the usual weight: the least that can be chosen and the most are not far apart."""
    profile = steady(model, optimizer, loss, batch, **how)
    return replace(profile, base=replace(profile.base, seconds=profile.base.seconds * 3))


def whole_and_head(model: nn.Module, cost: Callable[..., Profile]) -> tuple[Profile, float]:
    profile = cost(model, sgd(model), classify, STREAM[0])
    head = Unit("head", (Part("2.weight"), Part("2.bias"), Part("4.weight"), Part("4.bias")))
    return profile, profile.cost([head]).seconds


@pytest.mark.parametrize("speed", [0.96, 1.0, 1.02])
@pytest.mark.parametrize("between", [0.4, 0.6, 0.8])
def test_where_choices_lie_far_apart_they_alternate(
    between: float, speed: float, start: Open, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = coarse(60, 20)
    profile, head = whole_and_head(model, heavy)
    least, most = speed * head, speed * profile.full.seconds
    assert 1.1 < most / least < 1.25
    device.speed, asked = speed, least + between * (most - least)
    plans = []
    monkeypatch.setattr("pliant.session.choice.plan", lambda *words: plans.append(plan(*words)) or plans[-1])
    with start(replace(last(asked / profile.full.seconds), cost=heavy), model) as session:
        assert len({selection.units for selection in train(session, 300)}) > 1
        assert device.now / 300 == pytest.approx(asked, rel=0.03)
        assert len(plans) < len(session.rounds)  # going back to what was planned before needs no planning


def test_where_the_next_choice_lies_too_far_the_log_says_so(start: Open, device: Device, tmp_path: Path) -> None:
    model, log = coarse(3, 60), tmp_path / "run.jsonl"
    profile, head = whole_and_head(model, light)
    asked = head + 0.2 * (profile.full.seconds - head)
    assert profile.full.seconds > 1.25 * asked
    with start(last(asked / profile.full.seconds), model, log=log) as session:
        chosen = {selection.units for selection in train(session, 100)}
        assert len(chosen) == 1
    [note] = notes(log)
    assert note.endswith("the next choice up takes a quarter more than was asked, or more still")


def test_where_corrections_must_wait_debts_are_paid_back_slowly(
    start: Open, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_plan(
        policy: Policy, profile: Profile, values: Any, progress: Progress, correction: float | None, *within: float | None
    ) -> Selection:
        if correction is not None:
            device.now += 0.1 * profile.full.seconds
        return plan(policy, profile, values, progress, correction, *within)

    monkeypatch.setattr("pliant.session.choice.plan", slow_plan)
    device.speed = 1.02
    with start(last(0.5)) as session:
        shares = [device.speed * selection.share() for selection in train(session, 1000)]
        assert 0.4 < min(shares) < max(shares) < 0.65
        assert sum(shares) / 1000 == pytest.approx(0.5, rel=0.02)


def test_a_step_that_takes_what_was_asked_is_left_alone(start: Open) -> None:
    with start(last(0.5)) as session:
        train(session, 1)
        share = session.selection.share()
    with start(last(share)) as session:
        train(session, 100)
        assert len(session.rounds) == 1


def test_rounds_tell_what_was_asked_predicted_and_measured(start: Open, device: Device) -> None:
    device.speed = SLOW
    with start(last(0.5)) as session:
        chosen = train(session, 25)
        full, (first, second, *_) = session.profile.full.seconds, session.rounds
        assert (first.number, first.step, first.steps) == (0, 0, 10)
        assert first.asked == second.asked == 0.5 * full
        assert first.predicted == chosen[0].cost.seconds
        assert first.measured == pytest.approx(SLOW * first.predicted)
        assert (second.number, second.step) == (0, 10)
        assert second.predicted == chosen[10].cost.seconds < first.predicted
        assert sum(round.steps for round in session.rounds) == 25
        assert sum(round.seconds for round in session.rounds) == pytest.approx(device.now)


def test_a_corrected_selection_says_what_was_asked_and_what_was_planned_for(start: Open, device: Device) -> None:
    device.speed = SLOW
    with start(last(0.5)) as session:
        first, *_, corrected = train(session, 11)
        asked = 0.5 * session.profile.full.seconds
        assert first.asked == first.limit == corrected.asked == {"seconds": asked}
        assert corrected.cost.seconds <= corrected.limit["seconds"] < asked / SLOW  # it also pays back


def test_without_a_time_budget_nothing_is_corrected(start: Open, device: Device) -> None:
    device.speed = SLOW
    policy = replace(last(0.5), budget=Budget(macs=0.6))
    with start(policy) as session:
        train(session, 40)
        assert len(session.rounds) == 1
        assert session.rounds[0].asked is None
        assert session.rounds[0].measured == pytest.approx(SLOW * session.rounds[0].predicted)


@pytest.mark.parametrize("method", [last, by_lot])
def test_whoever_wants_no_correction_gets_what_the_profile_and_the_seed_say(
    method: Callable[[float], Policy], start: Open, device: Device
) -> None:
    chosen = {}
    for device.speed in (1.0, SLOW):
        with start(method(0.5), correct=False) as session:
            chosen[device.speed] = train(session, 130)
            assert all(selection.limit == selection.asked for selection in chosen[device.speed])
            assert len(session.rounds) == session.progress.round + 1
    assert chosen[1.0] == chosen[SLOW]


def test_looking_at_the_rounds_does_not_change_the_run(start: Open, device: Device) -> None:
    device.speed = SLOW
    with start(last(0.5)) as session:
        expected = train(session, 40)
    device.now = 0.0
    with start(last(0.5)) as session:
        seen = []
        for selection in run(session, 40):
            seen.append(selection)
            assert session.rounds
    assert seen == expected


def test_corrections_take_little_of_the_run(start: Open, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []
    monkeypatch.setattr(Pace, "_in_any_case", 0)

    def slow_plan(
        policy: Policy, profile: Profile, values: Any, progress: Progress, correction: float | None, *within: float | None
    ) -> Selection:
        if correction is not None:
            device.now += 0.1 * profile.full.seconds
            shares.append((len(shares) + 1) * 0.1 * profile.full.seconds / device.now)
        return plan(policy, profile, values, progress, correction, *within)

    monkeypatch.setattr("pliant.session.choice.plan", slow_plan)
    with start(last(0.5)) as session:
        for k in range(60):
            device.speed = (SLOW, FAST)[k % 2]  # never as it was
            train(session, 10)
    assert len(shares) > 1
    assert max(shares[1:]) <= Pace._most_correcting * 1.01


# ---------------------------------------------------------------- engines that spare some of the forward pass


def test_prices_know_what_inference_spares(start: Open, device: Device, racing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes before a choice takes 0.6 of its time as inference; that is known of other choices too then."""
    spare, see = 0.4, Race.see

    def least(way: Way, session: Session) -> float:
        plain, cached = (session.profile.cost(session.selection.units, cached=cached).seconds for cached in (False, True))
        return plain - spare * (plain - cached) if way.prefix else plain

    with start(ours(0.5)) as session:

        def steady_see(race: Race, seconds: Callable[[], float]) -> bool:
            took = least(race.now, session)
            return see(race, lambda: took)

        monkeypatch.setattr(Race, "see", steady_see)
        train(session, 17)
        assert session.engine == "prefix"
        assert session.profile.spared == pytest.approx(spare, rel=1e-6)
        assert session.selection.cost.seconds == pytest.approx(least(Way(prefix=True), session), rel=1e-6)
        chosen = train(session, 150)
        moves = [after for before, after in pairwise(chosen) if after.units != before.units]
        assert len(moves) <= 2  # to the room that inference left, and that is that
        assert chosen[-1].cost.seconds <= 1.02 * 0.5 * session.profile.full.seconds


# ---------------------------------------------------------------- what a correction leaves as it is


def test_a_correction_is_no_new_round_and_takes_no_probe(start: Open, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    probe, probed = score.probe, []

    def counted(*work: Any, **how: Any) -> Any:
        probed.append(how["round"])
        return probe(*work, **how)

    monkeypatch.setattr("pliant.session.session.score.probe", counted)
    device.speed = SLOW
    with start(by_gain(0.5)) as session:
        chosen = train(session, 80)
        assert [selection.round for selection in chosen] == [0] * 70 + [1] * 10
        assert len(session.rounds) > 2
        assert chosen[69].units != chosen[0].units
        assert chosen[69].values == chosen[0].values
    assert probed == [0, 1]


@pytest.mark.parametrize("make", [by_lot, by_gain])
def test_a_correction_only_adds_or_only_takes_away(make: Callable[..., Policy], start: Open, device: Device) -> None:
    """Another optimum may lie far from the one in force; layers that come and go every few steps learn nothing."""
    chosen = []
    with start(make(0.5)) as session:
        for device.speed in (FAST, SLOW):
            chosen += train(session, 60)
    moves = [(before, after) for before, after in pairwise(chosen) if after.units != before.units]
    corrected = [(before, after) for before, after in moves if after.round == before.round]
    assert {after.round for _, after in corrected} == {0, 1}
    grown = [set(before.units) < set(after.units) for before, after in corrected]
    assert all(set(before.units) < set(after.units) or set(after.units) < set(before.units) for before, after in corrected)
    assert any(grown) and not all(grown)


def test_a_correction_keeps_what_drift_remembers(start: Open, device: Device) -> None:
    device.speed = SLOW
    with start(by_gain(0.5, schedule.on_drift(2.0, at_least=1000))) as session:
        chosen = train(session, 40)
        assert chosen[-1].units != chosen[0].units
        drift = session.state_dict()["drift"]
        assert drift["count"] == 10  # a look every four steps, from the first
        always = set.intersection(*({unit.name for unit in selection.units} for selection in chosen))
        assert set(drift["now"]) == always


# ---------------------------------------------------------------- a new head


def test_a_new_head_trains_alone_until_the_first_score(start: Open, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is probed or corrected before; what it leaves of the budget is spent later."""
    probes = []
    probe = score.probe
    monkeypatch.setattr("pliant.signals.probe.probe", lambda *given, **how: probes.append(None) or probe(*given, **how))
    with start(replace(by_gain(0.5, schedule.growing(30, 10)), start="head"), total_steps=250) as session:
        chosen = train(session, 30)
        assert {tuple(unit.name for unit in selection.units) for selection in chosen} == {("head",)}
        assert not probes
        assert set(chosen[-1].values.values()) == {0.0}
        chosen += train(session, 220)
        assert len(probes) == 1
        assert len(chosen[-1].units) > 1
        shares = [selection.share() for selection in chosen]
        assert sum(shares) / len(shares) == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("make", [last, by_lot, by_gain])
def test_a_new_head_trains_alone_whatever_the_solver(make: Callable[..., Policy], start: Open) -> None:
    with start(replace(make(0.5), start="head", when=schedule.growing(30, 10))) as session:
        chosen = train(session, 15)
        session.budget = Budget(time=0.7)
        chosen += train(session, 10)
        assert {tuple(unit.name for unit in selection.units) for selection in chosen} == {("head",)}
        assert len(train(session, 10)[-1].units) > 1


def test_a_budget_that_changes_when_the_first_score_is_due_does_not_put_it_off(start: Open) -> None:
    with start(replace(by_gain(0.5, schedule.growing(30, 10)), start="head")) as session:
        train(session, 30)
        session.budget = Budget(time=0.7)
        assert [unit.name for unit in train(session, 1)[0].units] == ["head"]
        assert len(train(session, 1)[0].units) > 1


def test_a_first_score_that_fails_is_taken_with_the_next_batch(start: Open) -> None:
    with start(replace(by_gain(0.5, schedule.growing(30, 10)), start="head")) as session:
        train(session, 30)
        x, y = STREAM[30 % len(STREAM)]
        weights = copy.deepcopy(session.model.state_dict())
        session.step((x * torch.nan, y))
        session.model.load_state_dict(weights)
        assert len(session.selection.units) == 1
        assert len(train(session, 1)[0].units) > 1


@pytest.mark.parametrize(("total", "rounds"), [(None, 5), (99, 4), (100, 5), (59, 2)])
def test_on_drift_leaves_the_end_of_a_run_alone_that_is_too_short_to_pay_for_another_choice(
    start: Open, total: int | None, rounds: int
) -> None:
    """Twenty steps at the least: what comes at step 80 of 99 would last for fewer."""
    with start(by_gain(0.5, schedule.on_drift(2.0, at_least=20, at_most=20)), total_steps=total) as session:
        assert len({selection.round for selection in train(session, total or 100)}) == rounds


def test_a_head_that_waits_for_its_first_score_gets_one_at_the_end_of_a_run_too(start: Open) -> None:
    waiting = replace(by_gain(0.5, schedule.on_drift(2.0, at_least=20, at_most=25)), start="head")
    with start(waiting, total_steps=40) as session:
        assert {selection.round for selection in train(session, 40)} == {0, 1}


@pytest.mark.parametrize("share", [0.884, 0.95])
def test_what_no_later_step_pays_back_is_not_overspent(start: Open, device: Device, share: float) -> None:
    """A budget that is a function says itself what is left: choices do not take turns around it."""
    least, full = far_apart(start)
    device.now = 0.0
    with start(by_gain(lambda now: least / share / full, schedule.once()), few_layers()) as session:
        train(session, 150)
        assert device.now / 150 <= least / share


def test_before_the_first_score_nothing_is_out_of_reach_and_another_optimizer_asks_for_none(
    start: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "run.jsonl"
    with start(replace(by_gain(0.5, schedule.growing(60, 10)), start="head"), log=log) as session:
        monkeypatch.setattr("pliant.session.choice.Choice.again", None)  # nothing is corrected
        train(session, 15)
        session.budget = Budget(time=0.7)
        session.optimizer = sgd(session.model)
        assert {len(selection.units) for selection in train(session, 40)} == {1}
    assert notes(log) == ["the optimizer was replaced"]


def test_a_start_with_the_head_survives_a_stop(start: Open, device: Device, tmp_path: Path) -> None:
    policy = replace(by_gain(0.5, schedule.growing(30, 10)), start="head")
    with start(policy) as session:
        train(session, 20)
        session.save(tmp_path / "run.pt")
        go_on = [selection.to_json() for selection in train(session, 40)]
    with start(policy) as session:
        session.load(tmp_path / "run.pt")
        assert [selection.to_json() for selection in train(session, 40)] == go_on


# ---------------------------------------------------------------- budgets that are out of reach, that move, that change


def test_a_budget_below_the_floor_is_refused_at_the_start_and_out_of_reach_later(
    start: Open, device: Device, tmp_path: Path
) -> None:
    with start(last(0.1)) as session, pytest.raises(BudgetError, match="floor"):
        train(session, 1)
    device.speed, log = SLOW, tmp_path / "run.jsonl"
    with start(last(0.22), log=log) as session:
        train(session, 100)
        assert {unit.name for unit in session.selection.units} == {"head"}
    [note] = notes(log)
    assert note.endswith("the cheapest step there is takes more")
    assert "asked 0.220" in note


def test_a_fast_device_that_trains_everything_says_so_once(start: Open, device: Device, tmp_path: Path) -> None:
    device.speed, log = 0.5, tmp_path / "run.jsonl"
    with start(last(0.9), log=log) as session:
        train(session, 100)
        assert len(session.selection.units) == 17
    [note] = notes(log)
    assert note.endswith("everything that is worth training is chosen")


def test_a_budget_that_a_correction_will_keep_is_not_out_of_reach(start: Open, device: Device, tmp_path: Path) -> None:
    device.speed, log = SLOW, tmp_path / "run.jsonl"
    with start(last(1.0), log=log) as session:
        train(session, 100)
        assert session.rounds[-1].measured < 1.03 * session.profile.full.seconds
    assert notes(log) == []


def test_a_budget_that_falls_below_the_floor_ends_with_the_cheapest_step(start: Open, device: Device, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with start(last(schedule.ramp(1.0, 0.1)), log=log, total_steps=100) as session:
        chosen = train(session, 100)
        assert {unit.name for unit in chosen[-1].units} == {"head"}
        assert chosen[-1].asked["seconds"] < chosen[-1].limit["seconds"] == chosen[-1].cost.seconds
        assert {selection.round for selection in chosen} == {0}
    [note] = notes(log)
    assert note.endswith("the cheapest step there is takes more")


def test_a_budget_that_moves_is_followed_on_a_device_that_is_slow(start: Open, device: Device) -> None:
    device.speed = SLOW
    with start(last(schedule.ramp(0.9, 0.4)), total_steps=200) as session:
        train(session, 200)
        assert device.now / 200 == pytest.approx(0.65 * session.profile.full.seconds, rel=0.03)
        assert session.state_dict()["feedback"]["debt"] == 0.0  # the function itself says what is left


def test_another_budget_owes_nothing(start: Open, device: Device) -> None:
    device.speed = SLOW
    with start(last(0.9)) as session:
        train(session, 11)
        assert session.state_dict()["feedback"]["debt"] < 0
        session.budget = Budget(time=0.5)
        assert session.state_dict()["feedback"]["debt"] == 0.0
        device.now = 0.0
        train(session, 200)
        assert device.now / 200 == pytest.approx(0.5 * session.profile.full.seconds, rel=0.03)


def test_steps_before_another_budget_are_held_against_the_old_one(start: Open, device: Device) -> None:
    with start(last(0.9)) as session:
        train(session, 9)
        session.budget = Budget(time=0.5)
        train(session, 1)
        full = session.profile.full.seconds
        assert session.rounds[0].asked == 0.9 * full
        assert abs(session.state_dict()["feedback"]["debt"]) < 0.05 * full


# ---------------------------------------------------------------- a limit for the whole run


@pytest.mark.parametrize("speed", [FAST, 1.0, SLOW])
def test_a_whole_run_ends_when_it_was_to(speed: float, start: Open, device: Device) -> None:
    device.speed, whole = speed, 0.6 * 200 * full_seconds()
    with start(last(within(f"{whole}s")), total_steps=200) as session:
        train(session, 200)
    assert device.now == pytest.approx(whole, rel=0.03)


def test_what_passes_beside_the_steps_counts_too(start: Open, device: Device) -> None:
    whole = 0.8 * 200 * full_seconds()
    with start(last(within(f"{whole}s")), total_steps=200) as session:
        for _ in run(session, 200):
            device.now += 0.2 * session.profile.full.seconds
    assert device.now == pytest.approx(whole, rel=0.03)


def test_fit_knows_how_long_a_run_is(start: Open, device: Device) -> None:
    device.speed, whole = SLOW, 0.6 * 200 * full_seconds()
    with start(last(within(f"{whole}s"))) as session:
        assert len(session.fit(data(50), epochs=4)) == 4
    assert device.now == pytest.approx(whole, rel=0.03)


def test_a_limit_for_a_run_of_unknown_length_is_refused(start: Open) -> None:
    model = make()
    before = snapshot(model)
    with start(last(within("2min")), model) as session, pytest.raises(ValueError, match=r"within\('2min'\).*total_steps"):
        train(session, 1)
    assert differences(before, snapshot(model)) == []


# ---------------------------------------------------------------- stop and go on


@pytest.mark.parametrize("method", [last, by_gain])
@pytest.mark.parametrize("stop", [20, 24])
def test_a_corrected_run_goes_on_as_if_it_had_never_stopped(
    stop: int, method: Callable[[float], Policy], start: Open, device: Device, tmp_path: Path
) -> None:
    ends = []
    for stops in (False, True):
        device.now, device.speed = 0.0, SLOW
        session = start(method(0.5))
        chosen = train(session, stop)
        if stops:
            session.save(tmp_path / "run.pt")
            session.close()
            session = start(method(0.5), make(seed=5))
            session.load(tmp_path / "run.pt")
        chosen += train(session, 60)
        ends.append([snapshot(session.model, session.optimizer), chosen, session.rounds])
    assert ends[0][1:] == ends[1][1:]
    assert differences(ends[0][0], ends[1][0]) == []


def test_what_was_learned_of_the_device_survives_a_stop(start: Open, device: Device, tmp_path: Path) -> None:
    device.speed = SLOW
    with start(last(0.5)) as session:
        train(session, 60)
        session.save(tmp_path / "run.pt")
        known = session.state_dict()["feedback"]
    with start(last(0.5), make(seed=5)) as session:
        session.load(tmp_path / "run.pt")
        assert session.state_dict()["feedback"] == known
        assert known["ratio"] == pytest.approx(SLOW)
        before = device.now
        train(session, 140)
        assert session.progress.step == 200
        assert (device.now - before) / 140 == pytest.approx(0.5 * session.profile.full.seconds, rel=0.03)


# ---------------------------------------------------------------- near


def near(policy: Policy, profile: Profile, values: dict[Unit, float], share: float, held: tuple[Unit, ...]) -> Selection:
    return plan(replace(policy, budget=Budget(time=share)), profile, values, Progress(), 1.0, None, held)


def test_where_nothing_of_a_choice_can_stay_it_is_a_fresh_one() -> None:
    model = make()
    profile, policy = light(model, sgd(model), classify, STREAM[0]), replace(by_gain(0.5), head=False)
    all_units = policy.units(read(model, classify, STREAM[0]))
    values = dict.fromkeys(all_units, 1.0)
    dearest = max(all_units, key=lambda unit: profile.cost([unit]).seconds)
    share = 0.9 * profile.cost([dearest]).seconds / profile.full.seconds
    fresh = plan(replace(policy, budget=Budget(time=share)), profile, values, Progress())
    assert near(policy, profile, values, share, (dearest,)).units == fresh.units and dearest not in fresh.units


@pytest.mark.parametrize("solver", [solve.cycle(1), solve.sample(1), solve.with_ends(solve.sample(1))])
def test_what_takes_turns_is_not_added_to(solver: solve.Solver) -> None:
    model = make()
    profile, policy = light(model, sgd(model), classify, STREAM[0]), replace(by_gain(1.0), solver=solver)
    values = dict.fromkeys(policy.units(read(model, classify, STREAM[0])), 1.0)
    first = plan(replace(policy, budget=Budget(time=1.0)), profile, values, Progress())
    assert near(policy, profile, values, 1.0, first.units).units == first.units


def test_another_budget_is_no_correction(start: Open) -> None:
    """What a falling budget leaves is spent anew, on whatever is worth most now."""
    policy = Policy(units.layers(), score.nearness(), light, solve.knapsack(), budget=Budget(macs=schedule.ramp(0.9, 0.45)))
    with start(policy, total_steps=40) as session:
        chosen = train(session, 40)
        for selection in {selection.units: selection for selection in chosen}.values():
            share = selection.limit["macs"] / session.profile.full.macs
            values = {unit: selection.values[unit.name] for unit in session.units}
            fresh = plan(replace(policy, budget=Budget(macs=share)), session.profile, values, Progress())
            assert selection.units == fresh.units
        assert len({selection.units for selection in chosen}) > 2


# ---------------------------------------------------------------- steps that are captured


def launching(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, batch: Any, **how: Any) -> Profile:
    """Of a device that waits for launches three quarters of the time."""
    profile = light(model, optimizer, loss, batch, **how)
    return replace(profile, other_seconds=tuple(seconds / 4 for seconds in profile.seconds))


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if steps could be captured here."""
    monkeypatch.setattr("pliant.engine.engine.Engine.may_capture", property(lambda engine: engine.way.graphs))


def inference_and_head(start: Open) -> tuple[int, int]:
    """The bytes that inference takes, and those that a step takes beyond it that trains the head alone."""
    with start(replace(last(0.9), cost=launching), engine="graphs") as session:
        train(session, 1)
        return session.profile.inference, session.profile.cost(session.selection.units[:1]).bytes


def test_captured_steps_keep_what_launches_could_not(start: Open, capturing: None) -> None:
    policy = replace(last(0.15), cost=launching)
    with pytest.raises(BudgetError, match="below the floor"), start(policy, engine="plain") as session:
        session.step(STREAM[0])
    with pytest.raises(BudgetError, match="below the floor"), start(policy, engine="graphs") as session:
        session.before_step(STREAM[0])  # the caller's own steps are not captured
    with start(policy, engine="graphs") as session:
        chosen = train(session, 60)
    assert all(len(selection.units) > 1 for selection in chosen)
    spent, asked = [selection.cost.seconds for selection in chosen], 0.15 * session.profile.full.seconds
    assert 0.9 * asked <= sum(spent) / len(spent) <= 1.03 * asked


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[Session], None]:
    """Gives a session that has not begun the ways of a GPU, on which steps can be captured as far as is known."""
    captures = property(lambda engine: any(way.graphs for way in engine.race.ways))
    monkeypatch.setattr("pliant.engine.engine.Engine.may_capture", captures)

    def give(session: Session) -> None:
        session._engine._cuda = True
        session._engine.settle(session.budget, races=False)

    return give


def test_the_first_plan_counts_on_inference_where_a_race_will_tell(start: Open, as_on_cuda: Callable[[Session], None]) -> None:
    spared, least = {}, {}
    for engine in ("auto", "auto-prefix", "graphs", "prefix+graphs"):
        with start(replace(last(0.15), cost=launching), engine=engine) as session:
            as_on_cuda(session)
            train(session, 1)
            spared[engine] = session._choice.spared
            least[engine] = session.profile.cost(session.selection.units[:1]).seconds  # before the head most can be spared
    assert 0 < spared.pop("auto") < 1 and set(spared.values()) == {0}
    assert least.pop("auto") < 0.9 * min(least.values())


def test_what_a_first_plan_counts_on_ends_with_captures(start: Open, as_on_cuda: Callable[[Session], None]) -> None:
    inference, head = inference_and_head(start)

    def memory(now: Progress) -> str:
        return f"{head + inference + 100 if now.step < 3 else head + inference // 2}B"

    policy = replace(last(0.9), cost=launching, budget=Budget(time=0.9, memory=memory))
    with start(policy, engine="auto") as session:
        as_on_cuda(session)
        train(session, 1)
        assert session._choice.spared > 0
        train(session, 10)
        assert not session.profile.mode.graphs and session._choice.spared == 0


@pytest.mark.parametrize(
    ("cost", "engine", "raced"),
    [
        (launching, "auto", "graphs, prefix+graphs"),
        (light, "auto", "plain, graphs, prefix+graphs"),
        (launching, "auto-prefix", "plain, graphs"),  # one way is no race, and only a race tells whether it can be gone
    ],
)
def test_a_step_that_waits_for_launches_takes_part_in_no_race(
    start: Open, as_on_cuda: Callable[[Session], None], cost: Any, engine: str, raced: str
) -> None:
    with start(replace(last(0.5), cost=cost), engine=engine) as session:
        as_on_cuda(session)
        train(session, 1)
        assert ", ".join(map(str, session._engine.race.ways)) == raced


def test_where_no_step_could_be_captured_those_that_were_left_out_race_after_all(
    start: Open, as_on_cuda: Callable[[Session], None], racing: None, tmp_path: Path
) -> None:
    with start(replace(last(0.5), cost=launching), engine="auto", log=tmp_path / "run.jsonl") as session:
        as_on_cuda(session)
        train(session, 32)  # there is no GPU
        assert ", ".join(map(str, session._engine.race.ways)) == "plain, graphs, prefix+graphs"
        assert session._engine.race.winner is not None and not session._engine.race.is_on
        assert not session.profile.mode.graphs and session._choice.spared == 0
        told = [line for line in (tmp_path / "run.jsonl").read_text().splitlines() if "the fastest of" in line]
    assert len(told) == 1


def test_seconds_that_memory_keeps_from_being_spent_are_no_reason_for_another_choice(start: Open) -> None:
    policy = replace(by_gain(0.5), solver=solve.milp(), budget=Budget(time=0.5, memory="1GB"))
    with start(policy) as session:
        train(session, 30)
        choice, now = session._choice, session.progress
        feedback, limit = choice.feedback, choice._asked_bytes(now)
        assert limit is not None
        feedback.recent = 0.5 * (choice.asked_seconds(now) or 0.0)
        feedback.debt = 0.0
        assert choice.is_off(now, correct=True) and choice.out_of_reach != "memory leaves no room for more"
        first = feedback.rounds[-1]
        added = replace(first, predicted_bytes=first.predicted_bytes + 1, measured_bytes=int(limit) + 1)
        feedback.rounds += [added, replace(first)]
        assert not choice.is_off(now, correct=True) and choice.out_of_reach == "memory leaves no room for more"


def test_captured_steps_leave_room_for_inference_where_memory_is_limited(start: Open, capturing: None) -> None:
    """They hold on to all that they take, also while something else runs."""
    policy = replace(last(0.15), cost=launching)
    with start(policy, engine="graphs") as session:
        train(session, 1)
        whole, taken = session.profile.full, session.selection.cost.bytes
        inference, head = session.profile.inference, session.profile.cost(session.selection.units[:1]).bytes
    assert inference > 0 and head < taken

    def limited(memory: int) -> Session:
        return start(replace(policy, budget=replace(policy.budget, memory=f"{memory}B")), engine="graphs", correct=False)

    for memory in (taken + inference, taken + inference - 1, head + inference):
        with limited(memory) as session:
            train(session, 1)
            assert session.profile.mode.graphs and session.profile.full == whole
            assert session.selection.cost.bytes <= memory - inference
            assert (session.selection.cost.bytes == taken) == (memory == taken + inference)
    with limited(head + inference - 1) as session, pytest.raises(BudgetError, match="below the floor"):
        session.step(STREAM[0])  # eagerly there is room, but not the time
    eager = replace(policy, budget=Budget(time=1.0, memory=f"{head + inference - 1}B"))
    with start(eager, engine="graphs", correct=False) as session:
        train(session, 1)
        assert not session.profile.mode.graphs and not session._engine.may_hold
        assert head <= session.selection.cost.bytes < head + inference


def test_what_is_always_chosen_needs_its_room_too(start: Open, capturing: None) -> None:
    """Where it has none, steps are not captured."""
    policy = replace(last(1.0), cost=launching, always=("layers.0",))
    with start(policy, engine="graphs", correct=False) as session:
        train(session, 1)
        inference, profile = session.profile.inference, session.profile
        least = profile.cost([unit for unit in session.units if unit.name in ("layers.0", "head")]).bytes
    for memory, captured in ((least + inference, True), (least + inference // 2, False)):
        limited = replace(policy, budget=Budget(time=1.0, memory=f"{memory}B"))
        for correct in (False, True):
            with start(limited, engine="graphs", correct=correct) as session:
                train(session, 12)
                assert session.profile.mode.graphs == captured
                assert session.selection.cost.bytes <= memory - (inference if captured else 0)
                assert session._engine.may_hold == captured


@pytest.mark.parametrize("correct", [False, True])
def test_a_limit_that_falls_ends_captures(start: Open, capturing: None, correct: bool) -> None:
    inference, head = inference_and_head(start)

    def memory(now: Progress) -> str:
        return f"{head + inference + 100 if now.step < 15 else head + inference // 2}B"

    policy = replace(last(0.9), cost=launching, budget=Budget(time=0.9, memory=memory))
    with start(policy, engine="graphs", correct=correct) as session:
        train(session, 10)
        assert session.profile.mode.graphs and session.selection.cost.bytes <= head + 100
        train(session, 20)
        assert not session.profile.mode.graphs and session.selection.cost.bytes <= head + inference // 2


@pytest.mark.parametrize("correct", [False, True])
def test_a_limit_that_rises_again_lets_captures_begin_again(
    start: Open, capturing: None, correct: bool, tmp_path: Path
) -> None:
    """Also after a session was saved in between."""
    inference, head = inference_and_head(start)

    def memory(now: Progress) -> str:
        return f"{head + inference // 2 if 5 <= now.step < 15 else head + inference + 200}B"

    policy = replace(last(0.9), cost=launching, budget=Budget(time=0.9, memory=memory))
    with start(policy, engine="graphs", correct=correct) as session:
        train(session, 10)
        assert not session.profile.mode.graphs and not session._engine.may_hold
        state = session.state_dict()
        train(session, 20)
        assert session.profile.mode.graphs and session._engine.may_hold
        assert session.selection.cost.bytes <= head + 200
    with start(policy, engine="graphs", correct=correct) as session:
        session.load_state_dict(state)
        assert not session._engine.may_hold
        train(session, 20)
        assert session.profile.mode.graphs and session.selection.cost.bytes <= head + 200


@pytest.mark.parametrize("correct", [False, True])
def test_another_budget_leaves_room_for_inference(start: Open, capturing: None, correct: bool) -> None:
    policy = replace(last(0.3), cost=launching)
    with start(policy, engine="graphs", correct=correct) as session:
        train(session, 1)
        memory = session.profile.cost(session.units[:9]).bytes + session.profile.inference // 2
        session.budget = Budget(time=0.9, memory=f"{memory}B")
        train(session, 1)
        assert session.profile.mode.graphs
        assert session.selection.cost.bytes <= memory - session.profile.inference


def test_a_refused_budget_leaves_no_trace_where_it_would_end_captures(start: Open, capturing: None, device: Device) -> None:
    device.speed = SLOW
    with start(replace(last(0.3), cost=launching), engine="graphs") as session:
        train(session, 40)
        engine, feedback = session._engine, session._choice.feedback
        head = session.profile.cost(session.units[:1]).bytes
        session._look_at_steps()  # as another budget does first

        def now() -> Any:
            return engine.race, engine.is_tight, engine.may_hold, feedback.ratio, feedback.since, session.budget

        before = now()
        with pytest.raises(BudgetError, match="below the floor"):
            session.budget = Budget(time=0.15, memory=f"{head}B")
        assert now() == before


def test_another_budget_may_end_captures_and_begin_them(start: Open, capturing: None) -> None:
    with start(replace(last(0.5), cost=launching), engine="graphs", correct=False) as session:
        train(session, 1)
        inference, head = session.profile.inference, session.profile.cost(session.selection.units[:1]).bytes
        with pytest.raises(BudgetError, match="below the floor"):
            session.budget = Budget(time=0.15, memory=f"{head}B")
        assert session._engine.may_hold and session.profile.mode.graphs
        session.budget = Budget(time=0.9, memory=f"{head}B")
        train(session, 1)
        assert not session._engine.may_hold and not session.profile.mode.graphs
        assert session.selection.cost.bytes <= head
        session.budget = Budget(time=0.15, memory=f"{head + inference}B")  # which eager steps could not keep
        train(session, 1)
        assert session._engine.may_hold and session.profile.mode.graphs
        assert session.selection.cost.bytes <= head


def test_memory_may_be_limited_before_the_first_step_where_a_profile_is_given(start: Open) -> None:
    model = make()
    profile = light(model, sgd(model), classify, STREAM[0])
    for always in ((), ("layers.0",)):
        policy = replace(last(0.8), always=always)
        with start(policy, profile=profile, allow_mismatch=True) as session:
            session.budget = Budget(time=0.8, memory=0.5)
            state = session.state_dict()
            train(session, 1)
            assert session.selection.cost.bytes <= 0.5 * session.profile.full.bytes
        with start(replace(policy, budget=Budget(memory=0.9)), profile=profile, allow_mismatch=True) as session:
            session.load_state_dict(state)
            train(session, 1)
            assert session.selection.cost.bytes <= 0.5 * session.profile.full.bytes


@pytest.mark.parametrize("engine", ["auto", "graphs"])
def test_what_cannot_be_captured_is_priced_as_such(start: Open, racing: None, engine: str) -> None:
    """Here there is no CUDA device."""
    with start(replace(last(0.5), cost=launching), engine=engine) as session:
        train(session, 1)
        assert not session.profile.mode.graphs


@pytest.mark.parametrize("of", ["scaler", "channels"])
def test_what_is_known_to_be_eager_is_priced_as_such(start: Open, capturing: None, of: str) -> None:
    policy, how = replace(last(0.5), cost=launching), {}
    if of == "scaler":
        how["scaler"] = torch.amp.GradScaler("cpu")
    else:
        policy = replace(policy, units=units.channels(group=3))
    with start(policy, engine="graphs", **how) as session:
        train(session, 1)
        assert not session.profile.mode.graphs


def test_a_profile_of_captured_steps_prices_others_as_what_they_are(start: Open) -> None:
    model = make()
    profile = launching(model, sgd(model), classify, STREAM[0]).on(Mode(graphs=True))
    with start(last(0.5), profile=profile, allow_mismatch=True, engine="plain") as session:
        train(session, 1)
        assert not session.profile.mode.graphs
        assert session.selection.cost.seconds == pytest.approx(0.5 * session.profile.full.seconds, rel=0.1)


def test_a_ratio_is_forgotten_with_its_prices(start: Open, capturing: None, device: Device) -> None:
    device.speed = SLOW
    with start(replace(last(0.3), cost=launching), engine="graphs") as session:
        train(session, 40)
        assert session.profile.mode.graphs
        session._engine.settle(session.budget, races=False)
        session._choice.change_budget(Budget(time=0.6), session.progress, "plain", captured=False)
        train(session, 1)
        assert session.selection.cost.seconds == pytest.approx(0.6 * session.profile.full.seconds, rel=0.1)


@pytest.mark.parametrize(("seconds", "fewer"), [(0.0, False), (30.0, True), (1e9, True)])
def test_a_budget_moves_only_as_often_as_another_choice_is_worth_what_it_takes(
    start: Open, seconds: float, fewer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`seconds`: how many steps' time it takes to run another choice for the first time."""
    toll = seconds * 0.5 * full_seconds()
    monkeypatch.setattr("pliant.engine.engine.Engine.seconds_per_choice", property(lambda engine: toll))
    with start(last(schedule.ramp(0.8, 0.4)), total_steps=200) as session:
        chosen = train(session, 200)
    changes = sum(before.units != after.units for before, after in pairwise(chosen))
    assert (changes < 6) == fewer and (changes == 0) == (seconds > 1e6)


@pytest.mark.parametrize(("toll", "horizon"), [(0.0, 50), (1e-9, 90)])
def test_debts_are_paid_back_slowly_only_where_another_choice_is_costly(
    start: Open, toll: float, horizon: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pliant.engine.engine.Engine.seconds_per_choice", property(lambda engine: toll))
    with start(last(0.5), total_steps=200) as session:
        train(session, 21)
        assert session.state_dict()["feedback"]["horizon"] == horizon
