"""`plan` is pure, keeps its budget by the profile's own judgement, and names the floor when it cannot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from instances import chain_profile, laws, profiles, units

from pliant import Budget, BudgetError, Cost, Part, Policy, Profile, Progress, Selection, Unit, plan
from pliant.core.schedule import ramp
from pliant.cost.profile import Charge, ChargeKind
from pliant.planning.solve import Problem, Solver, coverage, cycle, fixed, greedy, knapsack, milp, sample


def policy(solver: Solver | None = None, **more: Any) -> Policy:
    """A policy that is only asked to decide: units, signal and cost are given to `plan` ready-made."""

    def unasked(*args: Any) -> Any:
        raise AssertionError("plan() works on what it is given")

    return Policy(unasked, unasked, unasked, solver or knapsack(), **more)


def chosen(selection: Selection) -> str:
    return " ".join(unit.name for unit in selection.units)


def worth(*values: float) -> dict[Unit, float]:
    return dict(zip(units(len(values)), values, strict=True))


FOUR = chain_profile(own=[1, 2, 3, 4], way=[1, 1, 1, 0], base=7)  # a full step takes 20
VALUES = worth(1, 5, 2, 9)


# ---------------------------------------------------------------- what is decided


def test_the_best_choice_inside_the_budget() -> None:
    picked = plan(policy(budget=Budget(time="14s")), FOUR, VALUES)
    assert chosen(picked) == "u3", "the deepest unit pays for the whole way"
    assert picked.cost.seconds == 14
    assert chosen(plan(policy(budget=Budget(time="13s")), FOUR, VALUES)) == "u0 u1"
    assert chosen(plan(policy(budget=Budget(time=0.8)), FOUR, VALUES)) == "u1 u3"


def test_a_selection_explains_itself() -> None:
    policy_ = policy(budget=Budget(time=0.8, memory=0.9), solver=milp())
    picked = plan(policy_, FOUR, VALUES, Progress(step=120, round=3))
    assert picked.limit == picked.asked == {"seconds": 16.0, "bytes": 18_000.0}
    assert picked.value == 14.0
    assert (picked.round, picked.step) == (3, 120)
    assert picked.full == FOUR.full == Cost(20, 20_000, 200)
    assert picked.cost == FOUR.cost(picked.units)
    assert picked.values == {"u0": 1.0, "u1": 5.0, "u2": 2.0, "u3": 9.0}


def test_two_budgets_at_once() -> None:
    charges = (
        Charge(ChargeKind.NODE, Cost(6.0, 1, 1), ("p0",)),
        Charge(ChargeKind.NODE, Cost(1.0, 6, 1), ("p1",)),
        Charge(ChargeKind.NODE, Cost(3.0, 3, 1), ("p2",)),
    )
    profile = Profile(charges, Cost(1.0, 1, 1))
    values = worth(5, 5, 4)
    both = plan(policy(milp(), budget=Budget(time="5s", memory="5B")), profile, values)
    assert chosen(both) == "u2"
    assert chosen(plan(policy(milp(), budget=Budget(time="5s")), profile, values)) == "u1 u2"
    assert chosen(plan(policy(milp(), budget=Budget(memory="5B")), profile, values)) == "u0 u2"


def test_always_and_head_are_chosen_in_any_case() -> None:
    budget = Budget(time="14s")
    assert chosen(plan(policy(budget=budget, always=("u2",)), FOUR, VALUES)) == "u1 u2"
    headed = replace(FOUR, head=("p0",))
    assert chosen(plan(policy(budget=budget), headed, VALUES)) == "u0 u1"
    assert chosen(plan(policy(budget=budget, head=False), headed, VALUES)) == "u3"


def test_always_must_name_something() -> None:
    with pytest.raises(ValueError, match=r"no unit matches 'stem'\. Units here: u0, u1, u2, u3 \(4\)\."):
        plan(policy(always=("stem",)), FOUR, VALUES)


def test_budget_moves_with_progress() -> None:
    shrinking = policy(budget=Budget(time=ramp(1.0, 0.4)))
    picked = [chosen(plan(shrinking, FOUR, VALUES, Progress(step=s, total_steps=10))) for s in (0, 5, 10)]
    assert picked == ["u0 u1 u2 u3", "u3", "u0"]


@laws(150)
@given(profiles(), st.lists(st.integers(-5, 9), min_size=6, max_size=6))
def test_a_full_budget_chooses_everything_of_positive_value(profile: Profile, values: list[int]) -> None:
    assume(max(values) > 0 and profile.full.seconds and profile.full.bytes)
    full = {unit for unit, value in worth(*values).items() if value > 0}
    for solver in (knapsack(), milp(), greedy()):
        assert set(plan(policy(solver, budget=Budget(time=1.0)), profile, worth(*values)).units) == full
    assert set(plan(policy(milp(), budget=Budget(time=1.0, memory=1.0)), profile, worth(*values)).units) == full
    assert set(plan(policy(), profile, worth(*values)).units) == full, "no budget is no limit"


# ---------------------------------------------------------------- the laws of budgets


def branching(seed: int, count: int) -> tuple[Profile, Mapping[Unit, float]]:
    """A graph whose branches share little; prices differ by orders of magnitude."""
    rng = np.random.default_rng(seed)
    charges = []
    for j in range(2 * count):
        later = [k for k in range(j + 1, min(j + 4, 2 * count)) if rng.random() < 0.4]
        cost = Cost(float(rng.lognormal(-6, 1)), int(rng.integers(1, 10**6)), int(rng.integers(1, 10**6)))
        charges.append(Charge(ChargeKind.NODE, cost, (f"p{rng.integers(count)}",), tuple(later)))
    return Profile(tuple(charges), Cost(0.02, 1000, 10**6)), worth(*rng.lognormal(0, 1.5, count))


SOLVERS: dict[str, Solver] = {
    "knapsack": knapsack(),
    "coarse": knapsack(100),
    "milp": milp(),
    "greedy": greedy(),
    "sample": sample(),
    "cycle": cycle(3),
}


@pytest.mark.parametrize("solver", [milp(), greedy()])
def test_slices_that_fill_a_limit_to_the_last_mac(solver: Solver) -> None:
    profile = Profile((Charge(ChargeKind.WEIGHT_GRAD, Cost(1.0, 0, 12 * 72), ("w",)),), Cost(), shapes={"w": (12, 2)})
    rows = {Unit(f"w[{i}]", (Part("w", 0, (i,)),)): 1.0 for i in range(12)}
    picked = plan(policy(solver, budget=Budget(macs="504MAC")), profile, rows)  # 7 / 12 · 12 · 72 is a little more as floats
    assert len(picked.units) == 7 and picked.cost.macs == 504


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("count", [6, 20])
def test_never_over_a_limit(count: int, name: str) -> None:
    for seed in range(4):
        profile, values = branching(seed, count)
        for share in np.linspace(0.3, 1.0, 8):
            budgets = [Budget(time=float(share)), Budget(memory=float(share))]
            if name not in ("knapsack", "coarse"):
                budgets.append(Budget(time=float(share), memory=float(share), macs=0.99))
            for budget in budgets:
                try:
                    picked = plan(policy(SOLVERS[name], budget=budget), profile, values)
                except BudgetError as error:
                    assert "floor" in str(error)
                    continue
                for resource, limit in picked.limit.items():
                    assert getattr(profile.cost(picked.units), resource) <= limit * (1 + 1e-8)


@pytest.mark.parametrize("name", ["knapsack", "coarse", "milp"])
@pytest.mark.parametrize("count", [6, 24])
def test_value_never_falls_when_a_budget_grows(count: int, name: str) -> None:
    for seed in range(2 if name == "milp" else 6):
        profile, values = branching(seed, count)
        best = -np.inf
        for share in np.linspace(0.01, 1.0, 30):
            try:
                value = plan(policy(SOLVERS[name], budget=Budget(time=float(share))), profile, values).value
            except BudgetError:
                assert best == -np.inf, "once a budget can be kept, every larger one can"
                continue
            assert value >= best - 1e-6
            best = value
        assert best == pytest.approx(sum(values.values()))


# ---------------------------------------------------------------- infeasible budgets


def refusal(policy_: Policy, profile: Profile, values: Mapping[Unit, float]) -> str:
    with pytest.raises(BudgetError) as caught:
        plan(policy_, profile, values)
    return str(caught.value)


def test_an_infeasible_budget_names_the_floor_and_what_makes_it() -> None:
    message = refusal(policy(budget=Budget(time=0.1)), FOUR, VALUES)
    assert message.startswith("time=0.100 (")
    assert "is below the floor of 0.400 (" in message
    assert "forward pass alone takes 0.350 (" in message
    assert "the cheapest unit ('u0') adds 0.050 (" in message
    assert "Use time>=0.400" in message


def test_the_floor_counts_what_is_always_chosen() -> None:
    message = refusal(policy(budget=Budget(memory=0.5), always=("u0", "u2")), FOUR, VALUES)
    assert "is below the floor of 0.650 (" in message
    assert "what is always chosen ('u0', 'u2') adds 0.300" in message


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["time", "memory", "macs"])
@pytest.mark.parametrize("always", [(), ("u0", "u5")])
def test_the_named_floor_works_as_a_share_and_as_an_amount(always: tuple[str, ...], kind: str, seed: int) -> None:
    profile, values = branching(seed, 6)
    message = refusal(policy(budget=Budget(**{kind: 1e-6}), always=always), profile, values)
    found = re.search(rf"Use {kind}>=([0-9.]+) \(([^)]*)\)\.", message)
    assert found, message
    for floor in (float(found[1]), found[2]):
        assert plan(policy(budget=Budget(**{kind: floor}), always=always), profile, values).units  # type: ignore[arg-type]


def test_what_a_full_step_keeps_is_never_refused() -> None:
    """Measured steps of a small model: with custom kernels, or by chance, part of it took longer than a plain full step."""
    profile = replace(FOUR, plain=Cost(5.0, 1000)).with_watts(50.0)
    for asked in (Budget(time=1.0), Budget(time="6s"), Budget(energy=1.0), Budget(energy=1.0, time="6s")):
        solver = milp() if asked.energy and asked.time else knapsack()
        assert chosen(plan(policy(solver, budget=asked), profile, VALUES)) == "u0"
    message = refusal(policy(budget=Budget(time=0.99)), profile, VALUES)
    assert "is below the floor of 1.600" in message and "Use time>=1.000 (5000 ms)" in message


@pytest.mark.parametrize("own", [1e-3, 1e-6, 1e-9])
def test_a_budget_at_the_exact_floor_works(own: float) -> None:
    """Also where the unit is so small beside the forward pass that subtracting the one from the other rounds."""
    for k in range(1, 20):
        profile = chain_profile([own, 30 * own], base=k / 23)
        floor = profile.cost(units(1)).seconds
        assert chosen(plan(policy(budget=Budget(time=f"{floor!r}s")), profile, worth(1.0, 1.0))) == "u0"


def test_the_message_never_says_that_a_budget_is_below_itself() -> None:
    message = refusal(policy(budget=Budget(time=0.3996)), FOUR, VALUES)
    given_, floor = re.findall(r"(0\.\d+) \(", message)[:2]
    assert float(given_) < float(floor)


def test_the_floor_of_two_budgets_is_that_of_the_unit_nearest_to_them() -> None:
    """u0 is over by 10 of 2,000 bytes, u1 by 5 of 2 seconds: shares of the limits are compared, not bytes with seconds."""
    charges = (Charge(ChargeKind.NODE, Cost(0.1, 1010), ("p0",)), Charge(ChargeKind.NODE, Cost(6.0, 10), ("p1",)))
    profile = Profile(charges, Cost(1.0, 1000))
    message = refusal(policy(milp(), budget=Budget(time="2s", memory="2000B")), profile, worth(1, 1))
    assert message.startswith("memory=")
    assert "'u0'" in message


def test_a_fixed_choice_over_its_budget_is_refused() -> None:
    message = refusal(policy(fixed("*"), budget=Budget(time=0.6)), FOUR, VALUES)
    assert "the choice of 4 units costs 1.000 (" in message
    assert "more than the limit of 0.600 (" in message
    assert chosen(plan(policy(fixed("u[01]"), budget=Budget(time=0.6)), FOUR, VALUES)) == "u0 u1"
    assert chosen(plan(policy(fixed("*")), FOUR, VALUES)) == "u0 u1 u2 u3"


def test_joules_that_nobody_measured_are_refused() -> None:
    assert "holds no joules" in refusal(policy(budget=Budget(energy=0.5)), FOUR, VALUES)


# ---------------------------------------------------------------- what measured steps correct


def test_a_correction_scales_the_seconds_that_are_planned_for() -> None:
    """Steps that take half as long as predicted leave room for twice as much, and the other way around."""
    policy_ = policy(budget=Budget(time="10s"))
    plain, more, less = (plan(policy_, FOUR, VALUES, correction=c) for c in (None, 1.4, 0.9))
    assert [chosen(s) for s in (plain, more, less)] == ["u1", "u3", "u0"]
    assert [s.limit for s in (plain, more, less)] == [{"seconds": 10.0}, {"seconds": 14.0}, {"seconds": 9.0}]
    assert all(s.asked == {"seconds": 10.0} for s in (plain, more, less))
    assert chosen(plan(policy_, FOUR, VALUES, correction=1.0)) == chosen(plain)


def test_a_corrected_limit_is_never_below_the_floor() -> None:
    """8 seconds is the cheapest step: a budget that asks for 10 and is halved by what was measured plans for 8."""
    corrected = plan(policy(budget=Budget(time="10s")), FOUR, VALUES, correction=0.5)
    assert chosen(corrected) == "u0"
    assert corrected.limit == {"seconds": 8.0} and corrected.asked == {"seconds": 10.0}
    always = plan(policy(budget=Budget(time="14s"), always=("u2",)), FOUR, VALUES, correction=0.1)
    assert chosen(always) == "u2" and always.limit == {"seconds": FOUR.cost(units(4)[2:3]).seconds}


def test_a_budget_below_the_floor_is_refused_at_first_and_planned_for_the_floor_later() -> None:
    low = policy(budget=Budget(time="4s"))
    assert "is below the floor of 0.400" in refusal(low, FOUR, VALUES)
    corrected = plan(low, FOUR, VALUES, correction=1.0)
    assert chosen(corrected) == "u0"
    assert corrected.limit == {"seconds": 8.0} and corrected.asked == {"seconds": 4.0}


@pytest.mark.parametrize("seed", range(12))
def test_what_is_taken_from_a_choice_leaves_the_others_where_they_are(seed: int) -> None:
    """The units that stay count for the others too, and are as far from each other as they were."""
    rng = np.random.default_rng(seed)
    profile = chain_profile(rng.uniform(0.2, 1, 14).tolist(), rng.uniform(0.2, 1, 13).tolist())
    values = dict(zip(units(14), rng.uniform(1, 2, 14).tolist(), strict=True))
    wide = policy(coverage(0.8, power=1), budget=Budget(time=0.5))
    near = plan(wide, profile, values).units
    fewer = plan(replace(wide, budget=Budget(time=0.42)), profile, values, near=near)
    assert set(fewer.units) < set(near)
    place = {unit: k for k, unit in enumerate(values)}

    def worth(some: tuple[Unit, ...]) -> float:
        return sum(max(min(v, values[c]) * 0.8 ** abs(place[u] - place[c]) for c in some) for u, v in values.items())

    subsets = [some for size in range(1, len(near) + 1) for some in combinations(near, size)]
    best = max(worth(some) for some in subsets if profile.cost(some).seconds <= 0.42 * profile.full.seconds)
    assert worth(fewer.units) == pytest.approx(best)


def of_ones_own(problem: Problem) -> np.ndarray:
    """A solver that does not look at what may be chosen."""
    return np.isin(problem.names, ["u0", "u1"])


@pytest.mark.parametrize("solver", [knapsack(), milp(), greedy(), greedy("order"), sample(), coverage(), of_ones_own])
def test_what_is_near_only_loses_where_it_costs_too_much(solver: Solver) -> None:
    profile = chain_profile([1.0] * 6, [1.0] * 5)
    values = dict(zip(units(6), [1.0, 3.0, 1.0, 1.0, 2.0, 5.0], strict=True))
    near = [unit for unit in values if unit.name in ("u0", "u2", "u3")]
    asked = policy(solver, budget=Budget(time="5s"), seed=3)
    assert not set(plan(asked, profile, values).units) <= set(near), "left alone it would take others"
    assert set(plan(asked, profile, values, near=near).units) < set(near)


def test_a_correction_is_for_seconds_only() -> None:
    both = policy(milp(), budget=Budget(time="10s", memory="14000B"))
    corrected = plan(both, FOUR, VALUES, correction=2.0)
    assert corrected.limit == {"seconds": 20.0, "bytes": 14_000.0}
    assert chosen(corrected) == "u3"
    memory = policy(budget=Budget(memory="4000B"))
    with pytest.raises(BudgetError, match="floor"):
        plan(memory, FOUR, VALUES, correction=2.0)
    assert plan(policy(), FOUR, VALUES, correction=0.1).limit == {}


@laws(150)
@given(st.integers(0, 50), st.floats(0.3, 1.0), st.floats(0.1, 3.0), st.sampled_from(["knapsack", "milp", "greedy"]))
def test_a_corrected_choice_keeps_what_was_planned_for(seed: int, share: float, correction: float, name: str) -> None:
    profile, values = branching(seed, 6)
    picked = plan(policy(SOLVERS[name], budget=Budget(time=share)), profile, values, correction=correction)
    asked = share * profile.full.seconds
    floor = min(profile.cost([unit]).seconds for unit in values if profile.due([unit]))  # of those that the loss hangs on
    assert picked.asked["seconds"] == pytest.approx(asked)
    assert picked.limit["seconds"] == pytest.approx(max(asked * correction, floor))
    assert picked.cost.seconds <= picked.limit["seconds"] * (1 + 1e-8)


# ---------------------------------------------------------------- bytes are a peak


@laws(200)
@given(profiles(moments=6), st.lists(st.integers(0, 9), min_size=6, max_size=6), st.floats(0.05, 1.0))
def test_a_memory_budget_holds_at_every_moment(profile: Profile, values: list[int], share: float) -> None:
    assume(profile.full.bytes > 0 and profile.full.seconds > 0)
    for solver, budget in (
        (knapsack(), Budget(memory=share)),
        (knapsack(3), Budget(memory=share)),
        (milp(), Budget(memory=share, time=1.0)),
    ):
        try:
            picked = plan(policy(solver, budget=budget), profile, worth(*values))
        except BudgetError as error:
            assert "floor" in str(error)
            continue
        assert profile.cost(picked.units).bytes <= share * profile.full.bytes * (1 + 1e-8)


def test_what_lives_beneath_the_peak_of_the_forward_pass_is_free() -> None:
    """u0 is kept when the forward pass is highest, u1 when it is over: a budget of bytes sees the first only."""
    charges = (
        Charge(ChargeKind.KEPT, Cost(1.0, 50), ("p0",), live=(0, 2)),
        Charge(ChargeKind.KEPT, Cost(1.0, 90), ("p1",), live=(1, 2)),
        Charge(ChargeKind.KEPT, Cost(1.0, 10), ("p2",)),
    )
    profile = Profile(charges, Cost(1.0), moments=(100, 0))
    assert profile.full.bytes == 60
    assert chosen(plan(policy(budget=Budget(memory="49B")), profile, worth(9, 1, 1))) == "u1 u2"
    assert chosen(plan(policy(budget=Budget(memory="50B")), profile, worth(9, 1, 1))) == "u0 u1"
    assert chosen(plan(policy(budget=Budget(memory="9B")), profile, worth(9, 1, 1))) == "u1"


# ---------------------------------------------------------------- values that say little


def test_a_value_that_is_not_a_number_says_nothing() -> None:
    nan, inf = float("nan"), float("inf")
    picked = plan(policy(budget=Budget(time=0.9)), FOUR, worth(1.0, nan, inf, -inf))
    assert chosen(picked) == "u0"
    assert picked.values == {"u0": 1.0, "u1": 0.0, "u2": 0.0, "u3": 0.0}
    assert picked.value == 1.0
    assert chosen(plan(policy(always=("u1",)), FOUR, worth(nan, nan, nan, nan))) == "u1"


def test_if_no_value_is_positive_the_best_single_unit_that_fits_is_chosen() -> None:
    for solver in (knapsack(), milp(), greedy()):
        assert chosen(plan(policy(solver), FOUR, worth(-4, -3, -2, -1))) == "u3"
        assert chosen(plan(policy(solver, budget=Budget(time="13s")), FOUR, worth(-4, -3, -2, -1))) == "u2"
        assert chosen(plan(policy(solver, budget=Budget(time="8s")), FOUR, worth(-4, -3, -2, -1))) == "u0"
    assert chosen(plan(policy(always=("u1",)), FOUR, worth(-4, -3, -2, -1))) == "u1"


def test_what_the_loss_does_not_hang_on_is_never_all_that_trains() -> None:
    values = {Unit("unused", (Part("unused"),)): 0.0, **worth(-1, -2, -3, -4)}
    assert chosen(plan(policy(budget=Budget(time="14s"), head=False), FOUR, values)) == "u0"
    with pytest.raises(BudgetError, match=r"cheapest unit \('u0'\)"):
        plan(policy(budget=Budget(time="7.5s"), head=False), FOUR, values)


def test_nothing_to_choose_from_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to choose from"):
        plan(policy(), FOUR, {})


def test_a_unit_without_any_cost_is_free() -> None:
    gift = Unit("gift", (Part("unused"),))
    picked = plan(policy(budget=Budget(time="8s")), FOUR, worth(1, 5, 2, 9) | {gift: 0.5})
    assert chosen(picked) == "u0 gift"


# ---------------------------------------------------------------- purity


@pytest.mark.parametrize("name", SOLVERS)
def test_same_inputs_same_answer(name: str) -> None:
    profile, values = branching(7, 20)
    policy_ = policy(SOLVERS[name], budget=Budget(time=0.6), seed=3)
    first = plan(policy_, profile, values, Progress(round=2, step=9))
    state = np.random.get_state()[1].tolist()
    for _ in range(3):
        assert plan(policy_, Profile.from_json(profile.to_json()), dict(values), Progress(round=2, step=9)) == first
    assert np.random.get_state()[1].tolist() == state, "the global generator is left alone"


def test_random_choices_hang_on_the_seed_and_the_round() -> None:
    profile, values = branching(7, 20)

    def draws(seed: int) -> list[str]:
        drawing = policy(sample(4), budget=Budget(time=0.9), seed=seed)
        return [chosen(plan(drawing, profile, values, Progress(round=r))) for r in range(5)]

    assert draws(0) == draws(0)
    assert draws(0) != draws(1)
    assert len(set(draws(0))) > 1


def test_the_order_of_the_values_is_the_order_of_the_units() -> None:
    picked = plan(policy(), FOUR, dict(reversed(list(VALUES.items()))))
    assert chosen(picked) == "u3 u2 u1 u0"


# ---------------------------------------------------------------- the policy itself


def test_a_policy_is_changed_word_by_word() -> None:
    ablation = replace(policy(), solver=greedy(), name="greedy")
    assert ablation.name == "greedy"
    assert chosen(plan(ablation, FOUR, VALUES)) == "u0 u1 u2 u3"


def test_optimizer_state_is_kept_or_dropped() -> None:
    assert policy(state="drop").state == "drop"
    with pytest.raises(ValueError, match="state='forget'"):
        policy(state="forget")
